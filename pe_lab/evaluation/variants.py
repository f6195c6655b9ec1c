"""Variants of a model: its layers rescaled (PI, YaRN, a logit scale ...), or under another encoding."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.checkpoints.checkpoint import Checkpoint, how_to_fit, read_logit_scale
from pe_lab.errors import ConfigError
from pe_lab.evaluation.command_line import as_flag
from pe_lab.language_model import LanguageModel
from pe_lab.positional import NTK, PI, Beta, DynamicYarn, Layer, NoPE, PartialRope, Rope, Yarn, drop, family, to_json
from pe_lab.positional import label as layer_label
from pe_lab.positional import read_with as parse_layers
from pe_lab.positional.codec import label_layers, ranges
from pe_lab.positional.encodings import ENCODINGS
from pe_lab.positional.scalings import SCALINGS
from pe_lab.results.records import Record, digest
from pe_lab.results.variants import EXTERNAL, PAPER_COEFFICIENT, PAPER_COEFFICIENT_EXTERNAL, VARIANTS, label, paper_beta
from pe_lab.results.variants import SCALINGS as SCALED_VARIANTS

ALL = "all"  # as --variants: all that make sense
LABEL_WIDTH = 60  # characters of a description in a label, at most


@dataclass(frozen=True)
class Subject:
    """A checkpoint to measure.

    Attributes:
      lm: the weights, with their tokenizer.
      run: the run's name.
      path: of the checkpoint within the run's directory, such as `pretrain/checkpoints/3000`.
    """

    lm: LanguageModel
    run: str
    path: str

    @property
    def checkpoint(self) -> Checkpoint:
        return self.lm.checkpoint

    @property
    def id(self) -> str:
        return str(self.checkpoint.metadata["id"])

    @property
    def training_length(self) -> int:
        return int(self.checkpoint.metadata["training_length"])

    @property
    def tokens_trained(self) -> int | None:
        """Tokens of the checkpoint's phase up to its step; None where the checkpoint does not tell."""
        return self.checkpoint.metadata.get("tokens")

    @property
    def lineage(self) -> list[str]:
        """The operations that made the weights, oldest first."""
        return [str(ancestor.get("what", "")) for ancestor in self.checkpoint.metadata.get("lineage", [])]

    @functools.cached_property
    def model(self) -> str:
        return model_name(self.checkpoint.layers, self.lineage)

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the variants that are possible for it."""
        return possible_variants(self.checkpoint.layers, self.training_length)

    @property
    def default_variants(self) -> tuple[str, ...]:
        """The variants that are measured where none are named: a model that rotates gets no fitted scale, no drop."""
        named = ("beta", "dropped") if any(_rotates(layer) for layer in self.checkpoint.layers) else ()
        return tuple(name for name in self.variants if name not in named)


def unscaled(length: int) -> float:
    """The logit scale of variants without one."""
    return 1.0


@dataclass(frozen=True)
class Variant:
    """A checkpoint under a rescaled or a described encoding.

    Attributes:
      subject: the checkpoint.
      name: of `VARIANTS`, or the description; records hold it under the key `variant`.
      label: its name in tables.
      described: the layers of a description, the same at every length; None of a variant of `VARIANTS`.
      beta_at: length in tokens -> the logit scale of the variants `beta` and `paper beta`, and of a fitted description.
      fitted: whether that scale is fitted on text, beyond the training length.
    """

    subject: Subject
    name: str
    label: str
    described: tuple[Layer, ...] | None = None
    beta_at: Callable[[int], float] = unscaled
    fitted: bool = False

    @property
    def lm(self) -> LanguageModel:
        return self.subject.lm

    @property
    def training_length(self) -> int:
        return self.subject.training_length

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the description, or those that the variant changes."""
        return self.subject.checkpoint.layers if self.described is None else self.described

    @property
    def crop(self) -> int | None:
        """Tokens at the end of a sequence that the variant `cropped` reads (DroPE, Fig. 5); None: all."""
        return self.training_length if self.name == "cropped" else None

    def layers_at(self, length: int) -> tuple[Layer, ...]:
        """The layers for sequences of `length` tokens."""
        if self.described is not None:
            return self.layers_with_beta(length, self.beta_at(length))
        return layers_under(self.name, self.layers, length, self.training_length, self.beta_at(length))

    def layers_with_beta(self, length: int, beta: float) -> tuple[Layer, ...]:
        """The layers of the description, or else the checkpoint's, at `length` tokens with a logit scale."""
        return self.layers if beta == 1 else scaled_logits(self.layers, length, beta)

    def at(self, length: int) -> LanguageModel:
        """The model for sequences of `length` tokens."""
        layers = self.layers_at(length)
        return dataclasses.replace(self.lm, layers=layers).at_length(length)

    def fingerprint(self, length: int) -> str:
        """A digest of the layers for sequences of `length` tokens; sample records hold it as `fingerprint`."""
        layers = self.layers_at(length)
        follows = length if any(layer.follows_length for layer in layers) else None
        return digest([[to_json(layer) for layer in layers], follows, self.crop])

    def record(self, length: int | None) -> dict[str, Any]:
        """The keys of a result record that name the checkpoint, the variant and the length (None: the samples' own)."""
        factor = None if length is None else length / self.training_length
        return {
            "run": self.subject.run,
            "phase": self.subject.checkpoint.metadata.get("phase", ""),
            "checkpoint": self.subject.path,
            "checkpoint_id": self.subject.id,
            "step": self.subject.checkpoint.step,
            "tokens_trained": self.subject.tokens_trained,
            "model": self.subject.model,
            "variant": self.name,
            "label": self.label,
            "length": length,
            "factor": int(factor) if factor is not None and factor.is_integer() else factor,
        }

    def sample_record(self, length: int) -> dict[str, Any]:
        """The keys of a sample record that describe the variant as sequences of `length` tokens are read."""
        return {
            "run": self.subject.run,
            "checkpoint": self.subject.path,
            "label": self.label,
            "positional": label_layers(self.layers_at(length)),
            "schedule_length": length,
            "lineage": self.subject.lineage,
        }


def variants_of(
    subject: Subject,
    names: Sequence[str],
    descriptions: Sequence[str],
    fitted_scale: Callable[[Variant], Callable[[int], float] | None],
    fit_scale: bool = False,
) -> list[Variant]:
    """The variants of a checkpoint: those of the names that are possible for it, then the descriptions.

    Args:
      descriptions: encodings as `--positional` takes them: `[NAME:]ENCODING`.
      fitted_scale: a variant -> its fitted logit scale by length; None: none was fitted.
      fit_scale: whether descriptions have a fitted scale.

    Raises:
      ConfigError: no scale was fitted for `beta`, or a description that is impossible for the model.
    """
    coefficient = paper_coefficient(subject.lineage)

    def paper_beta_at(length: int) -> float:
        return paper_beta(coefficient, length / subject.training_length)

    found = []
    for name in (name for name in names if name in subject.variants):
        scale = {"paper beta": paper_beta_at}.get(name, unscaled)
        found.append(
            Variant(subject, name, label(subject.model, name, coefficient), beta_at=scale, fitted=name == "beta")
        )
    for described in (parse_description(subject, text) for text in descriptions):
        name, shown = f"{described.name} + beta", f"{described.label}, β fitted"
        found.append(dataclasses.replace(described, name=name, label=shown, fitted=True) if fit_scale else described)
    return [_with_scale(variant, fitted_scale) if variant.fitted else variant for variant in found]


def _with_scale(variant: Variant, fitted_scale: Callable[[Variant], Callable[[int], float] | None]) -> Variant:
    beta_at = fitted_scale(variant)
    if beta_at is None and variant.described is None:
        raise ConfigError(f"--variants=beta: {how_to_fit(variant.subject.checkpoint)} Or name paper-beta.")
    if beta_at is None:
        raise ConfigError(
            f"--fit-scale: no logit scale was fitted for {variant.label!r} yet. Name a suite that fits one with it: "
            "--suite=beta,..."
        )
    return dataclasses.replace(variant, beta_at=beta_at)


def all_variants(
    subjects: Sequence[Subject],
    names: Sequence[str] | None,
    descriptions: Sequence[str],
    attention: str | None = None,
    fits: Sequence[Record] | None = None,
    longest: int | None = None,
) -> list[Variant]:
    """The variants of several checkpoints, for suites that generate; see `variants_of`.

    Args:
      names: None: as trained; none where there are descriptions.
      attention: the implementation of attention, instead of the checkpoints' own.
      fits: records of the suite `beta`, which give descriptions their fitted scale; None: descriptions have none.
      longest: of the sequences to come; up to the training length no scale is needed. None: any length.

    Raises:
      ConfigError: a variant is possible for none of the checkpoints.
      UnsupportedError: `attention` does not run here, or cannot read a KV cache.
    """
    check_variants(names or (), subjects)
    chosen = names if names is not None else () if descriptions else VARIANTS[:1]
    found = []
    scales = [read_logit_scale(subject.checkpoint) for subject in subjects]

    def fitted_scale(variant: Variant) -> Callable[[int], float] | None:
        if variant.described is not None:
            if longest is not None and longest <= variant.training_length:
                return unscaled
            return recorded_scale(variant, fits or ())
        own = read_logit_scale(variant.subject.checkpoint)
        return None if own is None else own.at

    for subject, scale in zip(subjects, scales, strict=True):
        if attention is not None:
            subject = dataclasses.replace(subject, lm=subject.lm.with_attention(attention))
        # An evaluation of a whole run fits the scale of the dropped model only, and that is then the one meant.
        unfitted = scale is None and any(scales) and "beta" not in subject.default_variants
        named = [name for name in chosen if not (name == "beta" and unfitted)]
        found += variants_of(subject, named, descriptions, fitted_scale, fits is not None)
    return found


def recorded_scale(variant: Variant, fits: Sequence[Record]) -> Callable[[int], float] | None:
    """The logit scale that records of the suite `beta` give a variant: of a length that was fitted, or by their law.

    They are those of the last fit's text.
    """
    from pe_lab.evaluation.suites.logit_scale import common_coefficient  # which imports this module

    mine = [one for one in fits if one.get("checkpoint_id") == variant.subject.id and one["variant"] == variant.name]
    mine = [one for one in mine if one["settings"]["data"] == mine[-1]["settings"]["data"]]
    if not mine:
        return None
    fitted = {int(one["length"]): float(one["beta"]) for one in mine}
    c = common_coefficient([*fitted.values()], [length / variant.training_length for length in fitted])
    law = Beta(c or 0.0, variant.training_length)
    return lambda length: fitted.get(length, law.at(length))


def check_variants(names: Sequence[str], subjects: Sequence[Subject]) -> None:
    """Raises `ConfigError` for a variant that is possible for none of the checkpoints."""
    possible = [name for name in VARIANTS if any(name in subject.variants for subject in subjects)]
    for name in names:
        if name not in possible:
            models = ", ".join(dict.fromkeys(subject.model for subject in subjects))
            raise ConfigError(
                f"--variants={as_flag(name)} makes no sense for what is here ({models}). "
                f"Possible: {', '.join(map(as_flag, possible))}."
            )


def parse_description(subject: Subject, text: str) -> Variant:
    """The variant that `--positional=[NAME:]ENCODING` describes.

    ENCODING is one for all layers, or one a layer joined by `+`. The label has NAME; without it ENCODING, shortened
    to at most `LABEL_WIDTH` characters.

    Raises:
      UserError: no such encoding, or an encoding that is impossible for the model.
    """
    name, _, rest = text.partition(":")
    kinds = {*ENCODINGS, *SCALINGS}
    if name in kinds or not re.fullmatch(r"[\w .-]+", name) or re.split("[:+/]", rest)[0] not in kinds:
        name, rest = "", text
    layers = parse_layers(rest, subject.checkpoint.layers, subject.training_length)
    return Variant(subject, rest, f"{subject.model} with {name or short_description(rest, layers)}", layers)


def short_description(text: str, layers: Sequence[Layer]) -> str:
    """At most `LABEL_WIDTH` characters: the text, layer ranges such as `rope 0-2,4-6; nope 3,7`, or counts of layers.

    Where parameters or ranges are left out, four digits of the text's hash tell different descriptions apart.
    """
    if len(text) <= (LABEL_WIDTH // 2 if "+" in text else LABEL_WIDTH):
        return text
    kinds: dict[str, list[int]] = {}
    for n, layer in enumerate(layers):
        kinds.setdefault(re.split(r"\W", layer_label(layer))[0], []).append(n)
    digest = f" #{hashlib.sha256(text.encode()).hexdigest()[:4]}"
    by_range = "; ".join(f"{kind} {ranges(numbers)}" for kind, numbers in kinds.items())
    by_range += digest if re.search("[:/]", text) else ""
    if len(by_range) <= LABEL_WIDTH:
        return by_range
    counts = "; ".join(f"{kind} on {len(numbers)} layers" for kind, numbers in kinds.items())
    return counts[: LABEL_WIDTH - len(digest)] + digest


def model_name(layers: Sequence[Layer], lineage: Sequence[str] = ()) -> str:
    """The name of a model by its encodings: RoPE, NoPE, DroPE (NoPE with a drop in its lineage), ALiBi, or a mix."""
    families = list(dict.fromkeys(family(layer) for layer in layers))
    if families == ["NoPE"]:
        # Surgery, and a phase that changes the encoding, write `rope(base=10000) -> nope on layers 0-23`.
        return "DroPE" if any("-> nope" in what for what in lineage) else "NoPE"
    scalings = dict.fromkeys(_scaling(layer) for layer in layers if _rotates(layer))
    names = [_scaling_name(s) for s in scalings if s is not None]
    return "/".join(families) + (f" ({', '.join(names)})" if names else "")


def paper_coefficient(lineage: Sequence[str]) -> float:
    """DroPE's c for a dropped model: 0.103 after an external pretraining (SmolLM-DroPE), 0.412 from scratch."""
    return PAPER_COEFFICIENT_EXTERNAL if any(what.startswith(EXTERNAL) for what in lineage) else PAPER_COEFFICIENT


def possible_variants(layers: Sequence[Layer], training_length: int) -> tuple[str, ...]:
    """The names of the variants that are possible for a model.

    Cropping, scaling and dropping need layers that rotate. A layer that is scaled already is not scaled again, nor is
    one whose window is within the training length. A logit scale is fitted for models whose layers rotate or have no
    encoding, are not scaled, and have no scale of their own; the paper's is for models without encodings. `dropped`
    shows the cost of a drop before recalibration.
    """
    chosen = ["as trained"]
    rotates = any(_rotates(layer) for layer in layers)
    if rotates:
        chosen.append("cropped")
        if any(can_scale(layer, training_length) for layer in layers):
            chosen += SCALED_VARIANTS
    bare = [isinstance(layer.encoding, NoPE) for layer in layers]
    fits = [none or (_rotates(layer) and _scaling(layer) is None) for none, layer in zip(bare, layers, strict=True)]
    if all(fits) and all(layer.logit_scale == 1 for layer in layers):
        chosen += ["beta"] + ["paper beta"] * all(bare)
    if rotates:
        chosen.append("dropped")
    return tuple(chosen)


def layers_under(
    variant: str, layers: Sequence[Layer], length: int, training_length: int, beta: float = 1.0
) -> tuple[Layer, ...]:
    """The layers of the variant of this name, for sequences of `length` tokens.

    Up to the training length every variant but `dropped` leaves the layers unchanged. `cropped` never changes them.
    """
    if variant == "dropped":
        return drop().apply(layers)
    factor = length / training_length
    if factor <= 1 or variant in ("as trained", "cropped"):
        return tuple(layers)
    if variant in ("beta", "paper beta"):
        return scaled_logits(layers, length, beta)
    scaling = {"PI": PI(factor), "NTK": NTK(factor), "YaRN": Yarn(factor, training_length)}[variant]
    return tuple(
        dataclasses.replace(layer, encoding=dataclasses.replace(layer.encoding, scaling=scaling))
        if can_scale(layer, training_length)
        else layer
        for layer in layers
    )


def scaled_logits(layers: Sequence[Layer], length: int, beta: float) -> tuple[Layer, ...]:
    """The layers for sequences of `length` tokens with their attention logits multiplied by `beta`."""
    return tuple(dataclasses.replace(layer, logit_scale=layer.scale_at(length) * beta) for layer in layers)


def _scaling_name(scaling: Any) -> str:
    name = type(scaling).__name__.replace("Yarn", "YaRN").replace("LongRope", "LongRoPE")
    return name if isinstance(scaling, DynamicYarn) else f"{name} {scaling.factor:g}"


def _scaling(layer: Layer) -> Any:
    return getattr(layer.encoding, "scaling", None)


def _rotates(layer: Layer) -> bool:
    return isinstance(layer.encoding, Rope | PartialRope) and layer.encoding.fraction > 0


def can_scale(layer: Layer, training_length: int) -> bool:
    """Whether a layer's rotation is to be rescaled beyond the training length; see `possible_variants`."""
    beyond = layer.window is None or layer.window > training_length
    return _rotates(layer) and _scaling(layer) is None and beyond
