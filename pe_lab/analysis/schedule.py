"""The positional encoding of every layer of a recipe's phases, or of layers on a command line, as a table."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from pe_lab.analysis.analysis import Analysis, whole
from pe_lab.config import ModelConfig, from_dict
from pe_lab.errors import ConfigError
from pe_lab.model import complete, model_schedule, preset
from pe_lab.positional import Layer, describe, layers
from pe_lab.recipes import load_config
from pe_lab.training.plan import given_layers, plan_phases


@dataclass(frozen=True)
class DescribedModel:
    """The encodings of one model.

    Attributes:
      name: of the phase, the checkpoint or the preset.
      layers: the encoding of each layer.
      length: tokens of a training sequence; None: not known.
      model: its shape.
      detail: more about it, for a title.
    """

    name: str
    layers: tuple[Layer, ...]
    length: int | None
    model: ModelConfig
    detail: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose a recipe, or layers."""
    add = parser.add_argument
    add("--config", help="a recipe, such as configs/table1.py:method=rnope_swa; --config.a.b=value as in training")
    add("--positional", help="instead of a recipe: descriptions of layers, A+B+C for a pattern")
    add("--model", default="drope_494m", help="instead of a recipe: a preset's shape (default: %(default)s)")


def described(args: argparse.Namespace) -> Sequence[DescribedModel]:
    """Each phase of the recipe, or the one description of the layers.

    Raises:
      UserError: no such recipe, preset or encoding.
    """
    if args.config:
        config = load_config(args.config, args.overrides, inherits=True)
        shape = complete(dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 1))
        return [
            DescribedModel(plan.name, plan.layers, phase.sequence_length, shape, f"QK-norm {plan.qk_norm}")
            for plan, phase in zip(plan_phases(config, given_layers(config)), config.phases, strict=True)
        ]
    shape = complete(from_dict(ModelConfig, preset(args.model), "--model"))
    return [DescribedModel(args.model, layers(args.positional, shape.layers), None, shape)]


# ---------------------------------------------------------------------------------------------------------------------
# The analysis


def _options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    help = "tokens of the sequence, for schemes that depend on it (default: the training length)"
    parser.add_argument("--length", help=help)


def _run(args: argparse.Namespace) -> None:
    length = whole("--length", args.length) if args.length else None
    if bool(args.config) == bool(args.positional):
        raise ConfigError("schedule shows a recipe (--config=...) or layers (--positional=...): give one of them.")
    parts = []
    for one in described(args):
        shape, at = one.model, length or one.length
        heads = f"{shape.heads} query heads on {shape.kv_heads} key heads of {shape.head_dim} channels"
        schedule = model_schedule(shape, one.layers, at)
        name = ", ".join(filter(None, [one.name, one.detail]))
        tokens = f", sequences of {at:,} tokens" if at else ""
        parts.append(f"{name}: {heads}{tokens}\n{describe(schedule, one.layers)}")
    print("\n\n".join(parts))


ANALYSIS = Analysis("", _options, _run, models=False)
