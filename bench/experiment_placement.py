"""Experiment f: ways in which models share one card, beside a card for each; what that does to steps and to the tail.

- As it is: under MPS, the persistent kernel of the small model on 40 % of the multiprocessors for the whole of its steps.
- Divided: that kernel on another part of them (`megakernel_percent`), of which the large model's kernels have the rest; or with
  a persistent kernel of the large model on the rest.
- In turns: one model at a time (`batching.overlap = false`), on the daemon as it is; or with a persistent kernel for each model, on
  all of the card in its turn.
- Without MPS, and with MPS limits of the large model, which come last: its matrix library gives wrong products on some.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.ablations import ablated
from bench.deployment import Deployment
from bench.experiment_case import EAGER, LARGE, PLANNED, SMALL, TROUTERD, TURNS, WHOLE, Case, Stage
from bench.experiment_kernel import kernel_model
from bench.experiment_scope import REFERENCE, Scope
from bench.experiment_setup import Setup
from trouterd.batching.placement import SEPARATE, SHARED
from trouterd.worker.engine import SHARED_PART

KERNEL = (20, 80, 12, 60, 40)
"""Percent of the multiprocessors for the persistent kernel; the first ones say most."""
BOTH = (20, 40)
"""Percent for that of the small model where the large one has a persistent kernel on the rest."""
LIMITS = (90, 80, 70, 60)
"""Percent of them that the large model may use at once."""
_WHOLE = 100
_TIME_SLICES = (1.0, 1.0)
_PROBED = (4, 16)
"""Streams at which the other models' step times are taken: batches of a route lie between and around them."""
_REFERENCE_SECONDS, _PROBE_SECONDS, _PROBE_SETTLE = 2.0, 1.0, 0.3
"""Of a model alone, whose steps are all alike."""
_NEAR = 2
"""Numbers of streams that are measured everywhere before the others."""
_FAR = 30
_SIDE_BY_SIDE, _PROBE, _PLANNED, _MORE = 1, 2, 3, 4
"""Importance, less where it counts more: what shows how the card is shared comes first, and turns by plan with it."""


def stages(scope: Scope) -> list[Stage]:
    """One daemon per way of sharing; on GPUs of their own, or on none, there is only one. Turns are for those who share."""
    scope = scope.only(1)
    setup = scope.setup
    turns = setup.placement != SEPARATE and not setup.takes_turns
    found = [scope.fleet(_as_it_is(scope, turns=turns), measured=True)]
    if setup.placement != SHARED:
        return found
    found += [_stage(scope, way, setup.deployment(own=own)) for way, own in _divisions(setup)]
    if turns and _is_free(setup):
        found.append(_whole(scope))
    contention = _TIME_SLICES if len(setup.names) == len(_TIME_SLICES) else None
    found.append(_stage(scope, Way("no MPS", 12), ablated(setup.deployment(), "no MPS"), contention))
    for rank, percent in enumerate(LIMITS):
        limited = setup.deployment(own={LARGE: (f"sm_percent = {percent}",)})
        found.append(_stage(scope, Way(f"large at {percent} %", 15 + rank, (LARGE,)), limited))
    return found


@dataclass(frozen=True, slots=True)
class Way:
    """Of sharing a card."""

    name: str
    """The system of its windows."""
    importance: int = REFERENCE
    changed: tuple[str, ...] = ()
    """See `Case.changed`."""


_USUAL, _IN_TURNS = Way(TROUTERD), Way(TURNS)


def _divisions(setup: Setup) -> Iterator[tuple[Way, Mapping[str, Sequence[str]]]]:
    """Parts of the card for persistent kernels, as lines of the models' tables: for that of one model, then for one of each."""
    said = {name: setup.settings.of_model(name) for name in setup.names}
    if kernel := kernel_model(setup):
        usual = said[kernel].get("megakernel_percent") or (_WHOLE if setup.takes_turns else round(100 * SHARED_PART))
        taken = sum(
            own.get("megakernel_percent", 0)
            for name, own in said.items()
            if name != kernel and own.get("megakernel") == "on"
        )
        for percent in KERNEL:
            if percent != usual and percent + taken <= _WHOLE:
                yield Way(f"kernel at {percent} %", 0, (kernel,)), {kernel: (f"megakernel_percent = {percent}",)}
    if _is_free(setup):
        for percent in BOTH:
            parts = {SMALL: percent, LARGE: _WHOLE - percent}
            own = {name: ('megakernel = "on"', f"megakernel_percent = {part}") for name, part in parts.items()}
            yield Way(f"kernels at {percent} + {_WHOLE - percent} %", 6, (SMALL, LARGE)), own


def _is_free(setup: Setup) -> bool:
    """Nobody has said which of two models has a persistent kernel."""
    said = (setup.settings.of_model(name) for name in setup.names)
    return setup.names == (SMALL, LARGE) and not any("megakernel" in own for own in said)


def _whole(scope: Scope) -> Stage:
    """Turns from the start, so that each model's kernel can have all of the card."""
    kernels = scope.setup.deployment(own=dict.fromkeys((SMALL, LARGE), ('megakernel = "on"',)))
    way = Way(WHOLE, 5, (SMALL, LARGE))
    cases = [*_probes(scope, way, way.changed, _PROBE), *_planned(scope, way, _SIDE_BY_SIDE)]
    return scope.fleet(cases, name=way.name, deployment=ablated(kernels, "no async"), measured=True)


def _stage(scope: Scope, way: Way, deployment: Deployment, contention: Sequence[float] | None = None) -> Stage:
    """A daemon of its own: steps of the model that it changes, both models side by side, and a plan by what that shows."""
    cases = _probes(scope, way, way.changed, _PROBE)
    cases += [*_eager(scope, way, _SIDE_BY_SIDE), *_planned(scope, way, _PLANNED)]
    return scope.fleet(cases, name=way.name, deployment=deployment, contention=contention, measured=True)


def _as_it_is(scope: Scope, *, turns: bool) -> list[Case]:
    """What everything is compared with, and turns, whose models are shown by them without each other."""
    counts, faster = _counts(scope), scope.setup.names[:-1]
    cases = [_alone(scope, _USUAL, LARGE, count, far, _REFERENCE_SECONDS) for count, far in counts]
    cases += [*_probes(scope, _USUAL, faster, 0), *_eager(scope, _USUAL, _SIDE_BY_SIDE)]
    if turns:
        cases += [*_probes(scope, _IN_TURNS, faster, _PLANNED), *_eager(scope, _IN_TURNS, _MORE)]
        if len(scope.setup.names) == 2:
            cases += _planned(scope, _IN_TURNS, _SIDE_BY_SIDE)
    return cases + _planned(scope, _USUAL, _PLANNED)


def _eager(scope: Scope, way: Way, importance: int) -> list[Case]:
    """One stream alone never waits: its window is a planned one."""
    return [_asked(scope, way, count, importance + far, EAGER) for count, far in _counts(scope) if count > 1]


def _planned(scope: Scope, way: Way, importance: int) -> list[Case]:
    return [_asked(scope, way, count, importance + far, PLANNED) for count, far in _counts(scope)]


def _asked(scope: Scope, way: Way, count: int, importance: int, batching: str) -> Case:
    workload, subject, rank = scope.workloads[0], scope.patterns[0].key, way.importance + importance
    return scope.case(workload, subject, count, rank, system=way.name, batching=batching, changed=way.changed)


def _probes(scope: Scope, way: Way, names: Sequence[str], importance: int) -> list[Case]:
    return [_alone(scope, way, name, count, importance, _PROBE_SECONDS) for name in names for count in _PROBED]


def _alone(scope: Scope, way: Way, name: str, count: int, importance: int, seconds: float) -> Case:
    rank = way.importance + importance
    case = scope.case(scope.workloads[0], name, count, rank, system=way.name, changed=way.changed)
    return replace(case, seconds=seconds, settle=min(case.settle, _PROBE_SETTLE))


def _counts(scope: Scope) -> list[tuple[int, int]]:
    """Numbers of streams, and what it costs in importance to be none of the first ones."""
    return [
        (count, _FAR + 10 * (place - _NEAR) if place >= _NEAR else 0)
        for place, count in enumerate(scope.counts(16, 64, 4, 1))
    ]
