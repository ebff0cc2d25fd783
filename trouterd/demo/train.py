"""Train the demo pair: `python -m trouterd.demo.train --out DIR`.

One tokenizer and two Qwen3 models are trained on generated problems and saved as `DIR/small` and `DIR/large`. A GPU
needs a few minutes, a CPU many hours. `--only` trains one of the two, with the result that a run of both has.
"""

import argparse
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from trouterd.demo.card import write_card
from trouterd.demo.corpus import Rows, make_rows_in_parallel, tokenizer_texts
from trouterd.demo.problems import generate
from trouterd.demo.report import (
    REPORT_SEED,
    accuracy,
    load_model,
    measure,
    prompt_ids,
    report_table,
    write_answers,
)
from trouterd.demo.tokenizer import CONTEXT_LENGTH, END_OF_TEXT, IM_END, save_tokenizer, token_id, train_tokenizer

MODELS = ("small", "large")
VOCABULARY = 1024
SINGLE_WIDTH = 192
"""Width of rows that hold one turn, in tokens."""
DIALOGUE_PERIOD = 10
"""Every so many steps the batch consists of long dialogues, which train late positions and several turns."""
CHECKS = 4
"""Progress reports per model."""
CHECK_SEED, CHECK_PROBLEMS = 7, 200
"""The problems of the training split that progress is measured on."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shape and schedule of one model. Heads are 64 wide; `batch` counts rows of SINGLE_WIDTH tokens."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    steps: int
    batch: int
    peak_rate: float


LARGE = Recipe("large", 256, 4, 4, 2, 704, steps=1900, batch=1024, peak_rate=2e-3)
SMALL = Recipe("small", 128, 2, 2, 1, 320, steps=750, batch=512, peak_rate=2e-3)
SMALL_RANGE = (0.38, 0.53)
"""Accuracy wanted of the small model on the check problems: it should read and write well and calculate badly."""


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """A freshly initialized model (float32, tied embeddings) from the current random state."""
    end, filler = token_id(tokenizer, IM_END), token_id(tokenizer, END_OF_TEXT)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=filler,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig.from_dict(
        {"do_sample": False, "bos_token_id": None, "eos_token_id": end, "pad_token_id": filler}
    )
    return model


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows on the training device: ids (rows, width) and the mask of ids that carry loss."""

    tokens: Tensor
    loss: Tensor

    @classmethod
    def of(cls, rows: Rows, device: str) -> "DeviceRows":
        """Copy rows to a device; ids become int16, which every backend can index."""
        return cls(torch.from_numpy(rows.tokens.astype("int16")).to(device), torch.from_numpy(rows.loss).to(device))

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`size` random rows: inputs and targets, both (size, width - 1); targets without loss are -100."""
        chosen = torch.randint(len(self.tokens), (size,), generator=generator).to(self.tokens.device)
        tokens = self.tokens[chosen].long()
        targets = tokens.masked_fill(~self.loss[chosen], -100)
        return tokens[:, :-1], targets[:, 1:]


def train_model(
    recipe: Recipe, tokenizer: Tokenizer, singles: DeviceRows, dialogues: DeviceRows, seed: int, console: Console
) -> Qwen3ForCausalLM:
    """Train one model: AdamW, a short warm-up, then a cosine to zero; bf16 autocast on CUDA."""
    device = singles.tokens.device.type
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = build_model(recipe, tokenizer)
    torch.nn.Module.to(model, device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.98), fused=device == "cuda")
    started = time.monotonic()
    for step in range(1, recipe.steps + 1):
        dialogue = step % DIALOGUE_PERIOD == 0
        size = max(1, recipe.batch * SINGLE_WIDTH // CONTEXT_LENGTH) if dialogue else recipe.batch
        inputs, targets = (dialogues if dialogue else singles).batch(size, generator)
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_rate * _schedule(step, recipe.steps)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=inputs, use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, recipe.steps // CHECKS) == 0:
            right = _check(tokenizer, model)
            console.print(
                f"{recipe.name} step {step}/{recipe.steps}  loss {loss.item():.4f}  right {right:.1%}  "
                f"{time.monotonic() - started:.0f} s"
            )
    return model


def train_small(
    tokenizer: Tokenizer, singles: DeviceRows, dialogues: DeviceRows, steps: int, seed: int, console: Console
) -> Qwen3ForCausalLM:
    """Train the small model; while its accuracy misses SMALL_RANGE, once more with more or fewer steps.

    Accuracy jumps from nothing to almost everything within a few hundred steps, at a point that depends on the machine.
    """
    for _ in range(6):
        model = train_model(replace(SMALL, steps=steps), tokenizer, singles, dialogues, seed, console)
        right = _check(tokenizer, model)
        if SMALL_RANGE[0] <= right <= SMALL_RANGE[1]:
            return model
        steps = round(steps * (1.07 if right < SMALL_RANGE[0] else 0.93))
        console.print(f"{right:.1%} is outside the wanted range; training again for {steps} steps")
    return model


def _schedule(step: int, steps: int) -> float:
    warm_up = min(200, steps // 10 + 1)
    if step < warm_up:
        return step / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def _check(tokenizer: Tokenizer, model: Qwen3ForCausalLM) -> float:
    problems = generate(CHECK_SEED, CHECK_PROBLEMS)
    prompts = [prompt_ids(tokenizer, problem.question) for problem in problems]
    return accuracy(tokenizer, problems, write_answers(tokenizer, model, None, prompts))


def save_model(model: Qwen3ForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a Hugging Face directory with bfloat16 weights, to which `model` itself is rounded too."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(directory)
    save_tokenizer(tokenizer, directory)


def training_data(tokenizer: Tokenizer, seed: int, rows: int, device: str) -> tuple[DeviceRows, DeviceRows]:
    """`rows` one-turn rows and a 25th as many dialogues, made by all processors of the machine."""
    make = partial(make_rows_in_parallel, tokenizer=tokenizer)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        singles = make(pool, seed=seed * 2, rows=rows, width=SINGLE_WIDTH, dialogue=False)
        dialogues = make(pool, seed=seed * 2 + 1, rows=rows // 25, width=CONTEXT_LENGTH, dialogue=True)
    return DeviceRows.of(singles, device), DeviceRows.of(dialogues, device)


def check_partner(directory: Path, tokenizer: Tokenizer) -> None:
    """Refuse a model that an earlier run left in `directory` if its tokenizer is not this one.

    Raises:
        SystemExit: the tokenizers differ.
    """
    file = directory / "tokenizer.json"
    if file.exists() and file.read_text(encoding="utf-8") != tokenizer.to_str(pretty=True):
        raise SystemExit(f"{file} is not the tokenizer of this run; train both models or choose another --out")


def write_cards(tokenizer: Tokenizer, options: argparse.Namespace, console: Console) -> None:
    """Measure the pair as saved, print the report and write it into both model cards."""
    small, large = (load_model(options.out / name, options.device) for name in MODELS)
    problems = generate(REPORT_SEED, options.problems, "held_out")
    report = measure(tokenizer, small, large, problems)
    console.print(report_table(report))
    setting: dict[str, str | int] = {
        "question": problems[0].question,
        "solution": problems[0].solution,
        "seed": options.seed,
        "rows": options.rows,
        "report_seed": REPORT_SEED,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "the CPU",
    }
    for name, model in zip(MODELS, (small, large), strict=True):
        write_card(options.out / name, name, model, report, setting)


def main() -> None:
    """Train the tokenizer and the models, save them; once both are there, measure them and write their cards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory that gets small/ and large/")
    parser.add_argument("--only", choices=MODELS, help="train this model alone, beside the other one in --out")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where to train (default: a GPU if there is one)",
    )
    parser.add_argument(
        "--steps", type=float, default=1.0, help="multiple of each recipe's number of steps (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of data and weights (default: 1)")
    parser.add_argument(
        "--rows", type=int, default=400_000, help="one-turn rows of training data (default: %(default)s)"
    )
    parser.add_argument(
        "--problems", type=int, default=500, help="held-out problems of the final report (default: %(default)s)"
    )
    options = parser.parse_args()
    # cuBLAS reads this when it starts; without it sums may be ordered differently from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    console = Console()
    tokenizer = train_tokenizer(tokenizer_texts(20_000), VOCABULARY)
    wanted = [options.only] if options.only else MODELS
    for name in set(MODELS) - set(wanted):
        check_partner(options.out / name, tokenizer)
    singles, dialogues = training_data(tokenizer, options.seed, options.rows, options.device)
    console.print(f"{len(singles.tokens)} one-turn rows, {len(dialogues.tokens)} dialogues")
    small_steps, large_steps = (round(recipe.steps * options.steps) for recipe in (SMALL, LARGE))
    if "large" in wanted:
        large = train_model(replace(LARGE, steps=large_steps), tokenizer, singles, dialogues, options.seed, console)
        save_model(large, tokenizer, options.out / "large")
    if "small" in wanted:
        small = train_small(tokenizer, singles, dialogues, small_steps, options.seed, console)
        save_model(small, tokenizer, options.out / "small")
    absent = [name for name in MODELS if not (options.out / name / "model.safetensors").exists()]
    if absent:
        console.print(f"no report and no cards yet: train the {absent[0]} model too")
    else:
        write_cards(tokenizer, options, console)


if __name__ == "__main__":
    main()
