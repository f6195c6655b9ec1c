"""How close a head's logits come to their upper bound, the product of the norms of query and key.

p-RoPE (Barbero et al. 2024), section D.1 and Tables 3 to 5.
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
from pe_lab.analysis.frequency_use import BAND_NAMES, bands, by_pair
from pe_lab.analysis.sequences import Sequences, add_arguments, check_length
from pe_lab.analysis.session import AnalysisSession
from pe_lab.attention.hooks import refuse_hooks
from pe_lab.attention.layer_encoding import encode_keys, encode_queries
from pe_lab.language_model import LanguageModel, Tokens
from pe_lab.model.layer_pass import LayerView, checked_layers
from pe_lab.model.shape import require_equal_heads
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts, layer_names
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import interval
from pe_lab.results.table import TextTable

FIRST = 8  # tokens of p-RoPE's Tables 3 to 5
TARGETS = ("self", "previous", "first")  # the keys whose logits are compared with their bounds


class LogitBounds(NamedTuple):
    """Logits of each query with three keys: its own token's, the previous token's, and the first token's.

    Logits are those of the softmax, scaled, without ALiBi's penalty. The bound of query i with key j is |q_i| |k_j|,
    scaled alike. A token without a previous one does not count there.

    Attributes:
      logit, bound: means over the tokens of a sequence; the axis of 3 is (self, previous, first).
      alignment: mean of logit / bound, the cosine of query and key, -1 to 1.
      tightest: the largest logit / bound of any token; above 1 by rounding alone.
      parts: means of each pair's part of the logit; they add up to `logit`.
      tokens: logits and bound of the first FIRST tokens, (bound with itself, self, previous): Tables 3 to 5.
    """

    logit: Float[np.ndarray, "B L H 3"]
    bound: Float[np.ndarray, "B L H 3"]
    alignment: Float[np.ndarray, "B L H 3"]
    tightest: Float[np.ndarray, "B L H 3"]
    parts: Float[np.ndarray, "B L H 3 R"]
    tokens: Float[np.ndarray, "B L H 3 first"]


def measure(lm: LanguageModel, tokens: Tokens, layers: Sequence[int] | None = None, **places: Any) -> LogitBounds:
    """The logits of each head against their Cauchy-Schwarz bounds, on a batch of sequences of at least two tokens.

    Arguments as in `frequency_use.measure`. In packed documents the first token is the document's.
    """
    chosen = checked_layers(lm.config.layers, layers)
    require_equal_heads(lm.config, chosen, "The bound of logits")
    found = lm.layer_pass(lm.sequences(tokens), _of_layer, chosen, **places)
    return LogitBounds(*(np.stack(arrays, 1) for arrays in zip(*found, strict=True)))


def _of_layer(view: LayerView, data: Any) -> tuple[jax.Array, ...]:
    B, T, H, K = view.query.shape
    refuse_hooks(view.encoding.hooks, "Bounds of logits are measured")
    query = encode_queries(view.query, view.encoding, view.key.shape[2])
    query = query.astype(jnp.float32) * view.encoding.scale(K)
    key = encode_keys(view.key, view.encoding, H)
    key = jnp.repeat(key.astype(jnp.float32), H // key.shape[2], axis=2)
    index = jnp.arange(T)
    if view.segments is None:
        begin = jnp.zeros((B, T), jnp.int32)
    else:
        new = view.segments != jnp.pad(view.segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        begin = jax.lax.cummax(jnp.where(new, index, 0), axis=1)
    visible = jnp.full((B, T), True) if view.window is None else index - begin < view.window
    own = jnp.full((B, T), True)
    previous = index - 1 >= begin if view.window is None else (index - 1 >= begin) & (view.window > 1)
    others = (key, jnp.roll(key, 1, axis=1), jnp.take_along_axis(key, begin[..., None, None], axis=1))
    columns = [_against(query, other, counts) for other, counts in zip(others, (own, previous, visible), strict=True)]
    logit, bound, alignment, tightest, parts, shown, shown_bound = (
        jnp.stack(column, 2) for column in zip(*columns, strict=True)
    )
    tokens = jnp.stack([shown_bound[:, :, 0], shown[:, :, 0], shown[:, :, 1]], 2)
    return logit, bound, alignment, tightest, parts, tokens


def _against(query: jax.Array, key: jax.Array, counts: jax.Array) -> tuple[jax.Array, ...]:
    """Means over the tokens that count, of the logits of each query with one key, and their bounds."""
    parts = by_pair(query, key)  # [B, T, H, R]
    logit = parts.sum(-1)
    bound = jnp.linalg.norm(query, axis=-1) * jnp.linalg.norm(key, axis=-1)
    cosine = logit / jnp.maximum(bound, 1e-30)
    weight = counts[..., None] / jnp.maximum(counts.sum(1), 1)[:, None, None]

    def mean(x: jax.Array) -> jax.Array:
        return (x * weight).sum(1)

    shown = jnp.where(counts[:, :FIRST, None], logit[:, :FIRST], jnp.nan).swapaxes(1, 2)
    tightest = jnp.where(counts[..., None], cosine, -jnp.inf).max(1)
    by_part = (parts * weight[..., None]).sum(1)
    return mean(logit), mean(bound), mean(cosine), tightest, by_part, shown, bound[:, :FIRST].swapaxes(1, 2)


# ---------------------------------------------------------------------------------------------------------------------
# The analysis

PROTOCOL = "logit_bounds-1"


def _options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, count=4)
    parser.add_argument("--layers", help="such as 0,2,8-11 (default: all)")
    parser.add_argument("--heads", help="LAYER.HEAD,... to list, such as 1.5,27.8 (default: the two most aligned)")


def _run(session: AnalysisSession) -> Findings:
    given = [session.heads(variant.lm) for variant in session.variants]
    check_length("logit_bounds", session.sequences, FIRST)

    def of_batch(lm: LanguageModel, batch: Sequences) -> dict[str, Any]:
        return measure(lm, batch.tokens, session.layers(lm), **batch.places)._asdict()

    measured = session.measure(PROTOCOL, of_batch, session.arguments.layers)
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


ANALYSIS = Analysis("p-RoPE, section D.1, Tables 3 to 5", _options, _run)
