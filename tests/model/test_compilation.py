"""The contents and the number of compiled programs, from the HLO, not from timing."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.config import MeshConfig, ModelConfig, OptimizerConfig
from pe_lab.model import Model
from pe_lab.parallel import AxisRules, make_mesh
from pe_lab.positional import NTK, PI, Alibi, Layer, NoPE, PartialRope, Rope, Yarn, build_schedule, layers
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.step import compile_train_step, init_state

TINY = ModelConfig(vocab_size=64, layers=4, d_model=32, d_ff=48, heads=4, kv_heads=2, dtype="float32")


def schedule_of(config: ModelConfig, description):
    head_dim = config.head_dim or config.d_model // config.heads
    return build_schedule(layers(description, config.layers), config.heads, config.kv_heads, head_dim)


def lowered_train_step(config: ModelConfig, description):
    """The train step of `pe_lab.train`, optimizer and learning-rate schedule included, from shapes alone."""
    model = Model(config)
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=10), 100, model.axes)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state = jax.eval_shape(lambda p: init_state(model, optimizer, p), model.shapes)
    whole = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    batch = {"tokens": whole, "targets": whole, "weights": jax.ShapeDtypeStruct((2, 16), jnp.float32)}
    return compile_train_step(model, optimizer, mesh, AxisRules()).lower(state, batch, schedule_of(config, description))


def trigonometry_of_arrays(hlo: str) -> list[str]:
    """Shapes, of one dimension at least, whose sine or cosine is taken: a learning rate's is a scalar's."""
    return re.findall(r"= \w+\[([\d,]+)\]\S* (?:sine|cosine|tan)\(", hlo)


def test_the_train_step_of_a_model_without_positions_takes_no_sine_and_no_cosine():
    nope = lowered_train_step(TINY, "nope").compile().as_text()
    assert trigonometry_of_arrays(nope) == []
    # With one rotary layer of four, they are found, so that this test can fail; that of the learning rate is found too.
    assert trigonometry_of_arrays(lowered_train_step(TINY, ("rope", "nope", "nope", "nope")).compile().as_text())
    assert re.search(r"f32\[\]\S* cosine\(", nope)


def operations(lowered) -> collections.Counter:
    return collections.Counter(re.findall(r"= \"?(stablehlo\.\w+|func\.call|call)", lowered.as_text()))


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(("rope",), id="uniform"),
        pytest.param(
            ("rope/window=8", "rope/window=8", "rope/window=8", "nope"),
            id="3 windowed to 1 full",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_train_step_is_the_same_program_at_any_depth(pattern):
    """As many operations at 48 layers as at 12: compile time cannot grow with depth. Unrolled, it does."""
    shallow, deep = (operations(lowered_train_step(dataclasses.replace(TINY, layers=n), pattern)) for n in (12, 48))
    assert shallow == deep
    assert shallow["stablehlo.dot_general"] > 0


def test_unrolled_the_program_does_grow():
    shallow, deep = (
        operations(lowered_train_step(dataclasses.replace(TINY, layers=n, scan=False), "rope")) for n in (2, 4)
    )
    assert deep["stablehlo.dot_general"] > shallow["stablehlo.dot_general"]


def test_encodings_share_one_compilation_of_the_evaluation_forward():
    """RoPE, its scalings, p-RoPE, partial RoPE, NoPE, a mix per layer: generalized, they are only data."""
    model = Model(TINY)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape) * 0.3, jnp.float32), model.shapes)
    tokens = jnp.asarray(rng.integers(0, 64, (2, 12)), jnp.int32)
    traces = []

    @jax.jit
    def forward(params, tokens, schedule):
        traces.append(schedule.structure)
        return model.apply(params, tokens, None, None, schedule)

    described = {
        "rope": "rope",
        "p-rope": Rope(fraction=0.5),
        "partial": PartialRope(fraction=0.5),
        "pi": Rope(scaling=PI(2)),
        "ntk": Rope(scaling=NTK(4)),
        "yarn": Rope(scaling=Yarn(4, 8)),
        "nope": "nope",
        "beta": Layer(NoPE(), logit_scale=1.3),
        "mixed": (Rope(), NoPE(), Rope(100.0, scaling=Yarn(2, 8)), Rope(fraction=0.25)),
    }
    logits = {
        name: np.asarray(forward(params, tokens, schedule_of(TINY, description).generalize()))
        for name, description in described.items()
    }
    assert len(traces) == 1
    names = list(logits)
    for i, name in enumerate(names):
        for other in names[:i]:
            assert np.abs(logits[name] - logits[other]).max() > 1e-4, f"{name} and {other} read the same"
    # The general program computes the same result as each encoding's own program.
    for name in ("yarn", "nope", "mixed"):
        own = forward(params, tokens, schedule_of(TINY, described[name]))
        np.testing.assert_allclose(logits[name], own, atol=1e-5)
    assert len(traces) == 4


def test_alibi_joins_where_slopes_are_asked_for():
    same = {
        schedule_of(TINY, encoding).generalize(heads="split", slopes=True).structure
        for encoding in (Rope(), NoPE(), Alibi())
    }
    assert len(same) == 1


def large_arrays(hlo: str, dtype: str, sizes: tuple[int, ...]) -> collections.Counter:
    """Arrays of these numbers of elements in the program's memory, without those inside fusions."""
    found, inside = collections.Counter(), False
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?(\S+) .*\{$", line):
            inside = any(word in header.group(1) for word in ("fused", "wrapped", "region"))
        made = re.match(r"\s+(?:ROOT )?%?\S+ = (\w+)\[([\d,]+)\]\S* ([\w-]+)\(", line)
        if made and not inside and made.group(1) == dtype:
            shape, operation = made.group(2), made.group(3)
            if int(np.prod([int(n) for n in shape.split(",")])) in sizes and operation not in ("bitcast", "parameter"):
                found[operation] += 1
    return found


def lowered_at(config: ModelConfig, description, shape: tuple[int, int], devices):
    model = Model(config)
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=10), 100, model.axes)
    state = jax.eval_shape(lambda p: init_state(model, optimizer, p), model.shapes)
    whole = jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = {"tokens": whole, "targets": whole, "weights": jax.ShapeDtypeStruct(shape, jnp.float32)}
    step = compile_train_step(model, optimizer, make_mesh(MeshConfig(), devices), AxisRules())
    return step.lower(state, batch, schedule_of(config, description))


@pytest.mark.slow
def test_a_rotation_holds_one_array_of_queries_and_one_of_keys():
    """On a CPU, in float32: forward and backward together, nothing beyond what the rotation itself returns."""
    config = dataclasses.replace(TINY, layers=2, head_dim=16, scan=False, qk_norm="head")
    shape = (8, 32)
    sizes = tuple(shape[0] * shape[1] * heads * config.head_dim for heads in (config.heads, config.kv_heads))
    rope, nope = (
        large_arrays(lowered_at(config, name, shape, jax.devices()[:1]).compile().as_text(), "f32", sizes)
        for name in ("rope", "nope")
    )
    assert nope.total() > 10  # queries, keys and values are seen
    assert rope.total() - nope.total() <= 2 * config.layers, (rope, nope)


@pytest.mark.slow
def test_on_a_tpu_the_rotation_of_bfloat16_holds_no_float32_copy():
    """By the real compiler, a layer of configs/drope_16b.py: not one more float32 array than without rotation."""
    pytest.importorskip("libtpu")
    from pe_lab.parallel.compiler import topology_devices
    from pe_lab.parallel.topology import parse_topology

    config = ModelConfig(1024, 1, d_model=896, d_ff=4864, heads=14, kv_heads=2, head_dim=64, scan=False)
    shape = (4, 1024)
    sizes = tuple(shape[0] * shape[1] * heads * config.head_dim for heads in (config.heads, config.kv_heads))
    devices = topology_devices(parse_topology("v5e:1x1"))[:1]
    rope, nope = (
        large_arrays(lowered_at(config, name, shape, devices).compile().as_text(), "f32", sizes)
        for name in ("rope", "nope")
    )
    assert nope.total() > 0  # float32 accumulators of attention are seen
    assert rope.total() <= nope.total(), (rope, nope)
