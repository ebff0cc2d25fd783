"""Text to ids and back: a checkpoint's tokenizer, its chat template, its stop ids, and decoding token by token.

Neither torch nor transformers is imported, unless a checkpoint has no tokenizer.json and must be converted.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from models.chat_template import ChatTemplate, ChatTemplateError
from models.config import ModelError, read_json
from models.longest_token import longest_token

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
DEFER_TOKEN = "<|defer|>"  # noqa: S105  (a word of a vocabulary)
"""The last token of a model of Co-LLM (arXiv 2403.03870). It is never text: its row of the LM head is a router's, and the tokenizer
is taken without it, so that it is that of any model of its family."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """One checkpoint's tokenizer.

    Args:
        backend: the Rust tokenizer.
        settings: contents of tokenizer_config.json.
        template: Jinja source of the chat template, if there is one.
        eos_ids: further end-of-sequence ids, from config.json and generation_config.json.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        template: str | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        description = json.loads(backend.to_str())
        decoder = description["decoder"] or {"type": "none"}
        self._decoders = frozenset(part["type"] for part in decoder.get("decoders", [decoder]))
        self._special_tokens = {name: text for name in _SPECIAL_NAMES if (text := _content(settings.get(name)))}
        self._template = ChatTemplate(template, self._special_tokens) if template else None
        self.special_ids = frozenset(t["id"] for t in description["added_tokens"] if t["special"])
        self.vocab_size = _vocabulary_size(description)
        self.bos_id = self._id_of("bos_token")
        own_eos = self._id_of("eos_token")
        ids = {*eos_ids, own_eos} if own_eos is not None else set(eos_ids)
        self.eos_ids = frozenset(token for token in ids if 0 <= token < self.vocab_size)
        normalizer = backend.normalizer
        self._longest = longest_token(description, normalizer.normalize_str if normalizer else str)
        self._bytes: dict[int, bytes | None] = {}

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Read a Hugging Face directory; model configs in it are optional. Raises ModelError."""
        directory = Path(directory)
        settings = _optional_json(directory / "tokenizer_config.json")
        eos_ids: list[int] = []
        for name in ("config.json", "generation_config.json"):
            eos_ids += _end_ids(directory / name)
        try:
            return cls(_load_backend(directory), settings, _load_template(directory, settings), eos_ids)
        except ChatTemplateError as error:
            raise ModelError(f"{directory}: {error}") from error

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text.

        With `add_special` the tokenizer adds what it adds (BOS, for those that do), once: a text that begins with the
        BOS token itself gets no second one.
        """
        # The batch call, because `encode` keeps the interpreter's lock: a text of megabytes would stop every other thread.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        if add_special and self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]
        return ids

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether a text certainly has more than this many tokens, by its length alone: False where only encoding it can tell."""
        return self._longest is not None and self._longest.exceeds(text, tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt's text; `variables` are those of `ChatTemplate.render`. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError("the model's tokenizer has no chat template; use the completions endpoint")
        return self._template.render(messages, **variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The prompt's ids. Whether it begins with BOS is the template's business alone. Raises ChatTemplateError."""
        return self.encode(self.apply_chat_template(messages, **variables), add_special=False)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids: exactly what an `IncrementalDecoder` yields over them in any pieces."""
        decoder = IncrementalDecoder(self, skip_special=skip_special)
        return decoder.push(ids) + decoder.flush()

    def id_to_token(self, token: int) -> str | None:
        """The vocabulary entry as the tokenizer spells it."""
        return self._backend.id_to_token(token)

    def id_to_bytes(self, token: int) -> bytes | None:
        """The bytes that an id stands for; None when the tokenizer does not work on bytes. Unknown ids are empty."""
        if token not in self._bytes:
            self._bytes[token] = self._to_bytes(token)
        return self._bytes[token]

    @property
    def works_on_bytes(self) -> bool:
        """Whether every id stands for bytes of its own, whatever its neighbours (byte-level BPE, byte fallback)."""
        return bool({"ByteLevel", "ByteFallback"} & self._decoders)

    @property
    def strips_first_space(self) -> bool:
        """Whether decoding drops a space that the encoder put before the first word."""
        return "Strip" in self._decoders and self.works_on_bytes

    def decode_together(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The tokenizer's own decoding of a whole sequence."""
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def first_difference(self, other: Tokenizer) -> str | None:
        """The lowest id that means different things to the two, described; ordinary ids come before special ones."""
        specials = self.special_ids | other.special_ids
        every = range(max(self.vocab_size, other.vocab_size))
        ordinary = (token for token in every if token not in specials)
        for token in (*ordinary, *sorted(specials)):
            mine, theirs = self.id_to_token(token), other.id_to_token(token)
            if mine != theirs:
                kind = "special id" if token in specials else "id"
                return f"{kind} {token} is {_spelt(mine)} in one and {_spelt(theirs)} in the other"
        return None

    def _to_bytes(self, token: int) -> bytes | None:
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b"" if self.works_on_bytes else None
        if "ByteLevel" in self._decoders:
            codes = [_BYTE_OF.get(char) for char in piece]
            return bytes(code for code in codes if code is not None) if None not in codes else piece.encode()
        if "ByteFallback" in self._decoders:
            if match := _BYTE_PIECE.match(piece):
                return bytes([int(match[1], 16)])
            return piece.replace("▁", " ").encode()
        return None

    def _id_of(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return self._backend.token_to_id(text) if text else None


class IncrementalDecoder:
    """Decodes one sequence as its ids arrive; a character whose bytes are split between tokens is held back."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_first_space
        # For tokenizers whose words depend on their left neighbour: the last ids that are out.
        self._window: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with these ids."""
        kept = [token for token in ids if token not in self._skip]
        if not self._tokenizer.works_on_bytes:
            return self._push_words(kept)
        return self._stripped(self._utf8.decode(b"".join(self._tokenizer.id_to_bytes(token) or b"" for token in kept)))

    def flush(self) -> str:
        """What is left at the end: at most one replacement character for a sequence cut inside a character."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def _push_words(self, ids: list[int]) -> str:
        if not ids:
            return ""
        before = self._tokenizer.decode_together(self._window, skip_special=False)
        text = self._tokenizer.decode_together(self._window + ids, skip_special=False)
        # Decoders treat a first word differently and look at direct neighbours; two words of context hide both.
        self._window = (self._window + ids)[-2:]
        return text[len(before) :]


def vocabulary_size(directory: Path | str) -> int:
    """Ids of a checkpoint's tokenizer, added tokens included, read without building it. Raises ModelError."""
    path = Path(directory) / "tokenizer.json"
    if not path.exists():
        return Tokenizer.load(directory).vocab_size
    return _read_description(path)[0]


def defer_id(directory: Path | str) -> int | None:
    """Id of a checkpoint's DEFER_TOKEN, which no tokenizer here knows any more. Raises ModelError where it is not the last one."""
    path = Path(directory) / "tokenizer.json"
    if path.exists():
        return _read_description(path)[1]
    found = _optional_json(Path(directory) / "added_tokens.json").get(DEFER_TOKEN)
    return found if isinstance(found, int) else None


def _read_description(path: Path) -> tuple[int, int | None]:
    """Ids of a tokenizer.json, DEFER_TOKEN not counted, and that one's id."""
    try:
        description = read_json(path)
        defer = _split_defer(description, path)
        return _vocabulary_size(description), defer
    except (KeyError, TypeError) as error:
        raise ModelError(f"{path}: not a tokenizer: {error!r}") from error


def _split_defer(description: dict[str, Any], source: Path) -> int | None:
    """Take DEFER_TOKEN out of a tokenizer's description; its id. Raises ModelError where it is not the last one."""
    added = description.get("added_tokens", [])
    defer = next((token["id"] for token in added if token["content"] == DEFER_TOKEN), None)
    if defer is None:
        return None
    if defer != _vocabulary_size(description) - 1:
        raise ModelError(f"{source}: {DEFER_TOKEN} has id {defer}; only the last id can be split off")
    description["added_tokens"] = [token for token in added if token["id"] != defer]
    vocab = description["model"]["vocab"]
    if isinstance(vocab, dict):
        vocab.pop(DEFER_TOKEN, None)
    return int(defer)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte -> the byte (GPT-2's convention)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(shifted)}


_BYTE_OF = _byte_alphabet()


def _entries(model: Mapping[str, Any]) -> list[tuple[int, str]]:
    """(id, piece) of a model's vocabulary: a mapping, or a list in the order of ids."""
    vocab = model["vocab"]
    if isinstance(vocab, Mapping):
        return [(token, piece) for piece, token in vocab.items()]
    return [(token, entry[0]) for token, entry in enumerate(vocab)]


def _vocabulary_size(description: Mapping[str, Any]) -> int:
    ids = [token for token, _ in _entries(description["model"])]
    ids += [token["id"] for token in description.get("added_tokens", [])]
    return max(ids, default=-1) + 1


def _load_backend(directory: Path) -> tokenizers.Tokenizer:
    backend = _read_backend(directory)
    if backend.token_to_id(DEFER_TOKEN) is None:
        return backend
    description = json.loads(backend.to_str())
    _split_defer(description, directory)
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _read_backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if path.exists():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust extension raises nothing narrower
            raise ModelError(f"{path}: not a tokenizer: {error}") from error
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory")
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        ).backend_tokenizer
    except (OSError, ValueError, ImportError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{directory}: no tokenizer.json, and transformers cannot build one: {reason}") from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{directory}: no tokenizer.json, and transformers has only a slow tokenizer for it")
    if not backend.encode("a").ids:  # without any vocabulary file, transformers builds a tokenizer of nothing
        raise ModelError(f"{directory}: no tokenizer.json, and nothing that says what its ids mean")
    return backend


def _load_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        try:
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        except (KeyError, TypeError) as error:
            problem = "chat_template: must be text or a list of objects with name and template"
            raise ModelError(f"{directory / 'tokenizer_config.json'}: {problem}") from error
    return template if isinstance(template, str) else None


def _end_ids(path: Path) -> list[int]:
    """`eos_token_id` of config.json or generation_config.json: an id, several, or none."""
    value = _optional_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ModelError(f"{path}: eos_token_id: must be a token id or a list of them, not {value!r}")
    return ids


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _content(token: Any) -> str | None:
    """Special tokens are written as text or as an object with the text as `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _spelt(piece: str | None) -> str:
    return "absent" if piece is None else repr(piece)
