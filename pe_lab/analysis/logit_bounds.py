"""How close a head's logits come to their upper bound, the product of the norms of query and key.

p-RoPE (Barbero et al. 2024), section D.1 and Tables 3 to 5.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.channel_pairs import BAND_NAMES, FIRST, TARGETS, bands, logit_bounds
from pe_lab.analysis.sequences import Sequences, add_arguments, check_length
from pe_lab.analysis.session import Session
from pe_lab.language_model import LanguageModel
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts, layer_names
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import interval
from pe_lab.results.table import TextTable

PROTOCOL = "logit_bounds-1"


def _options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, count=4)
    parser.add_argument("--layers", help="such as 0,2,8-11 (default: all)")
    parser.add_argument("--heads", help="LAYER.HEAD,... to list, such as 1.5,27.8 (default: the two most aligned)")


def _run(session: Session) -> Findings:
    given = [session.heads(variant.lm) for variant in session.variants]
    check_length("logit_bounds", session.sequences, FIRST)

    def measure(lm: LanguageModel, batch: Sequences) -> dict[str, Any]:
        places = dict(segments=batch.segments, positions=batch.positions)
        return logit_bounds(lm, batch.tokens, session.layers(lm), **places)._asdict()

    measured = session.measure(PROTOCOL, measure, session.arguments.layers)
    numbers: dict[str, np.ndarray] = {}
    tables, figures, sentences = [], [], []
    for v, (variant, name, found) in enumerate(zip(session.variants, session.names, measured, strict=True)):
        chosen, suffix = session.layers(variant.lm), f"_{v}" if len(measured) > 1 else ""
        numbers |= {f"{key}{suffix}": value for key, value in found.items()}
        drawn = given[v] or most_aligned(found, chosen)
        tables += [_table(name, found, chosen, drawn), *(_tokens(name, found, chosen, head) for head in drawn)]
        figures += _figures(name, suffix, found, chosen, drawn)
        sentences += _sentences(name, found)
    shapes = {
        "logit": "[S, L, H, 3] sequence, layer, query head, key (self, previous, first); mean over tokens",
        "bound": "[S, L, H, 3] norm of the query times norm of the key",
        "alignment": "[S, L, H, 3] mean of logit / bound",
        "tightest": "[S, L, H, 3] largest logit / bound",
        "parts": "[S, L, H, 3, R] each pair's part of the logit",
        "tokens": f"[S, L, H, 3, {FIRST}] of the first tokens: bound, self, previous",
    }
    return Findings(tuple(sentences), tuple(tables), tuple(figures), numbers, shapes)


def most_aligned(found: dict[str, np.ndarray], layers: Sequence[int]) -> list[tuple[int, int]]:
    """(layer, head) of the head whose logits are closest to the bound with itself, and with the previous token."""
    heads = []
    for target in (0, 1):
        alignment = found["alignment"][..., target].mean(0)
        n, h = np.unravel_index(np.argmax(alignment), alignment.shape)
        heads.append((layers[int(n)], int(h)))
    return list(dict.fromkeys(heads))


def _table(
    name: str, found: dict[str, np.ndarray], layers: Sequence[int], drawn: Sequence[tuple[int, int]]
) -> TextTable:
    rows = []
    for n, h in drawn:
        place = layers.index(n)
        for t, target in enumerate(TARGETS):
            by_band = bands(found["parts"][:, place, h, t])
            cells = [interval(found[key][:, place, h, t]) for key in ("bound", "logit", "alignment")]
            cells += [interval(by_band[:, band]) for band in range(by_band.shape[-1])]
            rows.append((f"layer {n}, head {h}", target, *(cell.cell("{:.2f}") for cell in cells)))
    header = ("head", "key", "bound", "logit", "logit / bound", *BAND_NAMES)
    title = f"{name}: logits, their bounds, and the part of each band of pairs (means over tokens, 95% intervals)"
    return TextTable(title, header, tuple(rows), words=2)


def _tokens(name: str, found: dict[str, np.ndarray], layers: Sequence[int], head: tuple[int, int]) -> TextTable:
    """Tables 3 to 5 of the paper for one head, on the first sequence."""
    values = found["tokens"][0, layers.index(head[0]), head[1]]
    rows = tuple(
        (what, *("–" if np.isnan(x) else f"{x:.2f}" for x in row))
        for what, row in zip(("upper bound", "diagonal", "previous token"), values, strict=True)
    )
    title = f"{name}: layer {head[0]}, head {head[1]} on the first tokens of the first sequence (p-RoPE, Tables 3 to 5)"
    return TextTable(title, ("token", *map(str, range(values.shape[1]))), rows)


def _sentences(name: str, found: dict[str, np.ndarray]) -> list[str]:
    alignment = found["alignment"].mean(0)  # [L, H, 3]
    written = []
    for t, target in enumerate(TARGETS[:2]):
        close = int((alignment[..., t] >= 0.5).sum())
        gap = interval(found["alignment"][..., t].max((1, 2)))
        written.append(
            f"{name}: the mean logit with {'itself' if target == 'self' else 'the previous token'} reaches half of its "
            f"bound in {close} of {alignment[..., t].size} heads; the best head reaches {gap.words('{:.2f}')}."
        )
    return [*written, f"{name}: no logit is more than {found['tightest'].max():.4f} of its bound."]


def _figures(
    name: str, suffix: str, found: dict[str, np.ndarray], layers: Sequence[int], drawn: Sequence[tuple[int, int]]
) -> list[Figure]:
    heads = tuple(f"head {h}" for h in range(found["alignment"].shape[2]))
    alignment = np.moveaxis(found["alignment"].mean(0), -1, 0)
    panels = []
    for n, h in drawn:
        lines = []
        for t, target in enumerate(TARGETS):
            around = interval(found["parts"][:, layers.index(n), h, t])
            lines.append(Line(target, np.arange(around.mean.size) * 1.0, around.mean, around.low, around.high))
        panels.append((f"layer {n}, head {h}", tuple(lines)))
    return [
        HeatMaps(
            f"alignment{suffix}",
            f"Logit over its upper bound, {name}",
            "Mean cosine of query and key after rotation: 1 where they are aligned (p-RoPE, section D.1).",
            alignment,
            tuple(f"with {'itself' if t == 'self' else f'the {t} token'}" for t in TARGETS),
            layer_names(layers),
            heads,
            "key",
            "layer",
            "head",
            "logit / bound",
            "diverging",
            (-1.0, 1.0),
        ),
        LineCharts(
            f"parts{suffix}",
            f"Each pair's part of the logit, {name}",
            "Means over tokens; bands are 95% intervals over sequences.",
            tuple(panels),
            "pair of channels, from fast to slow",
            "part of the logit",
        ),
    ]


ANALYSIS = Analysis(
    "logit_bounds",
    "how close logits come to the product of the norms of query and key, and which pairs they come from",
    "p-RoPE, section D.1, Tables 3 to 5",
    _options,
    _run,
)
