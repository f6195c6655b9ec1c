"""Estimates of memory against sums made by hand, and how `pe_lab.plan` writes numbers."""

import dataclasses
import json
import re

import pytest

from pe_lab.config import Config, ModelConfig, from_dict
from pe_lab.model import Model
from pe_lab.parallel.topology import parse_topology
from pe_lab.planning.memory import Compiled, OutOfMemory, SequenceMemory, longest, sequence_memory
from pe_lab.planning.plan import Plan, make_plan, ruled_out, step_advice
from pe_lab.planning.tables import _hours, evaluation_text, size
from pe_lab.positional import build_schedule, layers

GIB, MIB = 2**30, 2**20
# A token's keys and values are 2 x 2 heads x 16 channels x 2 bytes = 128 bytes on a layer.
SMALL = ModelConfig(vocab_size=512, layers=3, d_model=64, d_ff=96, heads=4, kv_heads=2, head_dim=16, dtype="bfloat16")


def memory(length: int, chips: int = 1, positional: str = "rope", **changes) -> SequenceMemory:
    model = Model(dataclasses.replace(SMALL, **changes))
    return sequence_memory(model, build_schedule(layers(positional, 3), 4, 2, 16).structure, length, chips)


def test_a_sequence_by_hand():
    found = memory(1000)
    assert found.cache == found.decoding == 3 * 1000 * 128
    # A token: three arrays [64]; queries twice and outputs, 3 x 4 x 16, keys and values twice, 4 x 2 x 16: 320 numbers,
    # which is more than gate, up and their product, 3 x 96 = 288. Logits in float32, twice: 512 x 8 bytes.
    token = 2 * (3 * 64 + 320) + 512 * 8
    assert found.at_once == 1000 * token and found.in_chunks == found.cache + 1000 * token
    gated = memory(1000, d_ff=128).at_once - memory(1000, d_ff=120).at_once
    plain = memory(1000, d_ff=180, gated_mlp=False).at_once - memory(1000, d_ff=172, gated_mlp=False).at_once
    assert gated == 1000 * 2 * 3 * 8 and plain == 1000 * 2 * 2 * 8


def test_a_sequence_over_chips_by_hand():
    one, four = memory(1000, d_ff=64), memory(1000, 4, d_ff=64)
    # Two slices of a quarter of the keys and values of a layer go round the ring.
    assert four.at_once == one.at_once // 4 + 2 * 250 * 128
    assert four.cache == one.cache and four.in_chunks == one.in_chunks and four.decoding == one.cache // 4
    assert memory(10, 4).decoding == -(-memory(10).cache // 4)
    windowed = memory(1000, positional="rope/window=100")
    assert windowed.cache == 3 * 100 * 128 and memory(50, positional="rope/window=100").cache == 3 * 50 * 128


def test_chunks_and_logits_have_a_largest_size():
    """A chunk has at most 4,096 tokens; logits beyond 2^26 numbers are computed in parts."""
    token = 2 * (3 * 64 + 320)
    assert memory(2**20).in_chunks == 3 * 2**20 * 128 + 4096 * (token + 512 * 8)
    assert memory(2**20).at_once == 2**20 * token + 2**26 * 8


def test_the_longest_sequence_is_the_last_that_fits():
    model, structure = Model(SMALL), build_schedule(layers("rope", 3), 4, 2, 16).structure
    for mode in ("at_once", "in_chunks", "decoding"):
        exactly = getattr(sequence_memory(model, structure, 20 * 1024, 2), mode)
        assert longest(model, structure, 2, exactly, mode) == 20 * 1024
        assert longest(model, structure, 2, exactly - 1, mode) == 19 * 1024
        assert longest(model, structure, 2, 0, mode) == 0


def test_key_heads_that_do_not_divide_are_on_every_device():
    model = {"vocab_size": 512, "layers": 2, "d_model": 64, "d_ff": 96, "heads": 4, "head_dim": 16, "remat": "dots"}
    kept = {}
    for kv_heads in (1, 2):
        config = {"model": model | {"kv_heads": kv_heads}, "mesh": {"tensor": 2, "data": 1}}
        (phase,) = make_plan(from_dict(Config, config), parse_topology("h100:2")).phases
        tokens = phase.plan.config.batch_size * phase.plan.config.sequence_length
        kept[kv_heads] = phase.memory.activations / (2 * tokens * 2)  # numbers of a token on a layer, of bfloat16
    # Two arrays [64]; two heads of queries, one of keys and one of values; half of gate and up.
    assert kept[1] == kept[2] == 2 * 64 + (2 + 1 + 1) * 16 + 96


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0.0 KiB"),
        (1536, "1.5 KiB"),
        (MIB - 1, "1024.0 KiB"),
        (MIB, "1.0 MiB"),
        (100 * MIB, "100.0 MiB"),
        (int(74.2 * MIB), "74.2 MiB"),
        (103 * MIB, "0.10 GiB"),
        (int(3.79 * GIB), "3.79 GiB"),
    ],
)
def test_sizes(number, shown):
    assert size(number) == shown


def test_hours():
    numbers = (12345.67, 10, 9.994, 0.5, 0.01, 0.0099)
    assert [_hours(number) for number in numbers] == ["12,345.7", "10.0", "9.99", "0.50", "0.01", "9.9e-03"]


@pytest.mark.parametrize(("unit", "power"), [("K", 10), ("M", 20), ("G", 30), ("T", 40)])
def test_units_of_a_refusal(unit, power):
    refused = OutOfMemory(f"Used 3.00{unit} of 1.50{unit} hbm.")
    assert (refused.used, refused.capacity) == (3 * 2**power, 3 * 2**power // 2)


STEP = {
    "model": {
        "vocab_size": 1024,
        "layers": 8,
        "d_model": 1024,
        "d_ff": 4096,
        "heads": 8,
        "kv_heads": 8,
        "remat": "dots",
    },
    "phases": [{"name": "one", "batch_size": 512}, {"name": "two", "batch_size": 256}],
    "mesh": {"data": 2, "fsdp": 2},
}


def planned(gib: float, **overrides: object) -> Plan:
    """STEP with keys such as "model.remat" changed, on four chips of `gib`."""
    topology = parse_topology("h100:4")
    chip = dataclasses.replace(topology.chip, memory=int(gib * GIB))
    tree = json.loads(json.dumps(STEP))
    for key, value in overrides.items():
        part, *rest = key.split(".")
        section = tree[part][int(rest[0])] if part == "phases" else tree[part]
        section[rest[-1]] = value
        if key == "mesh.fsdp":
            section["data"] = -1
    return make_plan(from_dict(Config, tree), dataclasses.replace(topology, chip=chip))


@pytest.mark.parametrize("gib", [10, *(pytest.param(gib, marks=pytest.mark.slow) for gib in (20, 2, 1.5, 0.9))])
def test_advice_is_the_smallest_change_that_fits(gib):
    """The step needs 36 GiB. Below 2 GiB no change alone is enough. What is advised fits, half of it does not."""
    plan = planned(gib)
    advice = step_advice(plan, plan.phases[0], None)
    options = advice.removeprefix("Try ").removesuffix(".").split(", or ")
    assert (len(options) > 1) == (gib == 20) and ("remat=full --config" in advice) == (gib < 2)
    for option in options:
        changes = dict(re.findall(r"--config\.([\w.]+)=(\w+)", option))
        changes = {key: int(value) if value.isdigit() else value for key, value in changes.items()}
        assert planned(gib, **changes).phases[0].memory.total <= gib * GIB
        last = list(changes)[-1]
        less = {**changes, last: changes[last] // 2 if isinstance(changes[last], int) else "dots"}
        assert planned(gib, **less).phases[0].memory.total > gib * GIB
        assert ("(phase 'one')" in option) == (len(changes) == 1 and "accumulate" in option)


@pytest.mark.parametrize(("accumulate", "more"), [(1, " --config.phases.0.accumulate=2 (phase 'one')"), ("auto", "")])
def test_a_sequence_that_is_too_long_is_divided(accumulate, more):
    """One sequence a chip, and nothing else to save: what a context axis takes of data and fsdp, it divides."""
    long = {"phases.0.sequence_length": 2**17, "phases.0.batch_size": 4, "phases.0.accumulate": accumulate}
    changes = long | {"model.remat": "full", "model.loss_chunks": 64, "mesh.fsdp": 4}
    needed = planned(80, **changes).phases[0].memory.total / GIB
    plan = planned(0.8 * needed, **changes)
    assert step_advice(plan, plan.phases[0], None) == f"Try --config.mesh.context=2 --config.mesh.fsdp=2{more}."


def test_what_a_context_axis_takes_is_of_the_fsdp_that_is_named_with_it():
    """Weights and sequences are too large: each change alone leaves the other."""
    long = {"phases.0.sequence_length": 2**15, "phases.0.batch_size": 4, "model.remat": "full", "mesh.fsdp": 1}
    long["model.loss_chunks"] = 64

    def gib(fsdp, context):
        changes = {"mesh.fsdp": fsdp, "mesh.context": context, "phases.0.accumulate": context}
        return planned(80, **{**long, **changes}).phases[0].memory.total / GIB

    both = gib(2, 2)
    assert both < min(gib(4, 1), gib(1, 4)) < gib(1, 1)
    plan = planned(1.01 * both, **long)
    assert step_advice(plan, plan.phases[0], None) == (
        "Try --config.mesh.fsdp=2 --config.mesh.context=2 --config.phases.0.accumulate=2."
    )


@pytest.mark.slow
def test_advice_without_a_way_out_and_by_what_the_compiler_found():
    plan = planned(0.5)
    assert step_advice(plan, plan.phases[0], None) == "Use more chips."
    plan = planned(20)
    assert "accumulate=2 " in step_advice(plan, plan.phases[0], None)
    # Twice the estimate: half of the memory is left.
    assert "accumulate=8 " in step_advice(plan, plan.phases[0], 2 * plan.phases[0].memory.total)


def test_a_step_far_above_the_memory_is_not_compiled():
    topology = parse_topology("h100:4")
    plan = make_plan(from_dict(Config, STEP), topology)
    for share, verdict in ((1.25, False), (1.35, True)):
        chip = dataclasses.replace(topology.chip, memory=int(plan.phases[0].memory.total / share))
        changed = dataclasses.replace(plan, topology=dataclasses.replace(topology, chip=chip))
        assert ruled_out(changed, plan.phases[0]) == verdict
    unknown = dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, memory=0))
    assert not ruled_out(dataclasses.replace(plan, topology=unknown), plan.phases[0])


@pytest.mark.parametrize(("peak", "needed"), [(100, 1000 + 50 - 30 + 200 + 7), (2000, 2000)])
def test_a_program_needs_its_peak_or_the_sum_of_its_parts(peak, needed):
    compiled = Compiled(arguments=1000, outputs=50, aliased=30, temporaries=200, code=7, peak=peak, seconds=1.0)
    assert compiled.needed == needed


def test_the_text_of_an_evaluation():
    model = {**dataclasses.asdict(SMALL), "layers": 3}
    phase = {"name": "one", "positional": ["rope", "rope/window=100", "nope/window=200"], "sequence_length": 64}
    plan = make_plan(from_dict(Config, {"model": model, "phases": [phase]}), parse_topology("v5e:2x2"))
    lines = evaluation_text(plan, plan.phases[0], 3000).splitlines()
    weights = 6 * plan.model.num_parameters  # float32, and a copy in bfloat16
    assert lines[1].endswith(f"on each chip: {size(weights)}, which leaves {size(16 * GIB - weights)}")
    assert lines[2].endswith("bfloat16: 128 bytes; 1 layers keep all tokens, 2 the last 100 or 200")
    assert [line.split()[0] for line in lines[4:-2]] == [
        *("64", "3,000", "8,192", "16,384", "32,768", "65,536", "131,072", "262,144", "524,288", "1,048,576"),
        "longest",
    ]
    # Layers keep 3000, 100 and 200 tokens of 128 bytes.
    assert f"{3300 * 128 / 2**10:.1f} KiB" in lines[5]
