"""Whether activations keep their size as a model gets wider: the coordinate check of muP.

Yang & Hu et al. 2022 (arXiv:2203.03466), appendix D.1 and Figure 5: over the first steps of training, the mean of the
absolute coordinates of embeddings, attention logits and logits does not grow with the width. Without muP it does, and
the best learning rate then falls with the width.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from pe_lab.analysis.analysis import Analysis, number, numbers, whole
from pe_lab.config import Config, ModelConfig
from pe_lab.data.pipeline import build_pipeline
from pe_lab.errors import ConfigError
from pe_lab.model import Model, model_schedule
from pe_lab.model.layer_pass import LayerView, advance, begin, layer_pass
from pe_lab.recipes import load_config
from pe_lab.results.figures import Line, LineCharts
from pe_lab.results.findings import Findings
from pe_lab.results.table import TextTable
from pe_lab.terminal import Progress, console
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.plan import given_layers, plan_phases, vocabulary
from pe_lab.training.step import Batch, init_state, train_step

PAIRS = 64  # tokens whose attention logits with each other are measured
SPARED = 1e-30  # below any size that is measured, so that the logarithm of 0 exists


class Coordinates(NamedTuple):
    """Means of absolute coordinates by width, step and kind.

    Attributes:
      kinds: embedding, attention logits and outputs of the layers, as means over these, and the model's logits.
      size: [W, S, C], of each kind at the widths W before training and after each step.
      change: [W, S, C], of the difference from before training.
    """

    kinds: tuple[str, ...]
    size: Float[np.ndarray, "W S C"]
    change: Float[np.ndarray, "W S C"]


def at_width(shape: ModelConfig, factor: float) -> ModelConfig:
    """The shape with all widths times a factor: more heads, or wider ones where `mup_base_head_dim` is set.

    Raises:
      ConfigError: a width is then no whole number.
    """
    heads = ("head_dim",) if shape.mup_base_head_dim else ("heads", "kv_heads")
    shape = dataclasses.replace(shape, head_dim=shape.head_dim or shape.d_model // shape.heads)
    wide = {name: getattr(shape, name) * factor for name in ("d_model", "d_ff", *heads)}
    for name, value in wide.items():
        if value != int(value) or value < 1:
            raise ConfigError(f"--widths: {factor:g} times model.{name} {getattr(shape, name)} is {value:g}.")
    return dataclasses.replace(shape, **{name: int(value) for name, value in wide.items()})


def measure_widths(
    config: Config,
    batches: Sequence[Batch],
    widths: Sequence[float],
    seeds: int = 3,
    rate: float = 0.0,
    progress: Callable[[int], None] = lambda done: None,
) -> Coordinates:
    """Trains the model of a recipe's first phase at several widths, a step on each batch but the last.

    Activations are those of the last batch, which none is trained on; means are over seeds. The rate of each step is
    the phase's peak, or `rate`, without warm-up.

    Args:
      config: a recipe whose model has its vocabulary.
      widths: factors on the recipe's.
      progress: gets the number of models that are trained.

    Raises:
      ConfigError: a width is no whole number, or the model cannot be that wide.
    """
    phase, layers = config.phases[0], plan_phases(config, given_layers(config))[0].layers
    optimizer = dataclasses.replace(
        phase.optimizer, schedule="constant", warmup_steps=0, learning_rate=rate or phase.optimizer.learning_rate
    )
    held_out, found, kinds = batches[-1]["tokens"], [], ()
    for w, factor in enumerate(widths):
        model = Model(at_width(config.model, factor))
        schedule = model_schedule(model.config, layers, held_out.shape[1])
        update = make_optimizer(optimizer, len(batches), model.axes, (), model.encoding_settings, model.config)
        step = jax.jit(lambda state, batch, m=model, u=update, s=schedule: train_step(m, u, 1, state, batch, s)[0])
        of_seeds = []
        for seed in range(seeds):
            state = init_state(model, update, model.init(jax.random.key(seed)))
            before = activations(model, state.params, held_out, schedule)
            kinds, measured = tuple(before), [_compared(before, before)]
            for batch in batches[:-1]:
                state = step(state, batch)
                measured.append(_compared(activations(model, state.params, held_out, schedule), before))
            of_seeds.append(measured)
            progress(w * seeds + seed + 1)
        found.append(np.mean(of_seeds, axis=0))
    size, change = np.moveaxis(np.asarray(found), -1, 0)
    return Coordinates(kinds, size, change)


def activations(model: Model, params: Any, tokens: np.ndarray, schedule: Any) -> dict[str, np.ndarray]:
    """The activations whose coordinates are measured, by kind; those of layers are stacked."""
    stream = begin(model, params, tokens, schedule)
    embedding, outputs = np.asarray(stream.x), []
    for n in range(model.config.layers):
        stream = advance(model, params, stream, schedule, n, n + 1)
        outputs.append(np.asarray(stream.x))
    return {
        "embedding": embedding,
        "attention logits": np.stack([x for _, x in layer_pass(model, params, tokens, schedule, _attention_logits)]),
        "outputs of layers": np.stack(outputs),
        "logits": np.asarray(model.logits(params, model.output(params, stream.x))),
    }


def _attention_logits(view: LayerView, data: Any) -> jax.Array:
    """[B, H, t, s] of the first `PAIRS` tokens, scaled, without rotation, bias and mask."""
    query, key = view.query[:, :PAIRS], view.key[:, :PAIRS]
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    return jnp.einsum("bthk,bshk->bhts", query, key) * view.encoding.scale(query.shape[-1])


def _compared(now: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray]) -> list[list[float]]:
    """[C, 2]: the mean absolute coordinate of each kind, and of its difference from before."""
    return [[float(np.abs(now[kind]).mean()), float(np.abs(now[kind] - before[kind]).mean())] for kind in now]


def exponents(values: Float[np.ndarray, "W C"], widths: Sequence[float]) -> Float[np.ndarray, " C"]:
    """e of the least squares fit of values ~ width^e in logarithms."""
    return np.polyfit(np.log(widths), np.log(np.maximum(values, SPARED)), 1)[0]


# ---------------------------------------------------------------------------------------------------------------------
# The analysis


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", help="a recipe, whose first phase is trained; --config.a.b=value as in training")
    add("--widths", default="1,2,4,8", help="factors on the recipe's widths (default: %(default)s)")
    add("--steps", default="4", help="of training (default: %(default)s)")
    add("--seeds", default="3", help="how many initial weights (default: %(default)s)")
    add("--rate", default="0", help="the learning rate (default: the recipe's peak)")
    add("--limit", default="0.2", help="the largest exponent that is no growth (default: %(default)s)")


def _run(args: argparse.Namespace) -> Findings:
    if not args.config:
        raise ConfigError("coordinates trains a recipe: give --config=RECIPE.")
    widths, steps, seeds = numbers("--widths", args.widths), whole("--steps", args.steps), whole("--seeds", args.seeds)
    rate, limit = number("--rate", args.rate), number("--limit", args.limit)
    if len(set(widths)) < 2 or min(widths) <= 0 or steps < 1 or seeds < 1 or rate < 0:
        raise ConfigError("coordinates needs two widths above 0, a step, a seed, and no rate below 0.")
    config = load_config(args.config, args.overrides)
    phase = config.phases[0]
    pipeline = build_pipeline(
        config.data,
        sequence_length=phase.sequence_length,
        batch_size=phase.batch_size,
        seed=config.data.seed,
        weights=phase.weights,
        vocab_size=config.model.vocab_size,
    )
    size = vocabulary(config, pipeline.vocab_size)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))
    batches = [next(pipeline) for _ in range(steps + 1)]
    with Progress(console(stderr=True), "coordinates", len(widths) * seeds) as progress:
        found = measure_widths(
            config, batches, widths, seeds, rate, lambda done: progress.update(done, f"{done} models")
        )
    shapes = [at_width(config.model, factor) for factor in widths]
    of_size = exponents(found.size[:, -1], widths)  # [C]
    of_change = exponents(found.change[:, -1], widths)
    grows = np.maximum(of_size, of_change) > limit
    base = config.model.mup_base_width
    how = f"muP from the width {base}" if base else "without muP"
    table = TextTable(
        f"Mean absolute coordinates after {steps} steps, {how}, {seeds} seeds",
        ("activations", *(f"width {shape.d_model}" for shape in shapes), "exponent", "of the change", ""),
        tuple(
            (
                kind,
                *(f"{value:.3g}" for value in found.size[:, -1, c]),
                f"{of_size[c]:+.2f}",
                f"{of_change[c]:+.2f}",
                "grows" if grows[c] else "",
            )
            for c, kind in enumerate(found.kinds)
        ),
    )
    worst = int(np.argmax(np.maximum(of_size, of_change)))
    exponent = max(of_size[worst], of_change[worst])
    verdict = "does not grow" if not grows.any() else f"grows in {grows.sum()} of {len(grows)} kinds of activations"
    sentence = (
        f"The size of coordinates {verdict} with the width, {how}: the largest exponent is {exponent:+.2f}, of "
        f"{found.kinds[worst]}; up to {limit:g} is no growth."
    )
    figure = LineCharts(
        "coordinates",
        f"Size of coordinates by width, {how}",
        "Mean absolute activation after each step, over seeds: flat lines are what muP promises.",
        tuple(
            (
                f"after {step} steps" if step else "before training",
                tuple(
                    Line(kind, np.asarray([float(s.d_model) for s in shapes]), found.size[:, step, c])
                    for c, kind in enumerate(found.kinds)
                ),
            )
            for step in (0, 1, steps)[: 3 if steps > 1 else 2]
        ),
        "width",
        "mean absolute coordinate",
        log_x=True,
        log_y=True,
        x_ticks=tuple(float(shape.d_model) for shape in shapes),
    )
    arrays = {"size": found.size, "change": found.change, "widths": np.asarray([s.d_model for s in shapes])}
    axes = "[W, S, C] width, steps from 0, kind of activation; "
    named = {"size": axes + "mean absolute value", "change": axes + "of the change since step 0", "widths": "[W]"}
    about = {"kinds": found.kinds, "exponents": of_size.tolist(), "exponents_of_change": of_change.tolist()}
    return Findings((sentence,), (table,), (figure,), arrays, named, about, failed=bool(grows.any()))


ANALYSIS = Analysis("Yang & Hu et al. 2022, appendix D.1 and Figure 5", _options, _run, models=False)
