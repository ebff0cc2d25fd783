"""The most text that one token can stand for, so that a text far beyond a context is known for one before it is tokenized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

_NFC_SHRINKS = 4
"""At most, over UTF-8 bytes; the worst is an iota written as U+1FBE with two accents, whose 7 bytes become 2."""


@dataclass(frozen=True, slots=True)
class LongestToken:
    """Of a vocabulary that leaves nothing of a text out.

    Args:
        size: bytes of normalised text.
        shrinks: how many bytes of text beyond ASCII become one normalised byte, at most; ASCII is never made shorter.
    """

    size: int
    shrinks: int = 1

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether a text certainly has more than this many tokens."""
        most = tokens * self.size * (1 if text.isascii() else self.shrinks)
        # Four bytes a character at most: short texts are not encoded for this.
        return len(text) > most or (4 * len(text) > most and len(text.encode(errors="surrogatepass")) > most)


def longest_token(description: Mapping[str, Any], normalise: Callable[[str], str]) -> LongestToken | None:
    """From a tokenizer.json; None where a token may stand for text of any length, or where that is not known.

    Args:
        description: the contents of the file.
        normalise: what the tokenizer's normaliser makes of a text.
    """
    normalizers = _parts(description["normalizer"], "normalizers")
    splitters = _parts(description["pre_tokenizer"], "pretokenizers")
    added = description["added_tokens"]
    whole = (
        all(map(_keeps_normalised, normalizers))
        and all(map(_keeps_split, splitters))
        and _knows_bytes(description["model"], splitters)
        # Such a token takes all white space beside it.
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    if not whole:
        return None
    contents = [token["content"] for token in added]
    pieces = [*description["model"]["vocab"], *contents, *map(normalise, contents)]
    composed = any(part["type"] == "NFC" for part in normalizers)
    return LongestToken(max(len(piece.encode()) for piece in pieces), _NFC_SHRINKS if composed else 1)


def _parts(step: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """A step of a tokenizer as its parts; sequences may be nested."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [part for inner in step[name] for part in _parts(inner, name)]


def _keeps_normalised(part: Mapping[str, Any]) -> bool:
    """Whether it makes no text shorter, or not by more than is known."""
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return bool(pattern) and len(part["content"].encode()) >= len(pattern.encode())
    return part["type"] in ("NFC", "Prepend")


def _keeps_split(part: Mapping[str, Any]) -> bool:
    """Whether it only splits."""
    if part["type"] == "Split":
        return bool(part["behavior"] != "Removed")
    return part["type"] in ("ByteLevel", "Digits", "Metaspace")


def _knows_bytes(model: Mapping[str, Any], splitters: Iterable[Mapping[str, Any]]) -> bool:
    """Whether every byte has a token, so that no character is dropped or swallowed with others by one for the unknown."""
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    if any(part["type"] == "ByteLevel" for part in splitters):
        single: Iterable[str] = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    elif model["byte_fallback"]:
        single = (f"<0x{byte:02X}>" for byte in range(256))
    else:
        return False
    return all(piece in model["vocab"] for piece in single)
