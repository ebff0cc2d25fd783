"""Other architectures over paged KV against transformers' own forward pass and generate; what is refused, and how."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.batch import Batch
from models.config import ModelError
from models.shape import load_shape
from models.transformers_config import TransformersConfig
from models.transformers_runner import TransformersRunner
from tests.models.foreign import edit_config, reference, tiny_foreign
from tests.models.test_torch_runner import PAGE, Driver, prompt
from tests.models.tiny import tiny_qwen3

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "olmo2": {},
    "phi3": {},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.8},
    "gemma": {"tie_word_embeddings": False},
    "starcoder2": {"tie_word_embeddings": False, "use_bias": True, "sliding_window": None},
    "qwen3_moe": {},
    "gpt2": {},
    "cohere": {"logit_scale": 1.0},
}
PROMPT, ANSWER = 70, 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoint of a family, written once."""
    root = tmp_path_factory.mktemp("foreign")

    def folder(family: str) -> Path:
        directory = root / family
        return directory if directory.exists() else tiny_foreign(directory, family, **FAMILIES[family])

    return folder


def load(directory: Path, num_pages: int = 96, page_size: int = PAGE, **options: Any) -> TransformersRunner:
    return TransformersRunner.load(directory, num_pages=num_pages, page_size=page_size, **options)


def whole_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_generate(folders: Callable[[str], Path], family: str) -> None:
    """A prompt in chunks across page borders, then one token at a time; transformers generates with its own cache."""
    directory = folders(family)
    model = reference(directory)
    with torch.no_grad():
        generated = model.generate(
            torch.tensor([prompt(PROMPT)]),
            attention_mask=torch.ones(1, PROMPT, dtype=torch.long),
            max_new_tokens=ANSWER,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0]
    driver = Driver.of(load(directory))
    slot = driver.open(prompt(PROMPT))
    rows = [driver.step({slot: count}).logits for count in (33, 1, 20, 16)]
    for _ in range(ANSWER):
        driver.ids[slot].append(int(rows[-1][-1].argmax()))
        rows.append(driver.step({slot: 1}).logits)
    assert driver.ids[slot] == generated.tolist()
    expected = whole_logits(model, driver.ids[slot])
    assert (torch.cat(rows) - expected).abs().max() < 1e-4
    assert expected.std() > 1


@pytest.mark.parametrize("family", ["gpt_neox", "granite", "qwen3_moe"])
def test_mixed_batches(folders: Callable[[str], Path], family: str) -> None:
    """Prefill, extend and decode rows of several requests in one step: every row as if its request were alone."""
    directory = folders(family)
    model, runner = reference(directory), load(directory)
    driver, draw = Driver.of(runner), random.Random(1)
    requests = {
        driver.open(prompt(length, seed)): prompt(length, seed) for seed, length in enumerate((150, 64, 17, 90))
    }
    expected = {slot: whole_logits(model, ids) for slot, ids in requests.items()}
    while left := {slot: len(ids) - driver.fed[slot] for slot, ids in requests.items() if driver.fed[slot] < len(ids)}:
        chosen = draw.sample(list(left), draw.randint(1, len(left)))
        counts = {slot: min(left[slot], draw.choice([1, 1, 4, 40])) for slot in chosen}
        before = dict(driver.fed)
        logits = driver.step(counts).logits
        wanted = torch.cat([expected[slot][before[slot] : driver.fed[slot]] for slot in counts])
        assert (logits - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("page_size", [1, 7, 48, 200])
def test_any_page_size(folders: Callable[[str], Path], page_size: int) -> None:
    directory = folders("olmo2")
    ids = prompt(290)
    runner = load(directory, num_pages=1 + 300 // page_size, page_size=page_size)
    table = np.random.default_rng(0).permutation(runner.num_pages).astype(np.int32)[None]
    rows = []
    for start, end in ((0, 130), (130, 131), (131, 200), (200, 203), (203, 290)):
        span = np.arange(start, end)
        batch = Batch(np.array(ids[start:end]), span, span * 0, table, span - start, span)
        rows.append(runner.step(batch).logits)
    assert (torch.cat(rows) - whole_logits(reference(directory), ids)).abs().max() < 1e-4


def test_shared_prefixes(folders: Callable[[str], Path]) -> None:
    directory = folders("gpt_neox")
    model, driver = reference(directory), Driver.of(load(directory), prefix_cache=True)
    shared = prompt(100)
    hits = []
    for seed in (1, 2, 3, 1):
        ids = shared + prompt(30, seed)
        slot = driver.open(ids)
        hits.append(driver.fed[slot])
        logits = driver.step({slot: len(ids) - driver.fed[slot]}).logits
        assert (logits - whole_logits(model, ids)[hits[-1] :]).abs().max() < 1e-4
        driver.close(slot)
    assert hits == [0, 96, 96, 128]


def test_wanted_rows_hidden_states_and_the_tokenizers_ids(folders: Callable[[str], Path]) -> None:
    directory = folders("gemma")
    full, cut = load(directory), load(directory, vocab_size=258)
    assert (cut.vocab_size, cut.hidden_size, cut.context_length) == (258, 64, 512)
    ids, rows = prompt(20), np.arange(20)
    table = np.arange(2, dtype=np.int32)[None]
    wanted = np.array([3, 4, 19])
    every = full.step(Batch(np.array(ids), rows, rows * 0, table, rows, rows))
    some = cut.step(Batch(np.array(ids), rows, rows * 0, table, wanted, wanted))
    assert torch.equal(some.hidden, every.hidden[wanted])
    assert (some.logits - every.logits[wanted, :258]).abs().max() < 1e-4
    head = load_file(directory / "model.safetensors")["lm_head.weight"]
    assert (some.hidden @ head[:258].T - some.logits).abs().max() < 1e-4
    none = cut.step(Batch(np.array(ids), rows, rows * 0, table, rows[:0], rows[:0]))
    assert (none.logits.shape, none.hidden.shape) == ((0, 258), (0, 64))


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3_moe"])
def test_bfloat16(folders: Callable[[str], Path], family: str) -> None:
    """As close to float32 as transformers' own bfloat16 is."""
    directory = folders(family)
    ids = prompt(150)
    exact = whole_logits(reference(directory), ids)
    theirs = whole_logits(reference(directory, torch.bfloat16), ids).float()
    driver = Driver.of(load(directory, dtype="bfloat16"))
    ours = driver.step({driver.open(ids): len(ids)})
    assert ours.logits.dtype == torch.float32
    assert ours.hidden.dtype == torch.bfloat16
    assert (ours.logits - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


def test_a_window_bounds_the_context(tmp_path: Path) -> None:
    """Within its window a sliding layer is a full one: served to the bound, not beyond."""
    directory = tiny_foreign(tmp_path, "gemma3_text", sliding_window=64, tie_word_embeddings=False)
    assert "sliding_attention" in json.loads((directory / "config.json").read_text())["layer_types"]
    config = TransformersConfig.load(directory)
    assert (config.context_length, config.bound) == (64, "sliding_window")
    driver = Driver.of(load(directory))
    ids = prompt(64)
    logits = driver.step({driver.open(ids): 64}).logits
    assert (logits - whole_logits(reference(directory), ids)).abs().max() < 1e-4
    with pytest.raises(ModelError, match="context_length 65 is over the model's 64"):
        load(directory, context_length=65)


def test_switching_rotations_bound_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [4.0] * 8, "rope_theta": 10_000.0}
    directory = tiny_foreign(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=128)
    config = TransformersConfig.load(directory)
    assert (config.context_length, config.bound) == (128, "rope_parameters")
    driver = Driver.of(load(directory))
    ids = prompt(128)
    logits = driver.step({driver.open(ids): 128}).logits
    assert (logits - whole_logits(reference(directory), ids)).abs().max() < 1e-4


def test_shape(tmp_path: Path) -> None:
    config = load_shape(edit_config(tiny_foreign(tmp_path / "a", "gpt2"), dtype="bfloat16"))
    assert config == TransformersConfig("gpt2", 260, 64, 2, 4, 4, 16, 512, "", "bfloat16")
    assert config.kv_bytes_per_token(2) == 2 * 2 * 4 * 16 * 2
    assert not isinstance(load_shape(tiny_qwen3(tmp_path / "b")), TransformersConfig)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "recurrent": ("mamba", {}, "model_type: 'mamba' is recurrent"),
    "position bias": (
        "bloom",
        {"n_head": 4},
        "model_type: 'bloom' has attention in transformers that cannot be replaced",
    ),
    "soft cap": ("gemma2", {"sliding_window": 512}, "attn_logit_softcapping: soft-capped attention is not supported"),
    "sinks": ("gpt_oss", {"sliding_window": 512}, "model_type: 'gpt_oss' cannot be served: its attention takes s_aux"),
    "not causal": ("bert", {}, "model_type: 'bert' cannot be served: over paged attention its logits differ by "),
    "two softmaxes": ("diffllama", {}, r"attention runs in layers \[0, 0, 1, 1\], though num_hidden_layers is 2"),
    "convolution": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"]},
        "layer_types: 'conv' layers are not supported",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_paged_attention_cannot_serve(tmp_path: Path, case: str) -> None:
    family, changes, message = REFUSED[case]
    directory = tiny_foreign(tmp_path, family, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load(directory)
    assert str(caught.value).startswith(f"{directory / 'config.json'}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5"}, "model_type: 't5' is not supported; supported are llama, qwen2, qwen3 and the language"),
        ({"model_type": "nothing"}, "model_type: 'nothing' is not supported"),
        ({"model_type": None}, "model_type: must be a string, not None"),
        ({"architectures": ["Olmo2Model"]}, "architectures: Olmo2Model is not the language model of 'olmo2'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantised weights are not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
        ({"num_hidden_layers": "two"}, "transformers cannot read it: .*num_hidden_layers"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: must be a positive whole number, not 0"),
        ({"model_type": "bart", "architectures": None}, "model_type: 'bart' has attention in transformers"),
    ],
)
def test_configurations_that_are_refused(
    folders: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text((folders("olmo2") / "config.json").read_text())
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        TransformersConfig.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_code_of_the_checkpoint_is_never_run(folders: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folders("olmo2") / "config.json").read_text())
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    edit_config(tmp_path, model_type="own", auto_map=names)
    marker = tmp_path / "was-run"
    (tmp_path / "code.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    with pytest.raises(ModelError, match="model_type: 'own' is not supported"):
        load(tmp_path)
    edit_config(tmp_path, model_type="olmo2")
    save_file(load_file(folders("olmo2") / "model.safetensors"), tmp_path / "model.safetensors", {"format": "pt"})
    assert load(tmp_path).vocab_size == 260
    assert not marker.exists()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
        (
            lambda tensors: tensors.update({"model.layers.2.self_attn.q_proj.weight": torch.ones(64, 64)}),
            "tensor model.layers.2.self_attn.q_proj.weight is not part of a olmo2 model of this shape",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(99, 64)}),
            r"tensor lm_head.weight has shape \(99, 64\), config.json asks for \(260, 64\)",
        ),
    ],
)
def test_weights_that_do_not_fit(
    folders: Callable[[str], Path], tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    source = folders("olmo2")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'model.safetensors'}: ")


def test_other_faults_of_a_directory(folders: Callable[[str], Path], tmp_path: Path) -> None:
    source = folders("olmo2")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    torch.save(load_file(source / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only safetensors weights are read"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError, match="damaged or unreadable"):
        load(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapter_config.json: adapters are not supported"):
        load(tmp_path)
    with pytest.raises(ModelError, match="the tokenizer has 261 ids, the model only 260 embeddings"):
        load(source, vocab_size=261)
    with pytest.raises(ModelError, match="context_length 513 is over the model's 512"):
        load(source, context_length=513)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("family", ["gpt_neox", "qwen3_moe"])
def test_on_a_gpu(folders: Callable[[str], Path], family: str) -> None:
    directory = folders(family)
    ids = prompt(150)
    expected = whole_logits(reference(directory), ids)
    for dtype, tolerance in (("float32", 1e-3), ("bfloat16", 0.3)):
        driver = Driver.of(load(directory, device="cuda", dtype=dtype))
        slot = driver.open(ids)
        logits = torch.cat([driver.step({slot: count}).logits.cpu() for count in (100, 1, 49)])
        assert (logits - expected).abs().mean() < tolerance
