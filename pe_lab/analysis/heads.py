"""The kinds of heads: positional, sink, semantic, retrieval; before and after a scaling or a drop.

p-RoPE (Barbero et al. 2024), Figures 5, 7a and 9; DroPE, Figures 7 and 8; DoPE, Figure 2.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.head_attention import AROUND, KINDS, MAP, NEAR, SAMPLED, THRESHOLDS, Heads, edges, heads, kinds
from pe_lab.analysis.sequences import Sequences, add_arguments
from pe_lab.analysis.session import Session
from pe_lab.errors import ConfigError
from pe_lab.language_model import LanguageModel
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts, layer_names
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import interval
from pe_lab.results.table import TextTable

PROTOCOL = "heads-3"
LEAST = 1e-6  # weight that the chart by distance shows
POSITIONAL, CONTENT = ("diagonal", "previous token", "local"), ("retrieval", "semantic")
MEASURES = {  # attribute -> its panel's name
    "on_self": "on itself",
    "on_previous": "on the token before",
    "on_first": "on the first token",
    "far": f"{NEAR} or more tokens away",
}


def _options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, count=4, suites="niah:standard and other tasks with one needle, or needles (the run's own)")
    parser.add_argument("--layers", help="such as 0,2,8-11 (default: all)")
    parser.add_argument(
        "--heads", help="LAYER.HEAD,... to draw, such as 1.5,27.8 (default: the clearest head of each kind)"
    )


def _run(session: Session) -> Findings:
    shapes = {(lm.config.layers, lm.config.heads) for lm in (variant.lm for variant in session.variants)}
    if len(shapes) > 1:
        raise ConfigError("heads compares heads one by one; these models have different numbers of them.")
    drawn, chosen = session.heads(session.variants[0].lm), session.layers(session.variants[0].lm)
    length = int(session.sequences.lengths.min())

    def measure(lm: LanguageModel, batch: Sequences) -> Mapping[str, np.ndarray]:
        places = dict(segments=batch.segments, positions=batch.positions)
        return heads(lm, batch.tokens, chosen, questions=batch.questions, length=length, **places)._asdict()

    measured = session.measure(PROTOCOL, measure, [session.arguments.layers, length])
    means = [{name: value.mean(0) for name, value in found.items()} for found in measured]
    of_kind = [kinds(one) for one in means]
    if drawn is None:
        drawn = clearest(means[0], of_kind[0], chosen)
    places = [(chosen.index(n), h) for n, h in drawn]
    names = [f"layer {n}, head {h}: {KINDS[of_kind[0][place]]}" for (n, h), place in zip(drawn, places, strict=True)]
    figures: list[Figure] = []
    for v, (name, one) in enumerate(zip(session.names, means, strict=True)):
        figures += _maps_of(name, f"_{v}" if len(means) > 1 else "", one, chosen, places, names)
    figures += _profiles(session.names, measured, places, names, length)
    numbers = {
        f"{key}{f'_{v}' if len(measured) > 1 else ''}": value
        for v, found in enumerate(measured)
        for key, value in {**found, "kind": of_kind[v]}.items()
        if key != "map"  # of all heads, they would be most of the file
    }
    numbers |= {"layers": np.asarray(chosen), "edges": np.asarray(edges(length))}
    tables = [_kind_table(session.names, of_kind), _head_table(drawn, places, names, means[0], measured[0])]
    sentences = []
    for name, one, kind, found in zip(session.names, means, of_kind, measured, strict=True):
        sentences += [_kind_sentence(name, one, kind), _by_frequency(name, found)]
    for v in range(1, len(measured)):
        sentences += _change(session.names, measured, of_kind, v)
    sentences.append(f"Kinds: {THRESHOLDS}.")
    described = {name: "[S, L, H] sequence, layer, query head" for name in Heads._fields}
    described |= {
        "by_distance": "[S, L, H, bins] weight by distance, in bins that begin at `edges`",
        "around": f"[S, L, H, {2 * AROUND}] weight on the tokens around the needle's first",
        "kind": f"[L, H] index of {', '.join(KINDS)}",
    }
    return Findings(tuple(sentences), tuple(tables), tuple(figures), numbers, described, {"kinds": KINDS})


def clearest(means: Mapping[str, np.ndarray], kind: np.ndarray, layers: Sequence[int]) -> list[tuple[int, int]]:
    """(layer, head) of the clearest head of each kind that there is."""
    near = means["by_distance"][..., :NEAR].sum(-1)
    clear = {
        "diagonal": means["on_self"],
        "previous token": means["on_previous"],
        "apostrophe-like": means["previous_share"] * means["first_elsewhere"],
        "retrieval": np.nan_to_num(means["on_source"]),
        "sink": means["on_first"],
        "semantic": means["far"],
        "local": near,
        "mixed": means["entropy"],
    }
    found = []
    for k, name in enumerate(KINDS):
        if (kind == k).any():
            place = np.argmax(np.where(kind == k, clear[name], -np.inf))
            n, h = np.unravel_index(place, kind.shape)
            found.append((layers[int(n)], int(h)))
    return found


def _kind_table(names: Sequence[str], of_kind: Sequence[np.ndarray]) -> TextTable:
    counts = [Counter(kind.ravel().tolist()) for kind in of_kind]
    rows = tuple((name, *(str(count[k]) for k in range(len(KINDS)))) for name, count in zip(names, counts, strict=True))
    return TextTable("Heads of each kind", ("model", *KINDS), rows)


def _head_table(
    drawn: Sequence[tuple[int, int]],
    places: Sequence[tuple[int, int]],
    names: Sequence[str],
    means: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
) -> TextTable:
    columns = ("on_self", "on_previous", "on_first", "far", "entropy", "distance", "on_source")
    rows = []
    for (layer, head), name in zip(places, names, strict=True):
        cells = []
        for column in columns:
            cells.append(interval(found[column][:, layer, head]).cell("{:.2g}"))
        rows.append((name, *cells))
    head_names = ("head", "self", "previous", "first", "far", "entropy", "distance", "needle")
    return TextTable("The heads that are drawn (first model; 95% intervals over sequences)", head_names, tuple(rows))


def _kind_sentence(name: str, means: Mapping[str, np.ndarray], kind: np.ndarray) -> str:
    counts = Counter(kind.ravel().tolist())
    listed = ", ".join(f"{counts[k]} {KINDS[k]}" for k in range(len(KINDS)) if counts[k])
    sink = means["on_first"].mean()
    return f"{name}: of {kind.size} heads {listed}. {sink:.0%} of all attention is on the first token."


def _by_frequency(name: str, found: Mapping[str, np.ndarray]) -> str:
    """Whether heads that use the fast pairs are the positional ones (p-RoPE, section 5: it is how to find them)."""
    from scipy.stats import spearmanr

    positional = found["on_self"] + found["on_previous"]
    each = {
        what: np.asarray([spearmanr(a.ravel(), b.ravel()).statistic for a, b in zip(found["fast"], y, strict=True)])
        for what, y in (("on the token itself and the one before", positional), ("far away", found["far"]))
    }
    parts = [f"{interval(values).words('{:.2f}')} with the weight {what}" for what, values in each.items()]
    return (
        f"{name}: over heads, the use of the fastest quarter of pairs has a rank correlation of {' and '.join(parts)}."
    )


def _change(
    names: Sequence[str], measured: Sequence[Mapping[str, np.ndarray]], of_kind: Sequence[np.ndarray], v: int
) -> list[str]:
    """How far a variant moves the attention of positional heads and of heads that attend by content (DroPE 4.1)."""
    moved = 0.5 * np.abs(measured[v]["by_distance"] - measured[0]["by_distance"]).sum(-1)  # total variation
    parts = []
    for what, group in (("positional heads", POSITIONAL), ("heads that attend far by content", CONTENT)):
        those = np.isin(of_kind[0], [KINDS.index(name) for name in group])
        if those.any():
            parts.append(f"{interval(moved[:, those].mean(1)).words('{:.3f}')} of {what} ({those.sum()})")
    changed = int((of_kind[v] != of_kind[0]).sum())
    sentence = f"{names[v]} against {names[0]}: {changed} of {of_kind[0].size} heads change their kind."
    if parts:
        sentence += f" Of the attention by distance, it moves {' and '.join(parts)}."
    return [sentence]


def _maps_of(
    name: str,
    suffix: str,
    means: Mapping[str, np.ndarray],
    layers: Sequence[int],
    places: Sequence[tuple[int, int]],
    names: Sequence[str],
) -> list[Figure]:
    """Weights by layer and head, and the downsampled maps of the drawn heads."""
    columns = tuple(f"head {h}" for h in range(means["on_self"].shape[1]))
    panels = dict(MEASURES)
    if not np.isnan(means["on_source"]).all():
        panels["on_source"] = "on the needle's token"
    weights = np.stack([means[key] for key in panels])
    about = "Mean attention weight over queries and sequences."
    figures: list[Figure] = [
        HeatMaps(
            f"weights{suffix}",
            f"What each head of {name} attends to",
            f"{about} The last panel is of the queries that answer." if "on_source" in panels else about,
            weights,
            tuple(panels.values()),
            layer_names(layers),
            columns,
            "weight",
            "layer",
            "head",
            "weight",
            limits=(0.0, 1.0),
        )
    ]
    maps = np.stack([means["map"][place] for place in places])
    with np.errstate(divide="ignore"):
        maps = np.maximum(np.log10(maps), -4)
    maps[:, np.arange(MAP)[:, None] < np.arange(MAP)] = np.nan  # later than the query
    shares = tuple(f"{100 * i // MAP}%" for i in range(MAP))
    figures.append(
        HeatMaps(
            f"maps{suffix}",
            f"Attention of chosen heads of {name}",
            f"Weights of {SAMPLED} queries, averaged over {MAP} ranges of queries and summed over "
            f"{MAP} ranges of keys (p-RoPE, Figures 5, 7a and 9).",
            maps,
            tuple(names),
            shares,
            shares,
            "head",
            "query, place in the sequence",
            "key, place in the sequence",
            "log10 weight",
            limits=(-4.0, 0.0),
        )
    )
    return figures


def _profiles(
    names: Sequence[str],
    measured: Sequence[Mapping[str, np.ndarray]],
    places: Sequence[tuple[int, int]],
    heads_drawn: Sequence[str],
    length: int,
) -> list[Figure]:
    """Attention by distance, and around the needle, of the drawn heads in every variant."""
    begins = np.asarray(edges(length), float)
    width = np.diff([*begins, length])
    panels, needles = [], []
    for (layer, head), title in zip(places, heads_drawn, strict=True):
        lines, around = [], []
        for name, found in zip(names, measured, strict=True):
            each = interval(np.maximum(found["by_distance"][:, layer, head] / width, LEAST))
            lines.append(Line(name, begins + 1, each.mean, each.low, each.high))
            near = interval(found["around"][:, layer, head])
            around.append(Line(name, np.arange(-AROUND, AROUND) * 1.0, near.mean, near.low, near.high))
        panels.append((title, tuple(lines)))
        needles.append((title, tuple(around)))
    figures: list[Figure] = [
        LineCharts(
            "by_distance",
            "Attention by distance",
            "Mean weight of a key at each distance, plus 1 so that a token itself is at 1 (DroPE, Figure 7). Weights "
            f"below {LEAST:g} are drawn there.",
            tuple(panels),
            "distance + 1, tokens",
            "weight of a key",
            log_x=True,
            log_y=True,
        )
    ]
    if not np.isnan(measured[0]["around"]).all():
        figures.append(
            LineCharts(
                "around_needle",
                "Attention around the needle",
                "Mean weight that the queries of the answer give to the tokens around the needle's first (DroPE, "
                "Figure 8).",
                tuple(needles),
                "tokens from the needle's first",
                "weight",
            )
        )
    return figures


ANALYSIS = Analysis(
    "heads",
    "what each head attends to, by distance and by kind: positional, sink, semantic, retrieval",
    "p-RoPE, Figures 5, 7a and 9; DroPE, Figures 7 and 8; DoPE, Figure 2",
    _options,
    _run,
)
