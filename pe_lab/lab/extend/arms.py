"""Methods trained at equal FLOPs: the arms of a comparison, their data and their cost, and the runs that train them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from pe_lab.checkpoints.checkpoint import open_source
from pe_lab.checkpoints.gguf.export import plan_gguf
from pe_lab.checkpoints.hf_export import plan_export
from pe_lab.config import DataConfig, from_dict, to_json
from pe_lab.data.mixture import open_mixture
from pe_lab.errors import ConfigError, DataError, UnsupportedError, UserError
from pe_lab.evaluation.suites.long_range import document_sizes
from pe_lab.evaluation.targets import locate
from pe_lab.evaluation.variants import Subject
from pe_lab.lab.extend.methods import UNCHANGED, Chosen
from pe_lab.lab.sweeps import Sweep
from pe_lab.lab.sweeps.cells import FILE, SweepCell, joined, load_sweep
from pe_lab.model import complete, train_flops_per_token
from pe_lab.recipes import load_config, with_long_documents
from pe_lab.results.groups import SEEDS
from pe_lab.storage import AnyPath, exists

RECIPE = "configs/extend.py"
MOST_BATCH = 2**19  # tokens a step, where the checkpoint's run does not say how many it had
STEPS = 40  # at least so many, if that leaves a window a step


@dataclass(frozen=True)
class TrainingSettings:
    """What all arms have in common.

    Attributes:
      checkpoint: as `--from` gives it.
      data: of the training, without the long documents as a source of their own.
      length: the target, in tokens.
      tokens: that the arm without any change reads; the others spend as many FLOPs.
      batch: tokens a step; 0: those of the checkpoint's run, or a fortieth of `tokens`, at most `MOST_BATCH`.
      rate: learning rate; 0: a tenth of the checkpoint's peak, or 3e-5.
      recalibration_rate: of arms that lose an encoding; 0: ten times `rate`.
      long: share of the text's windows that are of long documents.
      stages: of growing lengths.
      distill: what the checkpoint teaches arms that lose an encoding: none, logits or hidden.
      overrides: other keys of the config, as texts.
    """

    checkpoint: str
    data: DataConfig
    length: int
    tokens: int
    batch: int = 0
    rate: float = 0.0
    recalibration_rate: float = 0.0
    long: float = 0.5
    stages: int = 1
    distill: str = "none"
    overrides: Mapping[str, str] = field(default_factory=dict)

    def batch_tokens(self, subject: Subject) -> int:
        """Tokens a step, at least one window at the target."""
        phase = _phase_of(subject)
        own = int(phase.get("batch_size", 0)) * int(phase.get("sequence_length", 0))
        return max(self.length, self.batch or own or min(MOST_BATCH, self.tokens // STEPS))

    def rate_of(self, subject: Subject, recalibrates: bool) -> float:
        """The peak learning rate of an arm."""
        peak = float((_phase_of(subject).get("optimizer") or {}).get("learning_rate", 3e-4))
        plain = self.rate or peak / 10
        return (self.recalibration_rate or 10 * plain) if recalibrates else plain


def _phase_of(subject: Subject) -> Mapping[str, Any]:
    """The phase of a native checkpoint's config that made it; {} of an external one."""
    metadata = subject.checkpoint.metadata
    phases = (metadata.get("config") or {}).get("phases") or []
    index = metadata.get("phase_index", len(phases) - 1)
    return phases[index] if 0 <= index < len(phases) else {}


@dataclass(frozen=True)
class ExtensionArm:
    """A method that is trained.

    Attributes:
      chosen: the method and its layers.
      length, windows, steps: of its training; of several stages, of the last, with the steps of all.
      stages: of growing lengths.
      rate: the peak learning rate.
      flops_per_token: of a train step, see `flops_per_token`, with those of a teacher.
      before: FLOPs that were spent to find it, by a search.
      teacher: what it is taught, as `TrainingSettings.distill`.
    """

    chosen: Chosen
    length: int
    windows: int
    steps: int
    stages: int
    rate: float
    flops_per_token: float
    before: float = 0.0
    teacher: str = "none"

    @property
    def key(self) -> str:
        return self.chosen.key

    @property
    def tokens(self) -> int:
        return self.steps * self.windows * self.length

    @property
    def flops(self) -> float:
        """FLOPs of the training and of what found the method."""
        return self.before + self.tokens * self.flops_per_token


def flops_per_token(subject: Subject, layers: Sequence[Any], length: int, stages: int = 1) -> float:
    """FLOPs of a train step for each token, visible keys alone, under layers whose windows matter.

    Of several stages, the last at `length` and each before it at half of the next, it is the mean.
    """
    from pe_lab.model import model_schedule

    model = complete(subject.checkpoint.model)
    lengths = [length >> stage for stage in range(stages)]
    return fmean(train_flops_per_token(model, n, model_schedule(model, layers, n).structure).causal for n in lengths)


def plan_arms(
    chosen: Sequence[Chosen], subject: Subject, settings: TrainingSettings, before: Mapping[str, float]
) -> tuple[list[ExtensionArm], dict[str, str]]:
    """The arms at equal FLOPs, and why methods have none: {key: reason}.

    Args:
      before: {key: FLOPs that were spent to find a method}, which its training has less.

    Raises:
      ConfigError: the budget is too small for one step.
    """
    batch = settings.batch_tokens(subject)
    budget = settings.tokens * flops_per_token(subject, subject.lm.layers, settings.length, settings.stages)
    arms, left_out = [], {}
    for one in chosen:
        recalibrates = one.method.recalibrates
        length = subject.training_length if recalibrates else settings.length
        stages = 1 if recalibrates else settings.stages
        per_token, teacher = flops_per_token(subject, one.layers, length, stages), "none"
        if recalibrates and settings.distill != "none":
            teacher = settings.distill
            per_token += flops_per_token(subject, subject.lm.layers, length) / 3  # a forward pass
        windows = max(1, batch // length)
        spent = before.get(one.key, 0.0)
        steps = int((budget - spent) // (per_token * windows * length))
        if steps < 1:
            what = f"{settings.tokens:,} tokens an arm are {budget:.2e} FLOPs"
            if not spent:
                raise ConfigError(
                    f"{what}, less than one step of {windows * length:,} tokens ({one.name}). Give a larger budget, or "
                    "a smaller --batch."
                )
            left_out[one.key] = f"{what}, and its search took {spent:.2e} of them"
            continue
        rate = settings.rate_of(subject, recalibrates)
        arms.append(ExtensionArm(one, length, windows, steps, stages, rate, per_token, spent, teacher))
    return arms, left_out


def not_exportable(checkpoint: str, length: int, chosen: Sequence[Chosen], forms: Sequence[str]) -> dict[str, str]:
    """{key: why a method cannot be exported in one of the forms, at a length}."""
    source, found = open_source(locate(checkpoint).paths[-1]), {}
    plans = {"hf": plan_export, "gguf": plan_gguf}
    for one in chosen:
        changed = copy.copy(source)
        changed.layers = one.layers
        for form in forms:
            try:
                plans[form](changed, length=length)
            except UnsupportedError as error:
                found.setdefault(one.key, f"it cannot be exported: {str(error).rstrip('.')}")
    return found


# --------------------------------------------------------------------------------------------------------------------
# Data


def training_data(data: DataConfig, long: float, length: int) -> DataConfig:
    """The data of an arm: a share `long` of the text's windows is of documents of at least `length` tokens."""
    return from_dict(DataConfig, with_long_documents(to_json(data), long, length))


def check_documents(data: DataConfig, length: int) -> str:
    """One line about the documents of at least `length` tokens to train on.

    Raises:
      ConfigError: the data are a Grain dataset, or have no text.
      DataError: no document is that long.
    """
    if data.grain or any(one.source.startswith("grain:") for one in data.sources):
        raise ConfigError(
            "A longer context is trained on whole documents, and a Grain dataset gives windows. Give --data=SOURCE."
        )
    texts = [one for one in open_mixture(data).sources if one.prepared is not None]
    if not texts:
        raise ConfigError("A longer context is trained on text, and the data have none. Give --data=SOURCE.")
    told = []
    for source in texts:
        sizes = document_sizes(source.prepared.streams["train"])
        long = sizes[sizes >= length]
        if not len(long):
            raise DataError(
                f"{source.name}: none of {len(sizes):,} documents has {length:,} tokens; the longest has "
                f"{int(sizes.max(initial=0)):,}. Give --data with longer documents, a shorter --length, or --long=0 to "
                "train on shorter ones."
            )
        told.append(
            f"{source.name}: {len(long):,} of {len(sizes):,} documents have at least {length:,} tokens, "
            f"{int(long.sum()):,} of {int(sizes.sum()):,} tokens"
        )
    return "; ".join(told)


# --------------------------------------------------------------------------------------------------------------------
# Runs


def make_sweep_of(
    arms: Sequence[ExtensionArm], settings: TrainingSettings, seeds: Sequence[int], directory: AnyPath
) -> Sweep:
    """The runs of all arms and seeds, each by the recipe `configs/extend.py`.

    Raises:
      UserError: the config of an arm is wrong; names it.
    """
    cells = []
    for arm in arms:
        for seed in seeds:
            name = f"{arm.key}__seed={seed}"
            reference = _reference(arm, settings)
            data = training_data(settings.data, settings.long, arm.length)
            keys = {"data": repr(to_json(data)), **settings.overrides, **dict.fromkeys(SEEDS, str(seed))}
            if arm.key != UNCHANGED:
                keys["phases.0.positional"] = arm.chosen.text
            try:
                config = load_config(reference, keys, inherits=True, workdir=directory / name)
            except UserError as error:
                raise type(error)(f"{arm.chosen.name}: {error}") from None
            cells.append(SweepCell(name, {"arm": arm.key}, seed, reference, keys, config))
    described = {"recipe": "extend", "overrides": {}, "grid": {"arm": []}, "seeds": []}
    sweep = Sweep(directory, tuple(cells), frozenset(cell.name for cell in cells), None, described)
    return joined(sweep, load_sweep(directory)) if exists(directory / FILE) else sweep


def _reference(arm: ExtensionArm, settings: TrainingSettings) -> str:
    start = settings.checkpoint
    quoted = f"'{start}'" if re.search('[,"]', start) else start
    arguments = {
        "from": quoted,
        "length": arm.length,
        "steps": arm.steps,
        "batch": arm.windows,
        "rate": repr(arm.rate),
        "long": 0,  # the data come by a key of their own
        "stages": arm.stages,
        "distill": arm.teacher,
        "name": arm.key,
    }
    return f"{RECIPE}:{','.join(f'{key}={value}' for key, value in arguments.items())}"
