"""The kernel for Hopper GPUs against float64, interpreted on a CPU with a detector of races, and lowered for CUDA.

The interpreter is in JAX 0.11 and later, and so in the environment of Python 3.12 (`make test-hopper`). On an H100,
`JAX_PLATFORMS=cuda pytest tests/attention/test_hopper*.py` runs the same tests with compiled kernels. Each takes about
two seconds.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("JAX has no interpreter for it before 0.11, which needs Python 3.12", allow_module_level=True)

from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from jax.experimental.pallas import mosaic_gpu as plgpu
from key_blocks import INTERPRET, LINES, Case, an_h100, error, request
from test_gpu import BASE, FEATURES, KINDS, shapes

from pe_lab.attention.kernels import hopper
from pe_lab.attention.kernels.hopper import HopperTiles, hopper_key_block, tiles
from pe_lab.attention.key_block import MASKED, merge
from pe_lab.errors import UnsupportedError

CLOSE = 1e-2  # of bfloat16
BASE = dataclasses.replace(BASE, dtype="bfloat16")
SMALL = HopperTiles(heads=1, warpgroups=2, rows=64, keys=64, stages=2)  # several blocks of few keys


def slow(*cases):
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def attend(asked, **settings):
    run = jax.jit(functools.partial(hopper_key_block, interpret=INTERPRET, **settings))
    return run(asked.query, asked.key, asked.value, asked.inputs)


def check(case, **more):
    asked = request(case)
    found = attend(asked, **more)
    assert found.out.dtype == (jnp.float32 if more.get("wide") else asked.query.dtype)
    assert error(found.out, asked.out) < CLOSE
    unseen = asked.logsumexp == -1e30
    np.testing.assert_array_equal(np.asarray(found.logsumexp) == np.float32(MASKED), unseen)
    assert not np.asarray(found.out)[unseen].any()
    # Without a rotation inside, logits are exact products of the same numbers.
    close = CLOSE if case.rotation else 1e-5
    assert error(np.where(unseen, 0, found.logsumexp), np.where(unseen, 0, asked.logsumexp)) < close
    return found


@pytest.mark.parametrize("names", [(), *LINES[:4], *slow(*((name,) for name in FEATURES), *LINES[4:])], ids=" ".join)
def test_features_alone_and_together(names):
    changes = {name: value for feature in names for name, value in FEATURES[feature].items()}
    check(dataclasses.replace(BASE, **changes), cut=None if "few" in names else SMALL)


CAPPED = [("slopes", "segments"), *slow((), ("few",), ("window", "split"), ("key bias",))]


@pytest.mark.parametrize("names", CAPPED, ids=" ".join)
def test_a_soft_cap_with_other_features(names):
    changes = {name: value for feature in names for name, value in FEATURES[feature].items()}
    check(dataclasses.replace(BASE, soft_cap=1.5, scale=3.0, **changes))


@pytest.mark.parametrize("length", [129, *slow(1, 2, 127, 300)])
@pytest.mark.parametrize("rotation", ["", "split"])
def test_any_length(length, rotation):
    check(Case(T=length, dtype="bfloat16", rotation=rotation))


@pytest.mark.parametrize("head_dim", [80, 128, *slow(32, 48, 64, 96, 160, 256)])
def test_any_head_dim(head_dim):
    check(Case(T=70, K=head_dim, dtype="bfloat16", rotation="shared"))


def test_float16():
    check(Case(T=70, dtype="float16", slopes=True))


# The table has one entry, ends within the keys, or is longer than the keys.
@pytest.mark.parametrize("entries", [40, *slow(1, 500)])
@pytest.mark.parametrize("T", [3, 70])
def test_distances_of_any_table(entries, T):
    check(dataclasses.replace(BASE, T=T, start=(-1, 130), distance_bias=entries, key_bias=1), splits=2)


@pytest.mark.parametrize("heads", [(6, 3, 5), *slow((6, 3, 40), (4, 1, 5), (4, 1, 40))], ids=str)
def test_heads_of_a_group_and_all_at_once(heads):
    H, G, T = heads
    everything = dict(used=(300, 170), window=100, slopes=True, positions=True, segments=True)
    check(Case(2, T, 310, H, G, 64, "bfloat16", start=(250, 150), rotation="grouped", **everything), wide=T == 40)


@pytest.mark.slow
@settings(max_examples=12, derandomize=True, database=None)
@given(st.data())
def test_random_cases(data):
    draw = data.draw
    T, S, G = draw(st.integers(1, 90)), draw(st.integers(1, 200)), draw(st.sampled_from([1, 2]))
    case = Case(
        B=2, T=T, S=S, G=G, H=G * draw(st.integers(1, 3)), K=draw(st.sampled_from([32, 48, 64])), dtype="bfloat16",
        start=tuple(draw(st.tuples(*[st.integers(-T - 2, S + 2)] * 2))),
        used=draw(st.sampled_from([(), (S // 2, S), (0, max(1, S - 3))])),
        window=draw(st.none() | st.integers(1, S + T)),
        slopes=draw(st.booleans()),
        segments=draw(st.booleans()),
        rotation=draw(st.sampled_from(["", "shared", "grouped", "split"])),
        distance_bias=draw(st.sampled_from([0, 1, 30, 300])),
        key_bias=draw(st.sampled_from([0, 1, 2])),
        soft_cap=draw(st.none() | st.floats(0.5, 20)),
        seed=draw(st.integers(0, 9)),
    )  # fmt: skip
    check(case, splits=draw(st.integers(1, 3)))


@pytest.mark.parametrize("splits", [3, *slow(1, 2, 5)])
def test_splits_of_the_keys_agree(splits):
    case = Case(
        B=2, T=2, S=700, H=4, G=2, start=(690, 90), used=(692, 92), window=650, rotation="shared", dtype="bfloat16"
    )
    check(case, splits=splits)


def test_key_blocks_merge_as_in_a_ring():
    asked = request(Case(B=2, T=60, S=130, H=2, start=(70, 20), slopes=True, dtype="bfloat16"), garbage=False)
    parts = []
    for first, last in ((0, 50), (50, 130)):
        inputs = dataclasses.replace(asked.inputs, start=asked.inputs.start - first)
        one = dataclasses.replace(
            asked, key=asked.key[:, :, first:last], value=asked.value[:, :, first:last], inputs=inputs
        )
        parts.append(attend(one, wide=True))
    both = merge(parts)
    assert error(both.out, asked.out) < CLOSE
    assert error(both.logsumexp, asked.logsumexp) < 1e-5


def test_blocks_of_other_documents_are_not_read():
    """Keys of another document in a block of their own may be anything, even where no mask would hide them."""
    case = Case(T=256, S=256, segments=True, dtype="bfloat16")
    asked = request(case, garbage=False)
    ids = jnp.asarray(np.repeat([3, 7], 128))[None]
    inputs = dataclasses.replace(asked.inputs, query_segments=ids, key_segments=ids)
    asked = dataclasses.replace(asked, inputs=inputs)
    apart = attend(dataclasses.replace(asked, value=asked.value.at[:, :, :128].set(jnp.nan)), cut=SMALL)
    np.testing.assert_array_equal(apart.out[:, :, 128:], attend(asked, cut=SMALL).out[:, :, 128:])


def test_a_layer_of_a_cache():
    asked = request(dataclasses.replace(BASE, T=3, start=(10, 90), used=(13, 93)))
    nothing = jnp.full_like(asked.key, jnp.nan)
    key, value = (jnp.stack([nothing, x, nothing]) for x in (asked.key, asked.value))
    found = jax.jit(functools.partial(hopper_key_block, interpret=INTERPRET))(
        asked.query, key, value, asked.inputs, layer=jnp.int32(1)
    )
    assert error(found.out, asked.out) < CLOSE


def test_tiles_fit():
    """Queries, and two stages of keys and values, in the 227 KiB of an H100."""
    for K in range(32, 257, 16):
        for T, rotates in ((1, False), (3, True), (4096, False), (4096, True)):
            cut = tiles(8, 2, T, 2**20, K, rotates=rotates)
            size = 2 * K * (cut.warpgroups * cut.rows + 2 * cut.stages * cut.keys)
            places = 4 * cut.keys * K if rotates and K <= 128 else 0
            assert size + places + 8192 < 227 * 1024
            assert cut.heads == 1 or cut.heads * T <= cut.rows
    assert tiles(8, 2, 1, 4096, 64).heads == 4
    assert tiles(8, 2, 1, 4096, 64, alone=True).heads == 1


@pytest.mark.parametrize("T", [3, 300])
@pytest.mark.parametrize("K", range(32, 257, 32))
def test_copies_begin_at_whole_lines_of_shared_memory(T, K, monkeypatch):
    """A copy into a slot that does not begin at a multiple of 128 bytes fails on a GPU, and not in the interpreter."""
    made = []
    build = hopper.shared_memory
    monkeypatch.setattr(hopper, "shared_memory", lambda *of: made.append(build(*of)) or made[0])
    arguments, _ = shapes(
        B=2, T=T, S=5000, K=K, bounds=True, rotation=2, slopes=True, positions=True, segments=True, distances=200,
        key_bias=2,
    )  # fmt: skip
    jax.eval_shape(hopper_key_block, *arguments)
    slots = {name: x for name, x in made[0].items() if not isinstance(x, plgpu.Barrier) and "place" not in name}
    assert len(slots) >= 9
    for name, slot in slots.items():
        assert np.prod(slot.shape[1:]) * jnp.dtype(slot.dtype).itemsize % 128 == 0, name


# ---------------------------------------------------------------------------------------------------------------------
# For CUDA


def lowered(function, arguments, **settings):
    """The program of an H100, and its results' shapes."""
    allowed = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    with an_h100():
        call = jax.jit(functools.partial(function, **settings))
        exported = export.export(call, platforms=["cuda"], disabled_checks=allowed)(*arguments)
    return exported.mlir_module(), exported.out_avals


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "float32" not in kind])
def test_lowers_for_cuda(kind):
    arguments, settings = shapes(**KINDS[kind])
    text, out = lowered(hopper_key_block, arguments, **settings)
    assert text.count("@mosaic_gpu_v2") == 1
    query = arguments[0]
    assert [x.shape for x in out] == [query.shape, query.shape[:3]]
    assert out[0].dtype == query.dtype


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", range(32, 257, 16))
def test_everything_lowers_for_cuda_at_any_head_dim(head_dim):
    for T in (3, 300):
        arguments, _ = shapes(
            B=2, T=T, S=5000, K=head_dim, bounds=True, rotation=2, slopes=True, positions=True, segments=True,
            window=1000, distances=200, key_bias=2,
        )  # fmt: skip
        lowered(hopper_key_block, arguments)


def test_long_keys_are_split_for_few_queries(monkeypatch):
    kept = []
    monkeypatch.setattr(hopper, "merge", lambda parts: kept.extend(parts) or merge(parts))
    for kind, splits in ((dict(T=1, S=2**20), 66), (dict(T=1, S=300), 1), (dict(T=4096, S=4096), 1)):
        kept.clear()
        arguments, settings = shapes(**kind)
        jax.eval_shape(functools.partial(hopper_key_block, **settings), *arguments)
        assert len(kept) == (splits if splits > 1 else 0)


def test_too_few_threads_are_refused_where_the_interpreter_would_hang(monkeypatch):  # 0.1 s
    monkeypatch.setenv("NPROC", "2")
    asked = request(BASE)
    with pytest.raises(UnsupportedError, match=r"3 threads of XLA .* XLA has 2 here\. Set .* NPROC=8"):
        hopper_key_block(asked.query, asked.key, asked.value, asked.inputs, interpret=True)
