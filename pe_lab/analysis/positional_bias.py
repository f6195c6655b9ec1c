"""The positional bias of attention heads, its gradients, and the prefix spread of hidden states, of a loaded model.

DroPE (Gelberg et al. 2025), Definition 3.1, Figure 4, Propositions 3.2 and 3.3, Theorem 3.4.

The positional bias of one head with weights a_ij is A = (1/T) sum_i sum_{j<=i} c_ij a_ij, with centred c: for every
query i, sum_j c_ij = 0. For the pattern of a head that attends to one key p(i) of the n_i that query i sees (itself,
or the token before), c is 1 at p(i) and -1/(n_i - 1) at every other visible key. c is 0 for a query that sees no
other key, or does not see p(i): the first token, and the first of a document. As the weights of a query add up to 1,

  A = (1/T) sum_i [a_i - (1 - a_i) / (n_i - 1)] = (1/T) sum_i (n_i a_i - 1) / (n_i - 1),  a_i = a_{i,p(i)},

which needs one logit and one logsumexp of each query: no [T, T] array. A is 0 for uniform attention; 1, less the
share of queries with c = 0, for a head with all its weight on p(i).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.sequences import Sequences, add_arguments, check_length
from pe_lab.analysis.session import AnalysisSession
from pe_lab.attention.hooks import refuse_hooks
from pe_lab.attention.key_block import FLOOR, AttentionInputs, masked_logits, padded
from pe_lab.attention.layer_encoding import LayerEncoding, encode_keys, encode_queries
from pe_lab.config import ModelConfig
from pe_lab.errors import ConfigError
from pe_lab.evaluation.variants import Variant
from pe_lab.language_model import LanguageModel, Tokens
from pe_lab.model import Model
from pe_lab.model.layer_pass import LayerView, checked_layers
from pe_lab.model.shape import require_one_shape
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts, layer_names
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import Interval, interval
from pe_lab.results.table import TextTable

PATTERNS = ("diagonal", "previous token")
LEAST = 3  # tokens: with fewer, no query can choose between its previous token and another one than itself
BLOCK = 128  # queries in a block of logits, which has all keys


class PositionalBias(NamedTuple):
    """The positional bias of each sequence, layer and head, toward each of the P = 2 `PATTERNS`; float32.

    Attributes:
      bias: A.
      query_gradient, key_gradient: Frobenius norms of the gradient of a head's A with respect to its own part [D, K]
        of W_Q, and the part of W_K that it reads. With grouped queries, that of W_K is of each query head apart. The
        input of the layer is fixed, so this is the direct path and not that through earlier layers.
      spread: the prefix spread of the layer's input, max_{j<=i} |mean_{k<=i} h_k - h_j|, within documents.
      hidden_norm: the root mean square of |h_j| over tokens.
    """

    bias: Float[np.ndarray, "B L H P"]
    query_gradient: Float[np.ndarray, "B L H P"]
    key_gradient: Float[np.ndarray, "B L H P"]
    spread: Float[np.ndarray, "B L"]
    hidden_norm: Float[np.ndarray, "B L"]


def measure(lm: LanguageModel, tokens: Tokens, layers: Sequence[int] | None = None, **places: Any) -> PositionalBias:
    """The positional bias of attention, its gradients, and the prefix spread, on a batch of sequences.

    From the input of each layer on, all is computed in float32, whatever the compute dtype: differences from uniform
    attention may be smaller than the rounding of bfloat16. Memory is linear in the length, time quadratic.

    Arguments as in `frequency_use.measure`; `UserError` for fewer than three tokens too.
    """
    ids = lm.sequences(tokens)
    if ids.shape[1] < LEAST:
        raise ConfigError(f"The positional bias needs sequences of at least {LEAST} tokens, not {ids.shape[1]}.")
    require_one_shape(lm.config, "The gradient of the positional bias")
    chosen = checked_layers(lm.config.layers, layers)
    of_layer = _BiasOfLayer(_model(dataclasses.replace(lm.config, dtype="float32")))
    found = lm.layer_pass(ids, of_layer, chosen, **places)
    return PositionalBias(*(np.stack(arrays, 1) for arrays in zip(*found, strict=True)))


@functools.cache
def _model(config: ModelConfig) -> Model:
    """One model for each shape, so that measurements of equal shapes share compiled programs."""
    return Model(config)


@dataclasses.dataclass(frozen=True)
class _BiasOfLayer:
    """The arrays of `PositionalBias` for one layer: [B, H, P] and [B]."""

    model: Model

    def __call__(self, view: LayerView, data: Any) -> tuple[jax.Array, ...]:
        # An accelerator would else round the operands of float32 products.
        with jax.default_matmul_precision("highest"):
            norm = jnp.sqrt((view.x.astype(jnp.float32) ** 2).sum(-1).mean(-1))
            return *self._bias_and_gradients(view), prefix_spread(view.x, view.segments), norm

    def _bias_and_gradients(self, view: LayerView) -> tuple[jax.Array, ...]:
        x, attention, encoding = view.x.astype(jnp.float32), view.params["attention"], view.encoding
        B, H, G = x.shape[0], view.query.shape[2], view.key.shape[2]
        refuse_hooks(encoding.hooks, "The gradient of the positional bias is measured")

        def encode(weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            block = self.model.block({**view.params, "attention": {**attention, **weights}})
            query, key, _ = block.attention.queries_keys_values(block.attention_input(x))
            query = encode_queries(query, encoding, G) * encoding.scale(query.shape[-1])
            key = encode_keys(key, encoding, H)
            return query, jnp.repeat(key, H // key.shape[2], axis=2)

        weights = {name: attention[name].astype(jnp.float32) for name in ("query", "key")}
        (query, key), to_weights = jax.vjp(encode, weights)
        bias, to_encoded = jax.vjp(functools.partial(_biases, encoding=encoding, view=view), query, key)
        flat = self.model.config.qk_norm.endswith("flat")
        # Of each key head one query head at a time; with `flat`, one head, since others' queries depend on its weights.
        chosen = _selections(B, np.arange(H) % (H if flat else H // G))

        def of_pattern(pattern: jax.Array) -> jax.Array:
            only = jnp.zeros(bias.shape).at[pattern].set(1.0)
            d_encoded = to_encoded(only)

            def of_selection(selected: jax.Array) -> jax.Array:
                (d_weights,) = to_weights(tuple(d * selected[:, None, :, None] for d in d_encoded))
                squares = {name: (d**2).sum((0, 2)) for name, d in d_weights.items()}
                return jnp.stack([squares["query"], jnp.repeat(squares["key"], H // G)])

            squares = jax.lax.map(of_selection, chosen)
            return jnp.sqrt(jnp.einsum("cbh,cwh->wbh", chosen, squares))

        gradients = jax.lax.map(of_pattern, jnp.arange(len(PATTERNS)))  # [P, 2, B, H]
        return jnp.moveaxis(bias, 0, -1), *jnp.moveaxis(gradients, 0, -1)


def _selections(batch: int, kinds: Int[np.ndarray, " H"]) -> Float[Array, "C B H"]:
    """Parts of a batch differentiated at once: one sequence, and the heads of one kind. 1 for these, else 0."""
    of_heads = np.equal.outer(np.unique(kinds), kinds)
    both = np.eye(batch)[:, None, :, None] * of_heads[None, :, None, :]
    return jnp.asarray(both.reshape(-1, batch, len(kinds)), jnp.float32)


def _biases(
    query: Float[Array, "B T H K"], key: Float[Array, "B T H K"], encoding: LayerEncoding, view: LayerView
) -> Float[Array, "P B H"]:
    """A of every pattern, sequence and head, from encoded, scaled queries and encoded keys of every query head.

    Each block of queries is computed again for the gradient (Chen et al. 2016), so no more than a block of logits is
    ever stored.
    """
    B, T, H, K = query.shape
    t = min(BLOCK, T)
    index = jnp.arange(T, dtype=jnp.int32)
    positions = index[None] if view.positions is None else view.positions
    inputs = AttentionInputs(
        slope=encoding.slope,
        query_positions=positions,
        key_positions=positions,
        query_segments=view.segments,
        key_segments=view.segments,
        window=view.window,
        soft_cap=encoding.soft_cap,
    )
    keys = key.transpose(0, 2, 1, 3)
    blocks = jnp.moveaxis(padded(query.transpose(0, 2, 1, 3), 2, t).reshape(B, H, 1, -1, t, K), 3, 0)

    @jax.checkpoint
    def of_block(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        begin, queries = block
        own = begin + jnp.arange(t, dtype=jnp.int32)
        these = inputs.of_tokens(lambda x: jnp.take(x, own, axis=1, mode="clip"), lambda x: x)
        logits = masked_logits(queries, keys, own[:, None] - index, these)[:, :, 0]
        logsumexp = jax.nn.logsumexp(logits, axis=-1)
        count = (logits[:, :1] > FLOOR).sum(-1).astype(jnp.float32)
        found = []
        for target in (own, own - 1):  # as in PATTERNS
            at = jnp.clip(target, 0, T - 1)[None, None, :, None]
            logit = jnp.take_along_axis(logits, at, axis=-1)[..., 0]
            counted = (logit > FLOOR) & (target >= 0) & (own < T) & (count > 1)
            weight = jnp.exp(logit - logsumexp)
            found.append(jnp.where(counted, (count * weight - 1) / jnp.maximum(count - 1, 1), 0).sum(-1))
        return jnp.stack(found)

    return jax.lax.map(of_block, (t * jnp.arange(len(blocks)), blocks)).sum(0) / T


def prefix_spread(x: Float[Array, "B T D"], segments: Int[Array, "B T"] | None = None) -> Float[Array, " B"]:
    """max_{j<=i} |mean_{k<=i} x_k - x_j| of each sequence, with j and k in the document of i; float32.

    DroPE, Theorem 3.4. Memory is linear in the length, time quadratic.
    """
    T = x.shape[1]
    t, index = min(BLOCK, T), jnp.arange(T, dtype=jnp.int32)
    x = x.astype(jnp.float32)
    x = x - x.mean(1, keepdims=True)  # changes no difference, and the rounding of their squares below
    squares = (x**2).sum(-1)

    def of_block(begin: jax.Array) -> jax.Array:
        own = jnp.minimum(begin + jnp.arange(t, dtype=jnp.int32), T - 1)
        seen = (own[:, None] >= index)[None]
        if segments is not None:
            seen = seen & (segments[:, own, None] == segments[:, None, :])
        seen = jnp.broadcast_to(seen, (len(x), t, T))
        mean = jnp.einsum("bts,bsd->btd", seen.astype(jnp.float32), x) / seen.sum(-1, keepdims=True)
        distance = (mean**2).sum(-1, keepdims=True) + squares[:, None] - 2 * jnp.einsum("btd,bsd->bts", mean, x)
        return jnp.where(seen, distance, 0).max((1, 2))

    with jax.default_matmul_precision("highest"):
        return jnp.sqrt(jax.lax.map(of_block, t * jnp.arange(-(-T // t))).max(0))


# ---------------------------------------------------------------------------------------------------------------------
# The analysis

PROTOCOL = "positional_bias-1"
MOST_LINES = 8  # layers in the figure of training steps


@dataclass(frozen=True)
class BiasGroup:
    """One line of the figures: a checkpoint under an encoding, or random initializations of one shape under one.

    Attributes:
      name: unique.
      layers: the measured ones.
      found: the arrays of `PositionalBias` [N, S, L, ...]: N initializations (1 for a checkpoint), S sequences.
      weights: equal for groups whose weights differ in nothing but the encoding that they are measured under.
      encoded: some layer has an encoding of positions; False: none has.
      series: equal for the checkpoints of one phase under one encoding.
      progress: (tokens of the phase, step); None where they are not known, or random.
    """

    name: str
    layers: tuple[int, ...]
    found: Mapping[str, np.ndarray]
    weights: str
    encoded: bool
    series: str = ""
    progress: tuple[int | None, int] | None = None

    def units(self, key: str) -> Float[np.ndarray, "U L *rest"]:
        """Independent values of one array: means over sequences of each initialization, or each sequence."""
        values = np.asarray(self.found[key], np.float64)
        return values.mean(1) if len(values) > 1 else values[0]

    def gradients(self) -> Float[np.ndarray, "U L P"]:
        """Norms with respect to W_Q and W_K together, mean over heads."""
        query, key = (np.asarray(self.found[f"{name}_gradient"], np.float64) for name in ("query", "key"))
        both = np.sqrt(query**2 + key**2).mean(-2)
        return both.mean(1) if len(both) > 1 else both[0]


def _options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, count=4)
    parser.add_argument("--layers", help="such as 0,2,8-11 (default: all)")


def _run(session: AnalysisSession) -> Findings:
    check_length("positional_bias", session.sequences, LEAST)

    def of_batch(lm: LanguageModel, batch: Sequences) -> dict[str, Any]:
        return measure(lm, batch.tokens, session.layers(lm), **batch.places)._asdict()

    groups = groups_of(session, session.measure(PROTOCOL, of_batch, session.arguments.layers))
    drawn = _without_middle_steps(groups)
    figures = [*_by_layer(drawn), *_by_step(groups), *_by_head(drawn)]
    sentences = [text for encoded, bare in _pairs(groups) for text in compare(encoded, bare)]
    sentences += [text for group in drawn for text in _sentences(group)]
    numbers = {f"{key}_{g}": value for g, group in enumerate(groups) for key, value in group.found.items()}
    axes = "initialization (1 for a checkpoint), sequence, layer"
    shapes = {
        "bias": f"[N, S, L, H, P] {axes}, query head, pattern ({', '.join(PATTERNS)})",
        "query_gradient": "[N, S, L, H, P] norm of the gradient of a head's bias with respect to its W_Q",
        "key_gradient": "[N, S, L, H, P] and to its W_K",
        "spread": f"[N, S, L] {axes}; prefix spread of the layer's input",
        "hidden_norm": "[N, S, L] root mean square norm of the layer's input",
    }
    metadata = {"groups": [{"name": group.name, "layers": group.layers} for group in groups], "patterns": PATTERNS}
    return Findings(tuple(sentences), _tables(groups), tuple(figures), numbers, shapes, metadata)


def groups_of(session: AnalysisSession, measured: Sequence[Mapping[str, np.ndarray]]) -> list[BiasGroup]:
    """The variants of a session with their arrays; initializations that differ in the seed alone are one group."""
    found: dict[str, list[tuple[Variant, str, Mapping[str, np.ndarray]]]] = {}
    random = session.arguments.init is not None
    for variant, name, arrays in zip(session.variants, session.names, measured, strict=True):
        same = f"{variant.lm.config} {variant.fingerprint(session.length)}" if random else name
        members = found.setdefault(same, [])
        # The same weights may be found twice: in two checkpoints of one shape.
        if variant.subject.path not in [known.subject.path for known, _, _ in members] or not random:
            members.append((variant, name, arrays))
    groups = []
    for members in found.values():
        first, name, arrays = members[0]
        chosen = session.layers(first.lm)
        schedule = first.at(session.length).schedule_for(session.length)
        arrays_of = (schedule.inv_freq, schedule.alibi_slope)  # a structure may be more general
        encoded = any(np.any(x) for x in arrays_of) or any(s.hooks for s in schedule.structure)
        stacked = {key: np.stack([one[key] for _, _, one in members]) for key in arrays}
        if random:
            seeds = "initialization 0" if len(members) == 1 else f"initializations 0 to {len(members) - 1}"
            groups.append(BiasGroup(f"{first.label} ({seeds})", chosen, stacked, str(first.lm.config), encoded))
            continue
        subject = first.subject
        series = f"{subject.run} {subject.checkpoint.metadata.get('phase', '')}, {first.label}"
        progress = (subject.tokens_trained, subject.checkpoint.step)
        groups.append(BiasGroup(name, chosen, stacked, subject.id, encoded, series, progress))
    names = [group.name for group in groups]
    return [
        g if names.count(g.name) == 1 else BiasGroup(**{**vars(g), "name": f"{g.name} #{n}"})
        for n, g in enumerate(groups)
    ]


def _pairs(groups: Sequence[BiasGroup]) -> Iterator[tuple[BiasGroup, BiasGroup]]:
    """Groups of the same weights: one with an encoding, one without any."""
    for one in groups:
        for other in groups:
            if one.encoded and not other.encoded and one.weights == other.weights and one.layers == other.layers:
                yield one, other


# ---------------------------------------------------------------------------------------------------------------------
# Sentences and tables


def of_norms(values: Float[np.ndarray, "n ..."]) -> Interval:
    """The geometric mean of positive values, with its 95% interval: norms and ratios are compared by factors."""
    around = interval(np.log(np.maximum(values, 1e-30)))
    return Interval(np.exp(around.mean), np.exp(around.low), np.exp(around.high))


def compare(encoded: BiasGroup, bare: BiasGroup) -> list[str]:
    """DroPE's Figure 4 in these numbers: gradients larger than without encoding, by a factor that grows with depth."""
    ratios = encoded.gradients() / np.maximum(bare.gradients(), 1e-30)
    depth, L = np.asarray(encoded.layers, np.float64), len(encoded.layers)
    drope = "DroPE's Figure 4, larger" if encoded.progress is None else "Larger"  # the figure is of initializations
    sentences = []
    for p, pattern in enumerate(PATTERNS):
        around = of_norms(ratios[..., p])
        some = sorted({0, L // 2, L - 1})
        places = ", ".join(f"{around[n].words()} in layer {encoded.layers[n]}" for n in some)
        lower = int((around.mean > 1).sum())
        decided = "" if np.isnan(around.low).all() else f" (interval above 1 in {int((around.low > 1).sum())})"
        sentence = (
            f"{encoded.name} over {bare.name}, {pattern}: norms of the bias's gradient are {places} times as large, "
            f"and larger in {lower} of {L} layers{decided}."
        )
        everywhere = _verdict(around.low.min() > 1, around.mean.min() > 1, around.high.min() < 1)
        sentence += f" {drope} in every layer: {everywhere}."
        if L > 1:
            centred = depth - depth.mean()
            fits = (np.log(ratios[..., p]) * centred).sum(-1, keepdims=True) / (centred**2).sum()
            slope = of_norms(np.exp(fits))
            grows = _verdict(slope.low[0] > 1, slope.mean[0] > 1, slope.high[0] < 1)
            sentence += f" A gap that grows with depth: {grows}; the ratio changes by {slope[0].words()} a layer."
        sentences.append(sentence)
    return sentences


def _verdict(surely: Any, on_average: Any, surely_not: Any) -> str:
    """What 95% intervals decide about a sentence; nothing without them."""
    if surely or surely_not:
        return "confirmed" if surely else "not confirmed"
    return f"undecided ({'so' if on_average else 'not so'} on average)"


def _sentences(group: BiasGroup) -> list[str]:
    """The most biased heads of a group (DroPE's Figure 7 takes one), and Theorem 3.4's spread."""
    parts = []
    around = interval(group.units("bias"))
    for p, pattern in enumerate(PATTERNS):
        layer, head = np.unravel_index(np.argmax(around.mean[..., p]), around.mean.shape[:2])
        parts.append(
            f"toward the {pattern} {around[layer, head, p].words()} in head {head} of layer {group.layers[layer]}"
        )
    spread = group.units("spread")
    growth = of_norms(spread / np.maximum(spread[:, :1], 1e-30))
    most = int(np.argmax(growth.mean))
    return [
        f"{group.name}: the largest bias is {' and '.join(parts)}; means over heads and layers are "
        f"{', '.join(f'{x:.3g}' for x in around.mean.mean((0, 1)))}.",
        f"{group.name}: the prefix spread of hidden states is at most {growth[most].words()} times that of layer "
        f"{group.layers[0]}'s input, in layer {group.layers[most]} (Theorem 3.4's constant for these weights).",
    ]


def _tables(groups: Sequence[BiasGroup]) -> tuple[TextTable, ...]:
    """Biases and gradients, and the spread, in the first, the middle and the last layer."""

    def cells(values: Float[np.ndarray, "U L"], summary: Any) -> list[str]:
        L = values.shape[1]
        around = summary(np.concatenate([values[:, [0, L // 2, L - 1]], values.mean(1, keepdims=True)], 1))
        ends = zip(around.mean, around.low, around.high, strict=True)
        return [f"{mean:.3g}" if np.isnan(low) else f"{mean:.3g} [{low:.2g}, {high:.2g}]" for mean, low, high in ends]

    places = ("first layer", "middle layer", "last layer", "all layers")
    rows, spreads = [], []
    for group in groups:
        for p, pattern in enumerate(PATTERNS):
            rows.append((group.name, pattern, "bias", *cells(group.units("bias").mean(2)[..., p], interval)))
            for kind, weight in (("query", "W_Q"), ("key", "W_K")):
                norms = group.units(f"{kind}_gradient").mean(2)[..., p]
                rows.append((group.name, pattern, f"gradient, {weight}", *cells(norms, of_norms)))
        spread, norm = group.units("spread"), group.units("hidden_norm")
        spreads.append((group.name, "spread", *cells(spread, of_norms)))
        spreads.append((group.name, "over the norm of hidden states", *cells(spread / norm, of_norms)))
    units = "sequences, or over initializations"
    return (
        TextTable(
            f"Positional bias and norms of its gradient, means over heads; 95% intervals over {units}",
            ("model", "pattern", "of", *places),
            tuple(rows),
            words=3,
        ),
        TextTable("Prefix spread of the input of a layer", ("model", "of", *places), tuple(spreads), words=2),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def _steps(groups: Sequence[BiasGroup]) -> dict[str, list[BiasGroup]]:
    """The series with several checkpoints, each in the order of steps."""
    found: dict[str, list[BiasGroup]] = {}
    for group in groups:
        if group.progress is not None:
            found.setdefault(group.series, []).append(group)
    ordered = {name: sorted(members, key=lambda g: g.progress[1]) for name, members in found.items()}
    return {name: members for name, members in ordered.items() if len(members) > 1}


def _without_middle_steps(groups: Sequence[BiasGroup]) -> list[BiasGroup]:
    """All groups but the checkpoints between the first and the last of a phase."""
    middle = {group.name for members in _steps(groups).values() for group in members[1:-1]}
    return [group for group in groups if group.name not in middle]


def _line(group: BiasGroup, values: Float[np.ndarray, "U L"], summary: Any) -> Line:
    around = summary(values)
    return Line(group.name, np.asarray(group.layers, np.float64), around.mean, around.low, around.high)


def _by_layer(groups: Sequence[BiasGroup]) -> list[Figure]:
    """Lines over layers: the gradient (Figure 4), the bias, and the prefix spread (Theorem 3.4)."""
    gradients, biases = (
        tuple((pattern, tuple(_line(g, of(g)[..., p], how) for g in groups)) for p, pattern in enumerate(PATTERNS))
        for of, how in ((lambda g: g.gradients(), of_norms), (lambda g: g.units("bias").mean(2), interval))
    )
    spread = (("prefix spread", tuple(_line(g, g.units("spread"), of_norms) for g in groups)),)
    relative = tuple(_line(g, g.units("spread") / g.units("hidden_norm"), of_norms) for g in groups)
    bands = "Bands are 95% intervals over initializations, or over sequences of one model."
    layer = "layer"
    return [
        LineCharts(
            "gradient_by_layer",
            "Gradient of the positional bias, by layer",
            f"Norm with respect to W_Q and W_K together, mean over heads (DroPE, Figure 4). {bands}",
            gradients,
            layer,
            "norm of the gradient",
            log_y=True,
        ),
        LineCharts(
            "bias_by_layer",
            "Positional bias, by layer",
            f"Mean over heads (DroPE, Definition 3.1): 0 for uniform attention, near 1 for all weight. {bands}",
            biases,
            layer,
            "positional bias",
        ),
        LineCharts(
            "prefix_spread",
            "Prefix spread of the input of each layer",
            f"The largest distance of a hidden state from the mean of a prefix with it (DroPE, Theorem 3.4). {bands}",
            spread,
            layer,
            "distance",
            log_y=True,
        ),
        LineCharts(
            "prefix_spread_relative",
            "Prefix spread relative to the norm of hidden states",
            f"The prefix spread, over the root mean square norm of the layer's input. {bands}",
            (("relative to the norm", relative),),
            layer,
            "ratio",
        ),
    ]


def _by_step(groups: Sequence[BiasGroup]) -> list[Figure]:
    """The gradient along a training, a line for each layer (some, in a deep model) and one for their mean."""
    series = _steps(groups)
    if not series:
        return []
    known = all(group.progress[0] is not None for members in series.values() for group in members)
    panels = []
    for name, members in series.items():
        x = np.array([group.progress[0 if known else 1] for group in members], np.float64)
        values = np.stack([group.gradients().mean(0) for group in members])  # [steps, L, P]
        layers = members[0].layers
        some = sorted({int(n) for n in np.linspace(0, len(layers) - 1, min(MOST_LINES, len(layers)))})
        for p, pattern in enumerate(PATTERNS):
            lines = [Line(f"layer {layers[n]}", x, values[:, n, p]) for n in some]
            lines.append(Line("mean of all layers", x, values[..., p].mean(1)))
            panels.append((f"{name}: {pattern}", tuple(lines)))
    return [
        LineCharts(
            "gradient_by_step",
            "Gradient of the positional bias along the training",
            "Norm with respect to W_Q and W_K together, mean over heads and sequences.",
            tuple(panels),
            "tokens of the phase" if known else "step of the phase",
            "norm of the gradient",
            log_y=True,
        )
    ]


def _by_head(groups: Sequence[BiasGroup]) -> list[Figure]:
    """Heat maps of layers and heads, one panel a group, for each pattern."""
    layers = sorted({n for group in groups for n in group.layers})
    heads = max(group.found["bias"].shape[-2] for group in groups)
    figures: list[Figure] = []
    for key, what, scale in (
        ("bias", "Positional bias", "diverging"),
        ("query_gradient", "Gradient norm of the positional bias with respect to W_Q", "sequential"),
        ("key_gradient", "Gradient norm of the positional bias with respect to W_K", "sequential"),
    ):
        for p, pattern in enumerate(PATTERNS):
            values = np.full((len(groups), len(layers), heads), np.nan)
            for g, group in enumerate(groups):
                mean = group.units(key).mean(0)[..., p]
                values[g, [layers.index(n) for n in group.layers], : mean.shape[1]] = mean
            figures.append(
                HeatMaps(
                    f"{key}_by_head_{pattern.split()[0]}",
                    f"{what}, toward the {pattern}",
                    "Each head's own bias (DroPE, Definition 3.1), mean over sequences and initializations.",
                    values,
                    tuple(group.name for group in groups),
                    layer_names(layers),
                    tuple(f"head {h}" for h in range(heads)),
                    "model",
                    "layer",
                    "query head",
                    "positional bias" if key == "bias" else "norm of the gradient",
                    scale,
                )
            )
    return figures


ANALYSIS = Analysis("DroPE, section 3: Definition 3.1, Figure 4, Propositions 3.2 and 3.3, Theorem 3.4", _options, _run)
