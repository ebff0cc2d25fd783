"""What the demo pair can do: accuracy, agreement and the accuracy-against-share frontier of an entropy threshold.

`python -m trouterd.demo.report` measures the committed pair with a plain transformers loop, without the daemon.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM

from trouterd.demo import LARGE_DIRECTORY, SMALL_DIRECTORY
from trouterd.demo.problems import Problem, final_answer, generate
from trouterd.demo.tokenizer import END_OF_TEXT, IM_END, message_text, reply_prefix, token_id

REPORT_SEED = 2026
"""Generator seed of the held-out problems that the model cards report on."""
THRESHOLDS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Entropy thresholds of the frontier, in nats."""
ANSWER_LIMIT = 128


@dataclass(frozen=True, slots=True)
class Written:
    """One answer: its token ids and, for each, whether the large model wrote it."""

    ids: list[int]
    by_large: list[bool]


@dataclass(frozen=True, slots=True)
class Point:
    """One threshold of the frontier: accuracy and the large model's share of tokens, both in 0..1."""

    threshold: float
    accuracy: float
    share: float


@dataclass(frozen=True, slots=True)
class Report:
    """Accuracies and agreement in 0..1, over `problems` held-out problems, and the frontier."""

    problems: int
    small: float
    large: float
    agreement: float
    frontier: tuple[Point, ...]


def load_model(directory: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """One model of a pair, ready to write."""
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=dtype)
    torch.nn.Module.to(model, device)
    return model


def prompt_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    """The ids of a conversation that asks one question and waits for the reply."""
    return tokenizer.encode(message_text("user", question) + reply_prefix()).ids


@torch.inference_mode()
def write_answers(
    tokenizer: Tokenizer,
    small: Qwen3ForCausalLM,
    large: Qwen3ForCausalLM | None,
    prompts: Sequence[list[int]],
    threshold: float = 0.0,
) -> list[Written]:
    """Greedy answers of `small`; where the entropy (nats) of its softmax exceeds `threshold`, `large` writes the token.

    Without `large` the small model writes everything. Rows are padded on the right, which causal attention cannot see.
    """
    end, filler = token_id(tokenizer, IM_END), token_id(tokenizer, END_OF_TEXT)
    device = small.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width = int(lengths.max()) + ANSWER_LIMIT
    text = torch.full((len(prompts), width), filler, device=device)
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt)] = torch.tensor(prompt, device=device)
    written = [Written([], []) for _ in prompts]
    live = torch.arange(len(prompts), device=device)
    for _ in range(ANSWER_LIMIT):
        logits = _last_logits(small, text, lengths, live)
        tokens = logits.argmax(-1)
        asked = torch.zeros_like(tokens, dtype=torch.bool)
        if large is not None:
            asked = _entropy(logits) > threshold
        if large is not None and bool(asked.any()):
            tokens[asked] = _last_logits(large, text, lengths, live[asked]).argmax(-1)
        text[live, lengths[live]] = tokens
        lengths[live] += 1
        for row, token, by_large in zip(live.tolist(), tokens.tolist(), asked.tolist(), strict=True):
            written[row].ids.append(token)
            written[row].by_large.append(by_large)
        live = live[tokens != end]
        if not len(live):
            break
    return written


def _last_logits(model: Qwen3ForCausalLM, text: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
    """The float32 logits (rows, vocabulary) after the last token of each of `rows`."""
    ends = lengths[rows]
    ids = text[rows, : int(ends.max())]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(rows), device=ids.device), ends - 1]
    logits: Tensor = model.lm_head(last)
    return logits.float()


def _entropy(logits: Tensor) -> Tensor:
    """Entropy of the softmax of each row, in nats."""
    logarithms = logits.log_softmax(-1)
    return -(logarithms.exp() * logarithms).sum(-1)


def accuracy(tokenizer: Tokenizer, problems: Sequence[Problem], answers: Sequence[Written]) -> float:
    """The share of problems whose final answer is right."""
    pairs = zip(problems, answers, strict=True)
    return sum(final_answer(tokenizer.decode(a.ids)) == p.answer for p, a in pairs) / len(problems)


@torch.inference_mode()
def agreement(model: Qwen3ForCausalLM, prompts: Sequence[list[int]], answers: Sequence[Written]) -> float:
    """The share of tokens of `answers` that are also the greedy choice of `model` at their place."""
    agreed = total = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer.ids], device=model.device)
        choices = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
        agreed += int((choices == ids[0, len(prompt) :]).sum())
        total += len(answer.ids)
    return agreed / total


def measure(
    tokenizer: Tokenizer, small: Qwen3ForCausalLM, large: Qwen3ForCausalLM, problems: Sequence[Problem]
) -> Report:
    """Measure the pair on `problems`."""
    prompts = [prompt_ids(tokenizer, problem.question) for problem in problems]
    by_large = write_answers(tokenizer, large, None, prompts)
    by_small = write_answers(tokenizer, small, None, prompts)
    frontier = []
    for threshold in THRESHOLDS:
        answers = write_answers(tokenizer, small, large, prompts, threshold)
        share = sum(sum(a.by_large) for a in answers) / sum(len(a.ids) for a in answers)
        frontier.append(Point(threshold, accuracy(tokenizer, problems, answers), share))
    return Report(
        problems=len(problems),
        small=accuracy(tokenizer, problems, by_small),
        large=accuracy(tokenizer, problems, by_large),
        agreement=agreement(small, prompts, by_large),
        frontier=tuple(frontier),
    )


def report_table(report: Report) -> Table:
    """The frontier as a table, with the two models alone as its ends."""
    table = Table(title=f"{report.problems} held-out problems; the models agree on {report.agreement:.1%} of tokens")
    for heading in ("asked above, nats", "accuracy", "tokens by the large model"):
        table.add_column(heading, justify="right")
    table.add_row("never", f"{report.small:.1%}", "0.0%")
    for point in reversed(report.frontier):
        table.add_row(f"{point.threshold:g}", f"{point.accuracy:.1%}", f"{point.share:.1%}")
    table.add_row("always", f"{report.large:.1%}", "100.0%")
    return table


def main() -> None:
    """Measure the pair in two directories and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--small", type=Path, default=SMALL_DIRECTORY, metavar="DIR", help="the small model (default: the built-in one)"
    )
    parser.add_argument(
        "--large", type=Path, default=LARGE_DIRECTORY, metavar="DIR", help="the large model (default: the built-in one)"
    )
    parser.add_argument(
        "--problems", type=int, default=200, metavar="N", help="held-out problems (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=REPORT_SEED, metavar="N", help="of the problems (default: %(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="of both models (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and KV (default: %(default)s)"
    )
    options = parser.parse_args()
    dtype: torch.dtype = getattr(torch, options.dtype)
    small = load_model(options.small, options.device, dtype)
    large = load_model(options.large, options.device, dtype)
    tokenizer = Tokenizer.from_file(str(options.small / "tokenizer.json"))
    problems = generate(options.seed, options.problems, "held_out")
    Console().print(report_table(measure(tokenizer, small, large, problems)))


if __name__ == "__main__":
    main()
