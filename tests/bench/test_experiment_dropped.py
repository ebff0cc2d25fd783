"""What had no time, in one sentence."""

from __future__ import annotations

from itertools import product

from bench.experiment_case import STD, TROUTERD
from bench.experiment_dropped import fields_of, summary
from tests.bench.experiment_fakes import case


def keys(
    *, workloads: str = "low", ways: str = "planned", subjects: str = "r2r-35", system: str = TROUTERD
) -> list[str]:
    every = product(workloads.split(","), ways.split(","), subjects.split(","), (1, 4, 16, 64))
    return [case(subject, streams, way, system, workload=workload).key for workload, way, subject, streams in every]


def test_values_of_which_nothing_is_left_are_told() -> None:
    kept = keys()
    gone = keys(workloads="low,agent,100/256", ways="planned,auto,eager")
    gone = [key for key in gone if key not in kept]
    told = summary(gone, kept, {"auto": "learned B"})
    assert told.startswith("32 dropped: all of ")
    assert set(told.removeprefix("32 dropped: all of ").split(", ")) == {"agent", "100/256", "learned B", "eager"}
    # What is kept of a value keeps it from being told.
    assert "eager" not in summary(gone[:-4], [*kept, *gone[-4:]])


def test_what_is_gone_of_one_system_only() -> None:
    kept = [*keys(subjects="r2r-35,citer,collm"), *keys(system=STD, ways="-")]
    gone = keys(system=STD, ways="-", subjects="citer,collm")
    assert summary(gone, kept) == f"8 dropped: {STD} with citer, collm"
    one = keys(ways="auto", subjects="citer")[2:]
    assert summary([*gone, *one], [*kept, *keys(ways="auto", subjects="citer")[:2]]).endswith("; 2 more")


def test_few_and_all() -> None:
    few = keys()[:2]
    assert summary(few, keys()[2:]) == f"2 dropped: {few[0]}, {few[1]}"
    assert summary(keys(), []) == "4 dropped: everything"


def test_names_of_workloads_may_have_slashes() -> None:
    fields = fields_of(case("large", 4, workload="3072/32768").key)
    assert fields == {"workload": "3072/32768", "batching": "", "system": TROUTERD, "subject": "large", "streams": "4"}
