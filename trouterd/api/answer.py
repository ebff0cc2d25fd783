"""The text of one choice: detokenization, stop strings and what they hold back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ipc.messages import TokenUpdate, unpack_ids
from models.tokenizer import IncrementalDecoder, Tokenizer
from trouterd.api.stops import StopMatcher, StopStrings


@dataclass(frozen=True, slots=True)
class Delta:
    """What one update adds to a choice."""

    text: str
    """Text that can be shown: no half characters, nothing that may become a stop string."""
    token_ids: Sequence[int]
    """Ids that count, end-of-answer tokens included."""
    writers: bytes
    """u8 per id: index in the route's model list of the model that wrote it."""
    finish: str
    """'', 'stop' or 'length'."""


_NOTHING = Delta("", (), b"", "")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the ids of a request become text; shared by its choices."""

    tokenizer: Tokenizer
    models: tuple[str, ...]
    """Names by writer index."""
    stops: StopStrings | None = None
    include_stop: bool = False
    min_tokens: int = 0
    """Stop strings count only in the text of later tokens."""
    skip_special_tokens: bool = True


class Answer:
    """One choice from its first update to its finish."""

    def __init__(self, options: TextOptions) -> None:
        self.options = options
        self.completion_tokens = 0
        """Every sampled id up to the end of the answer, EOS or stop token included."""
        self.tokens_by_writer = [0] * len(options.models)
        self.finish = ""
        self.handoffs = 0
        self.pending_us = 0
        self.forwards: Sequence[int] = [0] * len(options.models)
        self.drafted = self.accepted = 0
        self._decoder = IncrementalDecoder(options.tokenizer, skip_special=options.skip_special_tokens)
        self._matcher = StopMatcher(options.stops) if options.stops is not None else None

    def push(self, update: TokenUpdate) -> Delta:
        """Apply an update; those after the finish are surplus and add nothing.

        When a stop string ends the answer, ids after the one that completed it are surplus too.
        """
        if self.finish:
            return _NOTHING
        self.handoffs, self.pending_us = update.handoffs, update.pending_us
        self.forwards = update.forwards or self.forwards
        self.drafted, self.accepted = update.drafted, update.accepted
        ids, counted, finish = unpack_ids(update.ids), len(update.writers), update.finish
        visible = ids[: counted - update.trim] if update.trim else ids
        if self._matcher is None:
            text = self._decoder.push(visible)
            if finish:
                text += self._decoder.flush()
        else:
            text, used = self._push_matching(visible, self._matcher)
            if not self._matcher.matched and finish:
                text += self._flush(self._matcher)
            elif self._matcher.matched:
                counted = used
            if self._matcher.matched:
                finish = "stop"
        writers = update.writers[:counted]
        self.completion_tokens += counted
        for writer in writers:
            self.tokens_by_writer[writer] += 1
        self.finish = finish
        return Delta(text, ids[:counted], writers, finish)

    def _push_matching(self, ids: Sequence[int], matcher: StopMatcher) -> tuple[str, int]:
        """Released text, and how many ids it took: the match decides which id was the last."""
        pieces = []
        for position, token_id in enumerate(ids):
            piece = self._decoder.push([token_id])
            if self.completion_tokens + position < self.options.min_tokens:
                pieces.append(piece)
                continue
            pieces.append(matcher.push(piece))
            if matcher.matched:
                if self.options.include_stop:
                    pieces.append(matcher.matched)
                return "".join(pieces), position + 1
        return "".join(pieces), len(ids)

    def _flush(self, matcher: StopMatcher) -> str:
        """What decoder and matcher still hold at the end; the end of a half character may complete a stop string."""
        text = matcher.push(self._decoder.flush())
        if not matcher.matched:
            return text + matcher.flush()
        return text + matcher.matched if self.options.include_stop else text
