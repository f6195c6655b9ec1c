"""What a recipe takes over from the checkpoint that a phase starts from: shape, tokenizer, length and encodings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pe_lab import storage
from pe_lab.checkpoints.checkpoint import open_source
from pe_lab.checkpoints.source import CheckpointSource
from pe_lab.checkpoints.surgery import FREE_FIELDS
from pe_lab.config import ModelConfig, check_name
from pe_lab.data.tokenizers import KIND_FILE, Tokenizer, load_tokenizer, same_ids
from pe_lab.errors import ConfigError, UserError
from pe_lab.positional import Layer
from pe_lab.storage import AnyPath, absolute, exists
from pe_lab.training.workdir import saved_config

SHAPE = tuple(field.name for field in dataclasses.fields(ModelConfig) if field.name not in FREE_FIELDS)
# Without these, the defaults of the config would be another model; recipes of a published shape set them.
NEEDED = ("layers", "d_model", "d_ff", "heads", "kv_heads")


def workdir_of(tree: Mapping[Any, Any], given: str | None) -> AnyPath:
    """The directory of a run: --workdir, or runs/NAME.

    Raises:
      ConfigError: the name is none of a directory in runs.
    """
    name = str(tree.get("name", "run"))
    check_name("config.name", name)
    return storage.path("--workdir", given) if given else Path("runs") / name


def inherit(tree: dict[Any, Any], workdir: AnyPath | None = None) -> dict[Any, Any]:
    """The tree of a recipe, completed by what its phases with `init_from` do not set.

    From the checkpoint come the fields of `model` that its weights determine, the tokenizer (unless the data are
    prepared), and the phase's `sequence_length` and `positional`. A run that has begun in `workdir` has these values in
    its run.json, and does not need the checkpoint any more.

    Raises:
      ConfigError: the checkpoint cannot be read, and the recipe does not do without it.
    """
    phases = tree.get("phases")
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        return tree  # `from_dict` has the message
    tree = {**tree, "phases": [dict(phase) for phase in phases]}
    saved, first = saved_config(workdir) if workdir is not None else None, True
    for index, phase in enumerate(tree["phases"]):
        path = phase.get("init_from")
        if not isinstance(path, str) or path in ("", "random") or _inside(path, workdir):
            continue
        wanted = _unset(tree, phase, first)
        values = _saved(saved, index, path, workdir)
        if values is None:
            values = _of_checkpoint(index, path, wanted)
        for part, key in wanted:
            if (part, key) in values:
                target = phase if part == "phase" else tree.setdefault(part, {})
                target[key] = values[part, key]
        first = False
    return tree


def _inside(path: str, workdir: AnyPath | None) -> bool:
    """Whether a checkpoint is one of the run itself, whose shape the config gives."""
    if workdir is None or path.startswith(("hf:", "gguf:")):
        return False
    return absolute(storage.path("init_from", path)).is_relative_to(absolute(workdir))


def _unset(tree: dict[Any, Any], phase: Mapping[Any, Any], first: bool) -> list[tuple[str, str]]:
    """What a recipe leaves to the checkpoint, as (model, data or phase; key)."""
    wanted = [("phase", key) for key in ("sequence_length", "positional") if key not in phase]
    if not first:  # one model and one tokenizer for all phases
        return wanted
    model, data = (tree.get(part) or {} for part in ("model", "data"))
    if isinstance(model, dict):
        tree["model"] = dict(model)
        wanted += [("model", key) for key in SHAPE if key not in model]
    if isinstance(data, dict) and "tokenizer" not in data and not data.get("prepared"):
        sources = data.get("sources") or []
        names = [str(source.get("source", "")) for source in sources if isinstance(source, dict)]
        if not any(name.startswith("prepared:") for name in names):
            tree["data"] = dict(data)
            wanted.append(("data", "tokenizer"))
    return wanted


def _saved(
    saved: Mapping[str, Any] | None, index: int, path: str, workdir: AnyPath | None
) -> dict[tuple[str, str], Any] | None:
    """The values of the run that has begun; None if there is none that starts from `path`."""
    try:
        phase, model, data = saved["phases"][index], saved["model"], saved["data"]
        if phase["init_from"] != path:
            return None
        values = {("model", key): model[key] for key in SHAPE if key in model}
        values |= {("phase", key): phase[key] for key in ("sequence_length", "positional")}
        tokenizer = data["tokenizer"]
        kept = workdir / "tokenizer"
        if not exists(storage.path("the tokenizer", tokenizer.partition(":")[2] or ".")) and exists(kept / KIND_FILE):
            tokenizer = f"saved:{kept}"  # the run's own copy
        return {**values, ("data", "tokenizer"): tokenizer}
    except (AttributeError, TypeError, LookupError):
        return None


def _of_checkpoint(index: int, path: str, wanted: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """The values of a checkpoint."""
    needed = [key for part, key in wanted if part != "model" or key in NEEDED]
    try:
        source = open_source(path)
    except UserError as error:
        if not needed:
            return {}  # the recipe says all; training says what is wrong with the checkpoint
        raise ConfigError(
            f"config.phases[{index}] takes {', '.join(needed)} from its init_from '{path}', which cannot be read: "
            f"{error} Make that checkpoint first (pe_lab.convert imports one), or set these keys."
        ) from None
    values = {("model", key): getattr(source.model, key) for key in SHAPE}
    values |= {("phase", "sequence_length"): source.training_length, ("phase", "positional"): _described(source)}
    if ("data", "tokenizer") in wanted:
        if not source.tokenizer:
            raise ConfigError(f"The checkpoint '{source.display_name}' has no tokenizer: set config.data.tokenizer.")
        values["data", "tokenizer"] = source.tokenizer
    return values


def _described(source: CheckpointSource) -> Any:
    """The layers of a checkpoint for `positional`: one encoding if all layers have it, and nothing else."""
    first = source.layers[0]
    same = all(layer == first for layer in source.layers)
    return first.encoding if same and first == Layer(first.encoding) else [first] if same else list(source.layers)


def check_tokenizer(source: CheckpointSource, tokenizer: Tokenizer, where: str) -> None:
    """`ConfigError` if a checkpoint was trained with another tokenizer than the data's; `where` names the phase."""
    if not source.tokenizer:
        return
    own = load_tokenizer(source.tokenizer)
    if not same_ids(own, tokenizer):
        raise ConfigError(
            f"{where}: the checkpoint '{source.display_name}' was trained with another tokenizer ({own.fingerprint}, "
            f"{own.vocab_size} ids) than the data have ({tokenizer.fingerprint}, {tokenizer.vocab_size} ids): its "
            "embeddings would mean other tokens. Leave data.tokenizer out, or prepare the data with "
            f"--tokenizer={source.tokenizer}. To train new meanings on purpose, set the phase's other_tokenizer=True."
        )
