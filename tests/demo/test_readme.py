"""What the README shows of the demo pair is what the committed models write."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import torch
from tokenizers import Tokenizer

from trouterd.demo import LARGE_DIRECTORY, SMALL_DIRECTORY
from trouterd.demo.report import Written, load_model, prompt_ids, write_answers

ROOT = Path(__file__).parents[2]


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.DOTALL)
    assert match is not None, pattern
    return match[1]


def test_answer_in_the_readme() -> None:
    torch.set_num_threads(1)
    readme = (ROOT / "README.md").read_text()
    route = tomllib.loads((ROOT / "trouterd.toml").read_text())["routes"]["demo"]
    asked = json.loads(found(r"-d '(\{.*?\})'\n", readme))
    shown = json.loads(found(r'"usage": (\{.*?\n\})', readme))
    wrong = found(r"wrong \(`(.*?)`\)", readme)
    answer = found(r"the answer is `(.*?)`", readme)
    tokenizer = Tokenizer.from_file(str(SMALL_DIRECTORY / "tokenizer.json"))
    prompt = prompt_ids(tokenizer, asked["messages"][0]["content"])
    small, large = load_model(SMALL_DIRECTORY), load_model(LARGE_DIRECTORY)

    def text(written: Written) -> str:
        decoded: str = tokenizer.decode(written.ids)
        return decoded

    assert wrong in text(write_answers(tokenizer, small, None, [prompt])[0])
    routed = write_answers(tokenizer, small, large, [prompt], route["params"]["threshold"])[0]
    assert text(routed) == " ".join(answer.split())
    by_large = sum(routed.by_large)
    assert shown["route"]["tokens"] == {"small": len(routed.ids) - by_large, "large": by_large}
    assert shown["completion_tokens"] == len(routed.ids)
    assert shown["prompt_tokens"] == len(prompt)
    assert shown["route"]["handoffs"] == 2 * by_large
    assert f"writes {by_large} of the {len(routed.ids)} tokens" in readme
