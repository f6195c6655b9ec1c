"""What is read out of compiled programs, against counts made by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pe_lab.parallel.compiler import topology_devices
from pe_lab.parallel.topology import parse_topology
from pe_lab.planning.hlo import Shape, parse, scope
from pe_lab.planning.memory import analyze_program
from pe_lab.planning.program import collectives, device_groups, kernels, memory_traffic, product_flops, wire_bytes

MESH = {"data": 2, "fsdp": 4}


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def program(function, *arguments):
    return parse(jax.jit(function).lower(*arguments).compile().as_text())


def on_tpu(function, *arguments):
    """The program for one TPU v5e."""
    (device,) = topology_devices(parse_topology("v5e:1x1"))
    sharding = NamedSharding(Mesh(np.array([device]), "x"), P())
    lowered = jax.jit(function, in_shardings=sharding, out_shardings=sharding).lower(*arguments)
    return parse(analyze_program(lowered, 0.0, dump=True)[1].text)


def test_products_in_a_loop_count_each_time():
    def five(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    found = program(five, floats(8, 16), floats(5, 16, 16))
    assert product_flops(found) == 5 * 2 * 8 * 16 * 16


@pytest.mark.parametrize(
    ("formula", "left", "right"),
    [
        ("ij,jk->ik", (256, 128), (128, 384)),
        ("bij,bkj->bik", (4, 256, 128), (4, 384, 128)),
        ("bti,bij->btj", (4, 8, 128), (4, 128, 256)),
    ],
)
def test_products_that_a_tpu_computes_as_convolutions(formula, left, right):
    found = on_tpu(functools.partial(jnp.einsum, formula), floats(*left), floats(*right))
    sizes = dict(zip("".join(formula.partition("->")[0].split(",")), (*left, *right), strict=True))
    assert product_flops(found) == 2 * np.prod(list(sizes.values()))


def test_collectives_of_a_program_by_kind_axes_and_bytes():
    """Each device has [16, 32] float32; a loop runs three times."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), tuple(MESH))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    def local(x):
        gathered = jax.lax.all_gather(x, "fsdp", tiled=True)  # [64, 32]
        x = x + jax.lax.psum_scatter(gathered, "fsdp", tiled=True)
        x = x + jax.lax.all_to_all(x, "fsdp", 0, 0, tiled=True)
        x = x + jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])

        def step(x, _):
            return x + jnp.sin(jax.lax.psum(x, "data")), None

        return jax.lax.psum(jax.lax.scan(step, x, None, length=3)[0], ("data", "fsdp"))

    found = collectives(program(local, floats(16, 32)), MESH)
    own = 16 * 32 * 4
    got = {(one.kind, one.axes): (one.group, one.payload, one.wire, one.times) for one in found}
    assert got == {
        ("all-gather", ("fsdp",)): (4, 4 * own, 3 * own, 1),
        ("reduce-scatter", ("fsdp",)): (4, 4 * own, 3 * own, 1),
        ("all-to-all", ("fsdp",)): (4, own, own * 3 // 4, 1),
        ("collective-permute", ("data",)): (2, own, own, 1),
        ("all-reduce", ("data",)): (2, own, own, 3),
        ("all-reduce", ("data", "fsdp")): (8, own, own * 7 // 4, 1),
    }
    # Of nodes of 4 devices, each has one member of a group along "data", and 4 of the group of all 8.
    assert {(one.kind, one.axes): one.crossing(4) for one in found if "data" in one.axes} == {
        ("collective-permute", ("data",)): own, ("all-reduce", ("data",)): own,
        ("all-reduce", ("data", "fsdp")): own * 7 // 4 // 4,
    }  # fmt: skip
    assert not any(one.crossing(4) for one in found if one.axes == ("fsdp",))
    # Of nodes of 2 devices, 2 of the 3 others in a group along "fsdp" are in another node.
    of_fsdp = {one.kind: one.crossing(2) for one in found if one.axes == ("fsdp",)}
    assert of_fsdp == {"all-gather": 3 * own // 2, "reduce-scatter": 3 * own // 2, "all-to-all": own // 2}


def test_a_ring_sends_all_but_its_own_part():
    assert [wire_bytes(kind, 800, 8) for kind in ("all-gather", "reduce-scatter", "all-to-all")] == [700] * 3
    assert wire_bytes("all-reduce", 800, 8) == 1400 and wire_bytes("collective-permute", 800, 2) == 800
    assert wire_bytes("all-reduce", 800, 1) == 0


@pytest.mark.parametrize(
    "written",
    [
        "replica_groups={{0,4},{1,5},{2,6},{3,7}}",
        "replica_groups=[4,2]<=[2,4]T(1,0)",
        "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}",
        "replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}",
    ],
)
def test_the_ways_in_which_groups_are_written(written):
    text = f"""ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %sum = f32[8]{{0}} all-reduce(%x), channel_id=1, {written}, to_apply=%add
}}"""
    module = parse(text)
    assert device_groups(module.by_name["main"]["sum"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    (one,) = collectives(module, MESH)
    assert (one.axes, one.group, one.wire) == (("data",), 2, 32)


def test_an_all_reduce_of_which_a_slice_is_kept_is_a_reduce_scatter():
    """As libtpu writes it; in a loop of 24, beside the gather of an asynchronous chain in three fusions."""
    named = 'metadata={op_name="jit(step)/transpose(jvp(layers))/while/body/mlp/up/dot_general"}'
    gather = "all-gather(%x), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}"
    text = f"""
%all-reduce-scatter.1 (input: bf16[64,32]) -> bf16[16,32] {{
  %input = bf16[64,32]{{1,0}} parameter(0)
  %all-reduce.1 = bf16[64,32]{{1,0}} all-reduce(%input), channel_id=1, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}
  ROOT %slice = bf16[16,32]{{1,0}} dynamic-slice(%all-reduce.1)
}}

%async_collective_fusion.1 (x: bf16[16,32]) -> bf16[64,32] {{
  %x = bf16[16,32]{{1,0}} parameter(0)
  ROOT %gather.1 = bf16[64,32]{{1,0}} {gather}, frontend_attributes={{chain_id="7"}}
}}

%async_collective_fusion.2 (x: bf16[16,32]) -> bf16[64,32] {{
  %x = bf16[16,32]{{1,0}} parameter(0)
  ROOT %gather.2 = bf16[64,32]{{1,0}} {gather}, frontend_attributes={{chain_id="7"}}
}}

%condition (state: s32[]) -> pred[] {{
  %state = s32[] parameter(0)
  %limit = s32[] constant(24)
  ROOT %less = pred[] compare(%state, %limit), direction=LT
}}

%body (state: s32[]) -> s32[] {{
  %state = s32[] parameter(0)
  %x = bf16[16,32]{{1,0}} fusion(%state), kind=kLoop, calls=%none
  %a = bf16[64,32]{{1,0}} fusion(%x), kind=kCustom, calls=%async_collective_fusion.1
  %b = bf16[64,32]{{1,0}} fusion(%x), kind=kOutput, calls=%async_collective_fusion.2
  %c = bf16[16,32]{{1,0}} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1, {named}
  ROOT %next = s32[] add(%state, %state)
}}

ENTRY %main (state: s32[]) -> s32[] {{
  %state = s32[] parameter(0)
  ROOT %loop = s32[] while(%state), condition=%condition, body=%body
}}"""
    found = {one.kind: one for one in collectives(parse(text), MESH)}
    assert set(found) == {"all-gather", "reduce-scatter"}
    whole = 64 * 32 * 2
    assert [(one.payload, one.wire, one.times) for one in found.values()] == [(whole, whole * 3 // 4, 24)] * 2
    assert found["all-gather"].overlapped and not found["reduce-scatter"].overlapped
    assert found["reduce-scatter"].source == "mlp/up, backward"


def test_memory_traffic_reads_slices_of_larger_arrays():
    assert memory_traffic(program(lambda x: x + 1, floats(1024))).total() == 2 * 4096

    def rows(x):
        return jax.lax.scan(lambda total, row: (total + jnp.sin(row), None), jnp.zeros(1024), x)[0]

    # Each of 50 rows is read once, and the sum is read, written and perhaps copied; not 50 times all rows.
    moved = memory_traffic(program(rows, floats(50, 1024))).total()
    assert 50 * 3 * 4096 <= moved <= 50 * 5 * 4096


KEPT = """HloModule jit_step, entry_computation_layout={()->()}

%write (stack: bf16[24,8,16], i: s32[], layer: bf16[8,16]) -> bf16[16,24,8] {
  %stack = bf16[24,8,16]{1,0,2} parameter(0)
  %i = s32[] parameter(1)
  %layer = bf16[8,16]{0,1} parameter(2)
  %turned = bf16[16,24,8]{2,1,0} bitcast(%stack)
  %one = bf16[16,1,8]{2,1,0} bitcast(%layer)
  %zero = s32[] constant(0)
  ROOT %written = bf16[16,24,8]{2,1,0} dynamic-update-slice(%turned, %one, %zero, %i, %zero)
}

%side (stack: bf16[24,8,16], i: s32[], layer: bf16[8,16]) -> bf16[16,24,8] {
  %stack = bf16[24,8,16]{1,0,2} parameter(0)
  %i = s32[] parameter(1)
  %layer = bf16[8,16]{0,1} parameter(2)
  ROOT %update = bf16[16,24,8]{2,1,0} fusion(%stack, %i, %layer), kind=kLoop, calls=%write
}

%read (stack: bf16[24,8,16], i: s32[]) -> f32[8,16] {
  %stack = bf16[24,8,16]{1,0,2} parameter(0)
  %i = s32[] parameter(1)
  %turned = bf16[16,24,8]{2,1,0} bitcast(%stack)
  %zero = s32[] constant(0)
  %one = bf16[16,1,8]{2,1,0} dynamic-slice(%turned, %zero, %i, %zero), dynamic_slice_sizes={16,1,8}
  %layer = bf16[8,16]{0,1} bitcast(%one)
  ROOT %wide = f32[8,16]{0,1} convert(%layer)
}

ENTRY %main (state: (bf16[24,8,16], (s32[], bf16[8,16]))) -> (bf16[16,24,8], f32[8,16]) {
  %state = (bf16[24,8,16]{1,0,2}, /*index=1*/(s32[], bf16[8,16]{0,1})) parameter(0)
  %i = s32[] copy(%state#1#0)
  %begun = ((bf16[24,8,16], s32[], bf16[8,16]), bf16[16,24,8], u32[]) async-start(%state#0, %i, %state#1#1), calls=%side
  %done = bf16[16,24,8]{2,1,0} async-done(%begun)
  %layer = f32[8,16] fusion(%state#0, %i), calls=%read, metadata={op_name="jit(step)/transpose(jvp(layers))/mlp/up/mul"}
  ROOT %out = (bf16[16,24,8]{2,1,0}, f32[8,16]{0,1}) tuple(%done, %layer)
}"""


def test_a_layer_is_written_to_and_read_from_a_stack_of_all():
    """Elements of tuples as JAX 0.12 writes them, slices of a stack in another layout, an operation beside others."""
    module = parse(KEPT)
    assert [str(one) for one in module.by_name["main"]["state#1"].shapes] == ["s32[]", "bf16[8,16]"]
    layer, index = 8 * 16 * 2, 4
    assert memory_traffic(module) == {"": 2 * layer + 3 * index, "mlp/up, backward": layer + index + 2 * layer}


def test_a_fusion_inside_another_reads_slices_too():
    """As libtpu writes a product whose operand is a layer of a stack."""
    text = """HloModule jit_step, entry_computation_layout={()->()}

%slice (all: bf16[24,8,16], at: s32[]) -> bf16[8,16] {
  %all = bf16[24,8,16] parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = bf16[1,8,16] dynamic-slice(%all, %at, %zero, %zero), dynamic_slice_sizes={1,8,16}
  ROOT %layer = bf16[8,16] bitcast(%one)
}

%product (stack: bf16[24,8,16], i: s32[], x: bf16[4,8]) -> bf16[4,16] {
  %stack = bf16[24,8,16] parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[4,8] parameter(2)
  %layer = bf16[8,16] fusion(%stack, %i), kind=kLoop, calls=%slice
  ROOT %out = bf16[4,16] dot(%x, %layer), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (stack: bf16[24,8,16], i: s32[], x: bf16[4,8]) -> bf16[4,16] {
  %stack = bf16[24,8,16] parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[4,8] parameter(2)
  ROOT %out = bf16[4,16] fusion(%stack, %i, %x), kind=kOutput, calls=%product
}"""
    assert memory_traffic(parse(text)).total() == 2 * (8 * 16 + 4 * 8 + 4 * 16) + 4


def test_kernels_of_triton_have_their_own_names():
    target = 'custom_call_target="__gpu$xla.gpu.triton"'
    name = "jit(step)/transpose(jvp(layers))/attention/attend/shard_map/pe_lab_attention_key_gradient/pallas_call"
    text = f"""ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %pallas_call.3 = f32[8]{{0}} custom-call(%x), {target}, metadata={{op_name="{name}"}}
  ROOT %pallas_call.4 = f32[8]{{0}} custom-call(%pallas_call.3), {target}, metadata={{op_name="{name}"}}
}}"""
    assert kernels(parse(text)) == {"pe_lab_attention_key_gradient": 2}


def test_copies_between_memories_are_read_and_written_once():
    text = """HloModule jit_step, entry_computation_layout={()->()}

ENTRY %main (x: f32[64,32]) -> f32[16,32] {
  %x = f32[64,32]{1,0:T(8,128)} parameter(0)
  %copy = (f32[64,32]{1,0:T(8,128)S(1)}, f32[64,32]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %copied = f32[64,32]{1,0:T(8,128)S(1)} copy-done(%copy)
  %slice = ((f32[64,32]{1,0:T(8,128)}), f32[16,32]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%x)
  %sliced = f32[16,32]{1,0:T(8,128)S(1)} slice-done(%slice)
  %back = (f32[16,32]{1,0:T(8,128)}, f32[16,32]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%sliced)
  ROOT %result = f32[16,32]{1,0:T(8,128)} copy-done(%back)
}"""
    assert memory_traffic(parse(text)).total() == (64 + 16 + 16) * 32 * 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jit(step)/jvp(layers)/while/body/closed_call/mlp/gate/dot_general", "mlp/gate"),
        ("jit(step)/transpose(jvp(layers))/while/body/closed_call/checkpoint/mlp/gate/mul", "mlp/gate, backward"),
        (
            "jit(step)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/attention/attend/mul",
            "attention/attend, recomputed",
        ),
        ("jit(step)/jvp(layers)/while/body/dynamic_update_slice", "layers"),
        ("jit(step)/jvp(loss)/shard_map/while/body/closed_call/sub", "loss"),
        ("jit(step)/jvp(loss)/shard_map/cond/branch_0_fun/reduce", "loss"),
        ("jit(step)/transpose(jvp(layers))/jvp(layers)/checkpoint/rematted_computation/mlp/mul", "mlp, recomputed"),
        ("jit(step)/reduce_sum", ""),
        (
            "jit(step)/transpose(jvp(layers))/while/body/(attention/key/dot_general:mlp/up/dot_general:mlp/up/mul)",
            "attention/key, backward + 1",
        ),
        ("jit(step)/(transpose(jvp(embedding))/psum:jvp(loss)/psum)", "embedding, backward + 1"),
        ("", ""),
    ],
)
def test_names_are_the_scopes_of_the_model(name, expected):
    assert scope(name) == expected


def test_bytes_and_memory_space_of_shapes():
    shape = Shape("bf16", (24, 14, 100, 64), "{3,2,1,0:T(8,128)(2,1)S(1)}")
    assert shape.bytes == 24 * 14 * 100 * 64 * 2 and shape.space == 1
    assert Shape("f8e4m3fn", (10,)).bytes == 10 and Shape("s4", (3,)).bytes == 2
