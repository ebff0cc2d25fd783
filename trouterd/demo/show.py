"""Show a running daemon route: `python -m trouterd.demo.show --socket PATH`.

Some word problems are answered by the route `demo` with every token coloured by the model that wrote it; then more of
them are sent, many at a time, to the small model, to the route and to the large model, and compared in one table.
"""

import argparse
import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from trouterd.demo import SMALL_DIRECTORY
from trouterd.demo.client import Answer, DemoClient, DemoError
from trouterd.demo.problems import Problem, final_answer, generate

ROUTE, SMALL, LARGE = "demo", "small", "large"
SHOW_SEED = 1
"""Generator seed of the held-out problems shown; other seeds give others."""
_ABOUT_SPEED = (
    "Tokens/s: steps of models this small differ by a factor of 2.5 only, and with routing three processes share the cores instead"
    " of two, so that on a busy machine it can be slower than the large model. It pays where the large model's steps are many times"
    " as long as the small one's, as with billions of weights on a GPU (README.md: What it buys)."
)
"""Below the table."""
_STYLES = {SMALL: "cyan", LARGE: "bold underline yellow"}


@dataclass(frozen=True, slots=True)
class Summary:
    """One model name over a set of problems: accuracy and share in 0..1, hand-offs per 100 tokens, tokens a second."""

    model: str
    accuracy: float
    large_share: float
    handoffs: float
    rate: float


def summarize(model: str, problems: Sequence[Problem], answers: Sequence[Answer], seconds: float) -> Summary:
    """Sum up answers that took `seconds` together."""
    tokens = sum(len(answer.tokens) for answer in answers)
    right = sum(final_answer(a.text) == p.answer for p, a in zip(problems, answers, strict=True))
    by_large = sum(writer == LARGE for answer in answers for _, writer in answer.tokens)
    return Summary(
        model=model,
        accuracy=right / max(1, len(problems)),
        large_share=by_large / max(1, tokens),
        handoffs=100 * sum(answer.handoffs for answer in answers) / max(1, tokens),
        rate=tokens / seconds,
    )


def bracketed(tokenizer: Tokenizer, answer: Answer) -> Text:
    """The answer with what the large model wrote in brackets, for an output without styles."""
    text = Text()
    for writer, tokens in itertools.groupby(answer.tokens, lambda token: token[1]):
        for number, (token, _) in enumerate(tokens):
            piece = tokenizer.decode([token])
            if writer == LARGE and not number:
                piece = piece[: len(piece) - len(piece.lstrip())] + "[" + piece.lstrip()
            text.append(piece)
        if writer == LARGE:
            text.append("]")
    return text


def coloured(tokenizer: Tokenizer, answer: Answer) -> Text:
    """The answer with each token in the style of the model that wrote it."""
    text = Text()
    for token, writer in answer.tokens:
        text.append(tokenizer.decode([token]), _STYLES.get(writer, ""))
    return text


def summary_table(summaries: Sequence[Summary], problems: int, concurrency: int) -> Table:
    """The summaries as a table, one row each."""
    table = Table(title=f"{problems} held-out problems, {concurrency} at a time")
    table.add_column("model")
    for heading in ("right", "tokens by large", "hand-offs per 100 tokens", "tokens/s"):
        table.add_column(heading, justify="right")
    for row in summaries:
        table.add_row(
            row.model, f"{row.accuracy:.1%}", f"{row.large_share:.1%}", f"{row.handoffs:.1f}", f"{row.rate:,.0f}"
        )
    return table


async def _show_one(console: Console, client: DemoClient, tokenizer: Tokenizer, problem: Problem) -> None:
    console.print(Text(problem.question, "bold"))
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            answer = await client.ask(
                ROUTE, problem.question, lambda a: live.update(Padding(coloured(tokenizer, a), (0, 2)), refresh=True)
            )
        text = coloured(tokenizer, answer)
    else:
        answer = await client.ask(ROUTE, problem.question)
        text = bracketed(tokenizer, answer)
    verdict = "right" if final_answer(answer.text) == problem.answer else f"wrong, it is {problem.answer}"
    note = f"{len(answer.tokens)} tokens, {answer.share(LARGE):.0%} by {LARGE}, {answer.handoffs} hand-offs; {verdict}"
    for part in (text, Text(note, "dim")):
        console.print(Padding(part, (0, 0, 0, 2), expand=False))
    console.print()


async def _compare(client: DemoClient, model: str, problems: Sequence[Problem], concurrency: int) -> Summary:
    places = asyncio.Semaphore(concurrency)

    async def ask(problem: Problem) -> Answer:
        async with places:
            return await client.ask(model, problem.question)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(problem)) for problem in problems]
    seconds = time.perf_counter() - started
    return summarize(model, problems, [task.result() for task in tasks], seconds)


async def show(
    socket_path: str | Path, console: Console, shown: int, problems: int, concurrency: int, seed: int
) -> list[Summary]:
    """Run the whole demo on `console` and return the rows of its table.

    Raises:
        DemoError: the daemon cannot be reached or fails a request (inside an ExceptionGroup while comparing).
    """
    tokenizer = Tokenizer.from_file(str(SMALL_DIRECTORY / "tokenizer.json"))
    examples = generate(seed, shown + problems, "held_out")
    legend = Text.assemble("Written by the ", (f"{SMALL} model", _STYLES[SMALL]), " and the ")
    large = f"{LARGE} model" if console.is_terminal else f"[{LARGE} model]"
    console.print(legend.append(large, _STYLES[LARGE]).append("\n"))
    async with DemoClient(socket_path) as client:
        for problem in examples[:shown]:
            await _show_one(console, client, tokenizer, problem)
        rest = examples[shown:]
        with console.status(f"{len(rest)} more problems for each model"):
            summaries = [await _compare(client, model, rest, concurrency) for model in (SMALL, ROUTE, LARGE)]
    console.print(summary_table(summaries, len(rest), concurrency))
    console.print(Text(_ABOUT_SPEED, "dim"))
    return summaries


def run_demo(
    socket_path: str | Path,
    *,
    shown: int = 4,
    problems: int = 100,
    concurrency: int = 16,
    seed: int = SHOW_SEED,
    console: Console | None = None,
) -> int:
    """Show the daemon at `socket_path` at work; 0, or 1 when it could not be reached or failed a request."""
    console = console or Console()
    failures: list[str] = []
    try:
        asyncio.run(show(socket_path, console, shown, problems, concurrency, seed))
    except* DemoError as group:
        failures += [str(error) for error in group.exceptions]
    if failures:
        console.print(f"demo: {failures[0]}", style="red", markup=False)
    return 1 if failures else 0


def main() -> int:
    """Entry point of the module; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trouterd.demo.show", description=__doc__)
    parser.add_argument("--socket", required=True, type=Path, help="unix socket of the daemon's HTTP server")
    parser.add_argument("--shown", type=int, default=4, help="problems shown with coloured tokens (default 4)")
    parser.add_argument("--problems", type=int, default=100, help="problems of the comparison (default 100)")
    parser.add_argument("--concurrency", type=int, default=16, help="problems in flight at a time (default 16)")
    parser.add_argument("--seed", type=int, default=SHOW_SEED, help="seed of the problems (default %(default)s)")
    options = parser.parse_args()
    return run_demo(
        options.socket,
        shown=options.shown,
        problems=options.problems,
        concurrency=options.concurrency,
        seed=options.seed,
    )


if __name__ == "__main__":
    raise SystemExit(main())
