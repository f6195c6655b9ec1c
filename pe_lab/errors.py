"""The errors that a user meets, by what they can do about them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class UserError(ValueError):
    """Bad input: what was wrong, where, and what to do. A command prints the message and exits with status 2."""


class ConfigError(UserError):
    """A key, a flag or an argument is wrong: change it."""


class DataError(UserError):
    """Text, a tokenizer, prepared data or a results file is missing, damaged or does not fit: replace it."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not fit: give another one."""


class UnsupportedError(UserError):
    """The input is valid, but this version, kernel or machine cannot do what it asks for: ask for something else."""


class TrainingDiverged(Exception):
    """The loss or its gradient is not finite. The input is valid: train again from an earlier checkpoint."""


class SilentCorruption(Exception):
    """The same computation gave two results: the hardware is faulty. The message names the process and the device."""


def did_you_mean(name: str, allowed: Sequence[str]) -> str:
    """`Did you mean 'x'?` for the nearest allowed name, else the list of what is allowed."""
    near = difflib.get_close_matches(name, allowed, n=1)
    return f"Did you mean '{near[0]}'?" if near else f"Allowed: {', '.join(sorted(allowed))}."
