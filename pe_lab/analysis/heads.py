"""The kinds of heads: positional, sink, semantic, retrieval; before and after a scaling or a drop.

p-RoPE (Barbero et al. 2024), Figures 5, 7a and 9; DroPE, Figures 7 and 8; DoPE, Figure 2.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.frequency_use import bands, pair_norms
from pe_lab.analysis.sequences import SequenceQuestions, Sequences, add_arguments
from pe_lab.analysis.session import AnalysisSession
from pe_lab.attention.statistics import attention_rows, attention_statistics
from pe_lab.errors import ConfigError
from pe_lab.language_model import LanguageModel, Tokens
from pe_lab.model.layer_pass import LayerView, checked_layers
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts, layer_names
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import interval
from pe_lab.results.table import TextTable

NEAR = 32  # distances that have a bin each
SAMPLED = 512  # queries whose whole row of weights is binned by distance
MAP = 64  # rows and columns of a downsampled map of weights
AROUND = 32  # tokens before and after a needle's first token whose weights are kept

KINDS = ("diagonal", "previous token", "apostrophe-like", "retrieval", "sink", "semantic", "local", "mixed")
# What a kind means; the first that fits is a head's. `retrieval` needs prompts with needles.
THRESHOLDS = (
    "diagonal: mean weight on the token itself >= 0.5; previous token: on the token before >= 0.5; apostrophe-like: on "
    "the token before >= 0.5 for 2% to 50% of the queries, and the others' mean weight on the first token >= 0.5; "
    "retrieval: mean weight from the answer's queries to the needle's token >= 0.1; sink: on the first token >= 0.5; "
    f"semantic: on tokens {NEAR} or more away, the first one left out, >= 0.5; local: on the nearest {NEAR} tokens >= "
    "0.5; else mixed"
)


class Heads(NamedTuple):
    """What heads attend to; means over the queries of a sequence unless an axis of queries is named.

    Attributes:
      entropy: of the weights, nats.
      on_self, on_previous, on_first: weight of the token itself, the one before, and the first (of its document).
      largest: weight of the key with the largest.
      distance: weighted mean distance, tokens.
      previous_share: share of the queries whose weight on the token before is at least 0.5.
      first_elsewhere: mean weight on the first token of all other queries.
      far: weight on tokens at least NEAR away, without the first token.
      by_distance: weight by distance, in bins that begin at `edges`; estimated by `sampled_queries`, as is `far`.
      map: weights of these queries, summed over MAP ranges of keys and averaged over MAP ranges of queries.
      fast: the fastest quarter of pairs' share of the logits' bound, the sum over pairs of the product of their mean
        norms in query and key (p-RoPE, section 4).
      on_source, on_needle, needle_entropy, needle_first: of the queries that answer a question about a needle: weight
        on the token to repeat, on the whole needle, entropy, weight on the first token; NaN without needles.
      around: weight of these queries on the 2 * AROUND tokens around the needle's first.
    """

    entropy: Float[np.ndarray, "B L H"]
    on_self: Float[np.ndarray, "B L H"]
    on_previous: Float[np.ndarray, "B L H"]
    on_first: Float[np.ndarray, "B L H"]
    largest: Float[np.ndarray, "B L H"]
    distance: Float[np.ndarray, "B L H"]
    previous_share: Float[np.ndarray, "B L H"]
    first_elsewhere: Float[np.ndarray, "B L H"]
    far: Float[np.ndarray, "B L H"]
    by_distance: Float[np.ndarray, "B L H bins"]
    map: Float[np.ndarray, "B L H rows columns"]
    fast: Float[np.ndarray, "B L H"]
    on_source: Float[np.ndarray, "B L H"]
    on_needle: Float[np.ndarray, "B L H"]
    needle_entropy: Float[np.ndarray, "B L H"]
    needle_first: Float[np.ndarray, "B L H"]
    around: Float[np.ndarray, "B L H W"]


def edges(length: int) -> tuple[int, ...]:
    """Where bins of distance begin: 0, 1 .. NEAR - 1, then NEAR, 2 NEAR, 4 NEAR .. below the length."""
    octaves = []
    begin = NEAR
    while begin < length:
        octaves.append(begin)
        begin *= 2
    return (*range(min(NEAR, length)), *octaves)


def measure(
    lm: LanguageModel,
    tokens: Tokens,
    layers: Sequence[int] | None = None,
    *,
    questions: SequenceQuestions | None = None,
    length: int | None = None,
    **places: Any,
) -> Heads:
    """What each head attends to on a batch of sequences. Memory is linear in the length.

    Other arguments as in `frequency_use.measure`.

    Args:
      questions: about needles in the sequences.
      length: queries from here on are padding and do not count; None: there is none.
    """
    ids = lm.sequences(tokens)
    T = ids.shape[1] if length is None else length
    asked = None if questions is None else (questions.at, questions.source, questions.needle)
    of_layer, chosen = _HeadsOfLayer(T, ids.shape[1]), checked_layers(lm.config.layers, layers)
    found = lm.layer_pass(ids, of_layer, chosen, (*sampled_queries(T), asked), **places)
    return Heads(*(np.stack(arrays, 1) for arrays in zip(*found, strict=True)))


def sampled_queries(length: int) -> tuple[Int[np.ndarray, " Q"], Float[np.ndarray, " Q"]]:
    """At most SAMPLED queries, and how many of all queries each stands for, as shares that add up to 1.

    The first 2 * NEAR queries are all there: only they have the first token, where much attention goes, at a small
    distance. Of the others one is drawn from each of equal ranges. Even distances between them would make that token
    show at multiples of the distance.
    """
    if length <= SAMPLED:
        return np.arange(length, dtype=np.int32), np.full(length, 1 / length, np.float32)
    begins = np.linspace(2 * NEAR, length, SAMPLED - 2 * NEAR + 1).round().astype(np.int32)
    drawn = np.random.default_rng(0).integers(begins[:-1], begins[1:])
    queries = np.concatenate([np.arange(2 * NEAR), drawn]).astype(np.int32)
    return queries, (np.concatenate([np.ones(2 * NEAR), np.diff(begins)]) / length).astype(np.float32)


@dataclass(frozen=True)
class _HeadsOfLayer:
    """What `layer_pass` measures: queries up to `length` of sequences of `padded` tokens."""

    length: int
    padded: int

    def __call__(self, view: LayerView, data: Any) -> tuple[jax.Array, ...]:
        sampled, shares, asked = data
        common = dict(x=view.normed, positions=view.positions, segments=view.segments, window=view.window)
        every = None if self.length == self.padded else jnp.arange(self.length)
        found = attention_statistics(view.query, view.key, view.encoding, queries=every, block=view.block, **common)
        means = [getattr(found, name).mean(-1) for name in Heads._fields[:6]]
        at_previous = found.on_previous >= 0.5
        elsewhere = ~at_previous
        first = jnp.where(elsewhere, found.on_first, 0).sum(-1) / jnp.maximum(elsewhere.sum(-1), 1)
        binned = self._binned(view, sampled, shares, common)
        query, key = (pair_norms(x[:, : self.length]) for x in (view.query, view.key))
        bound = bands(query * jnp.repeat(key, query.shape[1] // key.shape[1], axis=1))
        fast = bound[..., 0] / jnp.maximum(bound.sum(-1), 1e-30)
        return *means, at_previous.mean(-1), first, *binned, fast, *self._needles(view, asked)

    def _binned(
        self, view: LayerView, sampled: jax.Array, shares: jax.Array, common: Mapping[str, Any]
    ) -> tuple[jax.Array, ...]:
        """`far`, `by_distance` and `map`, from rows of weights, NEAR queries at a time."""
        T, count = self.length, sampled.shape[0]
        ends = jnp.asarray([*edges(T)[1:], T])  # of the bins of distance
        size = min(NEAR, count)
        queries = jnp.pad(sampled, (0, -count % size), mode="edge").reshape(-1, size)
        weights = jnp.pad(shares, (0, -count % size)).reshape(queries.shape)
        column = jax.nn.one_hot(jnp.minimum(jnp.arange(self.padded) * MAP // T, MAP - 1), MAP)

        def of_block(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            at, share = block
            rows = attention_rows(view.query, view.key, view.encoding, rows=at, **common) * share[:, None]
            # Weight up to each key, and of it what is nearer than the end of each bin.
            upto = jnp.pad(jnp.cumsum(rows, axis=-1), ((0, 0),) * 3 + ((1, 0),))
            before = jnp.maximum(at[:, None] + 1 - ends, 0)
            own = jnp.take_along_axis(upto, at[None, None, :, None] + 1, axis=-1)
            nearer = own - jnp.take_along_axis(upto, before[None, None], axis=-1)
            by_distance = jnp.diff(nearer, prepend=0, axis=-1)
            begin = jnp.zeros((1, size), jnp.int32) if view.segments is None else document_begin(at, view.segments)
            begin = jnp.broadcast_to(begin, (rows.shape[0], size))
            first = jnp.take_along_axis(rows, begin[:, None, :, None], axis=-1)[..., 0]
            far = by_distance[..., NEAR:].sum(-1) - jnp.where((begin <= at - NEAR)[:, None], first, 0)
            return far.sum(-1), by_distance.sum(2), jnp.einsum("bhqs,sc->bhqc", rows, column, precision="highest")

        far, by_distance, maps = jax.lax.map(of_block, (queries, weights))
        maps = jnp.moveaxis(maps, 0, 2)
        maps = maps.reshape(*maps.shape[:2], -1, MAP)[:, :, :count]
        row = jax.nn.one_hot(jnp.minimum(sampled * MAP // T, MAP - 1), MAP)
        row = row / jnp.maximum((row * shares[:, None]).sum(0), 1e-30)
        return far.sum(0), by_distance.sum(0), jnp.einsum("bhqc,qr->bhrc", maps, row)

    def _needles(self, view: LayerView, asked: Any) -> tuple[jax.Array, ...]:
        B, H = view.query.shape[0], view.query.shape[2]
        if asked is None:
            missing = jnp.full((B, H), jnp.nan)
            return *[missing] * 4, jnp.full((B, H, 2 * AROUND), jnp.nan)
        at, source, needle = asked
        rows = question_rows(view, at)
        index = jnp.arange(self.padded)
        on_source = jnp.take_along_axis(rows, source[:, None, :, None], axis=-1)[..., 0].mean(-1)
        within = (index >= needle[..., :1]) & (index < needle[..., 1:])  # [B, Q, T]
        on_needle = jnp.einsum("bhqs,bqs->bhq", rows, within.astype(jnp.float32), precision="highest").mean(-1)
        entropy = -jnp.where(rows > 0, rows * jnp.log(jnp.maximum(rows, 1e-37)), 0).sum(-1).mean(-1)
        places = needle[:, :, 0, None] + jnp.arange(-AROUND, AROUND)
        visible = (places >= 0) & (places < self.padded)
        around = jnp.take_along_axis(rows, jnp.clip(places, 0, self.padded - 1)[:, None], axis=-1)
        around = jnp.where(visible[:, None], around, jnp.nan).mean(2)
        return on_source, on_needle, entropy, rows[..., 0].mean(-1), around


def question_rows(view: LayerView, at: Int[jax.Array, "B Q"]) -> Float[jax.Array, "B H Q T"]:
    """The attention weights of a layer from queries `at` of each sequence."""
    B = view.query.shape[0]
    own = {"x": view.normed, "positions": view.positions, "segments": view.segments}
    batch = view.query, view.key, {"cos": view.encoding.cos, "sin": view.encoding.sin}, own

    def rows_of(b: int) -> jax.Array:
        # What all sequences share has a first axis of 1.
        query, key, rotation, places = jax.tree.map(lambda x: x[b : b + 1] if len(x) == B else x, batch)
        encoding = dataclasses.replace(view.encoding, **rotation)
        return attention_rows(query, key, encoding, rows=at[b], window=view.window, **places)

    # Each sequence has queries of its own; a batch has one sequence for each device.
    return jnp.concatenate([rows_of(b) for b in range(B)])


def document_begin(at: jax.Array, segments: jax.Array) -> jax.Array:
    """[B, Q]: the index of the first token of each query's document."""
    return jnp.argmax(segments[:, at, None] == segments[:, None, :], axis=-1)


def clarity(means: Mapping[str, Float[np.ndarray, "L H"]]) -> dict[str, Float[np.ndarray, "L H"]]:
    """How clearly each head is of each kind, from means over sequences."""
    return {
        "diagonal": means["on_self"],
        "previous token": means["on_previous"],
        "apostrophe-like": means["previous_share"] * means["first_elsewhere"],
        "retrieval": np.nan_to_num(means["on_source"]),
        "sink": means["on_first"],
        "semantic": means["far"],
        "local": means["by_distance"][..., :NEAR].sum(-1),
        "mixed": means["entropy"],
    }


def kinds(means: Mapping[str, Float[np.ndarray, "L H"]]) -> np.ndarray:
    """The index in KINDS of each head's kind [L, H], by THRESHOLDS, from means over sequences."""
    fits = {kind: clear >= (0.1 if kind == "retrieval" else 0.5) for kind, clear in clarity(means).items()}
    share = means["previous_share"]
    fits["apostrophe-like"] = (share >= 0.02) & (share <= 0.5) & (means["first_elsewhere"] >= 0.5)
    fits["mixed"] = np.ones(share.shape, bool)
    return np.argmax(np.stack([fits[kind] for kind in KINDS]), axis=0)


# ---------------------------------------------------------------------------------------------------------------------
# The analysis

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


def _run(session: AnalysisSession) -> Findings:
    shapes = {(lm.config.layers, lm.config.heads) for lm in (variant.lm for variant in session.variants)}
    if len(shapes) > 1:
        raise ConfigError("heads compares heads one by one; these models have different numbers of them.")
    drawn, chosen = session.heads(session.variants[0].lm), session.layers(session.variants[0].lm)
    length = int(session.sequences.lengths.min())

    def of_batch(lm: LanguageModel, batch: Sequences) -> Mapping[str, np.ndarray]:
        found = measure(lm, batch.tokens, chosen, questions=batch.questions, length=length, **batch.places)
        return found._asdict()

    measured = session.measure(PROTOCOL, of_batch, [session.arguments.layers, length])
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
    clear = clarity(means)
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


ANALYSIS = Analysis("p-RoPE, Figures 5, 7a and 9; DroPE, Figures 7 and 8; DoPE, Figure 2", _options, _run)
