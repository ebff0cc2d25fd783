"""Stop strings over a text that arrives in pieces, whatever the pieces are."""

from __future__ import annotations

from collections.abc import Sequence


def _failure_table(pattern: str) -> list[int]:
    """table[k]: length of the longest proper prefix of pattern[:k] that is also its suffix (Knuth, Morris, Pratt)."""
    table = [0] * (len(pattern) + 1)
    matched = 0
    for position in range(1, len(pattern)):
        while matched and pattern[position] != pattern[matched]:
            matched = table[matched]
        if pattern[position] == pattern[matched]:
            matched += 1
        table[position + 1] = matched
    return table


class StopStrings:
    """The compiled stop strings of a request, shared by its choices."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.patterns = [(string, _failure_table(string)) for string in strings]
        self.first_characters = frozenset(string[0] for string in strings)


class StopMatcher:
    """Finds the stop string that ends first and holds back only what may still become one.

    Characters are taken one at a time, so that the result depends on the text alone, not on how it was cut: the match that
    is completed first wins, and of those completed by the same character the longest.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._states = [0] * len(stops.patterns)
        """Per stop string: how much of it the end of the text matches."""
        self._held = ""
        self.matched = ""
        """The stop string that was found."""

    def push(self, text: str) -> str:
        """The text that can be released now; after a match, what was in front of it. Sets `matched`."""
        if not self._held and self._stops.first_characters.isdisjoint(text):
            return text
        for position, character in enumerate(text):
            if self._step(character):
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen[: len(seen) - len(self.matched)]
        seen = self._held + text
        released = len(seen) - max(self._states)
        self._held = seen[released:]
        return seen[:released]

    def flush(self) -> str:
        """The text ends here: what was held back is no stop string."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._states)
        return held

    def _step(self, character: str) -> bool:
        for number, (pattern, table) in enumerate(self._stops.patterns):
            state = self._states[number]
            while state and pattern[state] != character:
                state = table[state]
            if pattern[state] == character:
                state += 1
            if state == len(pattern):
                if len(pattern) > len(self.matched):
                    self.matched = pattern
                state = 0
            self._states[number] = state
        return bool(self.matched)
