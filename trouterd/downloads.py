"""Where a configuration says in its comments how to get what it lacks, as the examples do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_COMMAND = "hf download "
_ABSENT = ("no model directory", "no file or directory", "no directory")


def hints(file: Path | None, problems: Sequence[str]) -> list[str]:
    """A line on the downloads that comments of the file name, if something is absent and there are such comments.

    Args:
        file: the configuration.
        problems: found in it.
    """
    if file is None or not any(absent in problem for problem in problems for absent in _ABSENT):
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = [
        line[line.index(_COMMAND) :].strip()
        for line in lines
        if "#" in line.partition(_COMMAND)[0] and _COMMAND in line
    ]
    return (
        [f"{file}: its comments say how to get what is missing, in the file's folder: {'; '.join(found)}"]
        if found
        else []
    )
