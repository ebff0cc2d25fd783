"""What is swept: for each algorithm the parameter, its values and what stays fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from bench.frontier_fault import FrontierUsageError

Value = float | tuple[float, ...]
"""Of a parameter that is a number, or a list of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One line of the plot."""

    name: str
    algorithm: str
    parameter: str
    """Set per request."""
    values: tuple[Value, ...]
    """From few tokens of the large model to many."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    head: str = ""
    """The algorithm of `trouterd train` that makes its checkpoint; '': it needs none."""
    most_share: float = 0.3
    """Of the rows that a head has labels of: points beyond say nothing of interest."""
    reference: bool = False
    """To compare with; no choice of who writes a token."""
    route: str = ""
    """The route that it sweeps; '': one is made for it."""

    def params(self, checkpoint: str = "") -> dict[str, Any]:
        """Of its route; the swept parameter has its first value."""
        first = self.values[0]
        swept = list(first) if isinstance(first, tuple) else first
        return {**self.fixed, self.parameter: swept, **({"checkpoint": checkpoint} if self.head else {})}

    def refined(self, curve: Mapping[float, float]) -> Sweep:
        """The same at thresholds that part a head's values.

        Args:
            curve: threshold -> share of the labelled rows that go to the large model. Where all shares are of interest, the
                sweep's own thresholds that lie beyond the curve are kept; elsewhere those halfway between two are added.
        """
        own = [value for value in self.values if not isinstance(value, tuple)]
        rises = own[0] < own[-1]
        listed = [threshold for threshold, share in curve.items() if share <= self.most_share]
        listed.sort(reverse=not rises)
        if not listed:
            return self
        if self.most_share == 1:
            listed += [value for value in own if (value > listed[-1] if rises else value < listed[-1])]
        else:
            listed += [(one + other) / 2 for one, other in pairwise(listed)]
        return replace(self, values=tuple(sorted(listed, reverse=not rises)))

    def thinned(self, most: int) -> Sweep:
        """The same with at most `most` values, evenly chosen, the ends kept."""
        count = len(self.values)
        if count <= most:
            return self
        places = [round(place * (count - 1) / max(1, most - 1)) for place in range(most)]
        return replace(self, values=tuple(self.values[place] for place in places))


PROBABILITIES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)
"""Thresholds of a head whose calibration is not known."""
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
_WORST_TOKEN = {"measure": "quantile", "quantile": 0.0}

SWEEPS = (
    Sweep(name="entropy", algorithm="entropy", parameter="threshold", values=(1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05)),
    Sweep(name="rstitch", algorithm="rstitch", parameter="tau", values=(0.12, 0.08, 0.05, 0.03, 0.02, 0.01, 0.005)),
    Sweep(name="r2r", algorithm="r2r", parameter="threshold", values=PROBABILITIES[::-1], head="r2r"),
    Sweep(name="citer", algorithm="citer", parameter="threshold", values=PROBABILITIES, head="citer"),
    Sweep(name="collm", algorithm="collm", parameter="threshold", values=PROBABILITIES[::-1], head="collm"),
    Sweep(
        name="query",
        algorithm="query",
        parameter="threshold",
        values=PROBABILITIES[::-1],
        fixed={"source": "hidden"},
        head="query",
        most_share=1.0,
    ),
    Sweep(
        name="query-random",
        algorithm="query",
        parameter="threshold",
        values=tuple(round(1 - share, 3) for share in _SHARES),
        fixed={"source": "random"},
    ),
    Sweep(
        name="cascade-sequence",
        algorithm="cascade",
        parameter="threshold",
        values=(-4.0, -3.0, -2.0, -1.5, -1.2, -0.9, -0.6),
        fixed={"mode": "sequence", **_WORST_TOKEN},
    ),
    Sweep(
        name="cascade-chunk",
        algorithm="cascade",
        parameter="threshold",
        values=(-2.0, -1.0, -0.8, -0.6, -0.4, -0.2, -0.1),
        fixed={"mode": "chunk", "chunk": 8, **_WORST_TOKEN},
    ),
    Sweep(
        name="cascade-speculative",
        algorithm="cascade",
        parameter="alpha",
        values=(0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1),
        fixed={"mode": "speculative", "rule": "chow", "gamma": 4},
    ),
    Sweep(name="every_n", algorithm="every_n", parameter="n", values=(20, 10, 5, 3, 2), fixed={"shape": "visit"}),
    Sweep(name="bernoulli", algorithm="bernoulli", parameter="p", values=_SHARES),
    Sweep(
        name="me", algorithm="me", parameter="weights", values=tuple((round(1 - share, 3), share) for share in _SHARES)
    ),
    Sweep(name="speculative", algorithm="speculative", parameter="gamma", values=(1, 2, 4, 8), reference=True),
)


def named(names: Sequence[str]) -> tuple[Sweep, ...]:
    """The sweeps of these names, all for none.

    Raises:
        FrontierUsageError: there is none of a name.
    """
    known = {sweep.name: sweep for sweep in SWEEPS}
    if unknown := [name for name in names if name not in known]:
        raise FrontierUsageError(f"--only: no sweep is called {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else SWEEPS


def of_route(text: str, algorithms: Mapping[str, str]) -> Sweep:
    """A sweep over a route that exists, from ROUTE:PARAMETER=V,V,...

    Args:
        text: as given on the command line.
        algorithms: route -> its algorithm.

    Raises:
        FrontierUsageError: the text is none, or there is no such route.
    """
    route, colon, rest = text.rpartition(":")
    parameter, equals, listed = rest.partition("=")
    if not (route and colon and parameter and equals and listed):
        raise FrontierUsageError(f"--sweep {text}: expected ROUTE:PARAMETER=V,V,...")
    if route not in algorithms:
        known = ", ".join(algorithms) or "none"
        raise FrontierUsageError(f"--sweep {text}: no route {route!r} over these two models; there are: {known}")
    try:
        values = tuple(float(value) for value in listed.split(","))
    except ValueError as error:
        raise FrontierUsageError(f"--sweep {text}: {error}") from error
    return Sweep(name=route, algorithm=algorithms[route], parameter=parameter, values=values, route=route)


def over_routes(algorithms: Mapping[str, str]) -> tuple[list[Sweep], list[str]]:
    """Sweeps over routes that exist, route -> algorithm; and those routes whose algorithm is not swept in just one way."""
    sweeps, others = [], []
    for route, algorithm in algorithms.items():
        found = [sweep for sweep in SWEEPS if sweep.algorithm == algorithm]
        if len(found) == 1:
            sweeps.append(replace(found[0], name=route, head="", route=route))
        else:
            others.append(route)
    return sweeps, others
