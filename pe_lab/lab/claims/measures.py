"""The numbers of a claim, {metric: value}: of one run, and of a config alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from pe_lab.config import Config
from pe_lab.errors import DataError, UnsupportedError
from pe_lab.lab.claims.values import WindowMean
from pe_lab.results.records import Record, as_dict, as_list, digest, number
from pe_lab.results.runs import PhaseFiles, read_runs
from pe_lab.results.scores import measure
from pe_lab.results.variants import VARIANTS
from pe_lab.storage import AnyPath, exists

if TYPE_CHECKING:
    from pe_lab.data.windows import Batch

Measure = Callable[[AnyPath], Mapping[str, float]]
SUITES = {"perplexity": "text", "needles": "needles"}
FURTHER = {"choice": "choice", "key_gain": "key gain"}  # numbers of a record beside its main one: passkeys
# Of a spike: steps before it that it is compared with, robust standard deviations above them, steps that it lasts.
WINDOW, DEVIATIONS, LASTS = 200, 6.0, 50
SAME_TEXT = 0.02  # nats between a loss as logged and as read again: rounding of bfloat16, and no other text
BIAS_WINDOWS = 16


def together(*measures: Measure) -> Measure:
    """All numbers of several measures."""

    def measured(directory: AnyPath) -> dict[str, float]:
        return {name: value for one in measures for name, value in one(directory).items()}

    measured.__qualname__ = ", ".join(getattr(one, "__qualname__", str(one)) for one in measures)  # in results
    return measured


def scores(directory: AnyPath) -> dict[str, float]:
    """The numbers of `pe_lab.evaluate` for the last checkpoint: `text 4x`, `needles 4x YaRN`, `niah:standard 2x`.

    Texts are the loss in nats per token, the mean over the sources; needles and prompted tasks the share found, and
    `niah 2x` the mean over the tasks of a suite. Passkeys with distractors have three numbers: the share found is
    `passkeys 2x`; `passkeys choice 2x`, `passkeys key gain 2x`. At the end is the name of a variant other than as
    trained. A number of one source is a `WindowMean` where its record has the windows.
    """
    (run,) = read_runs([directory])
    last, found = run.phases[-1].name, {}
    for suite in run.evaluation.values():
        for record in suite:
            cell, factor = measure(record), number(record, "factor")
            if cell is None or factor is None or record.get("phase") not in (None, last):
                continue
            kind = str(record.get("suite", ""))
            source = str(record.get("source"))
            method = str(record.get("variant", ""))
            variant = "" if method == VARIANTS[0] else f" {method}"
            value = cell.score if cell.higher_is_better else -cell.score  # nats, not a perplexity
            numbers = {"": _with_windows(record, value, MAIN)}
            for key, word in FURTHER.items():
                if (further := number(record, key)) is not None:
                    numbers[f" {word}"] = _with_windows(record, further, (f"{key}_by_window",))
            for of in ("",) if kind in SUITES else ("", f":{source}"):
                for word, one in numbers.items():
                    name = f"{SUITES.get(kind, kind)}{of}{word} {factor:g}x{variant}"
                    found.setdefault(name, {})[source] = (number(record, "step") or 0.0, one)
    latest = {name: max(step for step, _ in each.values()) for name, each in found.items()}
    kept = {name: [v for step, v in each.values() if step == latest[name]] for name, each in found.items()}
    return {name: values[0] if len(values) == 1 else math.fsum(values) / len(values) for name, values in kept.items()}


MAIN = ("nll_by_tile", "accuracy_by_window")
DRAWN = ("passkey_windows", "passkeys", "distractors")  # settings of passkeys that other windows follow from


def _with_windows(record: Record, value: float, keys: Sequence[str]) -> float:
    """A number of a record with those of its windows, if it has them under one of the keys."""
    settings, length = as_dict(record.get("settings")), record.get("length")
    drawn = [settings[name] for name in DRAWN if name in settings]
    for key in keys:
        of = (settings.get("windows"), length, record.get("seed"), *drawn)
        if key == "nll_by_tile":
            of = (settings.get("tile"), record.get("tiles"))  # the same tokens at every length
        windows = [each for each in as_list(record.get(key)) if isinstance(each, int | float)]
        if windows and len(windows) == len(as_list(record.get(key))):
            text = digest([key, record.get("source"), settings.get("data"), of])
            return WindowMean(value, windows, text)
    return value


def losses(directory: AnyPath) -> dict[str, float]:
    """The last validation loss of each source, in nats per token: `validation`, `validation prose`.

    Training logs means. Where the run's last checkpoint is there, the held-out windows are read once more, and each
    number of a source is a `WindowMean`.

    Raises:
      DataError: the held-out windows are here other ones than the run was validated on.
    """
    (run,) = read_runs([directory])
    last, found = run.phases[-1], {}
    windows = window_losses(directory) if exists(directory / last.name / "checkpoints") else {}
    for name in validation_names(last):
        logged = last.series(name)[-1][1]
        source = name.removeprefix("validation_loss").removeprefix("/")
        # The mean over all sources is that of the source where there is one.
        known = windows.get(source) or ([*windows.values()][0] if not source and len(windows) == 1 else None)
        if known is not None and abs(known - logged) > SAME_TEXT:
            raise DataError(
                f"'{directory}': the loss on held-out {source or 'text'} is {known:.4f} here, and was {logged:.4f} in "
                "training: the data are others. Measure the run where it was trained."
            )
        value = logged if known is None else WindowMean(logged, known.windows, known.text)
        found[f"validation {source}".strip()] = value
    return found


def window_losses(directory: AnyPath) -> dict[str, WindowMean]:
    """{source: loss with that of each window, nats per token} of a run's last checkpoint on its validation windows."""
    import pe_lab  # JAX takes seconds to import, and a claim's command plans first
    from pe_lab.analysis.losses import Streams
    from pe_lab.config import from_dict

    lm = pe_lab.load(directory)
    config = from_dict(Config, lm.checkpoint.metadata["config"])
    found = {}
    for source, batches in _held_out(config, lm.config.vocab_size).items():
        nats, weights, texts = [], [], []
        for one in batches:
            streams = Streams(lm, one["tokens"], one.get("segments"), one.get("positions"))
            nats.append((streams.losses(one["targets"]) * one["weights"]).sum(1, dtype=np.float64))
            weights.append(one["weights"].sum(1, dtype=np.float64))
            texts.append(digest(one["targets"].tolist()))
        lost, counted = np.concatenate(nats), np.concatenate(weights)
        kept = counted > 0  # the last batch may be padded
        each = lost[kept] / counted[kept]
        found[source] = WindowMean(float(lost.sum() / counted.sum()), each.round(6), digest(texts))
    return found


def _held_out(config: Config, vocab_size: int = 0) -> dict[str, list[Batch]]:
    """The windows of each source that the last phase of a config is validated on."""
    from pe_lab.data.held_out import validation_batches

    last, count = config.phases[-1], config.log.validation_batches
    sizes = {"sequence_length": last.sequence_length, "batch_size": last.batch_size, "vocab_size": vocab_size}
    return validation_batches(config.data, count=count, **sizes)


def previous_token_bias(directory: AnyPath) -> dict[str, float]:
    """The largest bias of a head toward the previous token, `previous-token bias`: 0 of uniform attention, 1 of a
    head that attends to nothing else (DroPE, Definition 3.1, `pe_lab.analysis.positional_bias`); the mean over windows.

    A model whose layers do other things than rotate, such as SSMax, has no such number.
    """
    import pe_lab
    from pe_lab.analysis import positional_bias
    from pe_lab.analysis.sequences import text_windows
    from pe_lab.evaluation.variants import Subject

    lm = pe_lab.load(directory)
    text = text_windows(None, Subject(lm, "run", str(directory)), lm.training_length, BIAS_WINDOWS)
    try:
        bias = positional_bias.measure(lm, text.tokens).bias.mean(0)
    except UnsupportedError:
        return {}
    return {"previous-token bias": float(bias[..., positional_bias.PATTERNS.index("previous token")].max())}


def onset(directory: AnyPath) -> dict[str, float]:
    """The tokens after which a run from random weights predicts text better than a trigram table, `onset`.

    Between two validations the loss is taken to fall linearly in the logarithm of the tokens. The table is of the
    tokens that the whole run reads (`trigram`). A run that never does has no such number.

    Raises:
      DataError: the run has several phases, or text of several sources.
    """
    from pe_lab.config import from_dict

    (run,) = read_runs([directory])
    names = validation_names(run.phases[0])
    if len(run.phases) > 1 or len(names) > 2:  # the mean over the sources, and each of them
        raise DataError(f"'{directory}': an onset is measured of a run of one phase on one source of text.")
    (table,) = trigram(from_dict(Config, run.config)).values()
    phase, before = run.phases[0], None
    for at, loss in phase.series("validation_loss"):
        if loss < table:
            if before is None:
                return {"onset": at}
            share = (before[1] - table) / (before[1] - loss)
            return {"onset": before[0] * (at / before[0]) ** share}
        before = (at, loss) if at else None
    return {}


def validation_names(phase: PhaseFiles) -> list[str]:
    """The validation losses that a phase has logged."""
    names = dict.fromkeys(name for record in phase.metrics for name in record if name.startswith("validation_loss"))
    if not names:
        raise DataError(f"phase '{phase.name}' has logged no validation loss: lower log.validate_every_steps.")
    return list(names)


def spikes(directory: AnyPath) -> dict[str, float]:
    """How often the training loss jumped and stayed above, `loss spikes`, and by how much, `loss excess`, in nats.

    Partial RoPE's spikes are losses that do not come back soon, or at all; a single high loss is none. A logged loss
    that is no finite number, or null, is that of a run that has diverged.
    """
    (run,) = read_runs([directory])
    found = {"loss spikes": 0.0, "loss excess": 0.0}
    for phase in run.phases:
        logged = {}
        for record in phase.metrics:
            step, loss = number(record, "step"), number(record, "loss")
            if step is not None and "loss" in record and "event" not in record:  # events are not evenly spaced
                logged[step] = math.nan if loss is None else loss
        if len(logged) > 1:
            steps, losses = np.asarray(sorted(logged.items()), np.float64).T
            every = float(np.median(np.diff(steps)))
            found["loss spikes"] += lasting_spikes(losses, round(WINDOW / every), round(LASTS / every))
            found["loss excess"] = max(found["loss excess"], largest_excess(losses, round(LASTS / every)))
    return found


def lasting_spikes(losses: Float[np.ndarray, " n"], window: int, lasts: int) -> int:
    """How often `lasts` losses in a row lie above the running median by `DEVIATIONS` robust standard deviations.

    The median, and the deviation as 1.4826 times the median absolute deviation from it, are those of the last `window`
    losses that did not lie above: a jump is judged against what was before it, and counts once, however long it lasts.
    No finite loss is judged before `window` losses. One that is not finite lies above, wherever it is.
    """
    before: list[float] = []
    found = above = 0
    for loss in losses:
        middle = float(np.median(before)) if before else math.inf
        spread = 1.4826 * float(np.median(np.abs(np.asarray(before) - middle))) if before else 0.0
        judged = len(before) >= max(window, 2)
        if not math.isfinite(loss) or (judged and loss > middle + DEVIATIONS * spread):
            above += 1
            found += above == max(lasts, 1)
        else:
            above = 0
            before = [*before[1 - max(window, 2) :], float(loss)]
    return found


def largest_excess(losses: Float[np.ndarray, " n"], lasts: int) -> float:
    """How far the running median of `lasts` losses rises above its lowest value before, in nats; 0 if it only falls.

    A loss that is not finite counts as the largest that is, mostly that of random weights: an infinite excess would
    have no mean and no interval. It is 0 where none is finite.
    """
    known = np.isfinite(losses)
    if not known.any():
        return 0.0
    width = min(max(lasts, 1), len(losses))
    finite = np.where(known, losses, np.max(losses[known]))
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(finite, width), axis=1)
    return float(np.max(smooth - np.minimum.accumulate(smooth)))


# ---------------------------------------------------------------------------------------------------------------------
# Of a config, without a run: its shape, and what a table of its training tokens predicts

TOKENS = 128_000_000  # of training, at most: at the papers' sizes the table reads fewer tokens than the model


def shape(config: Config) -> dict[str, float]:
    """The heads of all layers, and the pairs of a head that rotate where most do."""
    from pe_lab.positional import frequencies, layers  # JAX takes seconds to import, and a claim's command plans first

    model = config.model
    head_dim = model.head_dim or model.d_model // model.heads
    described = layers(config.phases[-1].positional, model.layers)
    rotated = [np.count_nonzero(frequencies(one.encoding, head_dim)[0]) for one in described]
    return {"heads": float(model.layers * model.heads), "rotated pairs": float(max(rotated))}


def trigram(config: Config) -> dict[str, float]:
    """The validation losses of an interpolated trigram table of the training tokens, named as those of `losses`.

    It is interpolated by Witten and Bell's rule, which has nothing to tune: a context of c tokens, of which u differ,
    leaves u / (c + u) to the shorter context; the shortest leaves it to the uniform distribution. It reads the windows
    that the phases train on, and the held-out windows that the last phase is validated on.
    """
    from pe_lab.data.pipeline import build_pipeline

    vocabulary, seen, read = 0, [], 0
    for index, phase in enumerate(config.phases):
        pipeline = build_pipeline(
            config.data,
            sequence_length=phase.sequence_length,
            batch_size=phase.batch_size,
            seed=config.data.seed + index,
            weights=phase.weights,
        )
        vocabulary = pipeline.vocab_size
        for _ in range(min(phase.steps, (TOKENS - read) // (phase.batch_size * phase.sequence_length))):
            batch = next(pipeline)
            seen.append(np.concatenate([batch["tokens"], batch["targets"][:, -1:]], 1))
            read += batch["tokens"].size
    table = TrigramTable(seen, vocabulary)
    held_out = _held_out(config)
    needles = {source.name or source.source for source in config.data.sources if source.source == "needles"}
    found = {}
    for name, batches in held_out.items():
        if name in needles:
            continue  # a table says nothing about what is asked of the context
        lost = [(table.losses(one["tokens"], one["targets"]) * one["weights"]).sum() for one in batches]
        loss = float(sum(lost) / sum(one["weights"].sum() for one in batches))
        found["validation" if len(held_out) == 1 else f"validation {name}"] = loss
    return found


class TrigramTable:
    """Counts of one, two and three tokens in windows of several lengths."""

    def __init__(self, windows: list[Int[np.ndarray, "n T"]], vocabulary: int):
        self._vocabulary = vocabulary
        self._counts = []  # of n-grams: their codes, ascending, and how often each was seen
        for n in (1, 2, 3):
            codes = np.concatenate([self._codes(one, n).ravel() for one in windows])
            self._counts.append(np.unique(codes, return_counts=True))
        self._contexts = []  # of n-grams without their last token: codes, tokens that followed, different ones
        for codes, counts in self._counts:
            contexts, first, different = np.unique(codes // vocabulary, return_index=True, return_counts=True)
            self._contexts.append((contexts, np.add.reduceat(counts, first), different))

    def _codes(self, windows: Int[np.ndarray, "n T"], n: int) -> Int[np.ndarray, "n t"]:
        """Every n tokens in a row as one number."""
        length = windows.shape[1] - n + 1
        codes = np.zeros((len(windows), length), np.int64)
        for i in range(n):
            codes = codes * self._vocabulary + windows[:, i : i + length]
        return codes

    def losses(self, tokens: Int[np.ndarray, "B T"], targets: Int[np.ndarray, "B T"]) -> np.ndarray:
        """Minus the logarithm of each target's probability, in nats; the first of a window has a context of one."""
        windows = np.concatenate([tokens, targets[:, -1:]], 1)
        chance = np.full(targets.shape, 1 / self._vocabulary)
        for n in (1, 2, 3):
            codes = self._codes(windows, n)[:, -targets.shape[1] :]
            start = targets.shape[1] - codes.shape[1]
            contexts, followed, different = self._contexts[n - 1]
            seen = _looked_up(contexts, followed, codes // self._vocabulary)
            left = _looked_up(contexts, different, codes // self._vocabulary)
            counts = _looked_up(*self._counts[n - 1], codes)
            shorter = chance[:, start:]
            known = np.maximum(seen + left, 1)
            chance[:, start:] = np.where(seen > 0, (counts + left * shorter) / known, shorter)
        return -np.log(chance)


def _looked_up(
    keys: Int[np.ndarray, " k"], values: Int[np.ndarray, " k"], wanted: Int[np.ndarray, "B t"]
) -> Int[np.ndarray, "B t"]:
    """The value of each key, 0 of one that is not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
