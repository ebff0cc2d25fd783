"""The routes of a stage: those of patterns, and others."""

from __future__ import annotations

from dataclasses import dataclass

from bench.deployment import RouteSpec
from bench.patterns import Mixture, Pattern


@dataclass(frozen=True, slots=True)
class Routes:
    """What windows can ask for, beside models alone; the important ones first."""

    patterns: tuple[Pattern | Mixture, ...] = ()
    """Some share a route."""
    others: tuple[RouteSpec, ...] = ()
    """Whose windows are called `route:value`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all of them, each once."""
        names = (*(pattern.route for pattern in self.patterns), *(route.name for route in self.others))
        return tuple(dict.fromkeys(names))

    def pattern(self, subject: str) -> Pattern | Mixture | None:
        """Of a window's subject; None: it is no pattern."""
        return next((pattern for pattern in self.patterns if pattern.key == subject), None)

    def of(self, subject: str) -> str:
        """The route of a window's subject, or its model."""
        pattern = self.pattern(subject)
        return pattern.route if pattern else subject.partition(":")[0]

    def joined(self, more: Routes) -> Routes:
        """These, and those of the others that are not among them."""
        keys = {pattern.key for pattern in self.patterns}
        names = {route.name for route in self.others}
        return Routes(
            (*self.patterns, *(pattern for pattern in more.patterns if pattern.key not in keys)),
            (*self.others, *(route for route in more.others if route.name not in names)),
        )

    def parts(self, most: int) -> list[Routes]:
        """Divided so that none has more routes than that; one part at least."""
        names = self.names
        chunks = [names[place : place + most] for place in range(0, len(names), most)] or [()]
        return [
            Routes(
                tuple(pattern for pattern in self.patterns if pattern.route in chunk),
                tuple(route for route in self.others if route.name in chunk),
            )
            for chunk in chunks
        ]
