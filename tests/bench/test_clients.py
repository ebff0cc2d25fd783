"""Closed-loop clients against servers of all habits: what they ask, what they count, and how they fail."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from bench.clients import Clients
from bench.dialect import Conversation, Dialect, Form, learn
from bench.endpoint import Address, Connection, EndpointError
from bench.target import Target
from bench.window import measure
from bench.workloads import AGENT, Workload, find
from tests.bench.fake_server import FakeServer

PATIENCE = 50.0
"""Seconds without a byte that no server takes which is not silent on purpose."""
TWO_TURNS = Workload("two", ((10, 4), (3, 4)), system=6)


def fake(url: str, model: str = "fake") -> Target:
    return Target("fake", url, model, 2, body={"top_p": 0.5})


async def learned(server: FakeServer, folder: Path, workload: Workload) -> Dialect:
    async with server.served(folder) as url:
        return await learn(fake(url), workload, PATIENCE)


@pytest.mark.parametrize(
    ("server", "form", "extras", "continuous"),
    [
        (FakeServer(), Form.IDS, True, True),
        (FakeServer(usage="final"), Form.IDS, True, False),
        (FakeServer(takes_ids=False, crlf=True), Form.TEXT, True, True),
        (FakeServer(has_completions=False), Form.CHAT, True, True),
        (FakeServer(takes_extras=False), Form.IDS, False, False),
        (FakeServer(takes_extras=False, has_completions=False), Form.CHAT, False, False),
    ],
)
async def test_it_learns_what_a_server_takes(
    tmp_path: Path, server: FakeServer, form: Form, extras: bool, continuous: bool
) -> None:
    dialect = await learned(server, tmp_path, find("100/9"))
    assert (dialect.form, dialect.extras, dialect.continuous) == (form, extras, continuous)
    if extras and form is not Form.IDS:
        assert dialect.tokens_per_word == pytest.approx(2, rel=0.05)
    last = server.bodies[-1]
    assert last["top_p"] == 0.5
    assert last.get("ignore_eos", False) is extras


async def test_conversations_need_ids_of_answers(tmp_path: Path) -> None:
    server = FakeServer(returns_ids=False)
    assert (await learned(server, tmp_path, find("100/9"))).form is Form.IDS
    assert (await learned(server, tmp_path, TWO_TURNS)).form is Form.TEXT


@pytest.mark.parametrize("server", [FakeServer(), FakeServer(takes_ids=False), FakeServer(has_completions=False)])
async def test_turns_follow_each_other(tmp_path: Path, server: FakeServer) -> None:
    async with server.served(tmp_path) as url:
        dialect = await learn(fake(url), TWO_TURNS, PATIENCE)
        tried = len(server.bodies)
        async with Clients(dialect, TWO_TURNS, 1) as clients:
            await clients.begun()
            while len(server.bodies) < tried + 5:
                await clients.during(0.01, lambda _: None)
    # The only client begins in the middle of a conversation, which is where the second turn begins.
    begun, first, second, third, _ = server.bodies[tried : tried + 5]
    if dialect.form is Form.IDS:
        assert begun["prompt"] == list(TWO_TURNS.midway(0, 0.5)[0].said)
        assert len(begun["prompt"]) == 10 + 4 + 3
        said = [list(turn.said) for turn in TWO_TURNS.conversation(1)]
        assert first["prompt"] == said[0]
        assert second["prompt"] == said[0] + [0, 1, 2, 3] + said[1]
        assert third["prompt"][:6] == first["prompt"][:6]
        assert third["prompt"][6:] != first["prompt"][6:]
        assert len(third["prompt"]) == 10
    elif dialect.form is Form.TEXT:
        assert second["prompt"].startswith(first["prompt"] + " t0 t1 t2 t3")
        assert len(first["prompt"].split()) == 5  # two tokens each
        assert third["prompt"].split()[:3] == first["prompt"].split()[:3]
    else:
        roles = [message["role"] for message in second["messages"]]
        assert roles == ["user", "assistant", "user"]
        assert second["messages"][1]["content"] == " t0 t1 t2 t3"


@pytest.mark.parametrize("rate", [0.8, 1.0, 1.75, 2.5])
def test_words_are_as_many_tokens_alike_as_ids(rate: float) -> None:
    """Prompts of agents share 2,048 of 3,584 tokens, whatever a word takes."""
    dialect = Dialect(fake("http://x"), Form.TEXT, extras=True, continuous=True, tokens_per_word=rate)
    prompts = []
    for number in (1, 2):
        _, body = Conversation(dialect, AGENT, seed=0).request(AGENT.conversation(number)[0])
        prompts.append(body["prompt"].split())
    assert [len(prompt) for prompt in prompts] == [round(3584 / rate)] * 2
    alike = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*prompts, strict=True))))
    assert alike * rate == pytest.approx(2048, abs=20)
    later = [one != other for one, other in zip(*(prompt[alike:] for prompt in prompts), strict=True)]
    assert sum(later) > 0.8 * len(later)


async def test_messages_of_a_data_set_go_to_chat(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "2 + 2?"}], "max_tokens": 3}\n')
    server = FakeServer()
    async with server.served(tmp_path) as url:
        workload = find(str(path))
        async with Clients(await learn(fake(url), workload, PATIENCE), workload, 2) as clients:
            await clients.begun()
    assert all(body["chat"] and body["messages"][0]["content"] == "2 + 2?" for body in server.bodies)
    assert not any("ignore_eos" in body for body in server.bodies)


@pytest.mark.parametrize("usage", ["continuous", "final", "none"])
@pytest.mark.parametrize("per_event", [1, 3])
async def test_tokens_between_two_moments(tmp_path: Path, usage: str, per_event: int) -> None:
    """Events of several tokens, answers that begin before and end after: only a server without any usage hides what events hold."""
    server = FakeServer(usage=usage, per_event=per_event, alone=False)
    workload = find("5/36")
    async with server.served(tmp_path, tcp=True) as url:
        dialect = await learn(fake(url), workload, PATIENCE)
        async with Clients(dialect, workload, 2) as clients:
            await server.until(2)
            clients.log.open = True
            tried = server.events

            async def steps(count: int) -> None:
                """Each ends when clients have seen its events, and have both an answer under way again."""
                for _ in range(count):
                    await server.step()
                    await arrived(clients, server.events - tried)
                    await server.until(2)

            await steps(2)
            await clients.begun()
            begin = clients.begin()
            await steps(14)
            found = clients.end(begin)
    # Of the first answers 27 and 9 tokens are left. Events of 3: they end in steps 7 and 1, and the next one in step 13.
    expected = 28 * (per_event if usage != "none" else 1)
    assert found.tokens == pytest.approx(expected)
    assert len(found.whole) == (1 if per_event == 3 else 0)
    assert len(found.gaps) == (25 if per_event == 3 else 27)
    assert len(found.first) == (3 if per_event == 3 else 1)
    assert found.handoffs is None
    assert not found.models


async def arrived(clients: Clients, events: int) -> None:
    """Wait until clients have seen so many."""
    async with asyncio.timeout(30):
        while sum(c.events + (c.answer.events if c.answer else 0) for c in clients._clients) < events:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("status", "POST /v1/completions: HTTP 503: the model is gone"),
        ("event", "POST /v1/completions: the model failed"),
        ("close", "POST /v1/completions: .*closed"),
        ("silence", "no byte of an answer for 0.3 s"),
    ],
)
@pytest.mark.parametrize("sound", [0, 3])
async def test_faults_are_told_and_end_everything(tmp_path: Path, fault: str, message: str, sound: int) -> None:
    server = FakeServer(fault=fault, sound=sound)
    silence = 0.3 if fault == "silence" else PATIENCE
    async with server.served(tmp_path) as url:
        with pytest.raises(EndpointError, match=f"{url}: .*{message}"):
            await measure(fake(url), find("5/50"), 4, seconds=30, settle=0.1, silence=silence)


async def test_unknown_models_and_servers_that_are_not_there(tmp_path: Path) -> None:
    async with FakeServer().served(tmp_path) as url:
        with pytest.raises(EndpointError, match=f"{url}: .*HTTP 404: no model other"):
            await learn(fake(url, "other"), find("5/9"), PATIENCE)
    for gone in (url, "http://127.0.0.1:1"):
        with pytest.raises(EndpointError, match=f"{gone}: cannot connect"):
            await learn(fake(gone), find("5/9"), PATIENCE)


async def test_a_connection_that_was_closed_while_idle_is_opened_again(tmp_path: Path) -> None:
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()  # although it has promised to stay

    path = str(tmp_path / "s")
    async with await asyncio.start_unix_server(serve, path):
        connection = Connection(Address.of(f"unix:{path}"))
        for _ in range(3):
            assert await connection.json("GET", "/v1/models") == {}
    assert len(asked) == 3


async def test_keys_and_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    heads = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 401 No\r\nConnection: close\r\n\r\nwho are you?")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connection = Connection(Address.of(f"http://127.0.0.1:{port}/api/v1/"))
        with pytest.raises(EndpointError, match="HTTP 401: who are you"):
            await connection.json("GET", "/v1/models")
    assert heads[0].startswith(b"GET /api/v1/models HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in heads[0]


@pytest.mark.parametrize("url", ["https://host", "host:8000", "unix:", "http://"])
def test_addresses(url: str) -> None:
    with pytest.raises(ValueError, match=f"{url}: expected"):
        Address.of(url)
