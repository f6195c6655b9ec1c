"""The methods that a longer context is looked for with: each a change of the layers of a trained model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.config import DataConfig
from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.evaluation.progress import TokenProgress
from pe_lab.evaluation.scoring.forward import Forward
from pe_lab.evaluation.variants import Subject, can_scale
from pe_lab.lab.extend.objective import make_objective
from pe_lab.lab.extend.search import with_rotation
from pe_lab.model import complete
from pe_lab.positional import (
    NTK,
    PI,
    ClippedRope,
    DynamicNTK,
    Layer,
    Llama3,
    NTKByParts,
    Rope,
    Yarn,
    drop,
    label_layers,
    text_of,
)
from pe_lab.positional.encodings import rope_spectrum
from pe_lab.positional.scalings import Scaling

COST_TOKENS = 2048  # of the sequences that the cost of dropping a layer is measured on, at most
COST_SEQUENCES = 4
DROPPED_SHARE = 5  # one of so many layers loses its encoding in `cheapest layers dropped`
PERIOD = 4  # one of so many layers has no window in `windows`


class Impossible(Exception):
    """A method has no meaning for a model; the message says why, as the end of a sentence."""


@dataclass(frozen=True)
class Extension:
    """What the layers of a method depend on.

    Attributes:
      subject: the trained model.
      length: the target, in tokens.
      layer_costs: {layer: nats that dropping its encoding costs at the training length}; None: not measured.
      searched: the layers that a search found; None: nothing was searched.
    """

    subject: Subject
    length: int
    layer_costs: Mapping[int, float] | None = None
    searched: tuple[Layer, ...] | None = None

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.subject.lm.layers

    @property
    def trained(self) -> int:
        """The training length."""
        return self.subject.training_length

    @property
    def factor(self) -> float:
        return self.length / self.trained

    def scaled(self, scaling: Scaling) -> tuple[Layer, ...]:
        """The layers with a scaling; `Impossible` where none can be rescaled."""
        if not any(can_scale(layer, self.trained) for layer in self.layers):
            raise Impossible("no layer rotates without a scaling and sees more than the training length")
        return with_rotation(self.layers, lambda one: dataclasses.replace(one, scaling=scaling), self.trained)

    def each_rope(self, change: Callable[[Rope], Any]) -> tuple[Layer, ...]:
        """The layers with other encodings in the place of RoPE; `Impossible` where none has it unscaled."""
        chosen = [type(one.encoding) is Rope and can_scale(one, self.trained) for one in self.layers]
        if not any(chosen):
            raise Impossible("no layer has RoPE over all channels, unscaled")
        return tuple(
            dataclasses.replace(layer, encoding=change(layer.encoding)) if one else layer
            for layer, one in zip(self.layers, chosen, strict=True)
        )


@dataclass(frozen=True)
class Method:
    """One way to a longer context.

    Attributes:
      name: in tables.
      about: what it changes, for the page and the docs.
      layers: of a given.
      needs: `layer_costs` or `searched`, where it needs one.
      recalibrates: whether it takes an encoding away, and is then trained at the training length (DroPE); the others
        are trained at the target.
      screened: whether it is compared without training.
    """

    name: str
    about: str
    layers: Callable[[Extension], tuple[Layer, ...]]
    needs: str = ""
    recalibrates: bool = False
    screened: bool = True


def _slow_pairs(given: Extension) -> tuple[Layer, ...]:
    """RoPE on the pairs that complete a rotation within the training length alone."""
    head_dim = complete(given.subject.checkpoint.model).head_dim

    def kept(rope: Rope) -> Rope:
        periods = 2 * math.pi / rope_spectrum(rope.base, head_dim)
        return dataclasses.replace(rope, fraction=min(rope.fraction, float((periods <= given.trained).mean())))

    after = given.each_rope(kept)
    if after == given.layers:
        raise Impossible("all pairs complete a rotation within the training length")
    return after


def _windows(given: Extension) -> tuple[Layer, ...]:
    """Layers see what they were trained with, except every fourth, which sees all under YaRN."""
    scaled = given.scaled(Yarn(given.factor, given.trained))
    whole = [n for n in range(len(scaled)) if scaled[n] != given.layers[n]]
    kept = set(whole[PERIOD - 1 :: PERIOD] or whole[-1:])
    if len(kept) == len(whole):
        raise Impossible("it has one layer, and layers with a window need others that see all")
    return tuple(
        layer if n in kept or n not in whole else dataclasses.replace(given.layers[n], window=given.trained)
        for n, layer in enumerate(scaled)
    )


def _cheapest_dropped(given: Extension) -> tuple[Layer, ...]:
    """The cheapest layers see all without an encoding; the others see what they were trained with."""
    assert given.layer_costs is not None
    count = max(1, round(len(given.layers) / DROPPED_SHARE))
    if len(given.layer_costs) <= count:
        raise Impossible(f"it has {len(given.layer_costs)} layers that rotate, of which one would have to stay")
    cheapest = sorted(given.layer_costs, key=lambda n: given.layer_costs[n])[:count]
    after = drop(cheapest).apply(given.layers)
    return tuple(
        dataclasses.replace(layer, window=given.trained) if n in given.layer_costs and n not in cheapest else layer
        for n, layer in enumerate(after)
    )


def _slow_half(given: Extension) -> tuple[Layer, ...]:
    return given.each_rope(lambda rope: dataclasses.replace(rope, fraction=rope.fraction / 2))


def _dropped(given: Extension) -> tuple[Layer, ...]:
    after = drop().apply(given.layers)
    if after == given.layers:
        raise Impossible("no layer has an encoding to drop")
    return after


def _found(given: Extension) -> tuple[Layer, ...]:
    assert given.searched is not None
    return given.searched


UNCHANGED, YARN, SEARCHED = "unchanged", "yarn", "searched"
METHODS: dict[str, Method] = {
    UNCHANGED: Method("unchanged", "the encoding as it was trained", lambda s: s.layers),
    "pi": Method("PI", "all frequencies divided by the factor", lambda s: s.scaled(PI(s.factor))),
    "ntk": Method("NTK", "a larger base", lambda s: s.scaled(NTK(s.factor))),
    "ntk_by_parts": Method(
        "NTK-by-parts",
        "YaRN without its attention factor",
        lambda s: s.scaled(NTKByParts(s.factor, s.trained)),
    ),
    "dynamic_ntk": Method(
        "dynamic NTK", "a base that grows with the sequence", lambda s: s.scaled(DynamicNTK(s.trained))
    ),
    YARN: Method(
        "YaRN", "slow pairs interpolated, fast ones kept, logits scaled", lambda s: s.scaled(Yarn(s.factor, s.trained))
    ),
    "llama3": Method(
        "Llama 3",
        "pairs of fewer than 4 rotations interpolated",
        lambda s: s.scaled(Llama3(s.factor, original_length=s.trained)),
    ),
    "clipped": Method(
        "clipped RoPE",
        "pairs that never complete a rotation in training tapered to none",
        lambda s: s.each_rope(lambda rope: ClippedRope(s.trained, rope.base)),
    ),
    "slow_pairs": Method(
        "slow pairs dropped", "no rotation of pairs that never complete one in training", _slow_pairs, recalibrates=True
    ),
    "slow_half": Method("slow half dropped", "no rotation of the slower half", _slow_half, recalibrates=True),
    "windows": Method(
        "windows", f"windows of the training length, except one of {PERIOD} layers, under YaRN", _windows
    ),
    "cheapest_dropped": Method(
        "cheapest layers dropped",
        f"one of {DROPPED_SHARE} layers without encoding, windows of the training length on the others",
        _cheapest_dropped,
        needs="layer_costs",
        recalibrates=True,
    ),
    SEARCHED: Method("searched", "divisors that an evolution found", _found, needs="searched"),
    "drope": Method("DroPE", "no encoding at all", _dropped, recalibrates=True),
}


def parse_methods(text: str | None, option: str = "--methods") -> tuple[str, ...]:
    """The keys of `METHODS` from a comma-separated list; None: all. `ConfigError` for one that there is not."""
    if text is None:
        return tuple(METHODS)
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        key = item.lower().replace("-", "_").replace(" ", "_")
        if key not in METHODS:
            raise ConfigError(f"{option}: there is no method '{item}'. {did_you_mean(key, list(METHODS))}")
        found.append(key)
    if not found:
        raise ConfigError(f"{option} is empty. Allowed: {', '.join(METHODS)}.")
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Chosen:
    """A method for one model and target.

    Attributes:
      key: of `METHODS`.
      layers: at the target; at other lengths they are the same, except dynamic ones.
    """

    key: str
    layers: tuple[Layer, ...]

    @property
    def method(self) -> Method:
        return METHODS[self.key]

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def text(self) -> str:
        """As `--positional` of surgery, evaluation and the recipe takes it."""
        return text_of(self.layers)

    def describe(self) -> str:
        """The encoding in a line."""
        return label_layers(self.layers)


def choose(keys: Sequence[str], given: Extension) -> tuple[list[Chosen], dict[str, str]]:
    """The methods that are possible, and why others are not: {key: reason}."""
    found, impossible = [], {}
    for key in keys:
        method = METHODS[key]
        if method.needs and getattr(given, method.needs) is None:
            continue
        try:
            found.append(Chosen(key, method.layers(given)))
        except Impossible as error:
            impossible[key] = str(error)
    return found, impossible


def distinct(chosen: Sequence[Chosen]) -> tuple[list[Chosen], dict[str, str]]:
    """The methods without those whose layers an earlier one has, and why those are left out: {key: reason}."""
    found: list[Chosen] = []
    left_out = {}
    for one in chosen:
        if (same := next((other for other in found if other.layers == one.layers), None)) is None:
            found.append(one)
        else:
            left_out[one.key] = f"it is the same as {same.name} here"
    return found, left_out


def rotating_layers(subject: Subject) -> list[int]:
    """The layers whose rotation a method may change."""
    return [n for n, layer in enumerate(subject.lm.layers) if can_scale(layer, subject.training_length)]


def layer_costs(subject: Subject, data: DataConfig, forward: Forward, params: Any) -> dict[int, float]:
    """{layer that rotates: the loss that dropping its encoding alone adds to held-out text, nats}.

    Measured at the training length, or `COST_TOKENS` if that is longer. The layers are one population.
    """
    length = min(subject.training_length, COST_TOKENS)
    text = make_objective(("text",), data, subject, forward, params, length, COST_SEQUENCES)
    layers, rotating = subject.lm.layers, rotating_layers(subject)
    with TokenProgress("cost of each layer", (len(rotating) + 1) * text.tokens) as progress:
        forward.on_tokens = progress.add_up
        losses = text.losses(forward, params, [layers, *(drop([n]).apply(layers) for n in rotating)])[:, 0]
    return {n: float(loss - losses[0]) for n, loss in zip(rotating, losses[1:], strict=True)}
