"""The checkpoint of an answer: the trained weights with their encoding, as a run's child, and its exports."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from pe_lab import storage
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.checkpoints.surgery import write_child
from pe_lab.data.tokenizers import load_tokenizer, save_tokenizer
from pe_lab.errors import ConfigError, UserError
from pe_lab.lab.extend.extension import ANSWER, with_scale
from pe_lab.lab.extend.methods import METHODS
from pe_lab.storage import AnyPath, read_json

if TYPE_CHECKING:
    from pe_lab.lab.extend.extension import ExtensionPlan

BEST = "best"
FORMS_OF_EXPORT = ("hf", "gguf")


def parse_forms(text: str | None) -> tuple[str, ...]:
    """The forms of `--export`; `ConfigError` for one that there is not."""
    found = tuple(filter(None, (part.strip() for part in (text or "").split(","))))
    for one in found:
        if one not in FORMS_OF_EXPORT:
            raise ConfigError(f"--export={text}: there is no form '{one}'. Allowed: {', '.join(FORMS_OF_EXPORT)}.")
    return found


def write_best(plan: ExtensionPlan, show: Callable[[str], None]) -> AnyPath:
    """Writes `best/`, the arm that the answer chooses with the logit scale that fits it, and its exports.

    Of several seeds it is the first.
    """
    answer = read_json(plan.directory / ANSWER)
    arm = next(one for one in answer["arms"] if one["variant"] == answer["chosen"])
    run = plan.directory / "arms" / f"{arm['variant']}__seed={plan.seeds[0]}"
    parent = open_checkpoint(str(run))
    layers = with_scale(parent.layers, arm["scales"][0], int(parent.metadata["training_length"]), plan.target)
    to = plan.directory / BEST
    if storage.exists(to):
        storage.remove_tree(to)
    tokenizer = load_tokenizer(parent.tokenizer) if parent.tokenizer else None
    saved = None if tokenizer is None else functools.partial(save_tokenizer, tokenizer)
    what = f"{METHODS[arm['variant']].name}, the answer of pe_lab.extend at {plan.target:,} tokens"
    write_child(parent, layers, to, what, saved)
    show(f"{to}: {what}")
    for form in plan.export:
        target = plan.directory / ("best-hf" if form == "hf" else "best.gguf")
        if storage.exists(target):
            storage.remove_tree(target) if target.is_dir() else target.unlink()
        line = ["-m", "pe_lab.convert", f"--from={to}", f"--to={form}:{target}", f"--length={plan.target}"]
        done = subprocess.run([sys.executable, *line], capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"--export={form}: {done.stderr.strip().removeprefix('error: ')}")
        show(done.stdout.strip())
    return to
