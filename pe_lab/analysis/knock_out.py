"""Whether the heads that attend to the needle find it: the score without them, and without as many random heads.

Attention weights show where a head looks, not that the answer comes from there. Masking is the causal check: in a model
of 7 billion parameters, masking 87 retrieval heads takes needles from 1.00 to 0.00, and masking as many random heads
does nothing; zeroing the slowest 32 of 128 channels of these 87 alone takes them to 0.18, and zeroing 32 random
channels of them to 0.98 (arXiv 2606.21249).
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float32

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.losses import Streams, measure_edits
from pe_lab.analysis.sequences import SequenceQuestions, Sequences, add_arguments, counted
from pe_lab.analysis.session import AnalysisSession, sequence_groups
from pe_lab.attention.statistics import attention_rows
from pe_lab.config import ModelConfig
from pe_lab.errors import ConfigError
from pe_lab.evaluation.variants import Variant
from pe_lab.language_model import LanguageModel
from pe_lab.model import Params
from pe_lab.model.layer_pass import LayerView
from pe_lab.model.learned import split_layers
from pe_lab.model.shape import from_stacks, stacked_blocks, stacks
from pe_lab.positional import Bands, NoPE, Uniform, frequencies
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts, layer_names
from pe_lab.results.findings import Arrays, Findings
from pe_lab.results.statistics import Mean, interval, mean_of
from pe_lab.results.table import TextTable
from pe_lab.terminal import bounded

PROTOCOL = "knock_out-1"
Head = tuple[int, int]  # layer, query head


class NeedleScores(NamedTuple):
    """Log-probability of each answer token given the right ones before it, nats, and whether it is the likeliest."""

    log_prob: Float32[np.ndarray, "S Q"]
    right: Bool[np.ndarray, "S Q"]


def retrieval_scores(lm: LanguageModel, sequences: Sequences) -> Float32[np.ndarray, "S N H"]:
    """The attention of each query head to the needle: a mean over the questions of a sequence.

    It is the weight from the query that predicts a token of the answer to the same token in the needle.

    Args:
      sequences: with questions.

    Raises:
      ConfigError: sequences without questions.
    """
    found = []
    for group, count in sequence_groups(lm, range(len(sequences)), sequences.length, most=1):
        batch = sequences.batch(group)
        asked = _questions(batch)
        data = {"at": np.asarray(asked.at, np.int32), "source": np.asarray(asked.source, np.int32)}
        found.append(np.stack(lm.layer_pass(batch.tokens, _on_source, data=data), 1)[:count])
    return np.concatenate(found)


def _on_source(view: LayerView, data: Any) -> Float32[jax.Array, "B H"]:
    B, Q = data["at"].shape
    common = dict(x=view.normed, positions=view.positions, segments=view.segments, window=view.window)
    rows = attention_rows(view.query, view.key, view.encoding, rows=data["at"].reshape(-1), **common)
    rows = jnp.stack([rows[b, :, b * Q : (b + 1) * Q] for b in range(B)])  # those of a sequence's own questions
    return jnp.take_along_axis(rows, data["source"][:, None, :, None], axis=-1).mean((2, 3))


def measure(lm: LanguageModel, sequences: Sequences, heads: Sequence[Head] = (), mask: str = "zero") -> NeedleScores:
    """How well a model answers questions about needles, with the right answers before each token (teacher forcing).

    An answer of several tokens is found by greedy decoding if all its tokens are the likeliest ones here.

    Args:
      heads: that are masked.
      mask: as `masked` takes it.

    Raises:
      ConfigError: sequences without questions.
    """
    asked = _questions(sequences)
    return NeedleScores(
        *Streams(masked(lm, heads, mask) if heads else lm, sequences.tokens).scores(asked.at, asked.answers)
    )


def without_heads(params: Params, heads: Sequence[Head], config: ModelConfig) -> Params:
    """The parameters with the output projection of some query heads set to 0: they add nothing to the stream."""
    of_stacks, (blocks, learned) = stacks(config), split_layers(params["layers"])
    found = []
    for stack, one in zip(of_stacks, stacked_blocks(blocks, of_stacks), strict=True):
        chosen = [(stack.layers.index(n), head) for n, head in heads if n in stack.layers]
        out = jnp.asarray(one["attention"]["out"])
        out = out.at[tuple(np.array(chosen).T)].set(0) if chosen else out
        found.append({**one, "attention": {**one["attention"], "out": out}})
    layers = from_stacks(found, of_stacks) | ({"positional": learned} if learned else {})
    return {**params, "layers": layers}


def without_pairs(params: Params, removed: Mapping[Head, Sequence[int]], config: ModelConfig) -> Params:
    """The parameters with some pairs of channels of some heads' queries set to 0: they add nothing to the logits.

    Raises:
      ConfigError: queries are normalized after their projection, so that the others would grow.
    """
    if config.qk_norm != "none":
        raise ConfigError(
            f"--mask=random sets channels of the queries' projection to 0, and the norm after it (model.qk_norm="
            f"{config.qk_norm}) would enlarge the others. Take --mask=slow or fast."
        )
    of_stacks, (blocks, learned) = stacks(config), split_layers(params["layers"])
    found = []
    for stack, one in zip(of_stacks, stacked_blocks(blocks, of_stacks), strict=True):
        attention = {**one["attention"]}
        for (n, head), pairs in removed.items():
            if n in stack.layers:
                place, channels = stack.layers.index(n), np.array([*pairs])
                channels = np.concatenate([channels, channels + config.head_dim // 2])
                attention["query"] = jnp.asarray(attention["query"]).at[place, :, head, channels].set(0)
                if "query_bias" in attention:
                    attention["query_bias"] = jnp.asarray(attention["query_bias"]).at[place, head, channels].set(0)
        found.append({**one, "attention": attention})
    layers = from_stacks(found, of_stacks) | ({"positional": learned} if learned else {})
    return {**params, "layers": layers}


def random_quarter(lm: LanguageModel, layer: int, head: int) -> list[int]:
    """A random quarter of the pairs that rotate in a layer, another one for each head; `ConfigError` for under four."""
    rotated = np.flatnonzero(frequencies(lm.layers[layer].encoding, lm.config.head_dim)[0] > 0)
    _check_quarter(len(rotated), layer, "random")
    return np.random.default_rng((layer, head)).permutation(rotated)[: len(rotated) // 4].tolist()


def masked(lm: LanguageModel, heads: Sequence[Head], mask: str = "zero") -> LanguageModel:
    """The model without some heads.

    Args:
      mask: `zero`: the heads add nothing to the residual stream. `uniform`: they attend to all tokens alike, and add
        the mean value, which no layer has seen from them. `nope`: they keep their attention but lose their encoding.
        `slow`, `fast`, `random`: their logits lose the slowest, the fastest or a random quarter of the rotated pairs.
    """
    if mask in ("zero", "random"):
        weights = lm.checkpoint.params
        if mask == "zero":
            params = without_heads(weights, heads, lm.config)
        else:
            params = without_pairs(weights, {head: random_quarter(lm, *head) for head in heads}, lm.config)
        return dataclasses.replace(lm, checkpoint=dataclasses.replace(lm.checkpoint, params=params))
    for layer in sorted({n for n, _ in heads}):
        chosen = [h for n, h in heads if n == layer]
        to = (
            quarter_removed(lm, layer, mask)
            if mask in ("slow", "fast")
            else {"uniform": Uniform(), "nope": NoPE()}[mask]
        )
        lm = lm.with_heads(layer, chosen, to)
    return lm


def quarter_removed(lm: LanguageModel, layer: int, which: str) -> Bands:
    """The edit of heads of a layer that removes the `slow` or the `fast` quarter of the pairs that rotate.

    Raises:
      ConfigError: fewer than four pairs rotate.
    """
    rates = np.sort(frequencies(lm.layers[layer].encoding, lm.config.head_dim)[0])
    rates = rates[rates > 0]
    _check_quarter(len(rates), layer, which)
    edge = len(rates) // 4 if which == "slow" else len(rates) - len(rates) // 4
    # Between two rates, so that rounding decides nothing.
    return Bands(float(np.sqrt(rates[edge - 1] * rates[edge])), keep="fast" if which == "slow" else "slow")


def _check_quarter(count: int, layer: int, which: str) -> None:
    if count < 4:
        raise ConfigError(f"--mask={which}: layer {layer} has {count} pairs that rotate, of which none is a quarter.")


def _questions(sequences: Sequences) -> SequenceQuestions:
    if sequences.questions is None:
        raise ConfigError(f"{sequences.name} hold no needles: give --suite=niah:standard or --suite=needles.")
    return sequences.questions


def whole_answers(right: Bool[np.ndarray, "S Q"], asked: SequenceQuestions) -> list[list[bool]]:
    """For each sequence, whether each answer is found: all its tokens, successive ones that repeat one needle."""
    found = []
    for s, (at, needle) in enumerate(zip(np.asarray(asked.at), np.asarray(asked.needle), strict=True)):
        new = np.r_[True, (np.diff(at) != 1) | (needle[1:] != needle[:-1]).any(-1)]
        found.append([bool(part.all()) for part in np.split(right[s], np.flatnonzero(new)[1:])])
    return found


def random_heads(
    retrieval: Sequence[Head], layers: int, heads: int, seed: int, control: str = "any"
) -> tuple[Head, ...]:
    """As many random other heads, in a random order.

    Args:
      retrieval: the heads that are not drawn.
      control: `layers`: the i-th is drawn from the layer of the i-th retrieval head, or from any if none is left there.
    """
    rng = np.random.default_rng(seed)
    others = [(n, h) for n in range(layers) for h in range(heads) if (n, h) not in set(retrieval)]
    drawn: list[Head] = []
    for layer, _ in retrieval:
        left = [one for one in others if one not in drawn]
        same = [one for one in left if one[0] == layer] if control == "layers" else []
        pool = same or left
        drawn.append(pool[int(rng.integers(len(pool)))])
    return tuple(drawn)


# ---------------------------------------------------------------------------------------------------------------------
# The analysis


def _options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, count=40, suites="niah:standard, or needles (symbols, if the model was trained with them)")
    add = parser.add_argument
    add("--count", metavar="K[,K...]", help="how many heads are masked (default: 1,2,4 .. a quarter of all)")
    add("--control", choices=("any", "layers"), default="any", help="where random heads are drawn (default: any)")
    add("--draws", type=bounded(int, 1, 10_000), default=3, help="random draws of heads (default: %(default)s)")
    help = (
        "zero: a head adds nothing; uniform: it attends to all alike; nope: it loses its encoding; slow, fast, random: "
        "it loses the slowest, the fastest or a random quarter of its pairs (default: zero)"
    )
    add("--mask", choices=tuple(MASKS), default="zero", help=help)


def _run(session: AnalysisSession) -> Findings:
    arguments = session.arguments
    if arguments.suite is None:
        raise ConfigError("knock_out needs prompts with needles: --suite=niah:standard or --suite=needles.")
    for variant in session.variants:
        if arguments.mask == "nope" and all(isinstance(layer.encoding, NoPE) for layer in variant.layers):
            raise ConfigError(f"--mask=nope changes nothing in {variant.label}, whose heads have no encoding.")
    counts = [_counts(arguments.count, variant) for variant in session.variants]
    total = len(session.sequences)
    if total < 2:
        raise ConfigError("knock_out chooses heads on one half of the sequences: give --sequences of 2 or more.")
    order = np.random.default_rng(0).permutation(total)  # depths may alternate from one sequence to the next
    choosing = session.sequences.batch(sorted(order[: total // 2].tolist()))
    testing = session.sequences.batch(sorted(order[total // 2 :].tolist()))

    def of_batch(lm: LanguageModel, batch: Sequences) -> dict[str, np.ndarray]:
        return {"weight": retrieval_scores(lm, batch)}

    weights = [found["weight"] for found in session.measure(f"{PROTOCOL}-weights", of_batch, None, choosing)]
    work = len(testing) * sum(1 + len(each) * (1 + arguments.draws) for each in counts)
    results, done = [], 0
    with session.progress(session.analysis, work) as progress:

        def scored(prompts: int, found: bool) -> None:
            nonlocal done
            done += prompts
            if found:
                progress.found(prompts)
            progress.update(done, f"{done} of {work} prompts with masked heads")

        for variant, name, each, weight in zip(session.variants, session.names, counts, weights, strict=True):
            N, H = weight.shape[1:]
            strongest = np.argsort(-weight.mean(0).ravel(), kind="stable")[: max(each)]
            heads = tuple((int(i) // H, int(i) % H) for i in strongest)
            drawn = tuple(random_heads(heads, N, H, seed, arguments.control) for seed in range(arguments.draws))
            chosen: dict[Any, tuple[Head, ...]] = {"none": ()}
            for k in each:
                chosen["retrieval", k] = heads[:k]
                chosen |= {("random", k, d): draw[:k] for d, draw in enumerate(drawn)}
            scores = _scores(session, variant, testing, chosen, scored)
            found = {key: whole_answers(one.right, _questions(testing)) for key, one in scores.items()}
            log_prob = {key: one.log_prob.astype(np.float64).mean(-1) for key, one in scores.items()}
            results.append(Knocked(name, weight, heads, drawn, found, log_prob))
    return findings(arguments.mask, results, counts)


def _counts(text: str | None, variant: Variant) -> tuple[int, ...]:
    """How many heads are masked, ascending."""
    config = variant.lm.config
    total = config.layers * config.heads
    if text is None:
        return tuple(2**i for i in range(max(total // 4, 1).bit_length()))
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", part) and int(part) > 0 for part in parts):
        raise ConfigError(f"--count={text}: give whole numbers of heads, such as 1,4,16.")
    if 2 * max(map(int, parts)) > total:
        raise ConfigError(
            f"--count={text}: {variant.label} has {total} heads, and as many others are masked for comparison: give at "
            f"most {total // 2}."
        )
    return tuple(sorted(set(map(int, parts))))


def _scores(
    session: AnalysisSession,
    variant: Variant,
    testing: Sequences,
    chosen: Mapping[Any, Sequence[Head]],
    scored: Callable[[int, bool], None],
) -> dict[Any, NeedleScores]:
    """The scores with each group of heads masked; those that were measured before are read."""
    lm, mask, keys = variant.at(testing.length), session.arguments.mask, list(chosen)

    def identity(key: Any, index: int) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "checkpoint": variant.subject.id,
            "encodings": variant.fingerprint(testing.length),
            "sequence": testing.digests[index],
            "length": testing.length,
            "masked": [mask if chosen[key] else "", sorted(chosen[key])],
        }

    def measured(streams: Streams, key: Any, batch: Sequences) -> list[Arrays]:
        heads, asked = chosen[key], _questions(batch)
        edited = streams.under(masked(lm, heads, mask), min(n for n, _ in heads)) if heads else streams
        return [{"log_prob": p, "right": r} for p, r in zip(*edited.scores(asked.at, asked.answers), strict=True)]

    costs = [lm.config.layers - min((n for n, _ in chosen[key]), default=0) for key in keys]
    indices = range(len(testing))
    found: dict[Any, list[Arrays]] = {key: [] for key in keys}
    for k, group, parts, existed in measure_edits(session, lm, testing, indices, keys, identity, measured, costs):
        found[keys[k]] += parts
        scored(len(group), existed)
    return {
        key: NeedleScores(*(np.stack([part[name] for part in parts]) for name in NeedleScores._fields))
        for key, parts in found.items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# What was found

MASKS = {  # what is done to a head, and the state of the head afterwards
    "zero": ("masking", "add nothing to the residual stream"),
    "uniform": ("making uniform", "attend to all tokens alike"),
    "nope": ("dropping the encoding of", "have no positional encoding"),
    "slow": ("removing the slowest quarter of the pairs of", "have lost the slowest quarter of their pairs"),
    "fast": ("removing the fastest quarter of the pairs of", "have lost the fastest quarter of their pairs"),
    "random": ("removing a random quarter of the pairs of", "have lost a random quarter of their pairs"),
}
PUBLISHED = {  # arXiv 2606.21249
    "zero": "Published for 87 heads of a model of 7 billion parameters: 0.00, and 1.00 for random ones",
    "slow": "Published for the slowest 32 of 128 channels of 87 heads of a model of 7 billion parameters: 0.18",
    "random": "Published for 32 random channels of 128 of 87 heads of a model of 7 billion parameters: 0.98",
}


@dataclass(frozen=True)
class Knocked:
    """What was measured of one variant.

    Attributes:
      retrieval: attention to the needle in the choosing half of the sequences.
      heads: the retrieval heads, the strongest first.
      drawn: D random draws of other heads.
      found: whether each answer was found, by masked heads and sequence: "none", ("retrieval", k) or ("random", k, d).
      log_prob: mean log-probability of the answer tokens, likewise [S].
    """

    name: str
    retrieval: Float[np.ndarray, "S N H"]
    heads: tuple[Head, ...]
    drawn: tuple[tuple[Head, ...], ...]
    found: dict[Any, list[list[bool]]]
    log_prob: dict[Any, Float[np.ndarray, " S"]]

    def keys(self, kind: str, count: int) -> list[Any]:
        """The keys of the measurements with `count` heads of a kind masked: one, or one a draw."""
        if count == 0:
            return ["none"]
        draws = range(len(self.drawn))
        return [("retrieval", count)] if kind == "retrieval" else [("random", count, d) for d in draws]

    def share(self, kind: str, count: int) -> Mean:
        """The share of answers found. The answers of a sequence are one cluster, over all draws."""
        found = [self.found[key] for key in self.keys(kind, count)]
        units = [(s, float(x)) for draw in found for s, answers in enumerate(draw) for x in answers]
        mean = mean_of([x for _, x in units], [s for s, _ in units])
        assert mean is not None
        return mean

    def by_sequence(self, kind: str, count: int) -> Float[np.ndarray, " S"]:
        """The share of answers found in each sequence; mean over draws."""
        found = [self.found[key] for key in self.keys(kind, count)]
        return np.mean([[np.mean(answers) for answers in draw] for draw in found], axis=0)

    def lost(self, kind: str, count: int) -> Float[np.ndarray, " S"]:
        """What masking changes in the mean log-probability of the answer, by sequence; mean over draws."""
        found = [self.log_prob[key] for key in self.keys(kind, count)]
        return np.mean(found, axis=0) - self.log_prob["none"]


def findings(mask: str, results: Sequence[Knocked], counts: Sequence[Sequence[int]]) -> Findings:
    several = len(results) > 1
    numbers: dict[str, np.ndarray] = {}
    figures: list[Figure] = []
    sentences: list[str] = []
    rows: list[tuple[str, ...]] = []
    heads: dict[str, Any] = {}
    for v, (one, each) in enumerate(zip(results, counts, strict=True)):
        suffix, of = (f"_{v}", f" of {one.name}") if several else ("", "")
        sentences += _sentences(mask, one, each)
        figures += _figures(mask, one, each, suffix, of)
        rows += _rows(one, each)
        numbers |= {f"retrieval{suffix}": one.retrieval, f"counts{suffix}": np.array(each)}
        for kind in ("retrieval", "random"):
            numbers[f"{kind}_found{suffix}"] = np.stack([one.by_sequence(kind, k) for k in (0, *each)])
            numbers[f"{kind}_log_prob_change{suffix}"] = np.stack([one.lost(kind, k) for k in (0, *each)])
        heads[one.name] = {"retrieval": one.heads, "random": one.drawn}
    shapes = {
        "retrieval": "[S of the choosing half, N, H] sequence, layer, query head; attention to the needle",
        "counts": "[k] numbers of masked heads",
        "*_found": "[1 + k, S of the other half] share of answers found, with no heads and with k masked",
        "*_log_prob_change": "[1 + k, S of the other half] change of the answer tokens' mean log-probability, nats",
    }
    title = f"Answers found with heads masked ({mask}), and change of log-probability in nats (95% intervals)"
    table = TextTable(title, ("model", "masked heads", "found", "log-probability"), tuple(rows), words=2)
    return Findings(tuple(sentences), (table,), tuple(figures), numbers, shapes, {"heads": heads})


def _share(mean: Mean) -> str:
    return f"{mean.mean:.2f} [{mean.low:.2f}, {mean.high:.2f}]"


def _rows(one: Knocked, counts: Sequence[int]) -> list[tuple[str, ...]]:
    rows = [(one.name, "none", _share(one.share("retrieval", 0)), "")]
    for k in counts:
        for kind in ("retrieval", "random"):
            rows.append(
                (one.name, f"{k} {kind}", _share(one.share(kind, k)), interval(one.lost(kind, k)).words("{:.2f}"))
            )
    return rows


def _sentences(mask: str, one: Knocked, counts: Sequence[int]) -> list[str]:
    mean = one.retrieval.mean(0)
    n, h = one.heads[0]
    weight = interval(one.retrieval[:, n, h]).words("{:.3f}")
    found = [
        f"{one.name}: layer {n} head {h} attends most to the needle, with weight {weight}; the "
        f"mean over all heads is {mean.mean():.3f}."
    ]
    unmasked = one.share("retrieval", 0)
    for k in counts:
        found.append(
            f"{one.name}: {MASKS[mask][0]} {counted(k, 'retrieval head')} takes the share of answers found from "
            f"{_share(unmasked)} to {_share(one.share('retrieval', k))}, and the same with "
            f"{counted(k, 'random other head')} to {_share(one.share('random', k))} "
            f"({counted(len(one.drawn), 'draw')})."
        )
    return [*found, f"{one.name}: {verdict(one, counts, mask)}"]


def verdict(one: Knocked, counts: Sequence[int], mask: str = "zero") -> str:
    """Whether answers depend on the retrieval heads, or on their encoding, more than on as many random others."""
    unmasked = one.share("retrieval", 0)
    if unmasked.low < 0.1:
        return f"undecided: with nothing masked it finds {_share(unmasked)} of the answers, too few to lose any."
    # One test, over all counts: the count with the largest difference would be the luckiest one too.
    differences = np.mean([one.by_sequence("random", k) - one.by_sequence("retrieval", k) for k in counts], axis=0)
    around = interval(differences)
    confirmed = "confirmed" if around.low > 0 else "not confirmed"
    on = "the encoding of the retrieval heads" if mask == "nope" else "the retrieval heads"
    return (
        f"{confirmed} that the answers depend on {on} more than on random ones: over {', '.join(map(str, counts))} "
        f"heads, the share of answers lost is larger by {around.words('{:.2f}')}."
    )


def _figures(mask: str, one: Knocked, counts: Sequence[int], suffix: str, of: str) -> list[Figure]:
    N, H = one.retrieval.shape[1:]
    weights = HeatMaps(
        f"retrieval_scores{suffix}",
        f"Attention to the needle{of}, by layer and head",
        "The weight from the query that predicts a token of the answer to the same token in the needle; mean over "
        "questions and sequences.",
        one.retrieval.mean(0)[None],
        ("all questions",),
        layer_names(range(N)),
        tuple(f"head {h}" for h in range(H)),
        "",
        "layer",
        "query head",
        "attention weight",
    )
    x = np.asarray((0, *counts), np.float64)
    kinds = {"retrieval": "retrieval heads", "random": "random heads"}
    shares, changes = [], []
    for kind, label in kinds.items():
        means = [one.share(kind, k) for k in (0, *counts)]
        shares.append(Line(label, x, *(np.array([getattr(m, f) for m in means]) for f in ("mean", "low", "high"))))
        around = interval(np.stack([one.lost(kind, k) for k in (0, *counts)], axis=1))
        changes.append(Line(label, x, around.mean, around.low, around.high))
    how = f"Masked heads {MASKS[mask][1]}."
    published = f" {PUBLISHED[mask]} (arXiv 2606.21249)." if mask in PUBLISHED else ""
    return [
        weights,
        LineCharts(
            f"needles_found{suffix}",
            f"Answers found{of}, by masked heads",
            f"{how} Retrieval heads attend most to the needle in other prompts. 95% intervals (Wilson's, by prompt)."
            f"{published}",
            (("", tuple(shares)),),
            "masked heads",
            "share of answers found",
        ),
        LineCharts(
            f"answer_log_prob{suffix}",
            f"Change of the answer's log-probability{of}, by masked heads",
            f"{how} Mean over the tokens of the answers, less that with nothing masked; 95% intervals over prompts.",
            (("", tuple(changes)),),
            "masked heads",
            "change of log-probability, nats",
        ),
    ]


ANALYSIS = Analysis("causal checks of retrieval heads (arXiv 2606.21249)", _options, _run)
