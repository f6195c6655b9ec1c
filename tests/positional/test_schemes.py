"""Encodings since the papers against their authors' code, in models, and as text and JSON."""

import dataclasses
import importlib
import itertools
import json
import math
import pathlib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.attention import LayerEncoding, attention
from pe_lab.attention.hooks import Hooks, distance_bias, position_bias
from pe_lab.config import ModelConfig, to_json
from pe_lab.errors import EncodingError, UserError
from pe_lab.model import Model
from pe_lab.model.programs import ChunkedForward
from pe_lab.positional import (
    XSA,
    Bands,
    Beta,
    ClippedRope,
    ContentRotation,
    ContextualPosition,
    Encoding,
    Fire,
    FoPE,
    ForgettingGate,
    Function,
    GatedOutput,
    GatedRope,
    GatedXSA,
    Gaussian,
    HeadShape,
    KerpleLog,
    KerplePower,
    Layer,
    Layout,
    LearnedAlibi,
    LearnedPositions,
    LearnedSink,
    Llama4Temperature,
    LongRopeStart,
    NoPE,
    PoPE,
    Rope,
    SelectiveRope,
    Sinusoidal,
    SSMax,
    T5Bias,
    XPos,
    Yarn,
    apply_p_rope,
    build_schedule,
    family,
    frequencies,
    function,
    label,
    layer_hooks,
    layers,
    rotation_tables,
    to_canonical,
)
from pe_lab.positional.codec import from_json, parse
from pe_lab.positional.hooks import initial
from pe_lab.positional.notebook import NotebookBias, NotebookYarn
from pe_lab.positional.registry import ENCODINGS, import_encodings

GOLDEN = np.load(pathlib.Path(__file__).parent.parent / "data" / "encoding_golden.npz")
# Golden outputs are float64 of float32 inputs of size 1; ours are float32.
CLOSE = dict(rtol=2e-5, atol=2e-6)


def golden(scheme):
    """The arrays of a scheme by plain names, with the shared inputs beneath."""
    found = {name: GOLDEN[name] for name in ("q", "k", "v", "x")}
    return found | {name.removeprefix(f"{scheme}/"): GOLDEN[name] for name in GOLDEN if name.startswith(f"{scheme}/")}


def attend(encoding, arrays, params=None, positions=None, implementation="reference", order=None):
    """Our attention with one encoding, of golden inputs; `order` rearranges the channels of queries and keys."""
    q, k, v, x = (jnp.asarray(arrays[name], jnp.float32) for name in "qkvx")
    if order is not None:
        q, k = (to_canonical(one, order) for one in (q, k))
    T, K = q.shape[1], q.shape[3]
    schedule = build_schedule([Layer(encoding)], q.shape[2], k.shape[2], K)
    params = {name: jnp.asarray(value, jnp.float32) for name, value in (params or {}).items()}
    if params:
        wanted = initial(encoding, HeadShape(q.shape[2], k.shape[2], K, x.shape[2]), jax.random.key(0))
        assert {n: one.value.shape for n, one in wanted.items()} == {n: one.shape for n, one in params.items()}
    cos = sin = None
    if schedule.structure[0].rotates:
        tables = map(jnp.asarray, (schedule.fixed_freq[0, :1], schedule.gain[0, :1]))
        cos, sin = rotation_tables(*tables, jnp.arange(T)[None])
    hooks = Hooks((params,) * len(schedule.hooks[0]), schedule.hooks[0])
    layer = LayerEncoding(cos=cos, sin=sin, hooks=hooks)
    settings = dict(positions=positions, implementation=implementation, chunk=4)
    return jax.jit(lambda q, k, v, x: attention(q, k, v, layer, x=x, **settings))(q, k, v, x)


def check(encoding, arrays, params=None, output="output", **settings):
    ours = attend(encoding, arrays, params, **settings)
    np.testing.assert_allclose(ours, arrays[output], **CLOSE)
    plain = attend(NoPE(), arrays)
    assert np.abs(np.asarray(ours) - np.asarray(plain)).max() > 1e-2, "the test cannot fail"


def selective(arrays, heads=4):
    """The parameters of Selective RoPE from the authors' layout."""
    D, rank = arrays["down"].shape
    params = {"down": arrays["down"].reshape(heads, D // heads, rank), "up": arrays["up"].reshape(rank, heads, -1)}
    if "convolution" in arrays:
        params["filter"] = arrays["convolution"].reshape(heads, -1, arrays["convolution"].shape[-1])
    if "gate" in arrays:
        gate = arrays["gate"].reshape(heads, D // heads, heads)
        params |= {"log_bias": arrays["log_bias"], "gate": gate, "gate_bias": arrays["gate_bias"]}
    return params


# (scheme of the golden file, encoding, names of its parameters or a function of the arrays, output)
PLAIN = [
    ("ssmax", SSMax(), ["scale"], "output"),
    ("llama4", Llama4Temperature(0.3, 4), [], "output"),
    ("t5", T5Bias(), ["table"], "output"),
    ("kerple_log", KerpleLog(), ["r1", "r2"], "output"),
    ("kerple_power", KerplePower(), ["r1", "r2"], "output"),
    ("learned_alibi", LearnedAlibi(), ["slopes"], "output"),
    ("fire", Fire(6.0), ["c", "length_multiplier", "w1", "b1", "w2", "b2"], "output"),
    ("cope", ContextualPosition(4), ["embedding"], "listing_output"),
    ("cope", ContextualPosition(4, scaled=True), ["embedding"], "repository_output"),
    ("gated", GatedOutput(), ["gate"], "output"),
    ("xsa", XSA(), [], "output"),
]


@pytest.mark.parametrize(
    ("scheme", "encoding", "names", "output"), PLAIN, ids=lambda x: x if isinstance(x, str) else ""
)
def test_outputs_of_the_authors_code(scheme, encoding, names, output):
    arrays = golden(scheme)
    check(encoding, arrays, {name: arrays[name] for name in names}, output)


def test_forgetting_and_its_key_bias():
    arrays = golden("forgetting")
    params = {"weight": arrays["weight"], "bias": arrays["gate_bias"]}
    check(ForgettingGate(), arrays, params)
    check(ForgettingGate(), arrays, params, implementation="chunked")


def test_a_sink_takes_weight():
    arrays = golden("sink")
    check(LearnedSink(), arrays, {"sink": arrays["sinks"]})


def test_xpos_in_the_layout_of_torchscale():
    arrays = golden("xpos")
    for prefix in ("", "short_"):
        encoding = XPos(scale_base=float(arrays[f"{prefix}scale_base"]), origin=6)
        check(encoding, arrays, output=f"{prefix}output", order=Layout("interleaved"))
        # The origin changes no product of a query and a key.
        moved = dataclasses.replace(encoding, origin=0)
        check(moved, arrays, output=f"{prefix}output", order=Layout("interleaved"))


@pytest.mark.parametrize("scheme", ["fope", "fope_wide"])
def test_fope_as_the_authors_code_and_as_the_equation(scheme):
    arrays = golden(scheme)
    params = {name: arrays[name] for name in ("sin_coef", "cos_coef")}
    settings = {"original_length": 64, "fourier_dim": None if scheme == "fope" else 32}
    kept, count = FoPE(**settings).series(16)
    np.testing.assert_allclose(kept, arrays["inv_freq"], rtol=1e-12)
    assert params["sin_coef"].shape[1:] == (len(kept), count)
    check(FoPE(**settings, rest="doubled"), arrays, params)
    floats = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    for rest, prefix in (("doubled", ""), ("unrotated", "paper_")):
        q, k, x = (jnp.asarray(arrays[name], jnp.float32) for name in "qkx")
        encoded = FoPE(**settings, rest=rest).encode(floats, q, k, jnp.arange(q.shape[1])[None], x)
        for name, ours in zip("qk", encoded, strict=True):
            np.testing.assert_allclose(ours, arrays[f"{prefix}encoded_{name}"], rtol=2e-5, atol=5e-6)


def test_clipped_frequencies_of_the_authors_and_of_mlx():
    for name in [name for name in GOLDEN if name.startswith("clipped_rope/inv_freq_")]:
        K = int(name.rpartition("_")[2])
        base, length = float(GOLDEN[f"clipped_rope/base_{K}"]), int(GOLDEN[f"clipped_rope/length_{K}"])
        for clipped in (None, 20):
            inv_freq, gain = frequencies(ClippedRope(length, base, clipped), K)
            np.testing.assert_allclose(inv_freq, GOLDEN[name], rtol=1e-12, atol=1e-20)
            assert (gain == 1).all()
    columns = (GOLDEN[f"clipped_rope/auto_{name}"] for name in ("head_dim", "base", "length", "clip"))
    for index, (K, base, length, clip) in enumerate(zip(*columns, strict=True)):
        inv_freq, _ = frequencies(ClippedRope(int(length), float(base)), int(K))
        np.testing.assert_allclose(inv_freq, GOLDEN[f"clipped_rope/auto_inv_freq_{index}"], rtol=1e-12, atol=1e-20)
        hard, _ = frequencies(ClippedRope(int(length), float(base), hard=True), int(K))
        assert (hard == 0).sum() == clip
    scaled = frequencies(ClippedRope(1024, scaling=Yarn(4.0, 1024), clipped=0), 64)
    np.testing.assert_array_equal(scaled, frequencies(Rope(scaling=Yarn(4.0, 1024)), 64))


def test_longrope_with_a_start_of_unscaled_tokens():
    """The cosines and sines of LongRoPE's authors (make_longrope_start_golden.py), and the scores that they make."""
    golden = json.loads((pathlib.Path(__file__).parent.parent / "data" / "longrope_start_golden.json").read_text())
    cos, sin = np.array(golden["cos"]), np.array(golden["sin"])
    later = math.hypot(cos[-1, 0], sin[-1, 0])
    assert later > 1.2 and math.hypot(cos[golden["start"] - 1, 0], sin[golden["start"] - 1, 0]) == pytest.approx(1)
    encoding = LongRopeStart(tuple(golden["divisors"]), golden["start"], golden["base"], later)
    q, k = (jax.random.normal(jax.random.key(n), (1, 64, heads, 16)) for n, heads in enumerate((4, 2)))
    encoded = encoding.encode({}, q, k, jnp.arange(64)[None], jnp.zeros((1, 64, 8)))
    for ours, given in zip(encoded, (q, k), strict=True):
        a, b = np.split(np.asarray(given, np.float64), 2, axis=-1)
        rotated = np.concatenate([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)
        np.testing.assert_allclose(ours, rotated, rtol=2e-5, atol=2e-5)


def test_pope_at_any_positions():
    arrays, positions = golden("pope"), jnp.asarray(GOLDEN["positions"])
    params = {"delta": arrays["bias"]}
    q, k, x = (jnp.asarray(arrays[name], jnp.float32) for name in "qkx")
    encoded = PoPE().encode({"delta": jnp.asarray(arrays["bias"])}, q, k, positions, x)
    for name, ours in zip("qk", encoded, strict=True):
        # Theirs has the cosine and the sine of a channel as neighbours.
        both = np.stack(np.split(np.asarray(ours), 2, -1), -1).reshape(ours.shape)
        np.testing.assert_allclose(both, arrays[f"encoded_{name}"], rtol=2e-5, atol=2e-6)
    check(PoPE(), arrays, params, positions=positions)


@pytest.mark.parametrize("scheme", ["selective_rope", "selective_rope_gated", "selective_rope_difference"])
def test_selective_rope(scheme):
    arrays = golden(scheme)
    rest = dict(rank=int(arrays["rank"]), base=float(arrays["base"]))
    np.testing.assert_allclose(arrays["temperature"], 100.0 ** -(np.arange(4) / 4), rtol=1e-6)
    if scheme == "selective_rope_difference":
        check(ContentRotation(**rest), arrays, selective(arrays))
        return
    extra = scheme == "selective_rope_gated"
    encoding = SelectiveRope(**rest, convolution=4, log_bias=extra, gate=extra)
    assert not encoding.exact_cache and SelectiveRope().exact_cache
    check(encoding, arrays, selective(arrays))


def bias_of(encoding, params, T):
    """[H, T, T], by positions, and by the table of distances where there is one."""
    hooks = Hooks(
        ({name: jnp.asarray(value, jnp.float32) for name, value in params.items()},),
        layer_hooks([Layer(encoding)], 4)[0],
    )
    at = jnp.arange(T)[None]
    return np.asarray(position_bias(hooks).block(at, at, 4)[0]), distance_bias(hooks, T, 4)


BIASES = [(scheme, encoding, names) for scheme, encoding, names, _ in PLAIN if f"{scheme}/bias" in GOLDEN]


@pytest.mark.parametrize(("scheme", "encoding", "names"), BIASES, ids=lambda x: x if isinstance(x, str) else "")
def test_biases_and_their_tables_by_distance(scheme, encoding, names):
    arrays = golden(scheme)
    ours, table = bias_of(encoding, {name: arrays[name] for name in names}, 12)
    causal = np.tril(np.ones((12, 12), bool))
    np.testing.assert_allclose(ours[:, causal], arrays["bias"][:, causal], rtol=2e-6, atol=2e-6)
    assert np.isfinite(ours).all()  # at later keys too
    assert encoding.relative == (table is not None) == (scheme != "fire")
    if table is not None:
        np.testing.assert_allclose(table, arrays["bias"][:, -1, ::-1], rtol=2e-6, atol=2e-6)


def test_t5_buckets_at_every_distance():
    bucket = T5Bias().bucket_of()
    theirs = GOLDEN["t5/buckets"]
    np.testing.assert_array_equal(bucket[np.minimum(np.arange(len(theirs)), 128)], theirs)
    arrays = golden("t5")
    ours, table = bias_of(T5Bias(), {"table": arrays["table"]}, 150)
    np.testing.assert_allclose(ours[:, -1], arrays["last_row_150"], rtol=1e-6)
    np.testing.assert_allclose(table[:, ::-1], arrays["last_row_150"], rtol=1e-6)


def test_llama_4s_temperature_at_its_steps():
    at = jnp.asarray(GOLDEN["llama4/scale_positions"])[None]
    q = jnp.ones((1, at.shape[1], 1, 2))
    scaled, same = Llama4Temperature().encode({}, q, q, at, q[..., 0])
    assert same is q
    np.testing.assert_allclose(scaled[0, :, 0, 0], GOLDEN["llama4/scales"], rtol=1e-6)


def test_starts_of_the_authors():
    shape = HeadShape(8, 4, 16, 64)
    start = lambda encoding, name: np.asarray(initial(encoding, shape, jax.random.key(0))[name].value)  # noqa: E731
    assert start(SSMax(), "scale")[0] == pytest.approx(0.168, abs=5e-4)  # the paper's, at 1024 tokens
    np.testing.assert_allclose(start(LearnedAlibi(), "slopes"), 2.0 ** -np.arange(1.0, 9))
    assert 0.02 < start(T5Bias(), "table").std() * 0.25 < 0.04  # deviation 1 / 8
    coefficients = start(FoPE(64, sigma=0.0), "cos_coef")
    np.testing.assert_array_equal(coefficients, np.broadcast_to(np.eye(*coefficients.shape[1:]), coefficients.shape))
    gate = ForgettingGate(memory=100.0)
    log_gate = jax.nn.log_sigmoid(start(gate, "bias"))
    np.testing.assert_allclose(np.exp(log_gate * 100), np.exp(-1), rtol=1e-4)


def test_a_gradient_passes_where_a_parameter_is_at_its_bound():
    def total(delta):
        ones = jnp.ones((1, 3, 1, 4))
        q, k = PoPE().encode({"delta": delta}, ones, ones, jnp.arange(3)[None], ones[..., 0])
        return jnp.sum(q[:, 2] * k[:, 0])

    at_bound, within = (jax.jit(jax.grad(total))(jnp.full((1, 4), start)) for start in (0.0, -1e-4))
    np.testing.assert_allclose(at_bound, within, rtol=1e-2, atol=5e-4)  # jnp.clip gives half of it
    assert np.abs(at_bound).max() > 0.1

    def slopes(value):
        return LearnedAlibi().bias({"slopes": value}, jnp.arange(4), jnp.arange(4)).sum()

    assert (jax.jit(jax.grad(slopes))(jnp.asarray([-1.0])) < 0).all()  # it comes back


# In a model.

SCHEMES = [
    SSMax(),
    Llama4Temperature(floor_scale=4),
    ClippedRope(16),
    LongRopeStart((2.0,)),
    XPos(),
    FoPE(16, trained=True),
    PoPE(),
    GatedRope(base=100.0, penalty_per_head=0.1),
    SelectiveRope(rank=4),
    SelectiveRope(rank=4, convolution=3, log_bias=True, gate=True),
    ContentRotation(rank=4),
    ForgettingGate(),
    ContextualPosition(4),
    T5Bias(),
    KerpleLog(),
    KerplePower(),
    LearnedAlibi(),
    Fire(),
    GatedOutput(),
    GatedOutput(per="head"),
    XSA(),
    GatedXSA(),
    LearnedSink(),
    LearnedPositions(64),
    Sinusoidal(),
    function(apply_p_rope, rope_percentage=0.75),
]
SHAPE = dict(
    d_model=32,
    d_ff=64,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab_size=64,
    attention_chunk=8,
    dtype="float32",
    init_std=0.4,
)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 24)).astype(np.int32)
TARGETS = np.roll(TOKENS, -1, 1)


def test_every_scheme_is_in_the_tests():
    own = {kind for kind in ENCODINGS.values() if kind.__module__.startswith("pe_lab.positional.schemes")}
    assert own | {Function} == {type(one) for one in SCHEMES}


def model_of(encodings, implementation):
    """A small model with an encoding a layer."""
    described = [Layer(one) for one in encodings]
    config = ModelConfig(**SHAPE, layers=len(described), attention=implementation)
    schedule = build_schedule(described, config.heads, config.kv_heads, config.head_dim)
    return Model(config, hooks=schedule.hooks), schedule


def perturbed(params):
    """Parameters of encodings away from where they start, so that those that start at 0 matter."""
    keys = iter(jax.random.split(jax.random.key(7), 99))
    positional = params["layers"].get("positional", {})
    moved = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), positional)
    return {**params, "layers": {**params["layers"], "positional": moved}}


EXACT = [one for one in SCHEMES if one.exact_cache]
# Several schemes a model, one a layer: to compile few programs.
GROUPS = [tuple(EXACT[n : n + 7]) for n in range(0, len(EXACT), 7)]


def names(group):
    return "-".join(type(one).__name__ for one in group)


@pytest.mark.slow
@pytest.mark.parametrize("encodings", GROUPS, ids=names)
def test_models_have_finite_gradients_and_equal_losses_in_chunks(encodings):
    batch = {"tokens": jnp.asarray(TOKENS), "targets": jnp.asarray(TARGETS)}
    model, schedule = model_of(encodings, "reference")
    params = model.init(jax.random.key(1))

    @jax.jit
    def losses_and_gradients(params):
        def mean(params):
            losses = model.token_loss(params, batch, schedule)
            return losses.mean(), losses

        (_, losses), gradients = jax.value_and_grad(mean, has_aux=True)(params)
        return losses, gradients

    _, gradients = losses_and_gradients(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf).all(), path
    moved = perturbed(params)
    losses, gradients = losses_and_gradients(moved)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients["layers"]["positional"]):
        assert np.isfinite(leaf).all() and np.any(leaf), path
    chunked, _ = model_of(encodings, "chunked")
    by_chunks = jax.jit(lambda p: chunked.token_loss(p, batch, schedule))(moved)
    np.testing.assert_allclose(by_chunks, losses, rtol=2e-5, atol=2e-5)


# What a cache holds beside keys and values: keys of other channels, running sums, biases of keys, logits of all keys.
HELD = (PoPE(), SelectiveRope(rank=4), ForgettingGate(), ContextualPosition(4))


@pytest.mark.slow
@pytest.mark.parametrize("encodings", [HELD, *GROUPS], ids=names)
def test_losses_with_a_cache_are_those_of_the_whole_sequence(encodings):
    model, schedule = model_of(encodings, "reference")
    params = perturbed(model.init(jax.random.key(1)))
    batch = {"tokens": jnp.asarray(TOKENS), "targets": jnp.asarray(TARGETS)}
    losses = jax.jit(lambda p: model.token_loss(p, batch, schedule))(params)
    cached = ChunkedForward(model.config, chunk=8).losses(params, TOKENS, TARGETS, schedule)
    np.testing.assert_allclose(cached, losses, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_a_convolution_is_refused_with_a_cache_as_it_declares():
    (encoding,) = (one for one in SCHEMES if not one.exact_cache)
    model, schedule = model_of([encoding] * 2, "reference")
    params = perturbed(model.init(jax.random.key(1)))
    with pytest.raises(UserError, match="SelectiveRope is not exact under a KV cache"):
        ChunkedForward(model.config, chunk=8).losses(params, TOKENS, TARGETS, schedule)


UNCHANGED = [
    (SelectiveRope(rank=4, start="unchanged"), NoPE()),
    (SelectiveRope(rank=4, base=1e4, log_bias=True, start="unchanged"), Rope()),
    (ContentRotation(rank=4, start="unchanged"), NoPE()),
    (ForgettingGate(memory=1e9), NoPE()),
    (ContextualPosition(4), NoPE()),
    (T5Bias(start="unchanged"), NoPE()),
    (KerpleLog(least=0.0, start="unchanged"), NoPE()),
    (KerplePower(least=0.0, start="unchanged"), NoPE()),
    (LearnedAlibi(start="unchanged"), NoPE()),
    (Fire(start="unchanged"), NoPE()),
    (GatedOutput(start="unchanged"), NoPE()),
    (GatedOutput(per="head", start="unchanged"), NoPE()),
    (GatedXSA(), NoPE()),
    (LearnedSink(initial=-20.0), NoPE()),
    (Llama4Temperature(), NoPE()),
]


@pytest.mark.parametrize(("encoding", "same_as"), UNCHANGED, ids=repr)
def test_what_starts_unchanged_changes_nothing(encoding, same_as):
    arrays = golden("")
    found = initial(encoding, HeadShape(4, 2, 8, 32), jax.random.key(3))
    ours = attend(encoding, arrays, {name: one.value for name, one in found.items()})
    np.testing.assert_allclose(ours, attend(same_as, arrays), rtol=1e-5, atol=1e-6)


# Text and JSON.


def as_text(encoding):
    """The text of an encoding whose fields are numbers, words and tables."""
    values = {f.name: getattr(encoding, f.name) for f in dataclasses.fields(encoding)}
    settings = dict(values.pop("settings", ()))
    given = {name: value for name, value in (values | settings).items() if value not in (None, "")}
    given |= {name: "".join(f"{one}:" for one in value) for name, value in given.items() if isinstance(value, tuple)}
    name = next(name for name, kind in ENCODINGS.items() if kind is type(encoding))
    return f"{name}:{','.join(f'{key}={value}' for key, value in given.items())}".rstrip(":")


@pytest.mark.parametrize("encoding", [*SCHEMES, *(one for one, _ in UNCHANGED)], ids=repr)
def test_json_and_text_round_trip(encoding):
    layer = Layer(encoding)
    back = from_json(json.loads(json.dumps(to_json(layer), allow_nan=False)))
    assert back == layer and hash(back) == hash(layer)
    assert parse(as_text(encoding)) == layer
    extra = parse(f"nope/with={as_text(encoding)}") if not _spectral(encoding) else Layer(NoPE(), extras=())
    assert extra.extras == (() if _spectral(encoding) else (encoding,))


def _spectral(encoding):
    return isinstance(encoding, ClippedRope | XPos)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SSMax(original_length=1), "SSMax.original_length is 1"),
        (lambda: Llama4Temperature(floor_scale=0), "Llama4Temperature.floor_scale is 0"),
        (lambda: XPos(scale_base=0.0), "XPos.scale_base is 0.0"),
        (lambda: FoPE(3), "at least 7 tokens"),
        (lambda: FoPE(64, rest="none"), "it must be unrotated or doubled"),
        (lambda: PoPE(initial="one"), "it must be zero or uniform"),
        (lambda: SelectiveRope(rank=0), "SelectiveRope.rank is 0"),
        (lambda: SelectiveRope(convolution=0), "SelectiveRope.convolution is 0"),
        (lambda: T5Bias(start="zero"), "it must be published or unchanged"),
        (lambda: T5Bias(buckets=64, max_distance=32), "it must be above buckets / 2, which is 32"),
        (lambda: KerpleLog(least=-1.0), "KerpleLog.least is -1.0"),
        (lambda: ForgettingGate(memory=0.0), "ForgettingGate.memory is 0.0"),
        (lambda: ContextualPosition(1), "ContextualPosition.positions is 1"),
        (lambda: GatedOutput(per="token"), "it must be channel or head"),
        (lambda: initial(SelectiveRope(), HeadShape(3, 3, 8, 32), jax.random.key(0)), "3 must divide 32"),
        (lambda: function(lambda inputs, positions, head_dim: inputs), "has no name in a module"),
        (lambda: function(apply_p_rope, rope_percentage=np.ones(2)), "rope_percentage is"),
        (lambda: Function("apply_p_rope"), "give MODULE:NAME or PATH/FILE.py:NAME"),
        (lambda: parse("t5:bucket=16"), "Did you mean 'buckets'?"),
        (lambda: parse("function:rope_percentage=0.75"), "Function needs name"),
    ],
)
def test_what_is_refused(make, says):
    with pytest.raises(UserError) as error:
        make()
    assert says in str(error.value)


DESCRIPTIONS = [*SCHEMES, NotebookBias(), NotebookYarn(), Bands(0.1), Gaussian(7), Gaussian(7, 1.0), Beta(0.1, 64)]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("one", DESCRIPTIONS, ids=repr)
def test_no_number_of_a_description_is_beyond_use(one):
    """Whether a field has limits of its own or those of all."""
    numbers = [f.name for f in dataclasses.fields(one) if type(getattr(one, f.name)) in (int, float)]
    for name, value in itertools.product(numbers, (1e300, -1e300, math.inf, math.nan)):
        with pytest.raises(UserError, match=f"{type(one).__name__}.{name} is "):
            dataclasses.replace(one, **{name: value})


def test_limits_of_ones_own_replace_that_of_all_numbers():
    @dataclasses.dataclass(frozen=True)
    class Mine(Encoding):
        limits: ClassVar = {"least": (lambda x: x < 0, "it must be negative.")}
        least: float = -1e30
        other: float = 1.0

    assert Mine().least == -1e30 and Mine(-math.inf).least == -math.inf
    with pytest.raises(UserError, match=r"Mine.least is 1.0; it must be negative\."):
        Mine(1.0)
    with pytest.raises(UserError, match=r"Mine.other is -1e\+30; it must be a number of at most 4,294,967,296 in"):
        Mine(other=-1e30)


# Functions as encodings.


def test_a_function_is_what_it_computes():
    arrays = golden("")
    encoding = function(apply_p_rope, rope_percentage=0.75)
    assert encoding.name == "pe_lab.positional:apply_p_rope" and encoding.digest == ""
    assert label(Layer(encoding)) == "function(name=pe_lab.positional:apply_p_rope, settings=rope_percentage=0.75)"
    np.testing.assert_allclose(attend(encoding, arrays), attend(Rope(fraction=0.75), arrays), rtol=1e-5, atol=1e-6)
    assert layers(["rope", encoding], 4)[3] == Layer(encoding) and family(Layer(encoding)) == "apply_p_rope"
    assert function(apply_p_rope, rope_percentage=0.75, max_wavelength=100) == function(
        apply_p_rope, max_wavelength=100, rope_percentage=0.75
    )


RECIPE = """
import jax.numpy as jnp
TWO = 2

def my_rope(inputs, positions, head_dim, factor=1.0):
    return inputs * (TWO * factor + positions[..., None, None])

def wrong(inputs, positions, head_dim):
    return inputs[..., :2]
"""


def test_a_function_of_a_file_is_found_again_and_must_be_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "recipe.py"
    file.write_text(RECIPE)
    encoding = function(import_encodings("recipe.py").my_rope, factor=3)
    assert encoding.name == "recipe.py:my_rope" and encoding.settings == (("factor", 3),) and encoding.digest
    again = from_json(json.loads(json.dumps(to_json(Layer(encoding))))).encoding
    assert again == encoding and again.display_name == "my_rope"
    module = importlib.import_module("pe_lab.positional.registry")
    known = {key: f for key, f in module._known.items() if key[0] != encoding.name}
    monkeypatch.setattr(module, "_known", dict(known))  # as in another process
    q = jnp.ones((2, 3, 1, 4))
    encoded, _ = again.encode({}, q, q, jnp.arange(3)[None], q[..., 0, :])
    np.testing.assert_array_equal(encoded[1, :, 0, 0], [6, 7, 8])
    file.write_text(RECIPE.replace("TWO * factor", "4 * factor"))
    import_encodings("recipe.py")
    monkeypatch.setattr(module, "_known", dict(known))
    with pytest.raises(EncodingError, match="Bring the former source back"):
        again.encode({}, q, q, jnp.arange(3)[None], q[..., 0, :])
    with pytest.raises(EncodingError, match="which is not imported. Import it first: --encodings=recipe.py"):
        Function("recipe.py:other").encode({}, q, q, jnp.arange(3)[None], q[..., 0, :])
    with pytest.raises(UserError, match="it must keep theirs"):
        Function("recipe.py:wrong").encode({}, q, q, jnp.arange(3)[None], q[..., 0, :])
