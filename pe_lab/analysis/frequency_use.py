"""How heads use the rotary frequencies: norms of each pair of channels, and each pair's part in the logits.

p-RoPE (Barbero et al. 2024), section 4 and Figures 3, 4, 6, 7b and D.2.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.sequences import Sequences, add_arguments
from pe_lab.analysis.session import AnalysisSession
from pe_lab.attention import LayerEncoding, attention
from pe_lab.attention.hooks import refuse_hooks
from pe_lab.attention.layer_encoding import encode_keys, encode_queries
from pe_lab.attention.statistics import ArrayLike
from pe_lab.errors import ConfigError
from pe_lab.evaluation.variants import Variant
from pe_lab.language_model import LanguageModel, Tokens
from pe_lab.model.layer_pass import LayerView, checked_layers
from pe_lab.model.shape import require_equal_heads
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts, layer_names
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import interval
from pe_lab.results.table import TextTable

BANDS = 4  # of pairs, from the fastest to the slowest
BAND_NAMES = ("fastest quarter", "second", "third", "slowest quarter")


class FrequencyUse(NamedTuple):
    """The use of each pair of channels, by sequence, layer and head; means over the tokens of a sequence.

    Attributes:
      inv_freq: [L, H, R] radians per token; 0 for a pair that does not rotate.
      query, key, value: 2-norms of each pair. Values are not rotated; their pairs are for comparison (D.2).
      attended: each pair's part of the mean logit of the attended keys: sum over keys of weight * part.
      average: the same for equal weights on all visible keys. `attended - average` adds up over pairs to what makes
        attended keys stand out.
    """

    inv_freq: Float[np.ndarray, "L H R"]
    query: Float[np.ndarray, "B L H R"]
    key: Float[np.ndarray, "B L G R"]
    value: Float[np.ndarray, "B L G R"]
    attended: Float[np.ndarray, "B L H R"]
    average: Float[np.ndarray, "B L H R"]


def measure(lm: LanguageModel, tokens: Tokens, layers: Sequence[int] | None = None, **places: Any) -> FrequencyUse:
    """The use of the rotary frequencies on a batch of sequences.

    By Cauchy-Schwarz, a pair adds at most the product of its norms in query and key to a logit (section 4). Time is
    about that of two forward passes, and memory linear in the length.

    Args:
      tokens: as `lm.logits` takes them.
      layers: None: all.
      places: `segments` and `positions` of the tokens, for packed documents.

    Raises:
      UserError: a layer that does not exist.
    """
    ids = lm.sequences(tokens)
    chosen = checked_layers(lm.config.layers, layers)
    require_equal_heads(lm.config, chosen, "The use of frequencies")
    found = lm.layer_pass(ids, _of_layer, chosen, **places)
    stacked = [np.stack(arrays, 1) for arrays in zip(*found, strict=True)]
    schedule = lm.schedule_for(ids.shape[1])
    return FrequencyUse(np.asarray(schedule.inv_freq)[list(chosen), :, : schedule.structure[chosen[0]].pairs], *stacked)


def pair_norms(x: Float[jax.Array, "B T heads K"]) -> Float[jax.Array, "B heads R"]:
    """The 2-norm of each pair of channels, mean over tokens, float32. Pair i is channels i and i + K/2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.sqrt(first**2 + second**2).mean(1)


def by_pair(x: Float[jax.Array, "... K"], y: Float[jax.Array, "... K"]) -> Float[jax.Array, "... R"]:
    """Each pair's part of the dot product of x and y, float32."""
    product = x.astype(jnp.float32) * y.astype(jnp.float32)
    first, second = jnp.split(product, 2, axis=-1)
    return first + second


def _of_layer(view: LayerView, data: Any) -> tuple[jax.Array, ...]:
    encoding, H, G = view.encoding, view.query.shape[2], view.key.shape[2]
    refuse_hooks(encoding.hooks, "The use of frequencies is measured")
    query = encode_queries(view.query, encoding, G)
    keys = encode_keys(view.key, encoding, H)
    common = dict(positions=view.positions, segments=view.segments, window=view.window)
    run = dict(implementation="chunked", chunk=view.block, backward=False, **common)
    # Attention whose values are the rotated keys: the mean attended key of every query.
    raw = jnp.repeat(view.key, keys.shape[2] // G, axis=2)
    attended = attention(view.query, raw, keys, encoding, **run)
    if view.window is None and view.segments is None:
        count = jnp.arange(1, keys.shape[1] + 1, dtype=jnp.float32)[None, :, None, None]
        average = jnp.cumsum(keys.astype(jnp.float32), axis=1) / count
        average = jnp.repeat(average, H // keys.shape[2], axis=2)
    else:
        average = attention(jnp.zeros_like(view.query), raw, keys, LayerEncoding(), **run)
    scale = encoding.scale(query.shape[-1])
    parts = (scale * by_pair(query, mean).mean(1) for mean in (attended, average))
    return pair_norms(view.query), pair_norms(view.key), pair_norms(view.value), *parts


def bands(values: Float[ArrayLike, "*axes R"]) -> Float[ArrayLike, "*axes 4"]:
    """Sums over four bands of pairs, from the fastest to the slowest."""
    np_ = jnp if isinstance(values, jax.Array) else np
    return np_.stack([part.sum(-1) for part in np_.array_split(values, BANDS, axis=-1)], -1)


# ---------------------------------------------------------------------------------------------------------------------
# The analysis

PROTOCOL = "frequency_use-1"


def _options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, count=4)
    parser.add_argument("--layers", help="such as 0,2,8-11 (default: all)")
    parser.add_argument("--heads", help="LAYER.HEAD,... to draw alone too, such as 1.5,27.8")


def _run(session: AnalysisSession) -> Findings:
    rotating = [_rotates(session, variant) for variant in session.variants]
    if not any(rotating):
        raise ConfigError(
            f"frequency_use: none of the chosen layers of {', '.join(session.names)} rotates. Name a model "
            "with RoPE, or --positional=rope:base=10000."
        )
    drawn = [session.heads(variant.lm) for variant in session.variants]

    def of_batch(lm: LanguageModel, batch: Sequences) -> dict[str, Any]:
        used = measure(lm, batch.tokens, session.layers(lm), **batch.places)
        return {name: value for name, value in used._asdict().items() if name != "inv_freq"}

    measured = session.measure(PROTOCOL, of_batch, session.arguments.layers)
    numbers: dict[str, np.ndarray] = {}
    figures: list[Figure] = []
    rows, sentences = [], []
    for v, (variant, name, found) in enumerate(zip(session.variants, session.names, measured, strict=True)):
        chosen = session.layers(variant.lm)
        schedule = variant.at(session.length).schedule_for(session.length)
        inv_freq = np.asarray(schedule.inv_freq)[list(chosen)]
        suffix = f"_{v}" if len(measured) > 1 else ""
        numbers |= {f"{key}{suffix}": value for key, value in found.items()} | {f"inv_freq{suffix}": inv_freq}
        figures += _figures(name if len(measured) > 1 else "", suffix, chosen, inv_freq, found)
        if single := drawn[v]:
            figures.append(_chosen_heads(name, suffix, chosen, single, found))
        rows += _rows(name, found)
        if rotating[v]:
            sentences += _sentences(name, chosen, found)
    figures.append(_overview(session.names, measured))
    table = TextTable(
        "Share of the norm, and part of the logit that makes attended keys stand out, by band of pairs (95% intervals)",
        ("model", "of", *BAND_NAMES),
        tuple(rows),
        words=2,
    )
    shapes = {
        "inv_freq": "[L, H, R] layer, query head, pair; radians per token",
        "query": "[S, L, H, R] sequence, layer, query head, pair; mean 2-norm over tokens",
        "key": "[S, L, G, R] sequence, layer, key head, pair",
        "value": "[S, L, G, R] sequence, layer, key head, pair",
        "attended": "[S, L, H, R] part of the mean logit of attended keys",
        "average": "[S, L, H, R] the same for equal weights on all visible keys",
    }
    return Findings(tuple(sentences), (table,), tuple(figures), numbers, shapes)


def _rotates(session: AnalysisSession, variant: Variant) -> bool:
    schedule = variant.at(session.length).schedule_for(session.length)
    return bool(np.any(np.asarray(schedule.inv_freq)[list(session.layers(variant.lm))] > 0))


def _share(values: Float[np.ndarray, "S L heads R"]) -> Float[np.ndarray, "S 4"]:
    """The share of each band in the sum over layers, heads and pairs."""
    totals = bands(values).sum((1, 2))
    return totals / totals.sum(-1, keepdims=True)


def _rows(name: str, found: dict[str, np.ndarray]) -> list[tuple[str, ...]]:
    parts = [(kind, _share(found[kind]), "{:.1%}") for kind in ("query", "key", "value")]
    contrast = bands(found["attended"] - found["average"]).mean((1, 2))
    parts.append(("logit, nats", contrast, "{:.2f}"))
    return [(name, kind, *(interval(values)[band].cell(form) for band in range(BANDS))) for kind, values, form in parts]


def _sentences(name: str, chosen: Sequence[int], found: dict[str, np.ndarray]) -> list[str]:
    """p-RoPE's statements about Gemma 7B (section 4 and D.2), in this model's numbers."""
    written = []
    for kind in ("query", "key", "value"):
        by_band = bands(found[kind]).sum(2)  # [S, L, 4]
        ratio = by_band[..., -1] / by_band[..., 0]
        more = int((ratio.mean(0) > 1).sum())
        written.append(
            f"{name}: the slowest quarter of pairs has {interval(ratio.mean(1)).words('{:.2f}')} times the {kind} norm "
            f"of the fastest; more in {more} of {len(chosen)} layers."
        )
        fast = by_band[..., 0] / by_band.sum(-1)
        if kind != "value" and len(chosen) > 4:
            ends, middle = interval(fast[:, [0, -1]].mean(1)), interval(fast[:, 1:-1].mean(1))
            written.append(
                f"{name}: the fastest quarter has {ends.words('{:.1%}')} of the {kind} norm in the first and the last "
                f"layer, and {middle.words('{:.1%}')} in the others."
            )
    contrast = bands(found["attended"] - found["average"]).mean((1, 2))
    share = interval(contrast / contrast.sum(-1, keepdims=True))
    written.append(
        f"{name}: of the logit by which attended keys stand out, the fastest quarter of pairs gives "
        f"{share[0].words('{:.0%}')} and the slowest {share[-1].words('{:.0%}')}."
    )
    return written


def _figures(
    name: str, suffix: str, chosen: Sequence[int], inv_freq: np.ndarray, found: dict[str, np.ndarray]
) -> list[Figure]:
    """Heat maps of one model: by layer (Fig. 3), and by layer and head (Fig. 4)."""
    of = f" of {name}" if name else ""
    pairs = tuple(_pair_name(i, w) for i, w in enumerate(inv_freq.max((0, 1)).tolist()))
    drawn: list[Figure] = []
    for kind in ("query", "key", "value"):
        mean = found[kind].mean(0)
        common = dict(columns=pairs, column_label="pair of channels, from fast to slow", value_label="mean 2-norm")
        drawn.append(
            HeatMaps(
                f"{kind}_norms_by_layer{suffix}",
                f"Norm of each pair of channels in {_plural(kind)}{of}, by layer",
                "Mean over tokens, heads and sequences (p-RoPE, Figure 3; for values Figure 11).",
                mean.mean(1)[None],
                ("all heads",),
                layer_names(chosen),
                row_label="layer",
                panel_label="",
                **common,
            )
        )
        heads = tuple(f"{'head' if kind == 'query' else 'key head'} {h}" for h in range(mean.shape[1]))
        drawn.append(
            HeatMaps(
                f"{kind}_norms{suffix}",
                f"Norm of each pair of channels in {_plural(kind)}{of}, by layer and head",
                "Mean over tokens and sequences (p-RoPE, Figures 4, 6 and 7b).",
                mean,
                layer_names(chosen),
                heads,
                row_label="head",
                panel_label="layer",
                **common,
            )
        )
    contrast = (found["attended"] - found["average"]).mean(0)
    drawn.append(
        HeatMaps(
            f"logit_by_pair{suffix}",
            f"What makes attended keys stand out{of}, by pair",
            "Each pair's part of the logit of attended keys, less its part for equal weights on all keys; nats. The "
            "parts of a head add up to the difference of its two mean logits.",
            contrast,
            layer_names(chosen),
            tuple(f"head {h}" for h in range(contrast.shape[1])),
            pairs,
            "layer",
            "head",
            "pair of channels, from fast to slow",
            "nats",
            "diverging",
        )
    )
    return drawn


def _chosen_heads(
    name: str, suffix: str, chosen: Sequence[int], drawn: Sequence[tuple[int, int]], found: dict[str, np.ndarray]
) -> LineCharts:
    """Norms by pair in the queries and keys of single heads, with intervals over sequences (Figures 6 and 7b)."""
    group = found["query"].shape[2] // found["key"].shape[2]
    panels = []
    for n, h in drawn:
        lines = []
        for kind, head in (("query", h), ("key", h // group)):
            around = interval(found[kind][:, chosen.index(n), head])
            lines.append(Line(_plural(kind), np.arange(around.mean.size) * 1.0, around.mean, around.low, around.high))
        panels.append((f"layer {n}, head {h}", tuple(lines)))
    return LineCharts(
        f"norms_of_heads{suffix}",
        f"Norm of each pair of channels in single heads of {name}",
        "Mean over tokens; bands are 95% intervals over sequences (p-RoPE, Figures 6 and 7b).",
        tuple(panels),
        "pair of channels, from fast to slow",
        "mean 2-norm",
    )


def _overview(names: Sequence[str], measured: Sequence[dict[str, np.ndarray]]) -> LineCharts:
    """The norm of each pair, mean over layers and heads, with intervals over sequences."""
    panels = []
    for kind in ("query", "key", "value"):
        lines = []
        for name, found in zip(names, measured, strict=True):
            around = interval(found[kind].mean((1, 2)))
            lines.append(Line(name, np.arange(found[kind].shape[-1]) * 1.0, around.mean, around.low, around.high))
        panels.append((_plural(kind), tuple(lines)))
    return LineCharts(
        "norms",
        "Norm of each pair of channels",
        "Mean over tokens, heads and layers; bands are 95% intervals over sequences.",
        tuple(panels),
        "pair of channels, from fast to slow",
        "mean 2-norm",
    )


def _plural(kind: str) -> str:
    return {"query": "queries", "key": "keys", "value": "values"}[kind]


def _pair_name(index: int, frequency: float) -> str:
    return f"{index} ({2 * np.pi / frequency:,.4g} tokens)" if frequency > 0 else f"{index} (unrotated)"


ANALYSIS = Analysis("p-RoPE, section 4, Figures 3, 4, 6, 7b and D.2", _options, _run)
