"""What the heads that an entropy chooses do: their attention, and the directions of their queries.

A part of the analysis `head_entropy`, of its `--selected`. DoPE (Xiong et al. 2025), sections 5.4 and 5.5, Figures 2
to 6. Where the paper leaves something open:

- Figure 2 compares "all heads and top-16 heads (depth 0)" without naming the queries. Here they are those that answer
  the question about the needle; of text, the last NEAR tokens. Each end of a score is compared with all other heads.
- Figures 3 to 6 show "the cosine similarity between the query vectors of tokens [...] and the eigenvectors
  corresponding to their full 128 hidden-dimensional eigenvalues". Here the queries are rotated, as in eq. 23, and the
  eigenvectors are those of the Gram matrix of the same queries. The numbers without the rotation tell what it adds.
- "The first few of the total dimensions" are an eighth of the eigenvectors, 16 of the paper's 128. The squared cosines
  of a token with all eigenvectors add up to 1, so equal directions have an eighth of them there.
- "Clear periodicity": the share of the cosines' variation along the positions that is in one period, see `periodicity`.
- Figure 6 is a "low truncated matrix entropy example" in its caption, and a head of "high truncated matrix entropy" in
  section 5.5. Both ends are measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Array, Float, Int

from pe_lab.analysis.heads import NEAR, document_begin, question_rows
from pe_lab.analysis.sequences import SequenceQuestions, Sequences
from pe_lab.analysis.session import AnalysisSession
from pe_lab.attention.layer_encoding import encode_queries
from pe_lab.errors import ConfigError
from pe_lab.evaluation.variants import Variant
from pe_lab.language_model import LanguageModel, Tokens
from pe_lab.model.layer_pass import LayerView, checked_layers, hook_encoded
from pe_lab.model.shape import require_equal_heads
from pe_lab.positional import select_heads
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts
from pe_lab.results.statistics import Interval, interval
from pe_lab.results.table import TextTable

PLACES = 64  # ranges of keys whose weights are added up, beside the first token
RANGES = 128  # ranges of tokens whose cosines are averaged for a map
CYCLES = 4  # periods in a sequence from which on a variation counts as periodic
LEAST = 16  # tokens of a sequence that can have them
FEW = 8  # "the first few" eigenvectors are one part in FEW of them
PROTOCOL = "chosen_heads-1"


class HeadUse(NamedTuple):
    """What the heads of B sequences do in L layers.

    Attributes:
      entropy: of the attention weights, nats; this and the next four are means over the queries that answer.
      first, near: weight on the first token (of the query's document), and on the nearest NEAR tokens without it.
      needle: weight on the needle's tokens that the answer repeats, where they are neither; NaN of text.
      by_place: weight on the first token of the sequence, and on PLACES equal ranges of the tokens.
      mass: squared cosine of each eigenvector with the rotated queries, a mean over tokens; the sum is 1.
      mass_unrotated: of the unrotated queries with the eigenvectors of their own Gram matrix.
      peak, peak_unrotated: the share of the cosines' variation in one period, see `periodicity`.
      period: of the strongest variation of the rotated queries' cosines, tokens.
    """

    entropy: Float[np.ndarray, "B L H"]
    first: Float[np.ndarray, "B L H"]
    near: Float[np.ndarray, "B L H"]
    needle: Float[np.ndarray, "B L H"]
    by_place: Float[np.ndarray, "B L H places"]
    mass: Float[np.ndarray, "B L H K"]
    mass_unrotated: Float[np.ndarray, "B L H K"]
    peak: Float[np.ndarray, "B L H"]
    peak_unrotated: Float[np.ndarray, "B L H"]
    period: Float[np.ndarray, "B L H"]


def measure(
    lm: LanguageModel,
    tokens: Tokens,
    layers: Sequence[int] | None = None,
    *,
    questions: SequenceQuestions | None = None,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
    **places: Any,
) -> HeadUse:
    """What each head attends to where it answers, and along which directions its queries lie.

    Memory is linear in the length. Other arguments as in `frequency_use.measure`.

    Args:
      questions: about needles in the sequences; None: the queries are the last NEAR tokens of each sequence.
      lengths: tokens of each sequence that count, from its first; None: all.

    Raises:
      UserError: a layer that does not exist, heads of different sizes, or a sequence of fewer than LEAST tokens.
    """
    ids = lm.sequences(tokens)
    chosen = checked_layers(lm.config.layers, layers)
    require_equal_heads(lm.config, chosen, "The directions of queries")
    counted = np.full(len(ids), ids.shape[1], np.int32) if lengths is None else np.asarray(lengths, np.int32)
    if counted.min() < LEAST:
        raise ConfigError(f"A sequence has {counted.min()} tokens, too few for a period: give at least {LEAST}.")
    if questions is None:
        asked = (np.maximum(counted[:, None] - np.arange(NEAR, 0, -1), 0), None)
    else:
        asked = (np.asarray(questions.at, np.int32), np.asarray(questions.needle, np.int32))
    found = lm.layer_pass(ids, _of_layer, chosen, (counted, *asked), **places)
    return HeadUse(*(np.stack(arrays, 1) for arrays in zip(*found, strict=True)))


def similarity_maps(
    lm: LanguageModel,
    tokens: Tokens,
    heads: Sequence[tuple[int, int]],
    lengths: Int[Array | np.ndarray, " B"] | None = None,
    **places: Any,
) -> Float[np.ndarray, "B heads ranges K"]:
    """Cosines of the rotated queries of (layer, head) with the eigenvectors, means over RANGES equal ranges of tokens.

    An eigenvector's sign is that with a positive largest component. Other arguments as in `measure`.
    """
    ids = lm.sequences(tokens)
    chosen = checked_layers(lm.config.layers, [n for n, _ in heads])
    counted = np.full(len(ids), ids.shape[1], np.int32) if lengths is None else np.asarray(lengths, np.int32)
    found = dict(zip(chosen, lm.layer_pass(ids, _map_of_layer, chosen, counted, **places), strict=True))
    return np.stack([found[n][:, h] for n, h in heads], 1)


# ---------------------------------------------------------------------------------------------------------------------
# In a layer


def _of_layer(view: LayerView, data: Any) -> tuple[jax.Array, ...]:
    lengths, at, needle = data
    rotated, unrotated = (_directions(x, lengths, view.block) for x in (_rotated(view), view.query))
    return *_attention(view, lengths, at, needle), rotated[0], unrotated[0], rotated[1], unrotated[1], rotated[2]


def _rotated(view: LayerView) -> Float[jax.Array, "B T H K"]:
    return encode_queries(hook_encoded(view)[0], view.encoding, view.key.shape[2])


def _attention(view: LayerView, lengths: jax.Array, at: jax.Array, needle: jax.Array | None) -> tuple[jax.Array, ...]:
    """The first five fields of `HeadUse`."""
    rows = question_rows(view, at)  # [B, H, Q, T]
    B, _, Q, T = rows.shape
    index, own = jnp.arange(T), at[..., None]
    begin = jnp.zeros((B, Q, 1), jnp.int32)
    if view.segments is not None:
        begin = jax.vmap(lambda a, s: document_begin(a, s[None])[0])(at, view.segments)[..., None]
    on_first = index == begin
    on_needle = jnp.zeros((B, Q, T), bool)
    if needle is not None:
        on_needle = (index >= needle[..., :1]) & (index < needle[..., 1:]) & ~on_first
    on_near = (index > own - NEAR) & (index <= own) & ~on_first & ~on_needle
    first, near, found = (
        jnp.einsum("bhqs,bqs->bh", rows, those.astype(jnp.float32), precision="highest") / Q
        for those in (on_first, on_near, on_needle)
    )
    if needle is None:
        found = jnp.full_like(found, jnp.nan)
    entropy = -jnp.where(rows > 0, rows * jnp.log(jnp.maximum(rows, 1e-37)), 0).sum(-1).mean(-1)
    place = jnp.where(index == 0, 0, jnp.minimum(1 + index * PLACES // lengths[:, None], PLACES))
    by_place = jnp.einsum("bhs,bsp->bhp", rows.mean(2), jax.nn.one_hot(place, PLACES + 1), precision="highest")
    return entropy, first, near, found, by_place


def gram(x: Float[Array, "B T heads K"], lengths: Int[Array, " B"], block: int) -> Float[Array, "B heads K K"]:
    """The sum of outer products over the first `lengths` tokens (eq. 23 for all bands together), float32."""
    B, T, heads, K = x.shape
    block = min(block, T)

    def add(total: jax.Array, first: jax.Array) -> tuple[jax.Array, None]:
        start = jnp.minimum(first, T - block)  # the last block begins earlier, and skips what was counted
        at = start + jnp.arange(block)
        counted = (at >= first) & (at < lengths[:, None])
        part = jax.lax.dynamic_slice_in_dim(x, start, block, axis=1).astype(jnp.float32)
        part = jnp.where(counted[:, :, None, None], part, 0)
        return total + jnp.einsum("bthk,bthl->bhkl", part, part, precision="highest"), None

    return jax.lax.scan(add, jnp.zeros((B, heads, K, K), jnp.float32), jnp.arange(0, T, block))[0]


def cosines(x: Float[Array, "B T heads K"], lengths: Int[Array, " B"], block: int) -> Float[jax.Array, "B T heads K"]:
    """The cosine of each vector with each eigenvector of their Gram matrix, the largest eigenvalue first.

    Padding has 0.
    """
    vectors = jnp.linalg.eigh(gram(x, lengths, block))[1][..., ::-1]
    largest = jnp.take_along_axis(vectors, jnp.abs(vectors).argmax(-2, keepdims=True), axis=-2)
    vectors = jnp.where(largest < 0, -vectors, vectors)
    x = x.astype(jnp.float32)
    unit = x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-30)
    found = jnp.einsum("bthk,bhkl->bthl", unit, vectors, precision="highest")
    return jnp.where((jnp.arange(x.shape[1]) < lengths[:, None])[..., None, None], found, 0)


def _directions(x: jax.Array, lengths: jax.Array, block: int) -> tuple[jax.Array, ...]:
    """`mass`, `peak` and `period` of a layer."""
    found = cosines(x, lengths, block)
    return (found**2).sum(1) / lengths[:, None, None], *periodicity(found, lengths)


def periodicity(
    signals: Float[Array, "B T heads K"], lengths: Int[Array, " B"]
) -> tuple[Float[jax.Array, "B heads"], Float[jax.Array, "B heads"]]:
    """How much of the variation of K signals along T tokens is in one period each, and the strongest period in tokens.

    The power of a signal is that of its Fourier transform, without its mean and under Hann's window, which keeps a slow
    drift from passing for a short period. A period's power is that of its frequency and of the two beside it, where the
    window leaves at least 97% of a sine. The share is the sum over signals of the power of each one's strongest period
    over the sum of all power. Periods are those of which at least CYCLES fit into T. White noise has a share of
    about 3 ln(T / 2) / T.
    """
    B, T = signals.shape[:2]
    at = jnp.arange(T, dtype=jnp.float32)
    window = jnp.where(at < lengths[:, None], jnp.sin(jnp.pi * (at + 0.5) / lengths[:, None]) ** 2, 0)[..., None]

    def of_head(signal: Float[jax.Array, "B T K"]) -> tuple[jax.Array, jax.Array]:
        mean = signal.sum(1, keepdims=True) / lengths[:, None, None]
        power = jnp.abs(jnp.fft.rfft((signal - mean) * window, axis=1)) ** 2
        three = power[:, CYCLES - 1 : -2] + power[:, CYCLES:-1] + power[:, CYCLES + 1 :]
        share = three.max(1).sum(-1) / jnp.maximum(power[:, 1:].sum((1, 2)), 1e-30)
        return share, T / (CYCLES + three.max(-1).argmax(1))

    share, period = jax.lax.map(of_head, jnp.moveaxis(signals, 2, 0))
    return share.T, period.T.astype(jnp.float32)


def _map_of_layer(view: LayerView, lengths: jax.Array) -> Float[jax.Array, "B H ranges K"]:
    found = cosines(_rotated(view), lengths, view.block)
    T = found.shape[1]
    count = min(RANGES, T)
    place = jax.nn.one_hot(jnp.arange(T) * count // lengths[:, None], count)  # padding is beyond all ranges
    tokens = jnp.maximum(place.sum(1), 1)[:, None, :, None]
    return jnp.einsum("bthk,btr->bhrk", found, place, precision="highest") / tokens


# ---------------------------------------------------------------------------------------------------------------------
# What was found: a part of the analysis `head_entropy`

SCORES = {"vanilla": "matrix entropy", "16": "truncated matrix entropy"}  # of section 5.5, by rank
ENDS = {"lowest": "ascending", "highest": "descending"}
PAPER = "DoPE, sections 5.4 and 5.5"
Group = Sequence[tuple[int, int]]  # (layer, head) of some heads


class SelectedHeads(NamedTuple):
    """The part of one variant's findings that is about chosen heads."""

    numbers: dict[str, np.ndarray]
    tables: list[TextTable]
    figures: list[Figure]
    sentences: list[str]


SHAPES = {
    **{name: "[S, L, H] sequence, layer, query head" for name in HeadUse._fields},
    "by_place": "[S, L, H, 1 + places] attention on the first token, and on equal ranges of the tokens",
    "mass": "[S, L, H, K] squared cosine of rotated queries with each eigenvector, the largest eigenvalue first",
    "mass_unrotated": "[S, L, H, K] the same of unrotated queries, with eigenvectors of their own",
    "similarity": "[4, ranges, K] cosines of four heads in the first sequence, means over ranges of tokens",
    "heads": "[4, 2] layer and head of the four",
}


def check_count(count: int, variants: Sequence[Variant]) -> None:
    """Raises a `ConfigError` if a model has too few heads for two ends of `count`."""
    for variant in variants:
        total = variant.lm.config.layers * variant.lm.config.heads
        if 2 * count > total:
            raise ConfigError(
                f"--selected={count}: {variant.label} has {total} heads, too few for {count} at each end of a score. "
                f"Give at most {total // 2}."
            )


def examine(
    session: AnalysisSession, v: int, scores: Mapping[str, Float[np.ndarray, "S L H"]], criterion: str, count: int
) -> SelectedHeads:
    """What the heads at both ends of the scores of SCORES do in the session's variant v.

    Args:
      scores: by rank.
      criterion: their stage and indicator, such as post_ntk_key.
      count: heads at each end, 16 in the paper.
    """
    alone = dataclasses.replace(session, variants=[session.variants[v]], names=[session.names[v]])

    def of_batch(lm: LanguageModel, batch: Sequences) -> Mapping[str, np.ndarray]:
        return measure(lm, batch.tokens, questions=batch.questions, lengths=batch.lengths, **batch.places)._asdict()

    use = HeadUse(**alone.measure(PROTOCOL, of_batch, None, session.sequences)[0])
    means = {rank: scores[rank].astype(np.float64).mean(0) for rank in SCORES}
    groups = {(rank, end): select_heads(means[rank], count, order) for rank in SCORES for end, order in ENDS.items()}
    drawn = {(rank, end): select_heads(means[rank], 1, order)[0] for rank in SCORES for end, order in ENDS.items()}
    one = session.sequences.batch([0])

    def maps_of(lm: LanguageModel, batch: Sequences) -> Mapping[str, np.ndarray]:
        return {"map": similarity_maps(lm, batch.tokens, [*drawn.values()], batch.lengths, **batch.places)}

    (found,) = alone.measure(f"{PROTOCOL}-maps", maps_of, [list(head) for head in drawn.values()], one)
    session.reused = alone.reused
    several = len(session.variants) > 1
    suffix, of = (f"_{v}", f" of {session.names[v]}") if several else ("", "")
    numbers = {f"{key}{suffix}": x for key, x in use._asdict().items() if np.isfinite(x).any()}
    numbers |= {f"similarity{suffix}": found["map"][0], f"heads{suffix}": np.array([*drawn.values()])}
    statements = _statements(use, groups, drawn)
    tables = [
        _attention_table(use, groups, f"chosen by {criterion}{of}"),
        _direction_table(use, groups, drawn, f"chosen by {criterion}{of}"),
        _correlations(use, means, f"by {criterion}{of}"),
        TextTable(
            f"What DoPE writes of its Figures 2 to 6, and what is so of heads chosen by {criterion}{of} (95% intervals "
            "over sequences)",
            ("the paper's words", "measured", "number", "here"),
            tuple(statements),
            words=2,
        ),
    ]
    figures = _figures(session.sequences, use, groups, drawn, found["map"][0], criterion, suffix, of)
    return SelectedHeads(numbers, tables, figures, [_summary(session.names[v], statements, criterion)])


def _summary(name: str, statements: Sequence[tuple[str, ...]], criterion: str) -> str:
    counts = {word: sum(row[-1] == word for row in statements) for word in HERE}
    listed = ", ".join(f"{count} {word}" for word, count in counts.items())
    return f"{name}, heads chosen by {criterion}: of {len(statements)} statements of {PAPER}, as measured, {listed}."


def _of(values: Float[np.ndarray, "S L H"], heads: Group, others: bool = False) -> Float[np.ndarray, " S"]:
    """The mean over some heads, or over all others, of each sequence."""
    mask = np.zeros(values.shape[1:], bool)
    mask[tuple(np.array(heads).T)] = True
    return values[:, ~mask if others else mask].astype(np.float64).mean(1)


def few(use: HeadUse, rotated: bool = True) -> Float[np.ndarray, "S L H"]:
    """The share of the squared cosines in the first eighth of the eigenvectors."""
    mass = use.mass if rotated else use.mass_unrotated
    return mass[..., : max(mass.shape[-1] // FEW, 1)].sum(-1)


HERE = ("so here", "not so here", "not settled")


def _here(around: Interval, sign: int = 1) -> str:
    low, high = sorted((sign * float(around.low), sign * float(around.high)))
    return HERE[0] if low > 0 else HERE[1] if high < 0 else HERE[2]


def _statements(
    use: HeadUse, groups: Mapping[tuple[str, str], Group], drawn: Mapping[tuple[str, str], tuple[int, int]]
) -> list[tuple[str, ...]]:
    """(the paper's words, what was measured, the number, whether it is so) of each sentence that numbers can test."""
    rows: list[tuple[str, ...]] = []
    quoted = ""

    def add(words: str, measured: str, values: np.ndarray, sign: int = 1, against: float = 0.0) -> None:
        nonlocal quoted
        around = interval(values)
        number = around.words("{:.3f}") if against else around.words("{:+.3f}")
        rows.append(
            ("" if words == quoted else f'"{words}"', measured, number, _here(interval(values - against), sign))
        )
        quoted = words

    def compared(values: np.ndarray, rank: str, end: str) -> np.ndarray:
        return _of(values, groups[rank, end]) - _of(values, groups[rank, end], others=True)

    low = "low truncated entropy against the other heads: "
    add(
        "when the truncated matrix identify low-entropy heads, they tend to produce severe attention sink",
        f"{low}weight on the first token",
        compared(use.first, "16", "lowest"),
    )
    add("(recency bias)", f"{low}weight on the nearest {NEAR} tokens", compared(use.near, "16", "lowest"))
    if np.isfinite(use.needle).any():
        add(
            "while the remaining high-entropy heads correctly allocate attention to the inserted needle",
            "the other heads against those of low truncated entropy: weight on the needle",
            -compared(use.needle, "16", "lowest"),
        )
    add(
        "the overall high matrix entropy indicates a serious attention sink",
        "high matrix entropy against the other heads: weight on the first token",
        compared(use.first, "vanilla", "highest"),
    )
    if np.isfinite(use.needle).any():
        add(
            "although the low-entropy heads generate relatively normal attention distributions, they fail to locate "
            "the correct needle position",
            "low matrix entropy against the other heads: weight on the needle",
            compared(use.needle, "vanilla", "lowest"),
            sign=-1,
        )
    add(
        "RoPE Induces Low-rankness",
        f"all heads, rotated against unrotated queries: squared cosines in the first 1/{FEW} of their own eigenvectors",
        (few(use) - few(use, rotated=False)).astype(np.float64).mean((1, 2)),
    )
    # Of Figures 4 and 6, the one head that is drawn, and all that the score chooses.
    figure_4 = ("vanilla", "lowest")
    figure_6 = {("16", "highest"): "Figure 6 by section 5.5", ("16", "lowest"): "Figure 6 by its caption"}
    sizes = {"the head": {key: [head] for key, head in drawn.items()}, f"{len(groups[figure_4])} heads": groups}
    for key, name in {figure_4: "Figure 4", **figure_6}.items():
        for whom, heads in sizes.items():
            add(
                "Visually, its similirity (color) is mainly concentrated in the first few of the total dimensions",
                f"{whom} of {key[1]} {SCORES[key[0]]} ({name}): squared cosines in the first 1/{FEW} of the "
                f"eigenvectors, against 1/2 (all heads have {few(use).mean():.3f})",
                _of(few(use), heads[key]),
                against=0.5,
            )
    for key, name in figure_6.items():
        for whom, heads in sizes.items():
            add(
                "exhibits clear periodicity along the vertical axis (sequence length), compared to the head selected "
                "by the matrix entropy shown in Figure 4",
                f"{whom} of {key[1]} {SCORES[key[0]]} ({name}) against {whom} of {figure_4[1]} {SCORES[figure_4[0]]}: "
                "share in one period",
                _of(use.peak, heads[key]) - _of(use.peak, heads[figure_4]),
            )
    return rows


def _group_names(groups: Mapping[tuple[str, str], Group]) -> dict[tuple[str, str], str]:
    return {
        (rank, end): f"{len(heads)} of {end} {SCORES[rank]}{' (16)' if rank == '16' else ''}"
        for (rank, end), heads in groups.items()
    }


def _attention_table(use: HeadUse, groups: Mapping[tuple[str, str], Group], chosen: str) -> TextTable:
    columns = {"entropy, nats": use.entropy, "first token": use.first, f"nearest {NEAR}": use.near}
    if np.isfinite(use.needle).any():
        columns["needle"] = use.needle
    columns["elsewhere"] = 1 - use.first - use.near - np.nan_to_num(use.needle)
    everyone = [(n, h) for n in range(use.first.shape[1]) for h in range(use.first.shape[2])]
    rows = [
        (name, *(interval(_of(x, heads)).cell("{:.3f}") for x in columns.values()))
        for name, heads in [("all heads", everyone), *((_group_names(groups)[key], groups[key]) for key in groups)]
    ]
    title = f"What heads {chosen} attend to (DoPE, Figure 2; 95% intervals over sequences)"
    return TextTable(title, ("heads", *columns), tuple(rows))


def _direction_table(
    use: HeadUse, groups: Mapping[tuple[str, str], Group], drawn: Mapping[tuple[str, str], tuple[int, int]], chosen: str
) -> TextTable:
    columns = {
        f"first 1/{FEW}": few(use),
        f"first 1/{FEW}, unrotated": few(use, rotated=False),
        "in one period": use.peak,
        "in one period, unrotated": use.peak_unrotated,
    }
    everyone = [(n, h) for n in range(use.peak.shape[1]) for h in range(use.peak.shape[2])]
    named = {"all heads": everyone}
    for key, name in _group_names(groups).items():
        n, h = drawn[key]
        named |= {name: groups[key], f"{key[1]} {SCORES[key[0]]}: layer {n}, head {h}": [(n, h)]}
    rows = []
    for name, heads in named.items():
        period = np.median([use.period[:, n, h] for n, h in heads])
        rows.append((name, *(interval(_of(x, heads)).cell("{:.3f}") for x in columns.values()), f"{period:.0f}"))
    title = (
        f"Directions of the queries of heads {chosen} (DoPE, Figures 3 to 6): squared cosines in the first "
        "eigenvectors, and the cosines' variation in one period (95% intervals over sequences; median period)"
    )
    return TextTable(title, ("heads", *columns, "period, tokens"), tuple(rows))


def _correlations(use: HeadUse, means: Mapping[str, Float[np.ndarray, "L H"]], chosen: str) -> TextTable:
    columns = {"first token": use.first, f"nearest {NEAR}": use.near}
    if np.isfinite(use.needle).any():
        columns["needle"] = use.needle
    columns |= {f"first 1/{FEW}": few(use), "in one period": use.peak}
    rows = []
    for rank, mean in means.items():
        cells = []
        for x in columns.values():
            each = np.array([scipy.stats.spearmanr(mean.ravel(), of_one.ravel()).statistic for of_one in x])
            cells.append(interval(each).cell("{:.2f}"))
        rows.append((f"{SCORES[rank]}{' (16)' if rank == '16' else ''}", *cells))
    title = f"Rank correlation over all heads of their score {chosen} with what they do (95% intervals over sequences)"
    return TextTable(title, ("score", *columns), tuple(rows))


def _figures(
    sequences: Sequences,
    use: HeadUse,
    groups: Mapping[tuple[str, str], Group],
    drawn: Mapping[tuple[str, str], tuple[int, int]],
    maps: Float[np.ndarray, "4 ranges K"],
    criterion: str,
    suffix: str,
    of: str,
) -> list[Figure]:
    everyone = [(n, h) for n in range(use.peak.shape[1]) for h in range(use.peak.shape[2])]
    x = np.arange(PLACES + 1, dtype=float)
    panels = []
    for letter, (rank, name) in zip("ab", SCORES.items(), strict=True):
        lines = []
        for label, heads in (("all heads", everyone), *((end, groups[rank, end]) for end in ENDS)):
            mask = np.zeros(use.peak.shape[1:], bool)
            mask[tuple(np.array(heads).T)] = True
            around = interval(use.by_place[:, mask].mean(1))
            lines.append(Line(label, x, *(np.maximum(y, 1e-5) for y in (around.mean, around.low, around.high))))
        panels.append((f"({letter}) {name}", tuple(lines)))
    marks: tuple[tuple[float, str], ...] = ()
    if sequences.questions is not None:
        begins = np.asarray(sequences.questions.needle)[..., 0] * PLACES / sequences.lengths[:, None]
        if np.ptp(begins) <= 2:  # needles at one depth
            marks = ((float(1 + begins.mean()), "needle"),)
    count = len(groups["16", "lowest"])
    K, shown = use.mass.shape[-1], maps.shape[1]
    short = dict(zip(SCORES, ("vanilla", "truncated"), strict=True))  # longer ones are cut
    heads = [f"{n}.{h} {end} {short[rank]}" for (rank, end), (n, h) in drawn.items()]
    directions = np.arange(1, K + 1, dtype=float)
    cumulative = []
    for form, mass in (("rotated", use.mass), ("unrotated", use.mass_unrotated)):
        lines = []
        for label, group in (("all heads", everyone), *zip(heads, ([one] for one in drawn.values()), strict=True)):
            mask = np.zeros(use.peak.shape[1:], bool)
            mask[tuple(np.array(group).T)] = True
            around = interval(mass[:, mask].mean(1).cumsum(-1))
            lines.append(Line(label, directions, around.mean, around.low, around.high))
        cumulative.append((form, tuple(lines)))
    return [
        LineCharts(
            f"chosen_attention{suffix}",
            f"Attention of all heads, and of {count} with the lowest and the highest entropy{of}",
            f"Weight on the first token (0) and on {PLACES} equal ranges of the tokens, from the queries that answer "
            f"or the last ones. Heads by {criterion}; at least 1e-5 is drawn; 95% intervals over sequences (DoPE, "
            "Figure 2).",
            tuple(panels),
            "key, range of the sequence",
            "weight",
            log_y=True,
            marks=marks,
        ),
        HeatMaps(
            f"similarity{suffix}",
            f"Queries along the eigenvectors of their Gram matrix{of}",
            f"Cosines of rotated queries with the {K} eigenvectors, the largest eigenvalue first; means over {shown} "
            f"ranges of the first sequence. Heads by {criterion} (DoPE, Figures 3 to 6).",
            maps,
            tuple(heads),
            tuple(f"{100 * i / shown:.0f}%" for i in range(shown)),
            tuple(str(i) for i in range(1, K + 1)),
            "layer.head",
            "token, place in the sequence",
            "eigenvector",
            "cosine",
            "diverging",
            limits=(-1.0, 1.0),
        ),
        LineCharts(
            f"low_rank{suffix}",
            f"Squared cosines in the first eigenvectors{of}",
            f"The share of the squared cosines with the first eigenvectors, up to each. Equal directions are on the "
            f"diagonal. Heads by {criterion}; 95% intervals over sequences.",
            tuple(cumulative),
            "eigenvectors",
            "share of the squared cosines",
        ),
    ]
