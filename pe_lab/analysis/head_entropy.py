"""The spectra of heads: how many directions the queries and keys of each head fill, and scores to choose heads by.

DoPE (Xiong et al. 2025), section 4.3, eq. 12 and 23 to 30, and section 5.1. Where the paper leaves something open:

- A band is a pair of channels, here i and i + K/2. Its Gram matrix is 2 x 2, so eq. 30 on a band has no r above 2 and
  is 1 for r = 1. The truncated effective rank is therefore that of the head's whole K x K Gram matrix, as section 5.5
  has it ("their full 128 hidden-dimensional eigenvalues"); r from K on is the whole spectrum.
- "Full" of the tables: by their caption it is the "vanilla matrix entropy", the mean over bands of eq. 26, here
  `vanilla`. Eq. 30 without truncation is `full`. They are different numbers.
- r = 1: eq. 30 is 1 for every head, and the paper calls it "equivalent to the spectral norm". `1` is tr / sigma_max,
  the inverse of the largest eigenvalue of the trace-normalized Gram matrix. It is an effective rank, too (of Renyi's
  order infinity; 1 <= 1 / lambda_1 <= rho^full): a spiky head scores low, as under eq. 29 and 30, and the orders mean
  the same as for other r. `spectral_norm` is the paper's words, sigma_max of the Gram matrix (for each token): there
  a spiky head scores high, and so does one with large queries or keys.
- Stages. A change of frequencies alone changes no vector before its rotation. `pre_ntk` measures the unrotated vectors
  of the model as trained, `post_ntk` the unrotated vectors of the model under the scaling, whose layers have read
  hidden states that earlier scaled layers made, and `post_rope` the rotated vectors under the scaling.
- "Query and key jointly" (`both`): the Gram matrix of all queries and keys together, each side scaled to trace 1. The
  size of queries can be exchanged for that of keys without a change of the model; this score does not depend on it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.stats
from jaxtyping import Array, Float, Int

from pe_lab.analysis import chosen_heads
from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.chosen_heads import gram
from pe_lab.analysis.sequences import Sequences, add_arguments
from pe_lab.analysis.session import AnalysisSession
from pe_lab.attention.layer_encoding import encode_keys, encode_queries
from pe_lab.checkpoints.checkpoint import weights_digest
from pe_lab.errors import ConfigError, did_you_mean, redacted
from pe_lab.evaluation.variants import Variant
from pe_lab.language_model import LanguageModel, Tokens
from pe_lab.model.layer_pass import LayerView, checked_layers, hook_encoded
from pe_lab.model.shape import require_equal_heads
from pe_lab.positional import label_layers
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts, layer_names
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import interval
from pe_lab.results.table import TextTable
from pe_lab.terminal import positive

INDICATORS = ("query", "key", "both")
STAGES = ("pre_ntk", "post_ntk", "post_rope")
RANKS = ("vanilla", "1", "2", "4", "8", "16", "32", "full", "spectral_norm")


class HeadEntropy(NamedTuple):
    """The spectra of B sequences in L layers, for query heads; those that share a key head have its numbers.

    A matrix of zeros has entropy 0.

    Attributes:
      band_entropy: [B, L, H, R] matrix entropy of each band's Gram matrix, nats in 0 .. ln 2 (eq. 25).
      spectrum: [B, L, H, K] eigenvalues of the head's Gram matrix divided by its trace, the largest first.
      power: [B, L, H] the trace of the Gram matrix for each token; NaN for `both`, which has no scale.
    """

    band_entropy: Float[np.ndarray, "B L H R"]
    spectrum: Float[np.ndarray, "B L H K"]
    power: Float[np.ndarray, "B L H"]

    @property
    def entropy(self) -> Float[np.ndarray, "B L H"]:
        """The mean over bands (eq. 26)."""
        return self.band_entropy.mean(-1)

    def effective_rank(self, r: int | None = None) -> Float[np.ndarray, "B L H"]:
        """The effective rank of the r largest eigenvalues (eq. 30), in 1 .. r; None: of all."""
        kept = self.spectrum[..., :r]
        return np.exp(_entropy(kept / np.maximum(kept.sum(-1, keepdims=True), np.finfo(kept.dtype).tiny)))

    def score(self, rank: str) -> Float[np.ndarray, "B L H"]:
        """The score of `vanilla` (e_h, eq. 27), a number r, `full` or `spectral_norm`; see the module's docstring."""
        if rank == "vanilla":
            return np.exp(self.entropy)
        if rank == "spectral_norm":
            return self.spectrum[..., 0] * self.power
        if rank == "1":
            return 1 / np.where(self.spectrum[..., 0] > 0, self.spectrum[..., 0], 1)
        return self.effective_rank(None if rank == "full" else int(rank))


def measure(
    lm: LanguageModel,
    tokens: Tokens,
    layers: Sequence[int] | None = None,
    indicator: str = "key",
    stage: str = "post_ntk",
    lengths: Int[Array | np.ndarray, " B"] | None = None,
    **places: Any,
) -> HeadEntropy:
    """The spectra of the Gram matrices of a batch of sequences (eq. 23 to 26).

    Memory is linear in the length: Gram matrices add up block by block, in float32. Other arguments as in
    `frequency_use.measure`.

    Args:
      lm: the model under a scaling. `pre_ntk` measures its checkpoint's own encodings instead.
      indicator: query, key, or both.
      stage: pre_ntk, post_ntk or post_rope.
      lengths: tokens of each sequence that count, from its first; None: all.

    Raises:
      UserError: a layer, an indicator or a stage that does not exist.
    """
    check_name("indicator", indicator, INDICATORS)
    check_name("stage", stage, STAGES)
    if stage == "pre_ntk":
        lm = dataclasses.replace(lm, layers=lm.checkpoint.layers)
    measured = spectra_of(lm, tokens, layers, lengths, places)
    return select(measured, indicator, stage)


def choice(option: str, text: str) -> tuple[str, str, str]:
    """INDICATOR, STAGE and RANK of `key:post_ntk:16`.

    Raises:
      ConfigError: one of them does not exist.
    """
    parts = tuple(part.strip() for part in text.split(":"))
    if len(parts) != 3:
        raise ConfigError(f"{option}={text}: write INDICATOR:STAGE:RANK, such as key:post_ntk:full.")
    indicator, stage, rank = parts
    check_name(option, indicator, INDICATORS)
    check_name(option, stage, STAGES)
    return indicator, stage, checked_rank(option, rank, indicator)


def checked_rank(option: str, rank: str, indicator: str = "") -> str:
    """A rank: a whole number from 1, or a name of `RANKS`; else `ConfigError`."""
    if not (re.fullmatch("[0-9]{1,9}", rank) and int(rank) >= 1):
        check_name(option, rank, [name for name in RANKS if not name.isdecimal()])
    if rank == "spectral_norm" and indicator == "both":
        raise ConfigError(f"{option}: queries and keys together have no spectral norm. Take query or key.")
    return str(int(rank)) if rank.isdecimal() else rank


def rank_name(rank: str) -> str:
    """A rank in names of files and tables, such as trunc_16."""
    return f"trunc_{rank}" if rank.isdecimal() else rank


def check_name(option: str, name: str, allowed: Sequence[str]) -> None:
    if name not in allowed:
        raise ConfigError(f"{option}: there is no '{name}'. {did_you_mean(name, allowed)}")


# ---------------------------------------------------------------------------------------------------------------------
# Gram matrices and their spectra


def _grams(view: LayerView, lengths: Int[Array, " B"]) -> tuple[jax.Array, ...]:
    H, G = view.query.shape[2], view.key.shape[2]
    query, key = hook_encoded(view)
    query = encode_queries(query, view.encoding, G)
    key = encode_keys(key, view.encoding, H)
    return tuple(gram(x, lengths, view.block) for x in (view.query, view.key, query, key))


def spectra_of(
    lm: LanguageModel, tokens: Tokens, layers: Sequence[int] | None, lengths: Any, places: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The fields of `HeadEntropy` by indicator, before and after the rotation: `key_rotated_spectrum` and so on."""
    ids = lm.sequences(tokens)
    chosen = checked_layers(lm.config.layers, layers)
    require_equal_heads(lm.config, chosen, "The entropy of heads")
    counted = np.full(len(ids), ids.shape[1], np.int32) if lengths is None else np.asarray(lengths, np.int32)
    found: list[dict[str, np.ndarray]] = []
    for query, key, rotated_query, rotated_key in lm.layer_pass(ids, _grams, chosen, counted, **places):
        of_layer = {}
        for form, pair in (("unrotated", (query, key)), ("rotated", (rotated_query, rotated_key))):
            for indicator, spectra in _spectra(*pair, counted).items():
                of_layer |= {f"{indicator}_{form}_{name}": x for name, x in spectra._asdict().items()}
        found.append(of_layer)
    return {name: np.stack([one[name] for one in found], 1) for name in found[0]}


def select(measured: Mapping[str, np.ndarray], indicator: str, stage: str) -> HeadEntropy:
    """An indicator's spectra at a stage, out of those that `spectra_of` measured in that stage's model."""
    form = "rotated" if stage == "post_rope" else "unrotated"
    return HeadEntropy(*(measured[f"{indicator}_{form}_{name}"] for name in HeadEntropy._fields))


def _spectra(
    query: Float[np.ndarray, "B H K K"], key: Float[np.ndarray, "B heads K K"], tokens: Int[np.ndarray, " B"]
) -> dict[str, HeadEntropy]:
    """The spectra of one layer by indicator; their fields have no axis of layers."""
    H = query.shape[1]
    traces, wholes, bands = [], [], []
    for matrix in (query.astype(np.float64), np.repeat(key.astype(np.float64), H // key.shape[1], axis=1)):
        traces.append(np.trace(matrix, axis1=-2, axis2=-1))
        wholes.append(_over(matrix, traces[-1][..., None, None]))
        bands.append(_bands(matrix))
    wholes.append((wholes[0] + wholes[1]) / 2)
    bands.append((bands[0] + bands[1]) / 2)
    powers = [trace / tokens[:, None] for trace in traces]
    powers.append(np.full_like(powers[0], np.nan))
    found = {}
    for indicator, whole, band, power in zip(INDICATORS, wholes, bands, powers, strict=True):
        # Eigenvalues of [[a, b], [b, d]] with a + d = 1: a half, plus and minus the radius.
        radius = np.hypot((band[..., 0] - band[..., 1]) / 2, band[..., 2])
        half = band[..., :2].sum(-1) / 2
        pairs = np.stack([half + radius, half - radius], -1)
        values = np.linalg.eigvalsh(whole)[..., ::-1]
        found[indicator] = HeadEntropy(_entropy(pairs), np.maximum(values, 0), power)
    return found


def _bands(matrix: Float[np.ndarray, "B H K K"]) -> Float[np.ndarray, "B H R 3"]:
    """a, d and b of each band's [[a, b], [b, d]], divided by a + d (eq. 24)."""
    R = matrix.shape[-1] // 2
    first, second = np.arange(R), np.arange(R) + R
    parts = np.stack([matrix[..., first, first], matrix[..., second, second], matrix[..., first, second]], -1)
    return _over(parts, parts[..., :2].sum(-1, keepdims=True))


def _over(x: np.ndarray, total: np.ndarray) -> np.ndarray:
    """x / total, 0 where the total is."""
    return np.divide(x, total, out=np.zeros_like(x), where=np.broadcast_to(total, x.shape) > 0)


def _entropy(shares: Float[np.ndarray, "... n"]) -> Float[np.ndarray, "..."]:
    """-sum p ln p over the last axis."""
    p = np.clip(shares, 0, 1)
    return 0 - (p * np.log(np.where(p > 0, p, 1))).sum(-1)


# ---------------------------------------------------------------------------------------------------------------------
# The analysis, and files of scores for `pe_lab.surgery --mask-heads`

PROTOCOL = "head_entropy-1"
SHOWN = 5  # heads at either end of the table


def measure_heads(session: AnalysisSession, sequences: Sequences | None = None) -> list[dict[str, HeadEntropy]]:
    """For each variant, its entropies by criterion, such as `post_ntk_key`, on all sequences.

    Variants of one checkpoint share the measurement of the model as trained.
    """
    sequences = session.sequences if sequences is None else sequences

    trained = [Variant(variant.subject, "as trained", variant.subject.model) for variant in session.variants]
    models = [*trained, *session.variants]

    def of_batch(lm: LanguageModel, batch: Sequences) -> dict[str, np.ndarray]:
        found = spectra_of(lm, batch.tokens, None, batch.lengths, batch.places)
        return {name: x.astype(np.float32) for name, x in found.items()}

    inner = dataclasses.replace(session, variants=models, names=[variant.label for variant in models])
    measured = inner.measure(PROTOCOL, of_batch, None, sequences)
    session.reused = inner.reused
    return [
        {
            f"{stage}_{indicator}": select(as_trained if stage == "pre_ntk" else scaled, indicator, stage)
            for stage in STAGES
            for indicator in INDICATORS
        }
        for as_trained, scaled in zip(measured[: len(trained)], measured[len(trained) :], strict=True)
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, count=4, suites="niah or ruler with one needle, such as niah:noisy, or needles")
    parser.add_argument(
        "--scores",
        default="key:post_ntk:full",
        metavar="INDICATOR:STAGE:RANK",
        help=f"of scores.json, for pe_lab.surgery --mask-heads: {', '.join(INDICATORS)}; {', '.join(STAGES)}; "
        f"{', '.join(RANKS)} (default: %(default)s). The folder scores has all of them.",
    )
    parser.add_argument(
        "--selected",
        type=positive,
        metavar="N",
        help="also measure what the N heads with the lowest and the highest vanilla and truncated (16) entropy attend "
        "to, and along which directions their queries lie: DoPE's Figures 2 to 6, where N is 16. Indicator and stage "
        "are those of --scores; with --suite=niah:standard --depths=0 there is a needle, at depth 0",
    )


def _run(session: AnalysisSession) -> Findings:
    indicator, stage, rank = choice("--scores", session.arguments.scores)
    criterion, selected = f"{stage}_{indicator}", session.arguments.selected
    if selected is not None:
        chosen_heads.check_count(selected, session.variants)
    measured = measure_heads(session)
    numbers: dict[str, np.ndarray] = {}
    figures: list[Figure] = []
    tables, sentences, files = [], [], {}
    for v, (variant, name, found) in enumerate(zip(session.variants, session.names, measured, strict=True)):
        several = len(measured) > 1
        suffix, of = (f"_{v}", f" of {name}") if several else ("", "")
        for key, one in found.items():
            numbers |= {f"{key}_{part}{suffix}": x for part, x in one._asdict().items() if np.isfinite(x).any()}
        scores = _files(session, variant, found, tuple(dict.fromkeys((*RANKS, rank))))
        files |= {f"scores{suffix}/{file}": data for file, data in scores.items()}
        files[f"scores{suffix}.json"] = scores[f"{criterion}_{rank_name(rank)}.json"]
        figures += _figures(found, criterion, rank, suffix, of)
        tables.append(_table(found[criterion].score(rank), f"{criterion}, {rank_name(rank)}{of}"))
        sentences += _sentences(name, found, indicator, stage, rank)
        if selected is not None:
            scores_of = {rank: found[criterion].score(rank) for rank in chosen_heads.SCORES}
            chosen = chosen_heads.examine(session, v, scores_of, criterion, selected)
            numbers |= {f"chosen_{key}": x for key, x in chosen.numbers.items()}
            tables += chosen.tables
            figures += chosen.figures
            sentences += chosen.sentences
    shapes = {
        "band_entropy": "[S, L, H, R] sequence, layer, query head, band; nats (eq. 25)",
        "spectrum": "[S, L, H, K] eigenvalues of the trace-normalized Gram matrix, the largest first",
        "power": "[S, L, H] mean squared norm of the vectors",
    }
    if selected is not None:
        shapes |= {f"chosen_{key}": shape for key, shape in chosen_heads.SHAPES.items()}
    return Findings(tuple(sentences), tuple(tables), tuple(figures), numbers, shapes, files=files)


def _files(
    session: AnalysisSession, variant: Variant, found: Mapping[str, HeadEntropy], ranks: Sequence[str]
) -> dict[str, bytes]:
    """A file of scores [N, H] for each combination, means over sequences, and how they were made.

    `pe_lab.surgery --mask-heads` reads them.
    """
    checkpoint, length = variant.subject.checkpoint, session.length
    common = {
        "checkpoint": str(checkpoint.path),
        "checkpoint_id": variant.subject.id,
        "weights": weights_digest(checkpoint.params),
        "lineage": variant.subject.lineage,
        "length": length,
        "sequences": session.sequences.name,
        "command": redacted(shlex.join(["python", "-m", "pe_lab.analyze", *getattr(session.arguments, "argv", ())])),
    }
    files = {}
    for stage, indicator, rank in itertools.product(STAGES, INDICATORS, ranks):
        if (indicator, rank) == ("both", "spectral_norm"):
            continue
        scores = found[f"{stage}_{indicator}"].score(rank).astype(np.float64).mean(0)
        layers = checkpoint.layers if stage == "pre_ntk" else variant.layers_at(length)
        written = {"scores": scores.tolist(), "indicator": indicator, "stage": stage, "entropy": rank_name(rank)}
        written |= {"positional": label_layers(layers), **common}
        files[f"{stage}_{indicator}_{rank_name(rank)}.json"] = (json.dumps(written, allow_nan=False) + "\n").encode()
    return files


def _ends(scores: Float[np.ndarray, "L H"], count: int = SHOWN) -> tuple[list[int], list[int]]:
    """The flat indices of the lowest heads and of the highest ones, ascending."""
    order = np.argsort(scores.ravel(), kind="stable").tolist()
    count = min(count, len(order) // 2)
    return order[:count], order[len(order) - count :]


def _table(scores: Float[np.ndarray, "S L H"], of: str) -> TextTable:
    around, heads = interval(scores), scores.shape[2]
    mean, low, high = (x.ravel() for x in (around.mean, around.low, around.high))
    rows = []
    for end, chosen in zip(("lowest", "highest"), _ends(around.mean), strict=True):
        for i in chosen:
            limits = f"{low[i]:.3f} to {high[i]:.3f}" if len(scores) > 1 else ""
            rows.append((end, str(i // heads), str(i % heads), f"{mean[i]:.3f}", limits))
    title = f"Heads with the lowest and the highest scores by {of} (95% intervals over sequences)"
    return TextTable(title, ("", "layer", "head", "score", "interval"), tuple(rows))


def _sentences(name: str, found: Mapping[str, HeadEntropy], indicator: str, stage: str, rank: str) -> list[str]:
    scores = found[f"{stage}_{indicator}"].score(rank)
    mean = scores.mean(0)
    written = [
        f"{name}: the scores of {mean.size} heads by {stage}_{indicator}, {rank_name(rank)}, are {mean.min():.3f} to "
        f"{mean.max():.3f}, with a median of {np.median(mean):.3f}."
    ]
    others = [(s, indicator) for s in STAGES if s != stage] + [(stage, i) for i in ("query", "key") if i != indicator]
    parts = []
    for s, i in others:
        other = found[f"{s}_{i}"].score(rank).mean(0)
        if np.ptp(mean) > 0 and np.ptp(other) > 0:
            parts.append(f"{scipy.stats.spearmanr(mean.ravel(), other.ravel()).statistic:.2f} with {s}_{i}")
    if parts:
        written.append(f"{name}: rank correlation of these scores over heads: {', '.join(parts)}.")
    if len(scores) > 1:
        lowest = [set(_ends(one)[0]) for one in scores]
        pairs = [(a, b) for n, a in enumerate(lowest) for b in lowest[:n]]
        shared = np.mean([len(a & b) for a, b in pairs])
        written.append(
            f"{name}: two sequences share {shared:.1f} of their {len(lowest[0])} lowest heads, mean over "
            f"{len(pairs)} pair{'s' * (len(pairs) != 1)} of sequences."
        )
    return written


def _figures(found: Mapping[str, HeadEntropy], criterion: str, rank: str, suffix: str, of: str) -> list[Figure]:
    first = found[criterion]
    L, H, R = first.band_entropy.shape[1:]
    heads = tuple(f"head {h}" for h in range(H))
    maps = dict(rows=layer_names(range(L)), columns=heads, row_label="layer", column_label="query head")
    names = {"vanilla": "Effective rank of the bands (eq. 27)", "full": "Effective rank of all channels (eq. 30)"}
    names |= {"spectral_norm": "Spectral norm of the Gram matrix, for each token", "1": "1 / largest eigenvalue"}
    drawn: list[Figure] = []
    for one in dict.fromkeys(("vanilla", "1", "16", "full", rank)):
        panels = {key: x.score(one).mean(0) for key, x in found.items() if one != "spectral_norm" or "both" not in key}
        drawn.append(
            HeatMaps(
                f"{rank_name(one)}{suffix}",
                f"{names.get(one, f'Effective rank of the {one} largest eigenvalues (eq. 30)')}{of}, by layer and head",
                "Mean over sequences. Low values are spectra with one dominant direction.",
                np.stack(list(panels.values())),
                tuple(panels),
                panel_label="stage and vectors",
                value_label="squared norm" if one == "spectral_norm" else "effective rank",
                **maps,
            )
        )
    drawn.append(
        HeatMaps(
            f"band_entropy{suffix}",
            f"Matrix entropy of each band by {criterion}{of}, by layer and head",
            "Mean over sequences (eq. 25): 0 where one direction dominates the pair of channels, ln 2 where none does.",
            first.band_entropy.mean(0),
            layer_names(range(L)),
            heads,
            tuple(map(str, range(R))),
            "layer",
            "query head",
            "band, from fast to slow",
            "nats",
            limits=(0.0, float(np.log(2))),
        )
    )
    panels = []
    for stage in STAGES:
        lines = []
        for indicator in INDICATORS:
            if (rank, indicator) == ("spectral_norm", "both"):
                continue
            around = interval(found[f"{stage}_{indicator}"].score(rank))
            order = np.argsort(around.mean.ravel(), kind="stable")
            x = np.arange(len(order), dtype=float)
            lines.append(Line(indicator, x, *(y.ravel()[order] for y in (around.mean, around.low, around.high))))
        panels.append((stage, tuple(lines)))
    drawn.append(
        LineCharts(
            f"sorted{suffix}",
            f"Scores by {rank_name(rank)}{of}, sorted",
            "Heads from the lowest to the highest score, each line in its own order; 95% intervals over sequences.",
            tuple(panels),
            "heads, sorted",
            "score",
        )
    )
    return drawn


ANALYSIS = Analysis("DoPE, section 4.3, eq. 12 and 23 to 30, and section 5.1; Figures 2 to 6", _options, _run)
