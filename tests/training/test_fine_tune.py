"""`trouterd train collm --fine-tune`: a small model and its deferral row, on tiny models and on the demo pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.tokenizer import DEFER_TOKEN, Tokenizer
from tests.models.foreign import tiny_foreign
from tests.models.tiny import byte_tokenizer, tiny_llama, tiny_qwen3
from tests.training.conftest import options
from tests.training.pairs import config
from trouterd import cli
from trouterd.training import deferring
from trouterd.training.calibrate_route import CalibrationRun
from trouterd.training.faults import TrainingError
from trouterd.training.fine_tune import FineTuneRun
from trouterd.training.options import CalibrateOptions, PairOptions
from trouterd.training.pair import PairFiles
from trouterd.training.shards import TUNING
from trouterd.training.train import work_folder
from trouterd.training.tuning import MISTAKE_WEIGHT, Reading, Tuning, deferral_loss

PLAIN = 258
"""Ids of ByteTok."""


def fine_tune(small: Path, large: Path, output: Path, prompts: Path, **changes: Any) -> dict[str, Any]:
    """The sidecar of a short run on tiny models."""
    pair = PairOptions(prompts=str(prompts), max_tokens=24, texts=4)
    chosen = options(output, fine_tune=True, **({"pair": pair, "epochs": 3, "batch": 3, "rate": 1e-2} | changes))
    return msgspec.to_builtins(FineTuneRun(config(small, large), "pair", chosen).run())


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Eight questions; what the large model answers is what there is to learn."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(f'{{"prompt": "Question {number}:"}}' for number in range(8)))
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("large"), seed=1, hidden=48)


SMALL: dict[str, Callable[[Path], Path]] = {
    "tied, padded rows, bfloat16": lambda path: tiny_qwen3(path, dtype=torch.bfloat16),
    "own head, no spare row": lambda path: tiny_llama(path, tied=False, vocab=PLAIN),
}


@pytest.mark.parametrize("kind", SMALL)
def test_directory_for_routes_and_for_transformers(tmp_path: Path, large: Path, prompts: Path, kind: str) -> None:
    small, output = SMALL[kind](tmp_path / "small"), tmp_path / "tuned"
    sidecar = fine_tune(small, large, output, prompts, recall=None, share=0.3)
    assert 0 <= sidecar["threshold"] <= 1
    assert sidecar["report"]["best_epoch"] > 0
    settings = msgspec.json.decode((output / "config.json").read_bytes())
    assert settings["vocab_size"] == PLAIN + 1
    before, after = (load_file(folder / "model.safetensors") for folder in (small, output))
    assert [after[name].dtype for name in before] == [value.dtype for value in before.values()]
    assert all(not torch.equal(before[name][:PLAIN], after[name][:PLAIN]) for name in before)

    tokenizer, theirs = Tokenizer.load(output), AutoTokenizer.from_pretrained(output)
    assert tokenizer.first_difference(Tokenizer.load(small)) is None
    assert len(theirs) == PLAIN + 1
    assert theirs.convert_tokens_to_ids(DEFER_TOKEN) == PLAIN
    assert DEFER_TOKEN in theirs.all_special_tokens

    pair = PairFiles.of(config(output, large), "pair").open(texts=1, longest_prompt=40, limit=8)
    ids = tokenizer.encode("Question 3: yes")
    [(logits, hidden)] = pair.small.read([((*ids, 0), 1)], lambda read, _: (read.logits, read.hidden))
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, expected[:, :PLAIN], rtol=1e-4, atol=1e-4)
    assert pair.small.defer is not None
    assert torch.equal(pair.small.defer, model.lm_head.weight[PLAIN])
    torch.testing.assert_close(hidden @ pair.small.defer, expected[:, PLAIN], rtol=1e-4, atol=1e-4)


def test_interrupted_training_goes_on(
    tmp_path: Path, large: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its second epoch it ends as if nothing had happened; another seed ends elsewhere."""
    small, whole, cut = tiny_qwen3(tmp_path / "small"), tmp_path / "whole", tmp_path / "cut"
    expected = fine_tune(small, large, whole, prompts)
    learn, epochs = Tuning._learn, list[int]()

    def interrupted(self: Tuning) -> float:
        epochs.append(self._epoch)
        if epochs == [1, 2]:
            raise InterruptedError
        return learn(self)

    monkeypatch.setattr(Tuning, "_learn", interrupted)
    with pytest.raises(InterruptedError):
        fine_tune(small, large, cut, prompts)
    assert not cut.exists()
    assert fine_tune(small, large, cut, prompts) == expected
    assert epochs == [1, 2, 2, 3]
    for file in whole.iterdir():
        assert (cut / file.name).read_bytes() == file.read_bytes()

    def weights(output: Path, **changes: Any) -> bytes:
        fine_tune(small, large, tmp_path / output, prompts, **changes)
        return (tmp_path / output / "model.safetensors").read_bytes()

    (work_folder(cut) / TUNING).write_bytes(b"what is this")
    cut.rename(tmp_path / "first")
    with pytest.raises(TrainingError, match=rf"{TUNING}: cannot be gone on from; .*--fresh"):
        fine_tune(small, large, cut, prompts)
    same = weights(cut, fresh=True)
    assert same == (whole / "model.safetensors").read_bytes()
    cut.rename(tmp_path / "second")
    assert weights(cut, epochs=2) != same  # a state of another schedule is not gone on from
    assert epochs[4:] == [1, 2, 3, 1, 2]


def test_the_loss_is_that_of_single_texts(tmp_path: Path) -> None:
    """Against the formula, text by text and place by place; padding changes nothing."""
    model = deferring.load(tiny_qwen3(tmp_path), PLAIN, torch.device("cpu"))
    deferring.set_row(model, torch.linspace(-1, 1, 32))
    generator = torch.Generator().manual_seed(0)
    texts = []
    for length, start in ((5, 2), (9, 8), (7, 1)):
        ids = torch.randint(PLAIN, (length,), generator=generator).tolist()
        texts.append(Reading(tuple(ids), start, torch.rand(length - start, generator=generator).log()))
    expected = 0.0
    for text in texts:
        for place in range(text.start, len(text.ids)):
            logits = model(input_ids=torch.tensor([text.ids[:place]])).logits[0, -1].double()
            token, p = text.ids[place], torch.sigmoid(logits[PLAIN])
            law = logits[:PLAIN].softmax(-1)
            wrong = int(law.argmax()) != token
            mixture = -((1 - p) * law[token] + p * text.large[place - text.start].double().exp()).log()
            search = -MISTAKE_WEIGHT * p.log() if wrong else -(1 - p).log()
            expected += (mixture - law[token].log() + search).item() / 3
    assert deferral_loss(model, texts).item() == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_fine_tuned(tmp_path: Path, large: Path, prompts: Path) -> None:
    small, output = tiny_qwen3(tmp_path / "small"), tmp_path / "tuned"

    def refused(problem: str, model: Path = small, place: Path = output) -> None:
        with pytest.raises(TrainingError, match=problem):
            fine_tune(model, large, place, prompts)
        assert not work_folder(place).exists()

    refused("--output: .*small is there already", place=small)
    refused("--output: no folder", place=tmp_path / "no" / "tuned")
    refused("foreign: learns with a row only if it is one of llama", tiny_foreign(tmp_path / "foreign", "gpt_neox"))
    byte_tokenizer(small, extra=(DEFER_TOKEN,))
    refused(r"small: has <\|defer\|> already", small)


def test_only_collm_fine_tunes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("--small", "builtin:small", "--large", "builtin:large", "--prompts", "demo:4")
    assert cli.main(["train", "citer", *pair, "--output", str(tmp_path / "h"), "--fine-tune"]) == 2
    assert "--fine-tune: is for collm" in capsys.readouterr().err


def test_demo_pair_and_calibration_of_its_route(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line, and a threshold for the small model's own row."""
    output, budget = tmp_path / "tuned", ("--epochs", "1", "--max-tokens", "64", "--report-prompts", "1")
    pair = ("--small", "builtin:small", "--large", "builtin:large")
    assert (
        cli.main(["train", "collm", "--fine-tune", *pair, "--prompts", "demo:14", "--output", str(output), *budget])
        == 0
    )
    printed = capsys.readouterr().out
    assert f'[models.small]\npath = "{output}"' in printed
    assert "params = { threshold = " in printed
    route = config(output, algorithm="collm")
    chosen = CalibrateOptions(pair=PairOptions(prompts="demo:8", max_tokens=128), share=0.2)
    result = CalibrationRun(route, "pair", chosen).run()
    assert result.parameter == "threshold"
    assert 0 <= result.threshold <= 1
    assert result.routed is not None
