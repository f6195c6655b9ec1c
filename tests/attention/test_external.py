"""Attention kernels of external packages: their results, or their arguments, are those of the reference."""

import functools
import inspect
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.attention.capabilities import AttentionRequest
from pe_lab.attention.kernels import external
from pe_lab.attention.kernels.external import (
    CUDNN,
    SPLASH,
    TOKAMAX,
    cudnn_attention,
    splash_attention,
    splash_blocks,
    tokamax_attention,
)
from pe_lab.attention.key_block import AttentionInputs, scaled
from pe_lab.attention.reference import reference_attention
from pe_lab.errors import UnsupportedError, UserError
from pe_lab.parallel.compiler import libtpu_version, topology_devices
from pe_lab.parallel.topology import parse_topology


def qkv(T: int, B: int = 2, H: int = 4, G: int = 2, K: int = 16, dtype=jnp.float32):
    rng = np.random.default_rng(T)
    return tuple(jnp.asarray(rng.standard_normal((B, T, n, K)), dtype) for n in (H, G, G))


def documents(T: int, B: int = 2) -> jax.Array:
    """Several documents a row, of irregular lengths; the last is padding, 0."""
    cuts = np.sort(np.random.default_rng(T).integers(1, max(T, 2), (B, 3)), axis=1)
    ids = 1 + (np.arange(T)[None, :, None] >= cuts[:, None]).sum(-1)
    return jnp.asarray(np.where(ids == 4, 0, ids), jnp.int32)


@functools.partial(jax.jit, static_argnames=("attend", "window", "soft_cap"))
def evaluate(attend, q, k, v, segments=None, window=None, soft_cap=None):
    """Outputs, and the gradients of a random sum of them."""
    direction = jax.random.normal(jax.random.key(1), q.shape)
    inputs = AttentionInputs(query_segments=segments, key_segments=segments, window=window, soft_cap=soft_cap)

    def loss(q, k, v):
        out = attend(scaled(q, jnp.float32(1.3 * q.shape[-1] ** -0.5)), k, v, inputs)
        return (out.astype(jnp.float32) * direction).sum(), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)


def compare(attend, arrays, **settings):
    (_, out), gradients = evaluate(attend, *arrays, **settings)
    (_, expected), expected_gradients = evaluate(reference_attention, *arrays, **settings)
    assert out.dtype == arrays[0].dtype
    for a, b in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5)


# --- Splash ----------------------------------------------------------------------------------------------------------

interpreted = functools.partial(splash_attention, interpret=True)


@pytest.fixture
def short_blocks(monkeypatch):
    monkeypatch.setattr(external, "BLOCK", 128)


@pytest.mark.parametrize(
    "T, G, settings",
    [
        pytest.param(1, 2, dict(window=1), marks=pytest.mark.slow),
        pytest.param(127, 1, {}, marks=pytest.mark.slow),
        pytest.param(129, 4, dict(window=129), marks=pytest.mark.slow),
        pytest.param(200, 2, dict(window=1), marks=pytest.mark.slow),
        (257, 2, dict(window=128, segments=True)),
        pytest.param(600, 2, dict(segments=True), marks=pytest.mark.slow),
        # Five blocks: the backward pass in two kernels.
        pytest.param(600, 2, dict(window=129, segments=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_splash_is_the_reference_in_value_and_gradient(short_blocks, T, G, settings):
    settings = settings | (dict(segments=documents(T)) if "segments" in settings else {})
    compare(interpreted, qkv(T, G=G), **settings)


@pytest.mark.slow
def test_splash_with_blocks_in_pairs(monkeypatch):
    monkeypatch.setattr(external, "BLOCK", 128)
    T = 1930
    assert splash_blocks(T) == (8, 256, 128)
    compare(interpreted, qkv(T, B=1, H=2, G=1, K=8), window=300)


@pytest.mark.slow
def test_splash_in_bfloat16_stays_near_float32(short_blocks):
    arrays = qkv(257, dtype=jnp.bfloat16)
    (_, out), gradients = evaluate(interpreted, *arrays, window=130)
    (_, exact), exact_gradients = evaluate(reference_attention, *(x.astype(jnp.float32) for x in arrays), window=130)
    assert all(x.dtype == jnp.bfloat16 for x in (out, *gradients))
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.03)
    for a, b in zip(gradients, exact_gradients, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.03, rtol=0.05)


@pytest.mark.parametrize("window", [None, 1, 127, 128, 129, 383])
def test_splash_finds_the_blocks_that_its_own_masks_have(window):
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        LocalMask,
        MultiHeadMask,
        splash_attention_mask_info,
    )

    T, block = 1024, (256, 128)
    band = external._band()(T, window)
    theirs = LocalMask((T, T), (None if window is None else window - 1, 0), 0)
    for process in (splash_attention_mask_info.process_mask, splash_attention_mask_info.process_mask_dkv):
        tables, others = (process(MultiHeadMask([mask]), block)[0] for mask in (band, theirs))
        jax.tree.map(np.testing.assert_array_equal, tables, others)
    everything = slice(0, T), slice(0, T)
    np.testing.assert_array_equal(band[everything], theirs[everything])
    if window == 1:  # only blocks on the diagonal are computed; others are decided by their corners
        assert band[slice(256, 512), slice(512, 640)].size == band[slice(256, 512), slice(0, 128)].size == 1
    if window is None:
        assert band[slice(256, 512), slice(0, 128)].size == 1 and band[slice(256, 512), slice(0, 128)].all()


@pytest.mark.parametrize("T", [1, 128, 129, 512, 513, 1100, 4096, 7681, 8192, 8200, 131072, 2**19])
def test_splash_blocks_cover_a_text_with_little_padding(T):
    count, size, compute = splash_blocks(T)
    assert compute % 128 == 0 and compute <= 512 and size % compute == 0
    assert T <= count * size < T + 128 * count * (size // compute)


def test_splash_takes_no_text_whose_table_of_blocks_is_too_long():
    def lower(T, window):
        q, k, v = (jax.ShapeDtypeStruct((1, T, 1, 64), jnp.bfloat16) for _ in range(3))
        return jax.eval_shape(splash_attention, q, k, v, AttentionInputs(window=window))

    assert SPLASH.longest == 2**19
    with pytest.raises(UnsupportedError, match="1048576 tokens make"):
        lower(2**20, None)


@pytest.mark.slow
@pytest.mark.skipif(not libtpu_version(), reason="needs the TPU compiler: pip install 'pe-lab[aot]'")
@pytest.mark.parametrize("slice_", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("K", [64, 128])
def test_splash_compiles_for_tpus(slice_, K):
    device = topology_devices(parse_topology(slice_))[0]
    mesh = jax.sharding.Mesh(np.array([device]), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    B, T, H, G = 2, 1024, 4, 2
    shapes = [((B, T, n, K), jnp.bfloat16) for n in (H, G, G)] + [((B, T), jnp.int32)]
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]

    def loss(q, k, v, segments, **settings):
        inputs = AttentionInputs(query_segments=segments, key_segments=segments, **settings)
        out = splash_attention(q, k, v, inputs)
        return out.astype(jnp.float32).sum()

    for settings in ({}, dict(window=300)):
        f = functools.partial(loss, **settings)
        # Mosaic reads the chip from the mesh of the context, not from the arguments.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            forward = jax.jit(f).lower(*arrays).compile().as_text()
            backward = jax.jit(jax.grad(f, (0, 1, 2))).lower(*arrays).compile().as_text()
        assert "splash_mha_fwd_segmented" in forward
        assert "splash_mha_fwd_segmented_residuals" in backward and "splash_mha_dkv_segmented" in backward


# --- cuDNN -----------------------------------------------------------------------------------------------------------

by_xla = functools.partial(cudnn_attention, implementation="xla")


SLOW_WINDOWS = [pytest.param(33, window, marks=pytest.mark.slow) for window in (None, 1, 33, 100)]


@pytest.mark.parametrize("T, window", [(1, None), (33, 7), *SLOW_WINDOWS])
def test_cudnn_is_asked_for_the_reference(T, window):
    """`jax.nn` has the same arguments for XLA, which runs on a CPU."""
    compare(by_xla, qkv(T), window=window)


def _lowered_for_cuda(monkeypatch, window, K=64):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91800)
    arrays = [jax.ShapeDtypeStruct((2, 131, n, K), jnp.bfloat16) for n in (4, 2, 2)]

    def loss(q, k, v):
        return cudnn_attention(q, k, v, AttentionInputs(window=window)).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays).lower(lowering_platforms=("cuda",))
    return lowered.as_text().replace("\\22", '"')


@pytest.mark.parametrize("window", [None, 1, 40])
def test_the_call_of_cudnn_has_causality_and_the_window(monkeypatch, window):
    """cuDNN's window includes the token itself: (pos - length, pos]."""
    program = _lowered_for_cuda(monkeypatch, window)
    calls = re.findall(r"@__cudnn\$(\w+)\(", program)
    assert sorted(calls) == ["fmhaSoftmax", "fmhaSoftmaxBackward"]  # neither has a bias
    assert re.findall(r'"mask_type": "(\w+)"', program) == ["CAUSAL"] * 2
    lengths = {int(x) for x in re.findall(r'"sliding_window_length": (\d+)', program)}
    assert lengths == {window or 0}


def test_cudnn_takes_heads_of_256_channels_on_hopper(monkeypatch):
    """JAX asks the first GPU for its compute capability."""
    from jax._src.cudnn import fused_attention_stablehlo

    assert CUDNN.head_dims(256, 9.0) and CUDNN.head_dims(136, 10.0)
    assert not CUDNN.head_dims(136, 8.0) and not CUDNN.head_dims(264, 9.0)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda capability: True)
    calls = re.findall(r"@__cudnn\$(\w+)\(", _lowered_for_cuda(monkeypatch, None, K=256))
    assert sorted(calls) == ["fmhaSoftmax", "fmhaSoftmaxBackward"]


def test_jax_has_no_public_packing_for_cudnn():
    """Documents by cuDNN's offsets are in `jax._src` alone. Where this fails, they can serve packed documents.

    Test grouped queries first, whose gradients they had wrong (github.com/jax-ml/jax/issues/39521).
    """
    assert not [name for name in inspect.signature(jax.nn.dot_product_attention).parameters if "offset" in name]


# --- tokamax ---------------------------------------------------------------------------------------------------------

by_tokamax = functools.partial(tokamax_attention, implementation="xla")
needs_tokamax = pytest.mark.skipif(
    bool(external.why_no_tokamax(AttentionRequest(), here=True)), reason="tokamax 0.0.17 needs Python 3.12"
)


@needs_tokamax
@pytest.mark.parametrize("T, window, segments", [(1, None, False), (129, 7, False), (129, None, True), (200, 50, True)])
@pytest.mark.parametrize("more", [{}, {"soft_cap": 0.7}], ids=str)
def test_tokamax_is_asked_for_the_reference(T, window, segments, more):
    """With gradients, documents and windows, by tokamax's own XLA."""
    compare(by_tokamax, qkv(T), window=window, segments=documents(T) if segments else None, **more)


@needs_tokamax
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("of", [("slope",), ("slope", "positions"), ("key_bias",), ("slope", "key_bias")], ids=" ".join)
def test_tokamax_adds_biases_of_keys(of, segments):
    """ALiBi's penalty without the part of the query, which cancels in the softmax."""
    T, H = 150, 4
    rng = np.random.default_rng(0)
    positions = jnp.asarray(np.sort(rng.integers(0, 900, (2, T)), axis=1), jnp.int32) if "positions" in of else None
    ids = documents(T) if segments else None
    inputs = AttentionInputs(
        slope=jnp.asarray([0.5, 0.25, 0.1, 0.01]) if "slope" in of else None,
        key_bias=jnp.asarray(rng.standard_normal((1, H, T)), jnp.float32) if "key_bias" in of else None,
        query_positions=positions,
        key_positions=positions,
        query_segments=ids,
        key_segments=ids,
    )
    arrays = qkv(T)
    np.testing.assert_allclose(by_tokamax(*arrays, inputs), reference_attention(*arrays, inputs), atol=3e-5)


@needs_tokamax
def test_tokamax_has_no_array_of_all_pairs():
    """What its kernel is asked for, beside queries, keys and values, is linear in the length."""
    from tokamax._src.ops.attention import api

    asked = {}

    def kernel(q, k, v, **settings):
        asked.update(settings)
        return q

    T = 4096
    ids, slope = jnp.zeros((2, T), jnp.int32), jnp.ones(4)
    inputs = AttentionInputs(query_segments=ids, key_segments=ids, slope=slope, window=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "IMPLEMENTATIONS", {"mosaic_gpu": kernel})
        tokamax_attention(*(jnp.zeros((2, T, n, 16)) for n in (4, 2, 2)), inputs)
    assert asked["mask"].k_start.shape == (2, 1, T) and asked["mask"].bool_mask is None
    assert asked["bias"].shape == (1, 4, 1, T)


def test_without_tokamax_the_error_says_how_to_install_it(monkeypatch):
    for name in ("tokamax", "tokamax._src.ops.attention.api", "tokamax._src.ops.attention.base"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="pip install tokamax"):
        tokamax_attention(*qkv(4), AttentionInputs())


# --- All -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attend, capabilities",
    [(interpreted, SPLASH), (by_xla, CUDNN), pytest.param(by_tokamax, TOKAMAX, marks=needs_tokamax)],
    ids="sct",
)
def test_only_features_that_are_not_honoured_are_refused(attend, capabilities):
    q, k, v = qkv(5)
    segments = jnp.ones((2, 5), jnp.int32)
    requests = {
        "slopes": AttentionInputs(slope=jnp.ones(4)),
        "segments": AttentionInputs(query_segments=segments, key_segments=segments),
        "windows": AttentionInputs(window=2),
        "distance bias": AttentionInputs(distance_bias=jnp.ones((4, 5))),
        "key bias": AttentionInputs(key_bias=jnp.ones((1, 4, 5))),
        "sinks": AttentionInputs(sink=jnp.ones(4)),
        "soft cap": AttentionInputs(soft_cap=5.0),
    }
    assert capabilities.honours <= requests.keys()
    for name, inputs in requests.items():
        call = functools.partial(attend, q, k, v, inputs)
        if name in capabilities.honours:
            assert jax.eval_shape(call).shape == q.shape
        else:
            with pytest.raises(UnsupportedError, match=f"has no {name}"):
                call()
