"""What keeps a frontier from being measured."""

from __future__ import annotations


class FrontierError(Exception):
    """A fault that the user can mend; the message names option, file or line and says what to do."""


class FrontierUsageError(FrontierError):
    """The command line, or a file that it names, is at fault."""
