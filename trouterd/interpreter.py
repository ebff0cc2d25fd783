"""Starting our own modules in another Python process, with the same packages as in this one."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def module_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of ours."""
    # -P: a folder named "models" in the working directory must not become ours.
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(**variables: str) -> dict[str, str]:
    """This process's environment plus `variables`, with a search path that finds what this process finds."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    return os.environ | {"PYTHONPATH": path} | variables
