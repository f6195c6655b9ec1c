"""From a config file to frozen dataclasses: every default, every validation, every "did you mean".

A recipe in `configs/` builds an `ml_collections.ConfigDict`. It stops here: `load_config` turns it into a `Config`,
and the rest of the code base sees nothing but frozen dataclasses.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ml_collections import ConfigDict

from pe_lab.errors import UserError, did_you_mean


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the decoder. What it does with positions is not here: that is a phase's `positional`."""

    vocab_size: int = 0  # 0: taken from the tokenizer, rounded up to a multiple of 128
    layers: int = 12
    d_model: int = 768
    d_ff: int = 2048
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 0  # 0: d_model / heads
    qk_norm: str = "none"  # RMSNorm before rotation: none | head | flat | query_head | query_flat
    attention_bias: bool = False  # bias on the query, key and value projections (Qwen2)
    output_bias: bool = False  # bias on the output projection of the attention
    mlp_bias: bool = False  # bias on every projection of the feed-forward
    norm: str = "rms"  # of the residual stream: rms | rms_plus_one (scaled by 1 + w, Gemma) | layer
    activation: str = "silu"  # silu | gelu_tanh | gelu (the exact one)
    gated_mlp: bool = True  # down(activation(gate x) * up x), or else down(activation(up x))
    parallel_block: bool = False  # x + attention(norm x) + mlp(norm x), or else one after the other
    tie_embeddings: bool = True
    scale_embeddings: bool = False  # the input embedding times sqrt(d_model) (Gemma)
    norm_epsilon: float = 1e-6
    init_std: float = 0.02
    dtype: str = "bfloat16"  # compute; parameters are float32
    remat: str = "none"  # none | dots | full
    scan: bool = True  # False unrolls the layers: faster on a CPU, slower to compile
    attention: str = "auto"  # or a name that `python -m pe_lab.attention` lists
    attention_chunk: int = 512  # query and key block of the chunked attention, in tokens
    loss_chunks: int = 1  # the cross-entropy walks over the vocabulary in this many chunks


@dataclass(frozen=True)
class SourceConfig:
    """One corpus of the mixture. `options` are the source's own settings (needles have some)."""

    source: str = "stdlib"
    weight: float = 1.0
    column: str = "text"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    """What the model reads, and how it is cut into windows of `sequence_length` + 1 tokens."""

    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    tokenizer: str = "bytes"  # bytes | hf:PATH | gguf:PATH | saved:DIR | sentencepiece:PATH or :train:SIZE
    prepared: str = ""  # a directory written by pe_lab.prepare; replaces `sources` and `tokenizer`
    cache_dir: str = "data"  # where shards written on first use live
    segments: bool = False  # mask attention between the documents packed into one window
    validation_fraction: float = 0.01
    seed: int = 0
    workers: int = 0  # Grain worker processes; 0 reads in this process, on threads


@dataclass(frozen=True)
class MeshConfig:
    """Devices per mesh axis. -1 (on one axis): whatever is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1  # cuts texts along their length


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW under a warm-up and a decay. `schedule`: cosine | wsd | constant."""

    learning_rate: float = 3e-4
    schedule: str = "cosine"
    warmup_steps: int = 100
    decay_fraction: float = 0.2  # wsd: the share of the steps spent decaying
    final_fraction: float = 0.0  # learning rate at the end, as a fraction of the peak
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # on matrices only
    clip_norm: float = 1.0


@dataclass(frozen=True)
class PhaseConfig:
    """One stretch of training. A phase starts where the one before it ended, unless `init_from` says otherwise."""

    name: str = "pretrain"
    steps: int = 1000
    positional: Any = "rope"  # an encoding, a text ("rope:base=10000"), one per layer, or an edit: positional.layers
    qk_norm: str = ""  # as model.qk_norm, from this phase on; "" leaves it as it was
    qk_norm_init: Literal["matched", "ones"] = "matched"  # scales of an added norm: fitted to the logits, or 1 (DroPE)
    random_positions: int = 0  # positions are drawn below this, anew each step (Ruoss et al. 2023); 0: they count
    init_from: str = ""  # a checkpoint, hf:DIR, gguf:FILE, "random"; "" is the previous phase's last, else random
    sequence_length: int = 1024
    batch_size: int = 256  # windows a step, over all devices and micro-batches
    accumulate: int = 1  # micro-batches a step
    optimizer: OptimizerConfig = OptimizerConfig()


@dataclass(frozen=True)
class CheckpointConfig:
    """How often a run saves, and how many checkpoints a phase keeps (its last one always)."""

    every_steps: int = 1000
    keep: int = 2


@dataclass(frozen=True)
class LogConfig:
    """How often a run writes a row of metrics and measures the validation loss."""

    every_steps: int = 1
    validate_every_steps: int = 500
    validation_batches: int = 8


@dataclass(frozen=True)
class EvaluationConfig:
    """What `pe_lab.evaluate` does with this run by default."""

    factors: tuple[int, ...] = (1, 2, 4, 8)  # lengths, in multiples of the training length
    tokens: int = 65536  # held-out tokens per perplexity
    fit_tokens: int = 16384  # other held-out tokens, for a logit scale
    needle_windows: int = 256  # windows per needle accuracy
    crop_steps: int = 4  # the cropped context moves on by the training length / crop_steps
    seed: int = 0


@dataclass(frozen=True)
class Notes:
    """What a reader should know of a recipe; copied into the run and its report."""

    paper: str = ""
    command: str = ""
    cost: str = ""
    expected: str = ""


@dataclass(frozen=True)
class Config:
    """One experiment, whole."""

    name: str = "run"
    seed: int = 0
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    phases: tuple[PhaseConfig, ...] = (PhaseConfig(),)
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    notes: Notes = Notes()


# ---------------------------------------------------------------------------------------------------------------------
# From files and texts to a Config


def load_config(reference: str, overrides: Mapping[str, str] | None = None) -> Config:
    """Reads a recipe: `configs/x.py`, or `configs/x.py:ARG` to pass ARG to its `get_config`.

    Args:
      reference: the file, with its argument after a colon.
      overrides: `{"model.layers": "4", "phases.0.steps": "10"}`; values are read as Python literals, else as text.

    Raises:
      UserError: no such file, no `get_config`, an unknown key (with the nearest right one), a value of another type.
    """
    path, _, arg = reference.partition(":")
    if not Path(path).is_file():
        raise UserError(f"--config: there is no file '{path}'. Recipes are like configs/drope_laptop.py.")
    spec = importlib.util.spec_from_file_location(f"pe_lab_recipe_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config: '{path}' is not a Python file. Recipes are, such as configs/drope_laptop.py.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise UserError(f"--config: '{path}' defines no get_config(arg).")
    try:
        tree = _plain(module.get_config(arg))
    except ValueError as error:  # how a recipe refuses an argument
        raise UserError(f"--config: '{path}': {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"--config: get_config of '{path}' returns {tree!r}; it must return a ConfigDict.")
    for key, text in (overrides or {}).items():
        _override(tree, key, text)
    return from_dict(Config, tree)


def _plain(value: Any) -> Any:
    """ConfigDicts to dicts, tuples to lists; everything else as it is."""
    if isinstance(value, ConfigDict | Mapping):
        return {key: _plain(value[key]) for key in value}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _override(tree: Any, key: str, text: str) -> None:
    """Sets one dotted key of a recipe's tree; list items by number. Unknown names are left to `from_dict`."""
    *path, last = key.split(".")
    at = tree
    for name in path:
        if isinstance(at, list):
            if not name.isdigit() or int(name) >= len(at):
                raise UserError(f"--config.{key}: '{name}' is not one of the {len(at)} items, numbered from 0.")
            at = at[int(name)]
        else:
            at = at.setdefault(name, {})
        if not isinstance(at, dict | list):
            raise UserError(f"--config.{key}: '{name}' is a single value and has nothing inside.")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = {"true": True, "false": False}.get(text.lower(), text)
    if isinstance(at, list):
        if not last.isdigit() or int(last) >= len(at):
            raise UserError(f"--config.{key}: '{last}' is not one of the {len(at)} items, numbered from 0.")
        at[int(last)] = value
    else:
        at[last] = value


def from_dict(kind: type, value: Any, where: str = "config") -> Any:
    """A frozen dataclass (`Config`, `ModelConfig`, ...) from nested dicts, checking every key and every type."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise UserError(f"{where} is {value!r}; it must be a set of keys: {', '.join(typing.get_type_hints(kind))}.")
    hints = typing.get_type_hints(kind)
    if kind is ModelConfig and isinstance(value.get("qk_norm"), bool):
        # Recipes and checkpoints written when there was one kind of QK-norm say yes or no.
        value = {**value, "qk_norm": "head" if value["qk_norm"] else "none"}
    for key in value:
        if key not in hints:
            raise UserError(f"{where} has no key '{key}'. {did_you_mean(str(key), list(hints))}")
    return kind(**{key: _convert(hints[key], item, f"{where}.{key}") for key, item in value.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        if isinstance(value, list | tuple):
            return [_convert(hint, item, f"{where}[{i}]") for i, item in enumerate(value)]
        try:
            return _read_description(value) if isinstance(value, Mapping) else value
        except UserError as error:
            raise type(error)(f"{where}: {error}") from None
    if typing.get_origin(hint) is Literal:
        if value not in (allowed := typing.get_args(hint)):
            raise UserError(f"{where} is {value!r}. {did_you_mean(str(value), allowed)}")
        return value
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if not isinstance(value, list | tuple):
            raise UserError(f"{where} is {value!r}; it must be a list.")
        return tuple(_convert(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if typing.get_origin(hint) is not None:  # Mapping[str, Any]
        if not isinstance(value, Mapping):
            raise UserError(f"{where} is {value!r}; it must be a set of keys and values.")
        return dict(value)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # 1e3 is how people write a thousand steps.
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{where} is {value!r}; it must be of type {hint.__name__}.")
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Back to plain data


# Positional encodings, patterns and edits are dataclasses of `pe_lab.positional`, which registers them here.
_KINDS: dict[type, str] = {}
_read_description: Callable[[Mapping[str, Any]], Any] = dict
OMIT_DEFAULT = {"omit_default": True}  # metadata of a field that JSON has only where it is not the default


def register_descriptions(kinds: Mapping[str, type], read: Callable[[Mapping[str, Any]], Any]) -> None:
    """Lets configs hold dataclasses from outside: `kinds` by their names in JSON, and the function that reads them."""
    global _read_description
    _KINDS.update({kind: name for name, kind in kinds.items()})
    _read_description = read


def to_json(value: Any) -> Any:
    """A config, a part of one, or a description as plain JSON; registered kinds become {"kind": name, fields}."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: to_json(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if not (f.metadata.get("omit_default") and getattr(value, f.name) == f.default)
        }
        return {"kind": _KINDS[type(value)], **fields} if type(value) in _KINDS else fields
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value


# What a result depends on. Logging, evaluation, where the cache lies and how the devices are laid out may change
# between two sessions of one run; these may not.
_IDENTITY = ("seed", "model", "data", "phases")
_NOT_IDENTITY = ("data.cache_dir", "data.workers")


def identity(config: Config) -> dict[str, Any]:
    """The part of a config that a run may not change half-way, flat: {"model.layers": 4, ...}."""
    flat: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
        if children is None:
            flat[path] = value
        else:
            for key, item in children:
                walk(item, f"{path}.{key}")

    plain = to_json(config)
    for name in _IDENTITY:
        walk(plain[name], name)
    return {key: value for key, value in flat.items() if key not in _NOT_IDENTITY}


def config_hash(config: Config) -> str:
    """Twelve hex digits that name `identity(config)`."""
    return hashlib.sha256(json.dumps(identity(config), sort_keys=True).encode()).hexdigest()[:12]


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Takes `--config.a.b=value` (or `--config.a.b value`) out of a command line: (the rest, {"a.b": "value"})."""
    rest: list[str] = []
    overrides: dict[str, str] = {}
    items = iter(argv)
    for item in items:
        if not item.startswith("--config."):
            rest.append(item)
            continue
        key, equals, text = item.removeprefix("--config.").partition("=")
        if not equals:
            text = next(items, "")
            if not text or text.startswith("--"):
                raise UserError(f"{item}: give a value, as in {item}=VALUE.")
        overrides[key] = text
    return rest, overrides


def recipe_arguments(arg: str, **allowed: str | Sequence[str]) -> dict[str, str]:
    """What a recipe's argument `key=value,key=value` says, completed with defaults.

    `allowed` has for each key its choices, of which the first is the default ("": the recipe has to choose); or one
    text, the default of a key that takes any. `UserError` for what is not allowed, with what is.
    """
    listed = {key: [c for c in choices if c] for key, choices in allowed.items() if not isinstance(choices, str)}
    found = {key: choices if isinstance(choices, str) else choices[0] for key, choices in allowed.items()}
    usage = ", ".join(f"{key}={'|'.join(listed.get(key, ['TEXT']))}" for key in allowed)
    for item in filter(None, arg.split(",")):
        key, _, value = item.partition("=")
        if key not in allowed or not value or value not in listed.get(key, [value]):
            near = did_you_mean(value, listed[key]) if key in listed else did_you_mean(key, list(allowed))
            raise UserError(f"'{item}' is no argument of this recipe. {near} It takes {usage}.")
        found[key] = value
    return found
