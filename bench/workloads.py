"""What clients ask: conversations of given lengths, made up by a seed, or the lines of a data set.

| name | prompt, tokens | answer, tokens | |
|---|---|---|---|
| `low` | 100 | 2,048 | |
| `high` | 100 | 8,192 | |
| `agent` | 3,584, 5,120, 6,656, 8,192 | 1,024 each | four turns; the first 2,048 tokens are the same for all clients |
| `IN/OUT` | IN | OUT | |
| a file | | 512 at most, or the line's `max_tokens` | JSON lines of {"messages": [...]} or {"prompt": text or ids} |
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Ids = tuple[int, ...]
Messages = tuple[dict[str, Any], ...]
Prompt = Ids | str | Messages

FIRST_ID, LAST_ID = 16, 199
"""Ids of made-up prompts: every vocabulary has them, and they end no answer."""
DATASET_TOKENS = 512
"""Of an answer to a line of a data set that does not say."""
_IN_OUT = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client adds to its conversation, and how many tokens it wants in return."""

    said: Prompt
    max_tokens: int
    whole: bool = True
    """False: part of the answer has been written already, and is in what is said."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations by number."""

    name: str
    lengths: tuple[tuple[int, int], ...] = ()
    """Per turn: tokens that are added before the answer, and those of the answer."""
    system: int = 0
    """How many of the first ones all clients share."""
    lines: tuple[Turn, ...] = ()
    """A data set: its conversations have one turn."""
    cut: int = 0
    """Longest answer, tokens; 0: as the workload says."""
    seed: str = ""
    """Of made-up words; whatever it says."""

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.name}, answers cut to {self.cut}" if self.cut else self.name

    @property
    def ignore_eos(self) -> bool:
        """Whether answers have exactly the length that was asked for."""
        return not self.lines

    @property
    def turns(self) -> int:
        """Of a conversation."""
        return 1 if self.lines else len(self.lengths)

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer; 0: unknown."""
        return sum(added for added, _ in self.lengths) + sum(self._shortened(out) for _, out in self.lengths)

    @property
    def under_way(self) -> float:
        """Tokens of a conversation that is under way, without those that all share, in the mean over its life; 0: unknown."""
        before, weighted, written = -self.system, 0.0, 0
        for added, out in self.lengths:
            wanted = self._shortened(out)
            before += added
            weighted += wanted * (before + wanted / 2)
            before += wanted
            written += wanted
        return weighted / written if written else 0.0

    @property
    def answer(self) -> float:
        """Tokens of an answer, in the mean; 0: unknown."""
        wanted = [self._shortened(out) for _, out in self.lengths]
        return sum(wanted) / len(wanted) if wanted else 0.0

    def with_cut(self, most: int) -> Workload:
        """The same with answers of at most so many tokens; 0: as they are."""
        return replace(self, cut=most)

    def seeded(self, seed: str) -> Workload:
        """The same lengths, other words."""
        return replace(self, seed=seed)

    def conversation(self, number: int) -> Sequence[Turn]:
        """The turns of a conversation; equal for equal seeds and numbers."""
        if self.lines:
            line = self.lines[number % len(self.lines)]
            return [Turn(line.said, self._shortened(line.max_tokens))]
        return [Turn(said, wanted) for said, wanted in self._made_up(number)]

    def midway(self, number: int, part: float) -> Sequence[Turn]:
        """The rest of a conversation after `part`, below 1, of its answers: what there is by then, the beginning of an answer
        included, is what the first turn says. Nobody knows how long the answers to a data set's lines become: these are whole."""
        if self.lines:
            return self.conversation(number)
        turns = self._made_up(number)
        written = int(part * sum(wanted for _, wanted in turns))
        before: Ids = ()
        for turn, (said, wanted) in enumerate(turns):
            answer = _ids(f"{self.seed} {number} {turn} answer", min(written, wanted))
            before += said + answer
            if written < wanted:
                rest = [Turn(*later) for later in turns[turn + 1 :]]
                return [Turn(before, wanted - written, whole=False), *rest]
            written -= wanted
        raise ValueError(f"part {part}: expected less than 1")

    def _made_up(self, number: int) -> list[tuple[Ids, int]]:
        """What is added in each turn, and tokens of its answer."""
        shared = self.shared
        turns = []
        for turn, (added, wanted) in enumerate(self.lengths):
            own = _ids(f"{self.seed} {number} {turn}", added - len(shared))
            turns.append((shared + own, self._shortened(wanted)))
            shared = ()
        return turns

    @property
    def shared(self) -> Ids:
        """What all conversations begin with."""
        return _ids(f"{self.seed} system", self.system)

    def _shortened(self, tokens: int) -> int:
        return min(tokens, self.cut) if self.cut else tokens


LOW = Workload("low", ((100, 2048),))
HIGH = Workload("high", ((100, 8192),))
AGENT = Workload("agent", ((3584, 1024), (512, 1024), (512, 1024), (512, 1024)), system=2048)
NAMED = {workload.name: workload for workload in (LOW, HIGH, AGENT)}


def find(text: str, *, cut: int = 0) -> Workload:
    """The workload that a command line names.

    Args:
        text: a name, IN/OUT in tokens, or a data set's path.
        cut: longest answer, tokens; 0: as the workload says.

    Raises:
        ValueError: there is no such thing, or a line of the file cannot be used.
    """
    workload = NAMED.get(text)
    if workload is None and (lengths := _IN_OUT.fullmatch(text)):
        prompt, answer = map(int, lengths.groups())
        if prompt < 1 or answer < 1:
            raise ValueError(f"workload {text}: both lengths must be 1 or more")
        workload = Workload(text, ((prompt, answer),))
    if workload is None:
        workload = read(Path(text))
    return replace(workload, cut=cut)


class _Line(msgspec.Struct):
    """Of a data set; other fields are left alone."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] = DATASET_TOKENS


def read(path: Path) -> Workload:
    """A data set.

    Raises:
        ValueError: it cannot be read, is empty, or a line cannot be used, with its number.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        names = ", ".join(NAMED)
        raise ValueError(f"workload {path}: neither {names}, nor IN/OUT, nor a file: {error.strerror}") from error
    turns = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                turns.append(_turn(msgspec.json.decode(line, type=_Line)))
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
                raise ValueError(f"workload {path}: line {number}: {error}") from error
    if not turns:
        raise ValueError(f"workload {path}: holds no line")
    return Workload(path.stem, lines=tuple(turns))


def _turn(line: _Line) -> Turn:
    if (line.prompt is None) == (line.messages is None):
        raise ValueError("expected either 'prompt' or 'messages'")
    if not (line.prompt or line.messages):
        raise ValueError("the prompt is empty")
    if line.messages is not None:
        return Turn(tuple(line.messages), line.max_tokens)
    if isinstance(line.prompt, list):
        return Turn(tuple(line.prompt), line.max_tokens)
    return Turn(line.prompt or "", line.max_tokens)


def _ids(seed: str, count: int) -> Ids:
    # Strings seed by their characters, in every process alike.
    return tuple(random.Random(seed).choices(range(FIRST_ID, LAST_ID + 1), k=count))
