"""Statements of DroPE (Gelberg et al. 2025) on attention and models, measured in small pe_lab models in float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.attention.statistics import attention_rows
from pe_lab.config import ModelConfig
from pe_lab.lab.theory.rotary import softmax
from pe_lab.lab.theory.statement import Statement, statement
from pe_lab.model import Model, Params
from pe_lab.model.decoder import layer_arrays
from pe_lab.model.layer_pass import embed
from pe_lab.positional import Encoding, Layer, LayerStructure, NoPE, Rope, Schedule, build_schedule, frequencies

PAPER = "DroPE"
ROUNDING = 1e-5  # float32 sums of a few hundred terms are off by less, relative to their largest term
PREFIXES, PATTERNS = (16, 64, 256), ("diagonal", "previous")
ArrayLike = jax.Array | np.ndarray
VOCABULARY, LAYERS, WIDTH, HEADS, LENGTH = 32, 3, 32, 2, 256


def statements(seed: int = 0) -> Iterator[Statement]:
    """The statements on attention blocks and models."""
    yield from constant_sequence(seed)
    yield lemma_b_2(seed)
    yield from theorem_3_4(seed)
    yield small_variance(seed)
    yield lemma_b_4(seed)
    yield propositions_b_3_and_b_5(seed)


def patterns() -> Float[np.ndarray, "C T T"]:
    """c_ij / T' of every pattern and prefix length T', padded with zeros: causal weights make a prefix a sequence."""
    every = np.zeros((len(PATTERNS), len(PREFIXES), LENGTH, LENGTH))
    for i, pattern in enumerate(PATTERNS):
        for j, length in enumerate(PREFIXES):
            every[i, j, :length, :length] = positional_weights(length, pattern) / length
    return every.reshape(-1, LENGTH, LENGTH)


def _by_pattern(x: Float[np.ndarray, "B C H"]) -> Float[np.ndarray, "B patterns prefixes H"]:
    return np.abs(x).reshape(len(x), len(PATTERNS), len(PREFIXES), -1)


# ---------------------------------------------------------------------------------------------------------------------
# Constant sequences: Propositions 3.2 and 3.3


@functools.partial(jax.jit, static_argnums=0)
def _loss_gradients(
    model: Model, params: Params, tokens: jax.Array, targets: jax.Array, schedule: Schedule
) -> tuple[jax.Array, jax.Array]:
    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        batch = {"tokens": tokens, "targets": targets}
        return model.token_loss(params, batch, schedule).mean(), model.apply(params, tokens, None, None, schedule)

    gradients, logits = jax.grad(loss, has_aux=True)(params)
    projections = [gradients["layers"]["attention"][name] for name in ("query", "key")]
    return jnp.sqrt(sum((g**2).sum() for g in projections)), logits


def loss_gradients(
    params: Params, encoding: Encoding, tokens: Int[np.ndarray, "B T"], targets: Int[np.ndarray, "B T"]
) -> tuple[float, Float[np.ndarray, "B T V"]]:
    """The norm of the loss's gradient by all query and key projections, and the logits of the output."""
    found = _loss_gradients(small_model(), params, jnp.asarray(tokens), jnp.asarray(targets), schedule_of(encoding))
    return float(found[0]), np.asarray(found[1])


def constant_sequence(seed: int) -> Iterator[Statement]:
    """A sequence of one repeated token, without encoding and with RoPE."""
    model, params = small_model(), initial_parameters(seed)
    rng = np.random.default_rng((seed, 32))
    constant = np.full((1, LENGTH), 7, np.int32)
    varied, targets = (rng.integers(0, VOCABULARY, (1, LENGTH)).astype(np.int32) for _ in range(2))
    embedded = np.asarray(embed(model, params, constant, schedule_of(NoPE())))
    uniform = np.tri(LENGTH) / np.arange(1, LENGTH + 1)[:, None]
    found = {}
    for name, encoding in (("nope", NoPE()), ("rope", Rope())):
        layers = measured_layers(params, encoding, embedded, patterns())
        gradient, logits = loss_gradients(params, encoding, constant, targets)
        found[name] = {
            "not_uniform": max(np.abs(m.weights - uniform).max() for m in layers),
            "bias": max(np.abs(m.bias).max() for m in layers),
            "bias_gradient": max(max(m.query_gradient.max(), m.key_gradient.max()) for m in layers),
            "loss_gradient": gradient,
            "loss_gradient_varied": loss_gradients(params, encoding, varied, targets)[0],
            "not_constant": np.abs(logits - logits[:, :1]).max() / np.abs(logits).max(),
        }
        found[name]["layers"] = layers
    nope, rope = found["nope"], found["rope"]
    numbers = {f"{name}_{key}": value for name, of in found.items() for key, value in of.items() if key != "layers"}
    share = nope["loss_gradient"] / nope["loss_gradient_varied"]
    yield statement(
        f"{PAPER}, Proposition 3.2",
        "On a constant sequence a NoPE model has (1) uniform attention, (2) no gradients of the loss by queries and "
        "keys, (3) no positional bias and no gradient of it, and (4) constant outputs.",
        f"Weights differ from 1/i by at most {nope['not_uniform']:.1e}, the loss's gradient by queries and keys is "
        f"{share:.1e} of that on a random sequence, A^c is at most {nope['bias']:.1e} and its gradient "
        f"{nope['bias_gradient']:.1e}, and logits of the output vary by {nope['not_constant']:.1e} of the largest: "
        "all rounding of float32.",
        max(nope["not_uniform"], share, nope["bias"], nope["bias_gradient"], nope["not_constant"]) < ROUNDING,
        {**numbers, "nope_loss_gradient_share": share},
    )
    yield statement(
        f"{PAPER}, Remark B.1",
        "On a constant sequence a RoPE model has constant outputs too (4), but no uniform attention (1), and a "
        "positional bias with a gradient (3).",
        f"With RoPE the outputs vary by {rope['not_constant']:.1e} of the largest, the weights differ from 1/i by up "
        f"to {rope['not_uniform']:.2g}, A^c reaches {rope['bias']:.2g} and its gradient {rope['bias_gradient']:.2g}.",
        rope["not_constant"] < ROUNDING and min(rope["not_uniform"], rope["bias"], rope["bias_gradient"]) > 1e-3,
        numbers,
    )
    share = rope["loss_gradient"] / rope["loss_gradient_varied"]
    yield statement(
        f"{PAPER}, Remark B.1, part (2)",
        "On a constant sequence, the loss of a RoPE model has gradients by its queries and keys.",
        f"It has none: they are {share:.1e} of those on a random sequence, which is rounding.",
        share > ROUNDING,
        {**numbers, "rope_loss_gradient_share": share},
        "All values are equal, so outputs do not depend on the weights, with any encoding: by part (4). What RoPE adds "
        "on a constant sequence is a gradient of A^c, not of the loss.",
    )
    yield proposition_3_3(params, embedded, rope["layers"])


def proposition_3_3(params: Params, embedded: Float[np.ndarray, "B T D"], layers: list[LayerMeasurement]) -> Statement:
    """With c_ij = alpha_ij - 1/i, RoPE has a positive A^c and a gradient on a constant sequence (B.2)."""
    mean = np.tri(LENGTH) / np.arange(1, LENGTH + 1)[:, None]
    bias, gradient = [], []
    for n in range(LAYERS):
        c = (layers[n].weights[0] - mean) / LENGTH  # of each head
        measured = measured_layers(params, Rope(), embedded, c)[n]
        for head in range(HEADS):
            bias.append(measured.bias[0, head, head])
            gradient.append(math.hypot(measured.query_gradient[0, head, head], measured.key_gradient[0, head, head]))
    return statement(
        f"{PAPER}, Proposition 3.3",
        "On a constant sequence a RoPE head has positional weights, c_ij = alpha_ij - 1/i, with A^c > 0 and a gradient "
        "that is not 0.",
        f"Over {LAYERS} layers of {HEADS} heads, A^c is {min(bias):.2e} or more and the norm of its gradient by the "
        f"head's queries and keys {min(gradient):.2e} or more.",
        min(bias) > ROUNDING and min(gradient) > ROUNDING,
        {"bias": bias, "gradient": gradient},
        "The proof differentiates sum_j alpha_ij^2, as if c followed the parameters: with c fixed, the gradient is "
        "half of that, and the result the same. Its last step is false in general (the left factors may cancel); here "
        "each of them has a positive product with the query, so the sum has, too.",
    )


def flattest_logits(inv_freq: Float[np.ndarray, " R"], length: int) -> float:
    """The least standard deviation over distances 0 .. length - 1 of logits whose coefficients have norm 1.

    The logits of a constant sequence are sums of A_m cos(r w_m) + B_m sin(r w_m) (Lemma B.2).
    """
    angle = np.multiply.outer(np.arange(length), inv_freq)
    design = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    return float(np.linalg.svd(design - design.mean(0), compute_uv=False)[-1] / math.sqrt(length))


def lemma_b_2(seed: int, heads: int = 256, widths: tuple[int, ...] = (4, 8, 64)) -> Statement:
    """RoPE's logits on a constant sequence are not constant."""
    rng = np.random.default_rng((seed, 202))
    spread, flattest = [], []
    for K in widths:
        inv_freq = frequencies(Rope(), K)[0]
        q, k = (rng.standard_normal((heads, K // 2, 2)) @ [1, 1j] for _ in range(2))
        logits = ((q * np.conj(k)) @ np.exp(1j * np.multiply.outer(inv_freq, np.arange(K + 1)))).real
        spread.append(float((np.ptp(logits, axis=1) / np.abs(q * np.conj(k)).sum(1)).min()))
        flattest.append(flattest_logits(inv_freq, K + 1))
    return statement(
        f"{PAPER}, Lemma B.2",
        "The logits of a RoPE head on a constant sequence of more than d_k tokens are not all equal, unless every pair "
        "has a query or a key of 0.",
        f"In {heads} random heads of each of {', '.join(map(str, widths))} channels they differ by at least "
        f"{min(spread):.3f} of the largest possible logit. The flattest head possible has a standard deviation of "
        f"{', '.join(f'{x:.0e}' if x > 1e-16 else '0 to rounding' for x in flattest)} of the norm of its coefficients.",
        min(spread) > 1e-3 and flattest[0] > 1e-12,
        {"channels": widths, "heads": heads, "spread": spread, "flattest": flattest},
        "The proof's Vandermonde matrix is invertible, but barely: from 8 channels on, some heads that are not "
        "degenerate have logits that are constant to the last bit of a float32. Pairs of frequency 0 (p-RoPE) must be "
        "left out.",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Theorem 3.4: nearly equal embeddings


def slope(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float:
    """The exponent p of y = c x^p, fitted to logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def by_spread(encoding: Encoding, seeds: range, deviations: Float[np.ndarray, " B"]) -> dict[str, np.ndarray]:
    """What Theorem 3.4 bounds, of models at initialization: arrays [seeds, layers, B, prefixes].

    Returns:
      epsilon: the prefix spread of the first attention's input, equal for all layers; spread: of every layer; bias,
      gradient: the largest |A^c| of heads and patterns, and the largest norm of its gradients by W_Q or W_K.
    """
    found: dict[str, list] = {name: [] for name in ("epsilon", "spread", "bias", "gradient")}
    for seed in seeds:
        embedded = embeddings_near_one_vector(seed, deviations)
        layers = measured_layers(initial_parameters(seed), encoding, embedded, patterns())
        spreads = [np.stack([prefix_spread(m.hidden[:, :T]) for T in PREFIXES], axis=-1) for m in layers]
        largest = [[_by_pattern(x).max((1, 3)) for x in (m.bias, m.query_gradient, m.key_gradient)] for m in layers]
        found["epsilon"].append([spreads[0]] * LAYERS)
        found["spread"].append(spreads)
        found["bias"].append([bias for bias, _, _ in largest])
        found["gradient"].append([np.maximum(*gradients) for _, *gradients in largest])
    return {name: np.array(values) for name, values in found.items()}


def slopes(found: dict[str, np.ndarray], name: str) -> Float[np.ndarray, "seeds layers"]:
    """The fitted exponents of one quantity over epsilon, at the full length."""
    epsilon, values = found["epsilon"][..., -1], found[name][..., -1]
    return np.array(
        [[slope(*xy) for xy in zip(*of_seed, strict=True)] for of_seed in zip(epsilon, values, strict=True)]
    )


def theorem_3_4(seed: int, seeds: int = 3) -> Iterator[Statement]:
    """NoPE's positional bias vanishes linearly with the spread of the embeddings; RoPE's does not."""
    deviations = np.geomspace(1e-4, 1e-1, 5)
    nope, rope = (by_spread(e, range(seed, seed + seeds), deviations) for e in (NoPE(), Rope()))
    names = ("spread", "bias", "gradient")
    fitted = {name: slopes(nope, name) for name in names}
    # The constants C1, C2, C3: the largest ratio to epsilon, by prefix length.
    constants = {name: (nope[name] / nope["epsilon"]).max((0, 1, 2)) for name in names}
    growth = {name: value[-1] / value[0] for name, value in constants.items()}
    listed = {name: ", ".join(f"{x:.2g}" for x in value) for name, value in constants.items()}
    lowest, highest = min(x.min() for x in fitted.values()), max(x.max() for x in fitted.values())
    curves = {"deviation": deviations, "epsilon": nope["epsilon"][..., -1].mean((0, 1))}
    curves |= {f"nope_{name}": nope[name][..., -1].mean((0, 1)) for name in names}
    curves |= {f"rope_{name}": rope[name][..., -1].mean((0, 1)) for name in names}
    yield statement(
        f"{PAPER}, Theorem 3.4",
        "In a NoPE model the prefix spread of every layer, |A^c|, and its gradients by W_Q and W_K are at most C1, C2 "
        "and C3 times the spread epsilon of the first attention's input, with constants that do not grow with the "
        "sequence length.",
        f"Over {seeds} models of {LAYERS} layers and a thousandfold range of epsilon, the fitted exponents are "
        f"{lowest:.3f} to {highest:.3f} (1 is linear). For {', '.join(map(str, PREFIXES))} tokens the largest ratios "
        f"to epsilon are C1 = {listed['spread']}; C2 = {listed['bias']}; C3 = {listed['gradient']}.",
        lowest > 0.95 and max(growth.values()) < 1.25,
        {
            **curves,
            "prefix": PREFIXES,
            "lowest_exponent": lowest,
            "highest_exponent": highest,
            "C1": constants["spread"],
            "C2": constants["bias"],
            "C3": constants["gradient"],
            "growth": list(growth.values()),
        },
        "The patterns are the diagonal and the previous token. The constants are measured maxima over heads, layers, "
        f"patterns and {seeds} initializations, so they are lower bounds of the theorem's.",
    )
    names = ("bias", "gradient")
    largest = {name: float(np.abs(slopes(rope, name)).max()) for name in names}
    ratio = {name: float((rope[name] / nope[name])[:, :, 0, -1].min()) for name in names}
    yield statement(
        f"{PAPER}, Theorem 3.4, RoPE",
        "The theorem explains the difference between RoPE and NoPE: with RoPE the positional bias and its gradients do "
        "not vanish with the spread of the embeddings.",
        f"With RoPE the fitted exponents are at most {largest['bias']:.3f} (A^c) and {largest['gradient']:.3f} "
        f"(gradients) in absolute value. At the least epsilon, A^c is {ratio['bias']:.0f} times or more that of NoPE, "
        f"and the gradients {ratio['gradient']:.0f} times.",
        max(largest.values()) < 0.1 and min(ratio.values()) > 100,
        {
            **curves,
            "bias_exponent": largest["bias"],
            "gradient_exponent": largest["gradient"],
            "bias_ratio": ratio["bias"],
            "gradient_ratio": ratio["gradient"],
        },
    )


def small_variance(seed: int, deviations: tuple[float, ...] = (2e-1, 2e-2, 2e-3)) -> Statement:
    """Independent embeddings of small variance are not close to each other once they are normalized."""
    model, params = small_model(), initial_parameters(seed)
    rng = np.random.default_rng((seed, 340))
    entries = rng.standard_normal((VOCABULARY, WIDTH))[rng.integers(0, VOCABULARY, LENGTH)]
    block = model.block(jax.tree.map(lambda a: a[0], params["layers"]))
    before, after = [], []
    for std in deviations:
        x = jnp.asarray(std * entries, jnp.float32)[None]
        before.append(float(prefix_spread(np.asarray(x))[0]))
        after.append(float(prefix_spread(np.asarray(block.attention_norm(x)))[0]))
    share = [x / math.sqrt(WIDTH) for x in after]
    return statement(
        f"{PAPER}, Section 3.1",
        "Entries of the embeddings are drawn with a small variance, so the token embeddings are close to uniform at "
        "the beginning of training, as Theorem 3.4 asks of the hidden states that enter attention.",
        f"With standard deviations of {', '.join(f'{x:g}' for x in deviations)} the prefix spread of the embeddings is "
        f"{', '.join(f'{x:.2g}' for x in before)}: small. After the norm before the first attention it is "
        f"{', '.join(f'{x:.2f}' for x in share)} times the norm sqrt(d) of a hidden state.",
        max(share) < 0.1,
        {"deviation": deviations, "spread": before, "normalized_spread": after, "share_of_norm": share},
        "The theorem's h is the output of that norm. Its condition asks for embeddings that share a large common "
        "vector, not for small ones. The initializer range of 0.02 (Table 4) is a standard deviation in transformers.",
    )


# ---------------------------------------------------------------------------------------------------------------------
# The lemmas of the proof of Theorem 3.4 (appendix B.3), with constants computed from the weights

SLACK = 1 + 1e-6  # hidden states come from float32


def softmax_change(
    a: Float[np.ndarray, "*batch n"], b: Float[np.ndarray, "*batch n"]
) -> Float[np.ndarray, "*batch"] | float:
    """|softmax(a + b) - softmax(a)|_1 over max |b|: at most 1 by Lemma B.4."""
    return np.abs(softmax(a + b) - softmax(a)).sum(-1) / np.abs(b).max(-1)


def tightest_change(size: float) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Logits and a change of them that reach the bound of Lemma B.4 as `size` goes to 0: two equal weights."""
    return np.zeros(2), np.array([size, -size])


def lemma_b_4(seed: int, draws: int = 20_000, entries: int = 12) -> Statement:
    """The softmax is 1-Lipschitz from the largest to the summed absolute difference."""
    rng = np.random.default_rng((seed, 204))
    scale = 10 ** rng.uniform(-3, 2, (2, draws, 1))
    ratio = softmax_change(*(scale * rng.standard_normal((2, draws, entries)))).max()
    tight = float(softmax_change(*tightest_change(1e-4)))
    return statement(
        "DroPE, Lemma B.4",
        "|softmax(a + b) - softmax(a)|_1 is at most max |b|.",
        f"Over {draws:,} random a and b of {entries} entries the ratio is at most {ratio:.3f}; for two equal weights "
        f"and a small change it is {tight:.8f}, so the constant 1 is the least possible.",
        max(ratio, tight) <= 1 and tight > 0.999,
        {"draws": draws, "entries": entries, "largest_ratio": ratio, "tightest_ratio": tight},
    )


class Ratios(NamedTuple):
    """The left sides of three bounds over their right sides; at most 1 where the bounds hold.

    Attributes:
      logits: |s_ij - mean of s_i| by B^2 sqrt(H) Delta (Proposition B.3).
      weights: |alpha_i - u_i|_1 by the same (eq. 12).
      outputs: |z_i - mean of v| by B^3 sqrt(H) Delta^2 (eq. 13).
    """

    logits: float
    weights: float
    outputs: float


def spread_ratios(
    w_q: Float[np.ndarray, "D K"],
    w_k: Float[np.ndarray, "D K"],
    w_v: Float[np.ndarray, "D K"],
    hidden: Float[np.ndarray, "T D"],
) -> Ratios:
    """How near a NoPE head comes to the bounds, for hidden states of norm sqrt(D).

    B^2 and B^3 are products of the operator norms of the head's own projections, and sqrt(H) is sqrt(D / K).
    """
    h, (D, K) = np.asarray(hidden, np.float64), w_q.shape
    q, k, v = (h @ np.asarray(w, np.float64) for w in (w_q, w_k, w_v))
    norms = [float(np.linalg.norm(np.asarray(w, np.float64), 2)) for w in (w_q, w_k, w_v)]
    visible = np.tri(len(h), dtype=bool)
    counts = np.arange(1, len(h) + 1)[:, None]
    logits = q @ k.T / math.sqrt(K)
    mean = np.where(visible, logits, 0).sum(1, keepdims=True) / counts
    weights = softmax(np.where(visible, logits, -np.inf))
    bound = norms[0] * norms[1] * math.sqrt(D / K) * float(prefix_spread(h))
    means_of_v = np.cumsum(v, axis=0) / counts
    return Ratios(
        float(np.abs(np.where(visible, logits - mean, 0)).max() / bound),
        float(np.abs(weights - visible / counts).sum(1).max() / bound),
        float(np.linalg.norm(weights @ v - means_of_v, axis=1).max() / (norms[2] * float(prefix_spread(h)) * bound)),
    )


def opposite_states(width: int = 8) -> tuple[Float[np.ndarray, "D K"], Float[np.ndarray, "T D"]]:
    """A projection and two hidden states for which Proposition B.3 is an equality."""
    h = np.zeros((2, width))
    h[:, 0] = math.sqrt(width), -math.sqrt(width)
    return np.eye(width), h


def propositions_b_3_and_b_5(seed: int, deviations: tuple[float, ...] = (1e-3, 1e-1, 1e1)) -> Statement:
    """Proposition B.3 and equations 12 and 13 on the heads of a model."""
    params = initial_parameters(seed)
    embedded = embeddings_near_one_vector(seed, np.array(deviations))
    no_patterns = np.zeros((1, LENGTH, LENGTH))
    found = []
    for n, measured in enumerate(measured_layers(params, NoPE(), embedded, no_patterns)):
        attention = {name: np.asarray(params["layers"]["attention"][name][n]) for name in ("query", "key", "value")}
        for head in range(HEADS):
            projections = [w[:, head] for w in attention.values()]
            found += [spread_ratios(*projections, hidden) for hidden in measured.hidden]
    largest = Ratios(*np.max(found, axis=0).tolist())
    projection, states = opposite_states()
    tight = spread_ratios(projection, projection, projection, states).logits
    return statement(
        "DroPE, Proposition B.3, eq. 12 and 13",
        "Logits, weights and outputs of a NoPE head differ from those of uniform attention by at most B^2 sqrt(H) "
        "Delta, B^2 sqrt(H) Delta and B^3 sqrt(H) Delta^2, with B from the operator norms of its projections and Delta "
        "the prefix spread.",
        f"In {LAYERS * HEADS} heads, with embeddings from nearly equal to independent, the left sides reach "
        f"{largest.logits:.2f}, {largest.weights:.2f} and {largest.outputs:.2f} of the right ones. Two opposite hidden "
        f"states make the first bound an equality ({tight:.6f}).",
        max(largest) <= SLACK and abs(tight - 1) < 1e-9,
        {
            "heads": LAYERS * HEADS,
            "deviation": deviations,
            "logits": largest.logits,
            "weights": largest.weights,
            "outputs": largest.outputs,
            "tightest_logits": tight,
        },
        "The statement's sqrt(H) is sqrt(d / d_k), so it needs d = H d_k. The first sum of the proof should be "
        "subtracted; what follows is right.",
    )


# ---------------------------------------------------------------------------------------------------------------------
# The models, and the positional bias A^c of their attention (Definition 3.1) with its gradients


@functools.cache
def small_model() -> Model:
    """A pre-norm decoder in float32 whose weight matrices keep the norm of a vector on average."""
    return Model(
        ModelConfig(
            vocab_size=VOCABULARY,
            layers=LAYERS,
            d_model=WIDTH,
            d_ff=2 * WIDTH,
            heads=HEADS,
            kv_heads=HEADS,
            dtype="float32",
            init_std=WIDTH**-0.5,
            scaled_residual_init=False,
            attention="reference",
        )
    )


def schedule_of(encoding: Encoding) -> Schedule:
    """The schedule of `small_model` with this encoding in all layers."""
    return jax.tree.map(jnp.asarray, build_schedule([Layer(encoding)] * LAYERS, HEADS, HEADS, WIDTH // HEADS))


@functools.partial(jax.jit, static_argnums=0)
def _init(model: Model, key: jax.Array) -> Params:
    return model.init(key)


@functools.cache
def initial_parameters(seed: int) -> Params:
    """The parameters of `small_model` at initialization."""
    return _init(small_model(), jax.random.key(seed))


def positional_weights(length: int, pattern: Literal["diagonal", "previous"]) -> Float[np.ndarray, "T T"]:
    """The weights c_ij of a pattern: 1 at its key and -1/(i - 1) at the i - 1 others (Definition 3.1).

    The first row is 0: the first query has one key only, and no other weight is centred.
    """
    rows = np.arange(1, length + 1)[:, None]
    weights = np.tril(np.broadcast_to(-1.0 / np.maximum(rows - 1, 1), (length, length)))
    offset = 0 if pattern == "diagonal" else -1
    np.fill_diagonal(weights[-offset:], 1.0)
    weights[0] = 0.0
    return weights


def positional_bias(
    weights: Float[np.ndarray, "*batch T T"], c: Float[np.ndarray, "T T"]
) -> Float[np.ndarray, "*batch"] | float:
    """A^c of attention weights: the mean over queries of sum_j c_ij alpha_ij (Definition 3.1)."""
    return (np.asarray(weights, np.float64) * c).sum((-2, -1)) / len(c)


def prefix_spread(hidden: Float[np.ndarray, "*batch T D"]) -> Float[np.ndarray, "*batch"] | float:
    """The largest distance between a hidden state and the mean of a prefix that contains it (Theorem 3.4), in float64.

    Spreads of 1e-9 are measured here. `prefix_spread` of `pe_lab.analysis.positional_bias` is float32, with memory
    linear in the length.
    """
    h = np.asarray(hidden, np.float64)
    h = h - h[..., :1, :]  # so that small differences are not lost in squares
    means = np.cumsum(h, axis=-2) / np.arange(1, h.shape[-2] + 1)[:, None]
    squares = (means**2).sum(-1)[..., :, None] + (h**2).sum(-1)[..., None, :] - 2 * means @ np.swapaxes(h, -1, -2)
    return np.sqrt(np.maximum(np.where(np.tri(h.shape[-2], dtype=bool), squares, 0), 0).max((-2, -1)))


class LayerMeasurement(NamedTuple):
    """What one attention block did to a batch of B sequences, for C sets of positional weights c.

    Attributes:
      hidden: [B, T, D], the input of the projections (after the norm).
      weights: [B, H, T, T], the attention weights.
      bias: [B, C, H], the sum over i, j of c_ij alpha_ij.
      query_gradient, key_gradient: [B, C, H], norms of its gradients by the head's own projections; `hidden` is fixed.
    """

    hidden: Float[ArrayLike, "B T D"]
    weights: Float[ArrayLike, "B H T T"]
    bias: Float[ArrayLike, "B C H"]
    query_gradient: Float[ArrayLike, "B C H"]
    key_gradient: Float[ArrayLike, "B C H"]


@functools.partial(jax.jit, static_argnums=(0, 1))
def measured_layer(
    model: Model,
    structure: LayerStructure,
    block_params: Params,
    arrays: tuple[jax.Array, ...],
    x: Float[Array, "B T D"],
    c: Float[Array, "C T T"],
) -> tuple[Float[Array, "B T D"], LayerMeasurement]:
    """The output of a layer, and the measurement of its attention."""
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    encoding = model.layer_encoding(arrays, structure, positions)
    block = model.block(block_params)
    hidden = block.attention_norm(x)
    query, key, _ = block.attention.queries_keys_values(hidden)
    every = jnp.arange(x.shape[1], dtype=jnp.int32)
    weights = attention_rows(query, key, encoding, rows=every)

    def bias(projections: Mapping[str, jax.Array], one: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A^c of every head of one sequence; heads have separate projections, so the sum separates their gradients."""
        changed = {**block_params, "attention": {**block_params["attention"], **projections}}
        q, k, _ = model.block(changed).attention.queries_keys_values(one[None])
        by_head = jnp.einsum("hts,ts->h", attention_rows(q, k, encoding, rows=every)[0], c, precision="highest")
        return by_head.sum(), by_head

    both = jax.vmap(jax.grad(bias, has_aux=True), (None, None, 0))
    projections = {name: block_params["attention"][name] for name in ("query", "key")}
    gradients, biases = jax.vmap(both, (None, 0, None))(projections, hidden, c)
    norms = {name: jnp.sqrt((g**2).sum((-3, -1))) for name, g in gradients.items()}  # [B, C, D, H, K]
    output, *_ = block(x, encoding, positions, None, structure.window)
    return output, LayerMeasurement(hidden, weights, biases, norms["query"], norms["key"])


def measured_layers(
    params: Params, encoding: Encoding, embedded: Float[np.ndarray, "B T D"], c: Float[np.ndarray, "C T T"]
) -> list[LayerMeasurement]:
    """Every layer's measurement in NumPy, from the input of the first one; at most 5 sequences and 6 matrices.

    `c` includes the factor 1 / T of A^c.
    """
    model, schedule = small_model(), schedule_of(encoding)
    # One program serves all: fewer sequences and matrices are padded with copies.
    inputs = (jnp.asarray(np.resize(a, (size, *a.shape[1:])), jnp.float32) for a, size in ((embedded, 5), (c, 6)))
    x, c_padded = inputs
    found = []
    for n in range(LAYERS):
        data = jax.tree.map(lambda a, n=n: jnp.asarray(a[n]), (params["layers"], layer_arrays(schedule)))
        x, measured = measured_layer(model, schedule.structure[n], *data, x, c_padded)
        measured = [np.asarray(a)[: len(embedded)] for a in measured]
        found.append(LayerMeasurement(*measured[:2], *(a[:, : len(c)] for a in measured[2:])))
    return found


def embeddings_near_one_vector(seed: int, deviations: Float[np.ndarray, " B"]) -> Float[np.ndarray, "B T D"]:
    """Embedded random tokens: one common vector plus `deviation` times a vector of each token of the vocabulary."""
    rng = np.random.default_rng((seed, 34))
    common, own = rng.standard_normal(WIDTH), rng.standard_normal((VOCABULARY, WIDTH))
    chosen = own[rng.integers(0, VOCABULARY, LENGTH)]
    return (common + np.asarray(deviations)[:, None, None] * chosen).astype(np.float32)
