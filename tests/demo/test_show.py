import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from trouterd.demo import SMALL_DIRECTORY
from trouterd.demo.client import Answer, DemoClient, DemoError
from trouterd.demo.problems import Problem, generate
from trouterd.demo.show import bracketed, coloured, run_demo, summarize

SEED, SHOWN, COMPARED = 11, 1, 4


class FakeDaemon:
    """Streams the right solution, three tokens a chunk, every fourth written by the large model; small errs on half."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(SMALL_DIRECTORY / "tokenizer.json"))
        self.problems = {problem.question: problem for problem in generate(SEED, SHOWN + COMPARED, "held_out")}
        self.asked: list[dict[str, Any]] = []
        self.broken = False

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if body["model"] not in ("small", "demo", "large"):
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        question = body["messages"][-1]["content"]
        solution = self.problems[question].solution
        if body["model"] == "small" and list(self.problems).index(question) % 2:
            solution = "The answer is 0."
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids = self.tokenizer.encode(solution).ids
        for start in range(0, len(ids), 3):
            await self.send(response, self.chunk(body["model"], ids, start))
            if self.broken:
                await self.send(response, {"error": {"message": "worker large is gone", "type": "server_error"}})
                return response
        writers = [self.writer(body["model"], place) for place in range(len(ids))]
        tokens = {name: writers.count(name) for name in set(writers)}
        handoffs = 2 * writers.count("large") if body["model"] == "demo" else 0
        usage = {"completion_tokens": len(ids), "route": {"handoffs": handoffs, "tokens": tokens}}
        await self.send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def writer(self, model: str, place: int) -> str:
        return model if model != "demo" else ("large" if place % 4 == 3 else "small")

    def chunk(self, model: str, ids: list[int], start: int) -> dict[str, Any]:
        part = ids[start : start + 3]
        models = [self.writer(model, start + place) for place in range(len(part))]
        delta = {"content": self.tokenizer.decode(part)}
        return {"choices": [{"index": 0, "delta": delta, "token_ids": part, "models": models}]}

    async def send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[FakeDaemon]:
    fake = FakeDaemon()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "d.sock")).start()
    yield fake
    await runner.cleanup()


def run(socket: Path, *, terminal: bool = False) -> tuple[int, str]:
    console = Console(
        file=io.StringIO(), width=200, force_terminal=terminal, color_system="standard" if terminal else None
    )
    code = run_demo(socket, shown=SHOWN, problems=COMPARED, concurrency=3, seed=SEED, console=console)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


async def test_the_demo_shows_answers_and_compares_models(daemon: FakeDaemon, tmp_path: Path) -> None:
    code, output = await asyncio.to_thread(run, tmp_path / "d.sock")
    assert code == 0
    first = next(iter(daemon.problems.values()))
    assert first.question in output
    assert "Written by the small model and the [large model]" in output
    assert first.solution in output.replace("[", "").replace("]", "")
    rows = {cells[1]: cells[2:] for line in output.splitlines() if len(cells := line.split("│")) > 3}
    table = {name.strip(): [cell.strip() for cell in cells[:3]] for name, cells in rows.items()}
    assert table["small"] == ["50.0%", "0.0%", "0.0"]
    assert table["large"] == ["100.0%", "100.0%", "0.0"]
    assert table["demo"][0] == "100.0%"
    share, handoffs = float(table["demo"][1].rstrip("%")), float(table["demo"][2])
    assert 20 < share <= 25
    assert handoffs == pytest.approx(2 * share, abs=0.11)
    assert all(body["stream"] and body["return_token_ids"] and body["temperature"] == 0 for body in daemon.asked)
    assert len(daemon.asked) == SHOWN + 3 * COMPARED


async def test_a_stream_that_ends_in_an_error_is_told(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.broken = True
    code, output = await asyncio.to_thread(run, tmp_path / "d.sock")
    assert code == 1
    assert "worker large is gone" in output


async def test_a_refused_request_names_model_and_status(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with DemoClient(tmp_path / "d.sock") as client:
        with pytest.raises(DemoError, match="model huge: HTTP 404.*no such model"):
            await client.ask("huge", next(iter(daemon.problems)))


def test_a_missing_daemon_is_told(tmp_path: Path) -> None:
    code, output = run(tmp_path / "none.sock")
    assert code == 1
    assert "no answer from the daemon at" in output


def test_tokens_carry_the_style_of_their_writer() -> None:
    tokenizer = Tokenizer.from_file(str(SMALL_DIRECTORY / "tokenizer.json"))
    ids = tokenizer.encode("3 + 4").ids
    writers = ["small"] * (len(ids) - 1) + ["large"]
    text = coloured(tokenizer, Answer(tokens=list(zip(ids, writers, strict=True))))
    assert text.plain == "3 + 4"
    assert [str(span.style) for span in text.spans] == ["cyan"] * (len(ids) - 1) + ["bold underline yellow"]


def test_without_styles_brackets_show_the_writer() -> None:
    tokenizer = Tokenizer.from_file(str(SMALL_DIRECTORY / "tokenizer.json"))
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("3 + 4 = 7").ids]
    assert pieces == ["3", " +", " ", "4", " =", " ", "7"]
    writers = ["large", "large", "small", "small", "large", "large", "large"]
    tokens = list(zip(tokenizer.encode("3 + 4 = 7").ids, writers, strict=True))
    assert bracketed(tokenizer, Answer(tokens=tokens)).plain == "[3 +] 4 [= 7]"


async def test_a_terminal_gets_styles_and_no_brackets(daemon: FakeDaemon, tmp_path: Path) -> None:
    code, output = await asyncio.to_thread(lambda: run(tmp_path / "d.sock", terminal=True))
    assert code == 0
    plain = Text.from_ansi(output).plain
    assert "Written by the small model and the large model" in plain
    assert next(iter(daemon.problems.values())).solution in plain


def test_a_summary_counts_all_answers() -> None:
    problems = [Problem("?", 7, ""), Problem("?", 8, "")]
    answers = [
        Answer("The answer is 7.", [(1, "small"), (2, "large")], 2),
        Answer("The answer is 7.", [(1, "small"), (2, "small")], 0),
    ]
    row = summarize("demo", problems, answers, seconds=0.5)
    assert (row.accuracy, row.large_share, row.handoffs, row.rate) == (0.5, 0.25, 50.0, 8.0)
