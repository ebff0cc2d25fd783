"""Tokenizers of several kinds: ids, bytes, chat templates, and text that arrives token by token."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from models.chat_template import ChatTemplateError
from models.config import ModelError
from models.tokenizer import IncrementalDecoder, Tokenizer, vocabulary_size
from tests.models.tiny import BOS, EOS, byte_tokenizer, tiny_qwen3


@pytest.fixture(scope="module")
def bytetok(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_tokenizer(tmp_path_factory.mktemp("bytetok")))


def merged_bpe() -> Tokenizer:
    """Byte-level BPE with merges across bytes of one character, trained on a few lines."""
    backend = hf.Tokenizer(hf.models.BPE())
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<end>"]
    )
    backend.train_from_iterator(["größer 你好 😀 hello hello world 你们 😀😃 größe"] * 20, trainer)
    return Tokenizer(backend, {"eos_token": "<end>"})


def byte_fallback() -> Tokenizer:
    """SentencePiece style: pieces with a visible space, bytes for the rest, first space stripped."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    pieces = ["▁", "a", "b", "▁a", "▁ab", "ab", "ö"]
    vocab |= {piece: 257 + index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    backend = hf.Tokenizer(hf.models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))  # noqa: S106
    backend.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")])
    backend.decoder = hf.decoders.Sequence(
        [
            hf.decoders.Replace("▁", " "),
            hf.decoders.ByteFallback(),
            hf.decoders.Fuse(),
            hf.decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend, {})


def words() -> Tokenizer:
    backend = hf.Tokenizer(hf.models.WordLevel({"Q": 0, "+": 1, "7": 2, "<e>": 3}, unk_token="Q"))  # noqa: S106
    backend.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<e>"])
    return Tokenizer(backend, {"eos_token": "<e>"})


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    pieces, place = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(decoder.push(ids[place : place + size]))
        place += size
    return [*pieces, decoder.flush()]


def test_bytetok(bytetok: Tokenizer) -> None:
    assert bytetok.encode("Hi") == [BOS, 72, 105]
    assert bytetok.encode("Hi", add_special=False) == [72, 105]
    assert (bytetok.vocab_size, bytetok.bos_id, bytetok.eos_ids) == (258, BOS, {EOS})
    assert bytetok.special_ids == {BOS, EOS}
    assert [bytetok.id_to_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert bytetok.id_to_bytes(BOS) == b"<s>"


def test_bos_is_never_doubled(bytetok: Tokenizer, tmp_path: Path) -> None:
    assert bytetok.encode("<s>x") == [BOS, 120]
    message = [{"role": "user", "content": "x"}]
    expected = [BOS, *b"<u>x</u><a>"]
    assert bytetok.encode_chat(message) == expected
    silent = Tokenizer.load(byte_tokenizer(tmp_path, template_bos=False))
    assert silent.encode_chat(message) == expected[1:]
    plain = Tokenizer.load(byte_tokenizer(tmp_path, add_bos=False))
    assert plain.encode("x") == [120]
    assert plain.encode_chat(message) == expected


def test_character_split_across_tokens(bytetok: Tokenizer) -> None:
    assert streamed(bytetok, [0xF0, 0x9F, 0x98, 0x80, EOS], [1, 1, 1, 1]) == ["", "", "", "😀", "", ""]
    assert streamed(bytetok, [0x41, 0xE4, 0xBD], [1, 1]) == ["A", "", "", "\ufffd"]


@settings(max_examples=150)
@given(st.lists(st.integers(0, 257), max_size=24), st.lists(st.integers(0, 5), max_size=8))
def test_byte_level_pieces_join_to_the_full_decode(ids: list[int], sizes: list[int]) -> None:
    tokenizer = CACHED["bytes"]
    joined = "".join(streamed(tokenizer, ids, sizes))
    assert joined == tokenizer.decode(ids) == tokenizer.decode_together(ids, skip_special=True)


@settings(max_examples=150)
@given(
    st.text(alphabet="größer 你好😀 hewo\u0301\U0001f468\u200d", max_size=20), st.lists(st.integers(0, 3), max_size=12)
)
def test_texts_survive_any_cut(text: str, sizes: list[int]) -> None:
    for name in ("bytes", "merged", "fallback"):
        tokenizer = CACHED[name]
        pieces = streamed(tokenizer, tokenizer.encode(text, add_special=False), sizes)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=8))
def test_word_tokenizers_join_to_the_full_decode(ids: list[int], sizes: list[int]) -> None:
    tokenizer = CACHED["words"]
    assert not tokenizer.works_on_bytes
    assert tokenizer.id_to_bytes(0) is None
    assert "".join(streamed(tokenizer, ids, sizes)) == tokenizer.decode_together(ids, skip_special=True)


def test_special_tokens_are_shown_on_request(bytetok: Tokenizer) -> None:
    ids = [BOS, 65, EOS, 66]
    assert bytetok.decode(ids) == "AB"
    assert bytetok.decode(ids, skip_special=False) == "<s>A</s>B"


def test_unknown_ids_have_no_bytes(bytetok: Tokenizer) -> None:
    assert bytetok.id_to_bytes(9999) == b""
    assert bytetok.decode([65, 9999, 66]) == "AB"


def test_fallback_bytes() -> None:
    tokenizer = CACHED["fallback"]
    assert tokenizer.id_to_bytes(1 + 0xE4) == b"\xe4"
    assert tokenizer.id_to_bytes(261) == b" ab"
    assert tokenizer.decode([261, 261]) == "ab ab"


def test_eos_ids_are_the_union_of_all_files(tmp_path: Path) -> None:
    directory = tiny_qwen3(tmp_path, eos=[EOS, 10, 400])
    assert Tokenizer.load(directory).eos_ids == {EOS, 10}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 11}))
    assert Tokenizer.load(directory).eos_ids == {EOS, 10, 11}


def test_first_difference(bytetok: Tokenizer, tmp_path: Path) -> None:
    same = Tokenizer.load(byte_tokenizer(tmp_path / "same", template_bos=False))
    assert same.first_difference(bytetok) is None
    more = Tokenizer.load(byte_tokenizer(tmp_path / "more", extra=("<x>",)))
    assert more.first_difference(bytetok) == "special id 258 is '<x>' in one and absent in the other"
    difference = CACHED["merged"].first_difference(bytetok)
    assert difference is not None
    assert difference.startswith("id 1 is ")


def test_vocabulary_size_without_building(tmp_path: Path, bytetok: Tokenizer) -> None:
    assert vocabulary_size(byte_tokenizer(tmp_path, extra=("<x>", "<y>"))) == 260
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        vocabulary_size(tmp_path)


def test_unusable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        Tokenizer.load(tmp_path / "none")
    byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    with pytest.raises(ModelError, match="chat template"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default"}]}')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template: must be text or a list"):
        Tokenizer.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: cannot be read as UTF-8"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Slow", "own.Fast"]}}')
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="transformers cannot build one"):
        Tokenizer.load(tmp_path)


def test_templates_see_what_transformers_gives_them(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{%- if messages[0].role == 'tool' %}{{ raise_exception('tools first') }}{% endif %}\n"
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {{- m.content }}{% endfor %}{{ tools | tojson }}{% if enable_thinking %}T{% endif %}"
        "{% generation %}{{ eos_token }}{% endgeneration %}{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer = Tokenizer.load(tmp_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "<ä>"}, {"role": "user", "content": "never"}],
        tools=[{"name": "f<"}],
        enable_thinking=True,
    )
    assert text == '<ä>[{"name": "f<"}]T</s>>'
    with pytest.raises(ChatTemplateError, match="tools first"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}])
    with pytest.raises(ChatTemplateError, match="no element 0"):
        tokenizer.apply_chat_template([])


def test_templates_cannot_reach_python(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ChatTemplateError, match="unsafe"):
        Tokenizer.load(tmp_path).apply_chat_template([{"role": "user", "content": ""}])


def test_no_template(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat([])


def test_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = byte_tokenizer(tmp_path)
    ours, theirs = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}]
    assert ours.encode_chat(messages) == theirs.apply_chat_template(messages, return_dict=False)
    for text in ("x y", "größe 😀", ""):
        assert ours.encode(text) == theirs(text).input_ids
    assert ours.vocab_size == len(theirs)


def test_a_directory_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    vocab = json.loads((byte_tokenizer(tmp_path / "a") / "tokenizer.json").read_text())["model"]["vocab"]
    other = tmp_path / "b"
    other.mkdir()
    (other / "vocab.json").write_text(json.dumps(vocab))
    (other / "merges.txt").write_text("#version: 0.2\n")
    (other / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    assert Tokenizer.load(other).encode("Hi", add_special=False) == [72, 105]
    assert vocabulary_size(other) > 255


def test_other_threads_go_on_during_a_long_text(bytetok: Tokenizer) -> None:
    rounds, done = 0, threading.Event()

    def count() -> None:
        nonlocal rounds
        while not done.is_set():
            rounds += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    # Long enough that nobody is made to let go of the interpreter's lock: what runs meanwhile was let in.
    sys.setswitchinterval(1000.0)
    counter = threading.Thread(target=count)
    try:
        counter.start()
        before = rounds
        # On a busy host it may get no core while one text is read.
        for _ in range(100):
            ids = bytetok.encode("a" * 200_000, add_special=False)
            if (after := rounds) > before:
                break
    finally:
        done.set()
        counter.join()
        sys.setswitchinterval(interval)
    assert len(ids) == 200_000
    assert after > before


def normalising(normalizer: hf.normalizers.Normalizer) -> Tokenizer:
    backend = merged_bpe()._backend
    backend.normalizer = normalizer
    return Tokenizer(backend, {})


def test_length_tells_that_a_text_has_too_many_tokens(bytetok: Tokenizer) -> None:
    longest = len("</s>")
    assert bytetok.exceeds("a" * (10 * longest + 1), 10)
    assert not bytetok.exceeds("a" * (10 * longest), 10)
    # Bytes count, not characters.
    assert bytetok.exceeds("ä" * (10 * longest // 2 + 1), 10)
    assert not bytetok.exceeds("</s>" * 10, 10)


IOTA = "\u1fbe\u0308\u0301"
"""What NFC makes the least of: 7 bytes become 2."""


@pytest.mark.parametrize("tokenizer", [merged_bpe(), byte_fallback(), normalising(hf.normalizers.NFC())])
@given(text=st.text() | st.text("aglör <en>d▁" + IOTA, max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_text_that_fits_is_too_long(tokenizer: Tokenizer, text: str) -> None:
    assert not tokenizer.exceeds(text, len(tokenizer.encode(text, add_special=False)))
    assert tokenizer.exceeds(text + "a" * 10_000, 10)


def test_composed_characters_are_not_taken_for_more_than_they_are() -> None:
    vocab = {piece: number for number, piece in enumerate(sorted(hf.pre_tokenizers.ByteLevel.alphabet()))}
    backend = hf.Tokenizer(hf.models.BPE(vocab, []))
    backend.normalizer = hf.normalizers.NFC()
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(backend, {})
    assert len(tokenizer.encode(IOTA * 100)) == 200
    assert not tokenizer.exceeds(IOTA * 100, 200)
    assert tokenizer.exceeds(IOTA * 1000, 200)


def test_length_tells_nothing_where_text_may_vanish() -> None:
    shrinking = [
        hf.normalizers.Strip(),
        hf.normalizers.NFKC(),
        hf.normalizers.Lowercase(),
        hf.normalizers.Replace("aaaa", "a"),
        hf.normalizers.Replace(hf.Regex(" +"), " "),
        hf.normalizers.Sequence([hf.normalizers.NFC(), hf.normalizers.Sequence([hf.normalizers.StripAccents()])]),
    ]
    swallowing = merged_bpe()._backend
    swallowing.add_special_tokens([hf.AddedToken("<pad>", lstrip=True)])
    partial = hf.Tokenizer(hf.models.BPE({"a": 0}, []))
    partial.pre_tokenizer = hf.pre_tokenizers.ByteLevel()
    removing = merged_bpe()._backend
    removing.pre_tokenizer = hf.pre_tokenizers.Sequence(
        [hf.pre_tokenizers.Split("a", "removed"), hf.pre_tokenizers.ByteLevel()]
    )
    others = [Tokenizer(backend, {}) for backend in (swallowing, partial, removing)]
    for tokenizer in (words(), *map(normalising, shrinking), *others):
        assert not tokenizer.exceeds("a" * 100_000, 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b'{"eos_token_id": [1, "b"]}', r"config\.json: eos_token_id: must be a token id or a list"),
        ("generation_config.json", b'{"eos_token_id": [{}]}', r"generation_config\.json: eos_token_id: must be"),
        ("generation_config.json", b'{"eos_token_id": true}', r"generation_config\.json: eos_token_id: must be"),
        ("config.json", b"[" * 100_000, r"config\.json: not valid JSON"),
        ("chat_template.jinja", b"\xff\xfe", r"chat_template\.jinja: cannot be read as UTF-8 text"),
    ],
)
def test_broken_files_beside_the_tokenizer_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    directory = byte_tokenizer(tmp_path)
    (directory / name).write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.load(directory)
    assert "\n" not in str(caught.value)


def test_missing_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match=r"no tokenizer\.json, and nothing that says what its ids mean"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ModelError, match=r"no tokenizer\.json, and transformers cannot build one") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_torch_is_not_imported(tmp_path: Path) -> None:
    directory = byte_tokenizer(tmp_path)
    program = (
        "import sys; from models.tokenizer import Tokenizer; from models.config import ModelConfig;"
        f"Tokenizer.load({str(directory)!r}); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


CACHED: dict[str, Tokenizer] = {"merged": merged_bpe(), "fallback": byte_fallback(), "words": words()}


@pytest.fixture(scope="module", autouse=True)
def _bytetok_for_properties(bytetok: Tokenizer) -> None:
    CACHED["bytes"] = bytetok
