"""What goes wrong for reasons that the user can mend."""

from __future__ import annotations


class TrainingError(Exception):
    """Training or calibration cannot go on; the message names option, file or line and says what to do."""


class TrainingUsageError(TrainingError):
    """Options that do not go together."""
