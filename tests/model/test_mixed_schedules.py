"""Models whose layers and heads all differ, against a naive float64 model; packed documents against separate ones."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.config import ModelConfig
from pe_lab.model import Model
from pe_lab.positional import (
    NTK,
    PI,
    Alibi,
    Bands,
    Beta,
    DynamicNTK,
    DynamicYarn,
    Gaussian,
    HeadEdit,
    Layer,
    Llama3,
    LongRope,
    NoPE,
    NTKByParts,
    PartialRope,
    Rope,
    Uniform,
    Yarn,
    build_schedule,
)
from pe_lab.positional.notebook import NotebookBias, NotebookNTK, NotebookYarn

T, H, G, K = 24, 4, 2, 16
R = K // 2
SHAPE = dict(vocab_size=32, d_model=24, d_ff=32, heads=H, kv_heads=G, head_dim=K, norm_epsilon=1e-5, dtype="float32")


def random_params(model: Model, seed: int):
    """Wide enough for attention to be peaked and every norm to be felt."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        values = rng.standard_normal(leaf.shape)
        if path[-1].key == "scale":
            return jnp.asarray(1 + 0.3 * values, jnp.float32)
        width = 4.0 if path[0].key == "token_embedder" else np.prod(leaf.shape[1:-1]) ** 0.5
        return jnp.asarray(values * 1.5 / width, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, model.shapes)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params, tokens, positions, segments, schedule):
    return model.apply(params, tokens, positions, segments, schedule)


# --- The naive model: every formula written out, nothing imported from pe_lab below this line and above the next -----


def naive_logits(p, tokens, described):
    """One row of tokens [T]; `described`: for each layer a window, a logit scale, and H (frequency, gain, slope)."""

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    def rotated(x, n, frequency, gain):
        z = (x[:R] + 1j * x[R:]) * np.exp(1j * n * frequency) * gain
        return np.concatenate([z.real, z.imag])

    x = p["token_embedder"]["embedding"][tokens]
    for i, (window, beta, heads) in enumerate(described):
        a, m = ({k: v[i] for k, v in p["layers"][name].items()} for name in ("attention", "mlp"))
        read, mixed = norm(x, p["layers"]["attention_norm"]["scale"][i]), np.zeros_like(x)
        for h, (frequency, gain, slope) in enumerate(heads):
            g = h // (H // G)
            q, k, v = read @ a["query"][:, h], read @ a["key"][:, g], read @ a["value"][:, g]
            for t in range(len(tokens)):
                seen = range(0 if window is None else max(0, t - window + 1), t + 1)
                query = rotated(q[t], t, frequency, gain)
                logits = [beta * (query @ rotated(k[s], s, frequency, gain)) / K**0.5 - slope * (t - s) for s in seen]
                weights = np.exp(np.array(logits) - max(logits))
                mixed[t] += weights / weights.sum() @ v[list(seen)] @ a["out"][h]
        x = x + mixed
        read = norm(x, p["layers"]["mlp_norm"]["scale"][i])
        gate = read @ m["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (read @ m["up"])) @ m["down"]
    return norm(x, p["token_embedder"]["final_norm"]["scale"]) @ p["token_embedder"]["embedding"].T


def naive_rope(base=1e4, width=K):
    return np.array([base ** (-2 * i / width) if i < width // 2 else 0.0 for i in range(R)])


def naive_yarn(s, length, base=1e4):
    def bound(rotations):
        return K * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(bound(32)), 0), min(math.ceil(bound(1)), K - 1)
    share = np.array([min(max((i - low) / (high - low), 0), 1) for i in range(R)])
    return naive_rope(base) * (1 - share + share / s), 0.1 * math.log(s) + 1


# ---------------------------------------------------------------------------------------------------------------------

YARN_FREQUENCY, YARN_GAIN = naive_yarn(4, 300)
SLOPES = [2.0 ** (-8 * (h + 1) / H) for h in range(H)]
ONE, NOTHING, EVERY = np.ones(R), np.zeros(R), range(H)
ROPE = (naive_rope(), ONE, 0.0)
STILL = (NOTHING, ONE, 0.0)
FAST = (naive_rope() > 2 * math.pi / 300).astype(float)

# What the description says, and what the naive model is told: (window, logit scale, one triple a head).
MIXED = [
    (Layer(Rope()), (None, 1, [ROPE] * H)),
    (Layer(NoPE(), logit_scale=Beta(0.5, 12)), (None, 1 + 0.5 * math.log(2), [STILL] * H)),
    (Layer(Rope(base=50.0), window=5), (5, 1, [(naive_rope(50.0), ONE, 0.0)] * H)),
    (Layer(Alibi()), (None, 1, [(NOTHING, ONE, s) for s in SLOPES])),
    (
        Layer(Rope(scaling=Yarn(4.0, 300)), logit_scale=0.8),
        (None, 0.8, [(YARN_FREQUENCY, ONE * YARN_GAIN, 0.0)] * H),
    ),
    (
        Layer(Rope(scaling=DynamicNTK(8))),
        (None, 1, [(naive_rope(1e4 * (T / 8) ** (K / (K - 2))), ONE, 0.0)] * H),
    ),
    (
        Layer(Rope(fraction=0.5), heads=(HeadEdit((1,), Rope(scaling=PI(4.0))),)),
        (None, 1, [(naive_rope() * (np.arange(R) < R // 2) if h != 1 else naive_rope() / 4, ONE, 0.0) for h in EVERY]),
    ),
    # Heads 0 and 1 share a key head, as do 2 and 3: in both groups the heads differ.
    (
        Layer(PartialRope(fraction=0.5), heads=(HeadEdit((0,), NoPE()), HeadEdit((3,), Alibi()))),
        (
            None,
            1,
            [
                STILL if h == 0 else (NOTHING, ONE, SLOPES[3]) if h == 3 else (naive_rope(1e4, K // 2), ONE, 0.0)
                for h in EVERY
            ],
        ),
    ),
    (
        Layer(Rope(), 9, heads=(HeadEdit((2,), Uniform()), HeadEdit((0,), Bands(2 * math.pi / 300, "fast")))),
        (9, 1, [(naive_rope(), {0: FAST, 2: NOTHING}.get(h, ONE), 0.0) for h in EVERY]),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "scan"), [("reference", False), ("dense", True), ("chunked", True)], ids=str)
def test_every_layer_another_scheme_and_heads_that_differ(attention, scan):
    chunk = 7 if attention == "chunked" else 64
    model = Model(ModelConfig(layers=len(MIXED), scan=scan, attention=attention, attention_chunk=chunk, **SHAPE))
    params = random_params(model, 0)
    tokens = np.random.default_rng(1).integers(0, SHAPE["vocab_size"], (2, T)).astype(np.int32)
    schedule = build_schedule([layer for layer, _ in MIXED], H, G, K, length=T)
    assert [s.heads for s in schedule.structure][-3:] == ["split"] * 3
    ours = logits_of(model, params, jnp.asarray(tokens), None, None, schedule)
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    theirs = np.stack([naive_logits(wide, row, [told for _, told in MIXED]) for row in tokens])
    assert np.abs(theirs).max() > 3  # not the logits of a model that looks at nothing
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)
    if attention == "dense":
        # Generalized, the same numbers take part in another program.
        general = logits_of(model, params, jnp.asarray(tokens), None, None, schedule.generalize("split", slopes=True))
        np.testing.assert_allclose(general, theirs, rtol=0, atol=2e-4)


@pytest.mark.parametrize("n", range(len(MIXED)))
def test_the_naive_model_feels_every_layer(n):
    """Each layer's scheme alone, exchanged for no encoding, moves the naive logits: the comparison above sees it."""
    model = Model(ModelConfig(layers=len(MIXED), **SHAPE))
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), random_params(model, 0))
    tokens = np.random.default_rng(1).integers(0, SHAPE["vocab_size"], T)
    told = [told for _, told in MIXED]
    plain = [*told[:n], (None, 1, [STILL] * H), *told[n + 1 :]]
    assert np.abs(naive_logits(wide, tokens, told) - naive_logits(wide, tokens, plain)).max() > 0.01


# --- Packed documents ------------------------------------------------------------------------------------------------

TABLE = tuple(np.linspace(1, 3, R))
SCHEMES = {
    "rope": Rope(),
    "p-rope": Rope(fraction=0.5),
    "partial rope": PartialRope(fraction=0.5),
    "nope": NoPE(),
    "alibi": Alibi(),
    "pi": Rope(scaling=PI(4.0)),
    "ntk": Rope(scaling=NTK(4.0)),
    "dynamic ntk": Rope(scaling=DynamicNTK(8)),
    "ntk by parts": Rope(scaling=NTKByParts(4.0, 300)),
    "yarn": Rope(scaling=Yarn(4.0, 300)),
    "dynamic yarn": Rope(scaling=DynamicYarn(16)),
    "llama3": Rope(scaling=Llama3(8.0, original_length=64)),
    "longrope": Rope(scaling=LongRope(TABLE, tuple(2 * x for x in TABLE), 16, 4.0)),
    "notebook ntk": Rope(scaling=NotebookNTK(4.0)),
    "notebook yarn": NotebookYarn(original_length=6, blend=2),
    "notebook bias": NotebookBias(original_length=6),
    "window": Layer(Rope(), window=4),
    "heads that differ": Layer(Rope(), heads=(HeadEdit((1,), NoPE()), HeadEdit((2,), Alibi()))),
    "dope by parts": Layer(Rope(), heads=(HeadEdit((1,), Bands(0.1)),)),
    "dope uniform": Layer(Rope(), heads=(HeadEdit((0,), Uniform()),)),
    "dope gaussian": Layer(Rope(), heads=(HeadEdit((1, 2), Gaussian(7)),)),
    "dope gaussian on every head": Layer(NoPE(), heads=(HeadEdit((0, 1, 2, 3), Gaussian(7)),)),
}
DOCUMENTS = (9, 1, 14)


MODELS = {
    "dense": Model(ModelConfig(layers=2, attention="dense", **SHAPE)),
    "chunked": Model(ModelConfig(layers=2, attention="chunked", attention_chunk=8, **SHAPE)),
}


def schedule_of(name):
    """Generalized, so that one compilation serves most schemes; windows and the notebook's are their own programs.

    The schedule is that of the window, whatever the documents in it: dynamic schemes follow what is read at once.
    """
    scheme = SCHEMES[name]
    layer = scheme if isinstance(scheme, Layer) else Layer(scheme)
    return build_schedule([layer, layer], H, G, K, length=T).generalize("split", slopes=True)


@pytest.fixture(scope="module")
def params():
    return random_params(MODELS["dense"], 3)


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(2).integers(0, SHAPE["vocab_size"], T).astype(np.int32)


def packed(documents):
    """positions [1, T] and segments [1, T] of documents of these lengths."""
    positions = np.concatenate([np.arange(n) for n in documents]).astype(np.int32)
    segments = np.repeat(np.arange(len(documents)) + 1, documents).astype(np.int32)
    return jnp.asarray(positions)[None], jnp.asarray(segments)[None]


@pytest.mark.parametrize(
    "attention", [name if name == "chunked" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
@pytest.mark.parametrize("name", SCHEMES)
def test_packed_documents_equal_separate_ones(params, text, name, attention):
    model, schedule = MODELS[attention], schedule_of(name)
    together = logits_of(model, params, jnp.asarray(text)[None], *packed(DOCUMENTS), schedule)[0]
    # Each document alone, in a row of its own; what follows it there is later, and so not seen.
    starts = np.cumsum((0, *DOCUMENTS[:-1]))
    rows = np.stack([np.roll(text, -start) for start in starts])
    alone = logits_of(model, params, jnp.asarray(rows), None, None, schedule)
    for row, start, n in zip(alone, starts, DOCUMENTS, strict=True):
        np.testing.assert_allclose(together[start : start + n], row[:n], rtol=0, atol=2e-5)
    # Read as one document, they feel each other.
    joined = logits_of(model, params, jnp.asarray(text)[None], *packed([T]), schedule)[0]
    assert np.abs(joined - together)[DOCUMENTS[0] :].max() > 1e-3


@pytest.mark.slow
def test_every_scheme_reads_otherwise_than_every_other_one(params, text):
    found = {name: logits_of(MODELS["dense"], params, jnp.asarray(text)[None], *packed([T]), schedule_of(name))
             for name in SCHEMES}  # fmt: skip
    names = list(found)
    for i, name in enumerate(names):
        for other in names[:i]:
            assert np.abs(found[name] - found[other]).max() > 1e-3, f"{name} reads as {other}"
