"""Entropies of heads (DoPE): their spectra at three stages, and files of scores for `pe_lab.surgery --mask-heads`.

DoPE (Xiong et al. 2025), section 4.3 and section 5.1, Tables 1 to 4. `pe_lab.analysis.head_spectra` tells how the paper
is read where it leaves something open.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shlex
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.stats
from jaxtyping import Float

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.head_spectra import (
    INDICATORS,
    RANKS,
    STAGES,
    HeadEntropy,
    choice,
    head_entropy,
    rank_name,
    select,
    spectra_of,
)
from pe_lab.analysis.sequences import Sequences, add_arguments
from pe_lab.analysis.session import Session
from pe_lab.checkpoints.weights import weights_digest
from pe_lab.errors import redacted
from pe_lab.evaluation.variants import Variant
from pe_lab.language_model import LanguageModel
from pe_lab.positional import label_layers
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts, layer_names
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import interval
from pe_lab.results.table import TextTable

__all__ = ["ANALYSIS", "HeadEntropy", "head_entropy", "measure_heads"]

PROTOCOL = "head_entropy-1"
SHOWN = 5  # heads at either end of the table


def measure_heads(session: Session, sequences: Sequences | None = None) -> list[dict[str, HeadEntropy]]:
    """For each variant, its entropies by criterion, such as `post_ntk_key`, on all sequences.

    Variants of one checkpoint share the measurement of the model as trained.
    """
    sequences = session.sequences if sequences is None else sequences

    def identity(variant: Variant) -> tuple[str, str]:
        return variant.subject.id, variant.fingerprint(sequences.length)

    models: dict[tuple[str, str], Variant] = {}
    trained = [Variant(variant.subject, "as trained", variant.subject.model) for variant in session.variants]
    for variant in (*trained, *session.variants):
        models.setdefault(identity(variant), variant)

    def measure(lm: LanguageModel, batch: Sequences) -> dict[str, np.ndarray]:
        places = {"segments": batch.segments, "positions": batch.positions}
        found = spectra_of(lm, batch.tokens, None, batch.lengths, places)
        return {name: x.astype(np.float32) for name, x in found.items()}

    inner = dataclasses.replace(session, variants=[*models.values()], names=[v.label for v in models.values()])
    measured = dict(zip(models, inner.measure(PROTOCOL, measure, None, sequences), strict=True))
    session.reused = inner.reused
    return [
        {
            f"{stage}_{indicator}": select(measured[identity(own if stage == "pre_ntk" else variant)], indicator, stage)
            for stage in STAGES
            for indicator in INDICATORS
        }
        for variant, own in zip(session.variants, trained, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The analysis


def _options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, count=4, suites="niah or ruler with one needle, such as niah:noisy, or needles")
    parser.add_argument(
        "--scores",
        default="key:post_ntk:full",
        metavar="INDICATOR:STAGE:RANK",
        help=f"of scores.json, for pe_lab.surgery --mask-heads: {', '.join(INDICATORS)}; {', '.join(STAGES)}; "
        f"{', '.join(RANKS)} (default: %(default)s). The folder scores has all of them.",
    )


def _run(session: Session) -> Findings:
    indicator, stage, rank = choice("--scores", session.arguments.scores)
    criterion = f"{stage}_{indicator}"
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
    shapes = {
        "band_entropy": "[S, L, H, R] sequence, layer, query head, band; nats (eq. 25)",
        "spectrum": "[S, L, H, K] eigenvalues of the trace-normalized Gram matrix, the largest first",
        "power": "[S, L, H] mean squared norm of the vectors",
    }
    return Findings(tuple(sentences), tuple(tables), tuple(figures), numbers, shapes, files=files)


def _files(
    session: Session, variant: Variant, found: Mapping[str, HeadEntropy], ranks: Sequence[str]
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


ANALYSIS = Analysis(
    "head_entropy",
    "entropies of heads (DoPE): effective ranks of queries and keys, and scores for surgery --mask-heads",
    "DoPE, section 4.3, eq. 12 and 23 to 30, and section 5.1",
    _options,
    _run,
)
