"""Statements of the notebook "Advanced Positional Embeddings for Long-Context Generalization".

Its test gives every token the query and the key of all-ones vectors, and counts the queries whose largest logit is at
their own position. Its formulas are pe_lab's `NotebookBias`, `NotebookYarn` and `NotebookNTK`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float, Int

from pe_lab.lab.theory.rotary import BASE, HEAD_DIM, Distances, channels, pairs, rotated
from pe_lab.lab.theory.statement import Statement, statement
from pe_lab.positional import NTK, NoPE, Rope, frequencies
from pe_lab.positional.notebook import NotebookBias, NotebookNTK, NotebookYarn

PAPER = "pe_notebook"
TRAINED, TESTED, FIGURE = 128, 12_092, 4_096  # tokens; the figure's label says 4,096 and its code 12,092
SCHEMES = {
    "notebook_bias": NotebookBias(),
    "rope": Rope(),
    "notebook_yarn": NotebookYarn(),
    "notebook_ntk": Rope(scaling=NotebookNTK(8.0)),
}

Scheme = Rope | NoPE | NotebookBias | NotebookYarn


def statements(seed: int = 0) -> Iterator[Statement]:
    """Every statement of the notebook."""
    yield accuracy_table()
    yield from can_the_test_fail(seed)
    yield from ntk_speed()
    yield from yarn_clock()
    yield from bias_of_nope()


def warped(positions: Distances, scheme: Scheme) -> Float[np.ndarray, " T"]:
    """The positions that a scheme rotates by: the notebook's "YaRN" multiplies them, the others do not change them."""
    n = np.asarray(positions, np.float64)
    if not isinstance(scheme, NotebookYarn):
        return n
    blended = np.clip((n - (scheme.original_length - scheme.blend)) / (2 * scheme.blend), 0, 1)
    return n * ((1 - blended) * scheme.alpha + blended * scheme.beta)


def spectrum(scheme: Scheme, head_dim: int) -> Float[np.ndarray, " R"]:
    """The frequencies that a scheme rotates by, in radians per position."""
    return scheme.spectrum(head_dim) if isinstance(scheme, NotebookYarn) else frequencies(scheme, head_dim)[0]


def encoded(x: Float[np.ndarray, "... K"], positions: Distances, scheme: Scheme) -> Float[np.ndarray, "T K"]:
    """Queries or keys, rotated as the scheme does in float64."""
    return rotated(x, spectrum(scheme, x.shape[-1]), warped(positions, scheme))


def own_position_is_largest(
    scheme: Scheme, length: int, vector: Float[np.ndarray, " K"], rows: Int[np.ndarray, " Q"]
) -> Bool[np.ndarray, " Q"]:
    """For chosen queries, whether the first largest logit is their own; all queries and keys are `vector`."""
    every = np.arange(length)
    keys, queries = encoded(vector, every, scheme), encoded(vector, rows, scheme)
    logits = queries @ np.broadcast_to(keys, (length, len(vector))).T / math.sqrt(len(vector))
    if isinstance(scheme, NotebookBias):
        seen = rows < scheme.original_length
        logits[np.flatnonzero(seen), rows[seen]] += scheme.strength
    # Equal logits are equal up to rounding: the notebook's argmax takes the first.
    largest = logits.max(axis=1, keepdims=True)
    return (logits >= largest - 1e-9).argmax(axis=1) == rows


def sampled_rows(length: int, count: int = 400) -> Int[np.ndarray, " Q"]:
    """All queries of a short sequence, or the trained ones and others at equal distances."""
    if length <= count:
        return np.arange(length)
    return np.concatenate([np.arange(TRAINED), np.linspace(TRAINED, length - 1, count).astype(int)])


def accuracy(scheme: Scheme, length: int, vector: Float[np.ndarray, " K"]) -> float:
    """The share of queries with the largest logit at their own position.

    Of sequences above 400 tokens, the first 128 queries and 400 of the others, weighted by how many they represent.
    """
    rows = sampled_rows(length)
    right = own_position_is_largest(scheme, length, vector, rows)
    if len(rows) == length:
        return float(right.mean())
    return float((right[:TRAINED].sum() + right[TRAINED:].mean() * (length - TRAINED)) / length)


def accuracy_table() -> Statement:
    """The notebook's table, recomputed."""
    ones, printed = np.ones(HEAD_DIM), {name: (1.0, 0.0106 if name == "notebook_bias" else 1.0) for name in SCHEMES}
    found = {
        name: (accuracy(scheme, TRAINED, ones), accuracy(scheme, TESTED, ones)) for name, scheme in SCHEMES.items()
    }
    same = all(np.allclose(found[name], printed[name], atol=5e-5) for name in SCHEMES)
    return statement(
        f"{PAPER}, table of accuracies",
        f"With q = k = ones, the share of queries with the largest logit at their own position is 1 for all schemes at "
        f"{TRAINED} tokens, and at {TESTED:,} tokens 0.0106 for its NoPE and 1 for RoPE, its YaRN and its NTK.",
        f"At {TRAINED} tokens: {', '.join(f'{a:.4f}' for a, _ in found.values())}; at {TESTED:,}: "
        f"{', '.join(f'{b:.4f}' for _, b in found.values())} (its NoPE, RoPE, its YaRN, its NTK).",
        same,
        {
            "tokens": [TRAINED, TESTED],
            **found,
            "figure_label": FIGURE,
        },
        f"The label of its figure has {FIGURE:,} instead of {TESTED:,}. 0.0106 is {TRAINED} / {TESTED:,}, the share of "
        f"the tokens that its bias is defined for. At {TESTED:,} tokens 528 queries were computed.",
    )


def scrambled_accuracy(rng: np.random.Generator, length: int, vector: Float[np.ndarray, " K"]) -> float:
    """The accuracy of the notebook's test if every position has random angles, which no distance can be read from."""
    angles = rng.uniform(0, 2 * math.pi, (length, len(vector) // 2))
    x = channels(pairs(vector) * np.exp(1j * angles))
    return float(((x @ x.T).argmax(1) == np.arange(length)).mean())


def at_distance_accuracy(scheme: Scheme, positions: Int[np.ndarray, " Q"], distance: int) -> float:
    """The share of queries whose largest logit is `distance` tokens back, for a key that is rotated by that distance.

    The key is made with the angles of a scheme at the training length, and keys of all 64 nearest tokens compete.
    """
    ones, inv_freq = np.ones(HEAD_DIM), spectrum(scheme, HEAD_DIM)
    within = warped(np.array([distance, 0]), scheme)
    key = channels(pairs(ones) * np.exp(1j * (within[0] - within[1]) * inv_freq))
    back = np.arange(64)
    queries = encoded(ones, positions, scheme)
    keys = np.stack([encoded(key, positions - r, scheme) for r in back], axis=1)
    return float((np.einsum("qk,qrk->qr", queries, keys).argmax(1) == distance).mean())


def retrieval_accuracy(
    scheme: Scheme, distances: Int[np.ndarray, " T"], rng: np.random.Generator, others: int = 63, trials: int = 40
) -> float:
    """The share of targets found by content: the target's key is the query's vector, other keys are random vectors.

    The target is at one of `distances`, the others within 64 tokens of it.
    """
    right = 0
    for _ in range(trials):
        distance = int(rng.choice(distances))
        query, keys = rng.standard_normal(HEAD_DIM), rng.standard_normal((others + 1, HEAD_DIM))
        keys[0] = query
        back = distance + np.append(0, rng.integers(-min(32, distance), 32, others))
        end = np.array([distance + 64])
        logits = encoded(keys, end[0] - back, scheme) @ encoded(query[None], end, scheme)[0]
        right += int(logits.argmax() == 0)
    return right / trials


def can_the_test_fail(seed: int, vectors: int = 20, length: int = 512, distance: int = 5) -> Iterator[Statement]:
    """Whether any rotation can fail the notebook's test, and what two tests that can be failed find."""
    rng = np.random.default_rng((seed, 1))
    random = [rng.standard_normal(HEAD_DIM) for _ in range(vectors)]
    rotations: dict[str, Scheme] = {name: s for name, s in SCHEMES.items() if name != "notebook_bias"}
    of_random = {name: min(accuracy(s, length, x) for x in random) for name, s in rotations.items()}
    of_noise = min(scrambled_accuracy(rng, length, x) for x in random[:5])
    early, late = np.arange(64, TRAINED - 16), np.linspace(TRAINED + 80, TESTED, 64).astype(int)
    by_distance = {
        name: [at_distance_accuracy(s, at, distance) for at in (early, late)] for name, s in rotations.items()
    }
    rng, ranges = np.random.default_rng((seed, 3)), (np.arange(1, 8), np.linspace(8_000, TESTED, 64).astype(int))
    by_content = {
        name: [retrieval_accuracy(s, at, rng) for at in ranges] for name, s in (rotations | {"nope": NoPE()}).items()
    }
    yield statement(
        f"{PAPER}, its test",
        "Flawless accuracy in the test with q = k is proof that relative, rotation-based encodings generalize to "
        "longer sequences.",
        f"An encoding by random angles, without any order of positions, has an accuracy of {of_noise:.4f} too. With "
        f"{vectors} random vectors instead of ones the rotations have {min(of_random.values()):.4f} or more at "
        f"{length} tokens. Tests that can be failed find other things. With keys that make the logit largest "
        f"{distance} tokens back, the accuracies beyond {TRAINED} tokens are "
        f"{', '.join(f'{b:.2f}' for _, b in by_distance.values())} (RoPE, its YaRN, its NTK; within: "
        f"{', '.join(f'{a:.2f}' for a, _ in by_distance.values())}). An equal vector among random ones is found at "
        f"8,000 to {TESTED:,} tokens in {', '.join(f'{b:.2f}' for _, b in by_content.values())} (the same, and no "
        f"encoding; at 1 to 7 tokens: {', '.join(f'{a:.2f}' for a, _ in by_content.values())}).",
        of_noise < 1,
        {
            "vectors": vectors,
            "tokens": length,
            "random_angles": of_noise,
            **of_random,
            "least": min(of_random.values()),
            "distance": distance,
            **{f"{name}_by_distance": x for name, x in by_distance.items()},
            "trained_and_tested": [TRAINED, TESTED],
            "distances": [1, 7, 8_000, TESTED],
            **{f"{name}_by_content": x for name, x in by_content.items()},
        },
        "By Cauchy-Schwarz <R_n q, R_m q> <= |q|^2 for all rotations and all q, with equality at m = n: no rotation "
        "can fail, at any length. To be able to fail, a test needs different queries and keys, or keys that differ "
        "from token to token. The vectors of the last test are random in all pairs; a model that looks for content "
        "uses slow pairs, and loses less.",
    )
    bare = [accuracy(NoPE(), tokens, np.ones(HEAD_DIM)) for tokens in (TRAINED, length)]
    yield statement(
        f"{PAPER}, its test without encoding",
        "NoPE is accurate within its training length and collapses beyond it.",
        f"Without encoding all logits are equal and argmax returns the first, so the accuracy is one query of all: "
        f"{bare[0]:.4f} at {TRAINED} tokens already, and {bare[1]:.4f} at {length}.",
        bare[0] > 0.5,
        {"tokens": [TRAINED, length], "accuracy": bare},
        f"What is accurate up to {TRAINED} tokens and ends there is a bias on the diagonal, which NoPE does not have.",
    )


def ntk_speed(factor: float = 8.0) -> Iterator[Statement]:
    """The direction of the notebook's NTK-aware scaling."""
    plain = frequencies(Rope(BASE), HEAD_DIM)[0]
    for name, scaling in (("", NotebookNTK(factor)), (", corrected", NTK(factor))):
        ratio = frequencies(Rope(BASE, scaling=scaling), HEAD_DIM)[0] / plain
        yield statement(
            f"{PAPER}, NTK-aware RoPE{name}",
            f"Multiplying frequency i by gamma^({'-2i/(d - 2)' if name else '2i/d'}) makes low frequencies rotate more "
            "slowly.",
            f"With gamma = {factor:g} the slowest pair rotates {ratio[-1]:.3f} times as fast.",
            ratio[-1] < 1,
            {"factor": factor, "slowest": ratio[-1], "ratio": ratio},
        )


def yarn_clock() -> Iterator[Statement]:
    """What the notebook's YaRN does to positions."""
    scheme = NotebookYarn()
    at = np.arange(1, 512)
    speed = np.diff(warped(np.arange(512), scheme))
    ones, keys_back = np.ones(HEAD_DIM), 3
    scores = {
        name: np.einsum("tk,tk->t", encoded(ones, at[keys_back:], s), encoded(ones, at[:-keys_back], s)) / HEAD_DIM
        for name, s in (("notebook_yarn", scheme), ("rope", Rope()))
    }
    change = {name: float(np.ptp(x)) for name, x in scores.items()}
    yield statement(
        f"{PAPER}, YaRN, relative distances",
        "Its YaRN is relative: scores depend on the distance alone.",
        f"With its YaRN the score of equal vectors {keys_back} tokens apart changes by {change['notebook_yarn']:.3f} "
        f"of its largest value with the position; with RoPE by {change['rope']:.1e}.",
        change["notebook_yarn"] < 1e-9,
        {"distance": keys_back, **change, "score": scores["notebook_yarn"]},
        "It rotates by n m(n), which is not linear in n near the training length and has another rate beyond it. YaRN "
        "itself is relative.",
    )
    yield statement(
        f"{PAPER}, YaRN, transition",
        "It passes smoothly from a rate of alpha within the training length to beta beyond it.",
        f"A token advances the position by {speed[:100].mean():.2f} before the transition, by "
        f"{speed[-100:].mean():.2f} after it, and by up to {speed.max():.2f} within.",
        speed.max() <= scheme.beta + 1e-9,
        {"before": speed[:100].mean(), "after": speed[-100:].mean(), "largest": speed.max(), "speed": speed},
        "Position n is multiplied by m(n), whose derivative n m'(n) adds to the rate. YaRN itself has no dependence on "
        "the position: it scales pairs by their number of rotations.",
    )


def bias_of_nope() -> Iterator[Statement]:
    """The bias that the notebook calls NoPE."""
    scheme = NotebookBias()
    inside, outside = scheme.strength, 0.0
    removed = dataclasses.replace(scheme, strength=0.0)
    with_bias, without = (accuracy(s, TRAINED, np.ones(HEAD_DIM)) for s in (scheme, removed))
    yield statement(
        f"{PAPER}, NoPE",
        "NoPE adds a learned bias b_ij that depends on i - j only, so it extends to longer sequences.",
        f"At distance 0 its code adds {inside:g} below position {scheme.original_length} and {outside:g} after it. "
        f"Without the bias, its accuracy at {TRAINED} tokens is {without:.4f} instead of {with_bias:.4f}.",
        inside == outside,
        {
            "inside": inside,
            "outside": outside,
            "from_position": scheme.original_length,
            "accuracy_with_bias": with_bias,
            "accuracy_without_bias": without,
        },
        "NoPE (Kazemnejad et al. 2023) has no bias: order enters through the causal mask alone, which this test "
        "does not have.",
    )
