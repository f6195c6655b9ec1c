"""Whether the heads that attend to the needle find it: the score without them, and without as many random heads.

Attention weights show where a head looks, not that the answer comes from there. Masking is the causal check: in a model
of billions of parameters, masking 87 retrieval heads takes needles from 1.00 to 0.00, and masking as many random heads
does nothing (arXiv 2606.21249).
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.knock_out_findings import MASKS, Head, Knocked, findings
from pe_lab.analysis.losses import Streams
from pe_lab.analysis.sequences import Questions, Sequences, add_arguments
from pe_lab.analysis.session import Session, sequence_groups
from pe_lab.attention.statistics import attention_rows
from pe_lab.errors import ConfigError
from pe_lab.evaluation.variants import Variant
from pe_lab.language_model import LanguageModel
from pe_lab.model import Params
from pe_lab.model.layer_pass import LayerView
from pe_lab.positional import NoPE, Uniform
from pe_lab.results.findings import Findings
from pe_lab.terminal import bounded

PROTOCOL = "knock_out-1"


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


def needle_scores(lm: LanguageModel, sequences: Sequences, params: Params | None = None) -> NeedleScores:
    """How well a model answers questions about needles, with the right answers before each token (teacher forcing).

    An answer of several tokens is found by greedy decoding if all its tokens are the likeliest ones here.

    Args:
      params: other weights for the model, such as those of `without_heads`; None: its own.

    Raises:
      ConfigError: sequences without questions.
    """
    if params is not None:
        lm = _with_params(lm, params)
    asked = _questions(sequences)
    return NeedleScores(*Streams(lm, sequences.tokens).scores(asked.at, asked.answers))


def without_heads(params: Params, heads: Sequence[Head]) -> Params:
    """The parameters with the output projection of some query heads set to 0: they add nothing to the stream."""
    attention = params["layers"]["attention"]
    layers, chosen = (np.array(part) for part in zip(*heads, strict=True))
    out = jnp.asarray(attention["out"]).at[layers, chosen].set(0)
    return {**params, "layers": {**params["layers"], "attention": {**attention, "out": out}}}


def masked(lm: LanguageModel, heads: Sequence[Head], mask: str = "zero") -> LanguageModel:
    """The model without some heads.

    Args:
      mask: `zero`: the heads add nothing to the residual stream. `uniform`: they attend to all tokens alike, and add
        the mean value, which no layer has seen from them. `nope`: they keep their attention but lose their encoding.
    """
    if mask == "zero":
        return _with_params(lm, without_heads(lm.checkpoint.params, heads))
    for layer in sorted({n for n, _ in heads}):
        chosen = [h for n, h in heads if n == layer]
        lm = lm.with_heads(layer, chosen, Uniform() if mask == "uniform" else NoPE())
    return lm


def _with_params(lm: LanguageModel, params: Params) -> LanguageModel:
    return dataclasses.replace(lm, checkpoint=dataclasses.replace(lm.checkpoint, params=params))


def _questions(sequences: Sequences) -> Questions:
    if sequences.questions is None:
        raise ConfigError(f"{sequences.name} hold no needles: give --suite=niah:standard or --suite=needles.")
    return sequences.questions


def whole_answers(right: Bool[np.ndarray, "S Q"], asked: Questions) -> list[list[bool]]:
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
    help = "zero: a head adds nothing; uniform: it attends to all alike; nope: it loses its encoding (default: zero)"
    add("--mask", choices=tuple(MASKS), default="zero", help=help)


def _run(session: Session) -> Findings:
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

    def measure(lm: LanguageModel, batch: Sequences) -> dict[str, np.ndarray]:
        return {"weight": retrieval_scores(lm, batch)}

    weights = [found["weight"] for found in session.measure(f"{PROTOCOL}-weights", measure, None, choosing)]
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
            scores = _measure(session, variant, testing, chosen, scored)
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


def _measure(
    session: Session,
    variant: Variant,
    testing: Sequences,
    chosen: Mapping[Any, Sequence[Head]],
    scored: Callable[[int, bool], None],
) -> dict[Any, NeedleScores]:
    """The scores with each group of heads masked; those that were measured before are read."""
    lm, mask = variant.at(testing.length), session.arguments.mask
    groups = sequence_groups(lm, range(len(testing)), testing.length)
    pieces = [(group, count, key) for group, count in groups for key in chosen]

    def identity(digest: str, heads: Sequence[Head]) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "checkpoint": variant.subject.id,
            "encodings": variant.fingerprint(testing.length),
            "sequence": digest,
            "length": testing.length,
            "masked": [mask if heads else "", sorted(heads)],
        }

    def measure(numbers: Iterable[int]) -> Iterator[list[dict[str, np.ndarray]]]:
        streams, of = None, None
        for group, count, key in (pieces[n] for n in numbers):
            batch, heads = testing.batch(group), chosen[key]
            asked = _questions(batch)
            if streams is None or of != group:
                streams, of = Streams(lm, batch.tokens), group
            edited = streams.under(masked(lm, heads, mask), min(n for n, _ in heads)) if heads else streams
            scores = edited.scores(asked.at, asked.answers)
            yield [{"log_prob": p, "right": r} for p, r in zip(*scores, strict=True)][:count]

    identities = [[identity(testing.digests[i], chosen[key]) for i in group[:count]] for group, count, key in pieces]
    found: dict[Any, list[NeedleScores]] = {key: [] for key in chosen}
    costs = [lm.config.layers - min((n for n, _ in chosen[key]), default=0) for *_, key in pieces]
    measured = session.measure_edits(identities, measure, costs)
    for (_, count, key), (parts, existed) in zip(pieces, measured, strict=True):
        found[key].append(NeedleScores(*(np.stack([part[name] for part in parts]) for name in NeedleScores._fields)))
        scored(count, existed)
    return {key: NeedleScores(*map(np.concatenate, zip(*parts, strict=True))) for key, parts in found.items()}


ANALYSIS = Analysis(
    "knock_out",
    "whether needles are found by the heads that attend to them: the score with these heads masked",
    "causal checks of retrieval heads (arXiv 2606.21249)",
    _options,
    _run,
)
