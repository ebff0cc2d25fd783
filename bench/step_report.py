"""Tables of a bench of steps, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_KERNELS = 15


def markdown(result: dict[str, Any]) -> str:
    """Everything that `bench.step` measured."""
    parts = [_head(result)]
    for name, table in (
        ("decode", _decode),
        ("extend", _extend),
        ("prefill", _prefill),
        ("generate", _generate),
    ):
        if result.get(name):
            parts.append(table(result[name]))
    parts += map(_profile, result.get("profile", ()))
    if result["skipped"]:
        parts.append("Left out:\n" + "\n".join(f"- {case}" for case in result["skipped"]))
    return "\n\n".join(parts) + "\n"


def _head(result: dict[str, Any]) -> str:
    model, ceilings = result["model"], result["ceilings"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join(
        (
            f"## {model['name']}, {model['dtype']}, {model['parameters'] / 1e6:,.1f} M weights, on {result['hardware']}",
            "",
            f"`{result['command']}` at {result['commit']}; {versions}.",
            f"Large copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, large product"
            f" {ceilings['matmul_flop_per_s'] / 1e12:.0f} TFLOP/s. Floor: bytes that must move by the first, or, where it takes"
            " longer, products by the second.",
        )
    )


def _decode(cases: Sequence[dict[str, Any]]) -> str:
    contexts = sorted({case["context"] for case in cases})
    rows = []
    for batch in sorted({case["batch"] for case in cases}):
        found = {case["context"]: case for case in cases if case["batch"] == batch}
        cells = [_cell(found[context]) if context in found else "-" for context in contexts]
        first = next(iter(found.values()))
        rows.append([str(batch), *cells, f"{first['launch_us']:.0f} / {first['poll_us']:.0f}"])
    titles = ["batch", *(f"context {context}" for context in contexts), "host us: launch / poll"]
    return _table("Decode step: ms between records (device ms; floor / step)", titles, rows)


def _cell(case: dict[str, Any]) -> str:
    return f"{case['wall_ms']:.3f} ({case['device_ms']:.3f}; {_share(case)})"


def _share(case: dict[str, Any]) -> str:
    products = "" if case["bound"] == "bytes" else "*"
    return f"{case['floor_ms'] / case['wall_ms']:.0%}{products}"


def _extend(cases: Sequence[dict[str, Any]]) -> str:
    counts = sorted({case["count"] for case in cases})
    rows = []
    for batch in sorted({case["batch"] for case in cases}):
        found = {case["count"]: case for case in cases if case["batch"] == batch}
        base = found.get(1)
        cells = []
        for count in counts:
            if count not in found:
                cells.append("-")
                continue
            case = found[count]
            ratio = f"{case['wall_ms'] / base['wall_ms']:.2f}x; " if base else ""
            cells.append(f"{case['wall_ms']:.3f} ({ratio}{_share(case)})")
        rows.append([str(batch), *cells])
    context = cases[0]["context"]
    title = f"Extend step at context {context}: ms by new tokens per request (against one; floor / step, * = floor of products)"
    return _table(title, ["batch", *map(str, counts)], rows)


def _prefill(cases: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            str(case["count"]),
            f"{case['wall_ms']:.2f}",
            f"{1e3 * case['count'] / case['wall_ms']:,.0f}",
            _share(case),
            f"{case['launch_us'] / 1e3:.2f}",
        ]
        for case in cases
    ]
    return _table("Prefill of one prompt", ["tokens", "ms", "token/s", "floor / step", "host ms: launch"], rows)


def _generate(cases: Sequence[dict[str, Any]]) -> str:
    rows = []
    for case in cases:
        peer = case.get("peer_step_ms")
        rows.append(
            [
                str(case["batch"]),
                f"{case['wall_ms']:.3f}",
                f"{case['worst_ms']:.3f}",
                f"{1e3 * case['batch'] / case['wall_ms']:,.0f}",
                _share(case),
                f"{case['prompts_ms']:.1f}",
                f"{peer:.3f}" if peer else "-",
                f"{peer / case['wall_ms']:.2f}x" if peer else "-",
            ]
        )
    first = cases[0]
    title = f"Answers of {first['output']} tokens to prompts of {first['prompt']}"
    if version := first.get("peer_version"):
        title += f"; peer: vLLM {version}"
    titles = [
        "batch",
        "step, ms",
        "p99, ms",
        "token/s",
        "floor / step",
        "prompts, ms",
        "peer's step, ms",
        "peer / ours",
    ]
    return _table(title, titles, rows)


def _profile(profile: dict[str, Any]) -> str:
    rows = [
        [kernel["name"][:90], f"{kernel['per_step']:.1f}", f"{kernel['us_per_step']:.1f}"]
        for kernel in profile["kernels"][:_KERNELS]
    ]
    rest = profile["kernels"][_KERNELS:]
    if rest:
        launches, micros = (sum(kernel[key] for kernel in rest) for key in ("per_step", "us_per_step"))
        rows.append([f"{len(rest)} others", f"{launches:.1f}", f"{micros:.1f}"])
    title = (
        f"Kernels of a step of {profile['batch']} x {profile['count']} rows, context {profile['context']}:"
        f" {profile['launches']:.0f} launches, {profile['span_us']:.0f} us, of which {profile['idle_us']:.0f} us with no kernel"
        " at work"
    )
    return _table(title, ["kernel", "per step", "us per step"], rows)


def _table(title: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(titles)} |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    return "\n".join((f"**{title}**", "", *lines, *(f"| {' | '.join(row)} |" for row in rows)))
