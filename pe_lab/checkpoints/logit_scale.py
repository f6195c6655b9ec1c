"""The fitted logit scale of a checkpoint: DroPE's beta(n) = 1 + c ln(n / L), and the data of the fit.

`PHASE/logit_scale.json` has one entry per checkpoint id: fitting changes no weights, and a checkpoint that is trained
further has another id.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pe_lab.checkpoints.checkpoint import Checkpoint
from pe_lab.checkpoints.locating import DIRECTORY
from pe_lab.errors import CheckpointError
from pe_lab.positional import Beta
from pe_lab.storage import read_json, write_json

FILE = "logit_scale.json"


def place(checkpoint: Checkpoint) -> Path | None:
    """The file for a native checkpoint; None for an external one."""
    directory = checkpoint.path.parent
    return directory.parent / FILE if directory.name == DIRECTORY else None


def write_logit_scale(checkpoint: Checkpoint, coefficient: float, fitted: Mapping[int, float], on: str) -> Path | None:
    """Writes a fit and returns the file's path; None for an external checkpoint.

    Args:
      coefficient: c, common to all lengths.
      fitted: length in tokens -> the scale that was fitted there.
      on: a description of the data of the fit.

    Raises:
      DataError: the file cannot be written.
    """
    path = place(checkpoint)
    if path is None:
        return None
    kept = _read(path)
    kept[str(checkpoint.metadata["id"])] = {
        "coefficient": coefficient,
        "original_length": int(checkpoint.metadata["training_length"]),
        "scales": {str(length): scale for length, scale in sorted(fitted.items())},
        "fitted_on": on,
        "step": checkpoint.step,
    }
    write_json(path, kept, "The fitted logit scale is lost.")
    return path


def read_logit_scale(checkpoint: Checkpoint) -> Beta | None:
    """The scale that was fitted for a checkpoint, or None.

    Raises:
      CheckpointError: the file is damaged.
    """
    path = place(checkpoint)
    entry = _read(path).get(str(checkpoint.metadata.get("id"))) if path is not None else None
    if entry is None:
        return None
    try:
        return Beta(float(entry["coefficient"]), int(entry["original_length"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}). Remove it, and fit again: --suite=beta.") from None


def how_to_fit(checkpoint: Checkpoint) -> str:
    """The advice of a message about a checkpoint without a fitted scale."""
    if place(checkpoint) is None:
        return (
            f"{checkpoint.path} has no fitted logit scale, and external checkpoints cannot store one. Import "
            f"it first (python -m pe_lab.convert --from={checkpoint.path} --to=runs/NAME), then fit one."
        )
    return (
        f"no logit scale was fitted for {checkpoint.path} yet. Fit one on held-out text: python -m pe_lab.evaluate "
        f"--from={checkpoint.path} --suite=beta --lengths=2x,4x."
    )


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, "Remove it, and fit again: --suite=beta.", CheckpointError) if path.exists() else {}
