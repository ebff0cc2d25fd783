"""Another engine in the same run, through a folder whose scripts know how to run it without our help.

The folder holds the script that is asked for and, where there is something to install,
    unpack.py FOLDER TARGET     puts the engine into TARGET, which later scripts find as VLSITE in their environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class PeerError(Exception):
    """The peer cannot be run; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class PeerScript:
    """A script of a folder, installed."""

    path: Path
    site: Path
    """Where the engine is."""
    scratch: Path
    """A folder for what it writes."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Its command line."""
        return [sys.executable, str(self.path), *arguments]

    def environment(self) -> dict[str, str]:
        """This process's, and where the engine is."""
        return os.environ | {"VLSITE": str(self.site)}

    def fault(self, code: int) -> PeerError:
        """What to raise when it ended with this code."""
        return PeerError(f"--vllm: {self.path} ended with {code}")


@contextmanager
def installed(folder: Path, name: str) -> Iterator[PeerScript]:
    """The script of this name.

    Raises:
        PeerError: there is none, or the engine cannot be installed.
    """
    script, installer = folder / name, folder / "unpack.py"
    if not script.is_file():
        raise PeerError(f"--vllm: {script} is not there")
    with tempfile.TemporaryDirectory(prefix="peer-") as scratch:
        site = Path(scratch) / "site"
        if installer.is_file():
            done = subprocess.run([sys.executable, str(installer), str(folder), str(site)])
            if done.returncode:
                raise PeerError(f"--vllm: {installer} ended with {done.returncode}")
        yield PeerScript(script, site, Path(scratch))
