"""What the terms of a report mean: those that occur in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from bench.experiment_group import OTHER_RUN

TITLE = "## Terms"
_STARTED = "or a time to the first token that is of all N beginning at once, since no request began in the window"


@dataclass(frozen=True, slots=True)
class Term:
    """Of tables and their titles."""

    name: str
    means: str
    words: tuple[str, ...] = ()
    """Any of which says that it occurs, as whole words; (): the name."""

    def occurs(self, text: str) -> bool:
        """Whether it does."""
        return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) for word in self.words or (self.name,))


_TERMS = (
    Term("N", "requests under way, all the time: each client asks again as soon as it is answered", ("N",)),
    Term(
        "B",
        "of delayed batching: with how many ready requests a model launches a step; in brackets what was in force, small first;"
        " *any*: one request alone never waits",
        ("B",),
    ),
    Term(
        "planned B",
        "lists of `trouterctl batching plan`, from step times of the models alone (of the same run, or `--step`) and the rates"
        " in the names",
    ),
    Term(
        "learned B", "the controller's (`auto`), after a while of this load: what the daemon does unless told otherwise"
    ),
    Term("eager", "every launch takes what is ready"),
    Term("asked", "the route or the model that requests name"),
    Term(
        "large only",
        "the large model without routing, same workload and N, in the fastest way that was measured: by itself in a daemon"
        " of its own (with the persistent kernel, without it, over all GPUs), or by its name in the daemon that routes",
    ),
    Term(
        f"{OTHER_RUN} behind a number",
        f"a ratio to a window of another run on the same kind of card; {_STARTED}",
        (OTHER_RUN,),
    ),
    Term(
        "drawn",
        "shares of steps that handed over (p) and back (q) in the window, for the ones that are in the name: a window of seconds"
        " misses them by some percent, and routed windows of one run draw alike",
    ),
    Term(
        "at nominal rates",
        "the ratio for the rates in the name, to first order (time in steps of each model by the steps there, time between steps by"
        " the hand-offs)",
        ("at nominal rates", "had the draws met their rates"),
    ),
    Term(
        "small steps, large steps",
        "of a request's time for a token of its answer, what it is in steps of that model",
        ("in none",),
    ),
    Term(
        "were it alone",
        "what the same steps would take, were each as long as for that model alone with such a batch and one row a request",
    ),
    Term("in none", "time in no step: hand-offs, and waiting for a launch"),
    Term("at the pace alone", "of the time, what the steps would take were both models alone"),
    Term(
        "of ideal",
        "of the token/s of requests that never wait, in steps as long as the window's in the mean and with its own moves: the part"
        " of their time that requests are in steps; for every system alike",
    ),
    Term(
        "price of a visit",
        "what a visit of the large model costs a request beside the steps of both models at their pace alone: two hand-offs,"
        " waiting for a launch, and what steps take longer",
    ),
    Term("speed of one user kept", "token/s of one of N users by those of a single one"),
    Term("in force", "the thresholds of that window, small first; *x planned*: token/s by those with the plan's own"),
    Term("predicted", "token/s that the throughput model promised for these thresholds, before the window"),
    Term("hand-offs / 100", "by tokens: two for each visit of the large model"),
    Term("GPU-s", "GPUs that the system keeps times seconds, idle ones too", ("GPU-s", "GPU-seconds")),
    Term(
        "device-s",
        "devices that the system keeps times seconds, idle ones too; without a GPU each model counts as a device",
        ("device-s", "device-seconds"),
    ),
    Term(
        "large steps / 1,000",
        "forward passes of the large model for 1,000 tokens; one pass serves a whole batch",
        ("large steps / 1,000", "forward passes of the large model"),
    ),
    Term("held", "for how long a launch was held back, in the mean", ("held, ms",)),
    Term(
        "hand-off, ms",
        "from sending a request to another model until the step that takes it",
        ("hand-off, ms", "sent to first step, ms"),
    ),
    Term("cached", "of the tokens that came to a model, those that its prefix cache had"),
    Term(
        "first token, gap, whole answer",
        "times: means, medians, 95th percentiles of 20 or more, 99th of 100 or more. *Estimated*: time to the first token, and the"
        " mean time per token for the others",
        ("first token mean, ms",),
    ),
    Term(
        "waited for a launch",
        "requests, from when they could take a row to the launch of it; *admission* for new ones alone",
    ),
    Term(
        "Std. Serving",
        "a dispatcher outside of the servers asks for one token a call, by the same draws; no head runs for it, to its advantage",
        ("Std. Serving", "std serving"),
    ),
    Term(
        "Std. Serving on vLLM",
        "the peer's script sends N requests of 100 and 64 tokens at once and waits for the last of them, prefill and drain"
        " included; beside it there is ours at `100/64`, which goes on with N requests all the time",
        ("on vLLM",),
    ),
)


def glossary(text: str) -> str:
    """Of the tables in a text and their titles; '' where none of the terms occurs."""
    lines = "\n".join(line for line in text.splitlines() if line.startswith(("|", "#", "Workload")))
    return "\n".join([TITLE, "", *found]) if (found := list(_lines(lines))) else ""


def _lines(text: str) -> Iterator[str]:
    for term in _TERMS:
        if term.occurs(text):
            yield f"- *{term.name}*: {term.means}."
