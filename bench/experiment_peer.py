"""The stage of an experiment that is Std. Serving on vLLM, by the peer's own script (`bench.vllm_peer`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.experiment_case import LARGE, Case, CaseError, Measure, Record, Stage
from bench.experiment_routes import Routes
from bench.experiment_scope import Scope
from bench.patterns import Pattern
from bench.peer_folder import PeerError
from bench.vllm_peer import PeerCase, run_std_serving

VLLM = "std serving on vLLM"
_PROMPT, _TOKENS = 100, 64
"""Of the script's requests."""
WORKLOAD = f"{_PROMPT}/{_TOKENS}"
"""Ours that is most like its load: it sends N requests at once and waits for the last, prefill and drain included; ours goes on."""
_MOST_PATTERNS = 2
"""Each takes the script some seconds for every number of streams."""
_LIMIT = 300.0
"""Seconds for two engines to load, 150, and for the script; what it has not come to by then is not measured."""


class OpenedPeer:
    """What the script has measured.

    Args:
        cases: all of it.
        shares: p of each subject; None: the large engine alone.
    """

    def __init__(self, cases: Sequence[PeerCase], shares: Mapping[str, float | None]) -> None:
        self._found = {(one.p, one.streams): one for one in cases}
        self._shares = shares

    def record(self, case: Case, measure: Measure) -> Record:
        """See `Opened`; nothing is measured any more."""
        del measure
        found = self._found.get((self._shares[case.subject], case.streams))
        if found is None:
            raise CaseError("the peer's script did not come to it")
        return Record(case, _window(case, found), {"answer_tokens": _TOKENS})


def peer(scope: Scope, folder: Path, counts: Sequence[int], importance: int) -> Stage:
    """Patterns that a dispatcher of its kind knows, and the large engine alone.

    Args:
        scope: two published shapes; both go to the first GPU.
        folder: of the peer.
        counts: streams.
        importance: of its windows.
    """
    small, large = scope.setup.sources
    shares: dict[str, float | None] = {one.key: one.p for one in known(scope)}

    @contextmanager
    def start(_: Path, __: Routes) -> Iterator[OpenedPeer]:
        values = [share for share in dict.fromkeys(shares.values()) if share is not None]
        try:
            cases = run_std_serving(
                folder, small=small, large=large, streams=counts, shares=values, tokens=_TOKENS, limit=_LIMIT
            )
        except PeerError as error:
            raise CaseError(str(error)) from error
        yield OpenedPeer(cases, shares | {LARGE: None})

    cases = [
        replace(scope.case(WORKLOAD, subject, count, importance, system=VLLM), instant=True)
        for subject in (*shares, LARGE)
        for count in counts
    ]
    script = folder, scope.setup.sources, tuple(counts), tuple(shares.items())
    return Stage(VLLM, _LIMIT, start, tuple(cases), script)


def known(scope: Scope) -> list[Pattern]:
    """Patterns that a dispatcher of its kind knows, the important ones."""
    return [one for one in scope.patterns if isinstance(one, Pattern) and not one.writes_on][:_MOST_PATTERNS]


def _window(case: Case, found: PeerCase) -> dict[str, Any]:
    """In the fields of `bench.window.Window`, as far as the script tells them."""
    unknown = dict.fromkeys(("ttft_ms", "request_ms", "handoffs_per_100", "large_forwards_per_1000", "ideal"))
    gap = {"mean": None, "p50": found.gap_p50_ms, "p95": None, "p99": found.gap_p99_ms}
    rate = found.tokens_per_second
    return unknown | {
        "system": found.system,
        "workload": case.workload,
        "streams": found.streams,
        "seconds": None,
        "tokens_per_second": rate,
        "gap_ms": gap,
        "requests": None,
        "tokens_per_model": {},
        "batch": {},
        "step_ms": {},
        "busy": {},
        "gpu_seconds_per_1000": 1e3 / rate,
        "extra": {},
    }
