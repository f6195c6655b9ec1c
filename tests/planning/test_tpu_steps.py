"""Steps that libtpu compiled: their memory, kernels and traffic."""

import json
import sys
from pathlib import Path

import pytest

from pe_lab import plan as command
from pe_lab.attention.context import sent
from pe_lab.config import Config, from_dict
from pe_lab.parallel import compiler
from pe_lab.parallel.topology import GIB, parse_topology
from pe_lab.planning.memory import OutOfMemory, sequence_memory
from pe_lab.planning.plan import compile_phase, explain_phase, make_plan
from pe_lab.recipes import load_config

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import tpu_step  # noqa: E402

pytestmark = pytest.mark.slow

DROPE = "configs/drope_16b.py"
KINDS = ("all-gather", "reduce-scatter", "all-reduce")

SMALL = {
    "model": {
        "vocab_size": 8192,
        "layers": 2,
        "d_model": 256,
        "d_ff": 512,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
    },
    "phases": [{"name": "p", "steps": 1000, "batch_size": 8, "sequence_length": 128}],
}


def test_tpu_compiler_shards_the_state_over_fsdp():
    compiled = {}
    for fsdp in (1, 4):
        config = from_dict(Config, {**SMALL, "mesh": {"data": -1, "fsdp": fsdp}})
        plan = make_plan(config, parse_topology("v5e:2x2"))
        compiled[fsdp] = compile_phase(plan, plan.phases[0])
        state = plan.phases[0].memory.parameters + plan.phases[0].memory.optimizer
        assert state <= compiled[fsdp].aliased < 1.2 * state  # small arrays are padded to tiles
    assert compiled[4].arguments < 0.3 * compiled[1].arguments
    assert compiled[4].needed < compiled[1].needed


def test_muon_exchanges_whole_matrices_once():
    """With fsdp, the iteration adds an all-to-all to what AdamW sends, and its products, shared by all chips. 60 s."""
    found = []
    for name, steps in (("adamw", 5), ("muon", 2), ("muon", 5)):
        optimizer = {"name": name, "muon": {"newton_schulz_steps": steps}}
        config = {
            "model": SMALL["model"] | {"layers": 8},
            "phases": [{**SMALL["phases"][0], "optimizer": optimizer}],
            "mesh": {"data": 1, "fsdp": 8},
        }
        plan = make_plan(from_dict(Config, config), parse_topology("v5e:2x4"))
        phase = plan.phases[0]
        compiled, report = explain_phase(plan, phase)
        wire = {kind: sum(row.wire for row in report.traffic if row.kind == kind) for kind in (*KINDS, "all-to-all")}
        found.append((wire, report.product_flops, phase.newton_schulz / 8))
        state = phase.memory.parameters + phase.memory.optimizer
        assert state <= compiled.aliased < 1.3 * state  # small arrays are padded to tiles
    (adamw, products, _), (two, flops_two, least), (five, flops_five, most) = found
    assert two == five and all(two[kind] == adamw[kind] for kind in KINDS)
    matrices = 8 * (
        2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512
    )  # float32 there, bfloat16 back, 7/8 of a chip's eighth
    assert five["all-to-all"] - adamw["all-to-all"] == pytest.approx(matrices * (4 + 2) / 8 * 7 / 8, rel=0.35)
    assert flops_two - products == pytest.approx(least, rel=0.01)
    assert flops_five - products == pytest.approx(most, rel=0.01)


def test_tpu_compiler_refuses_a_step_that_does_not_fit():
    # 131,072 tokens x 65,536 logits in float32: 32 GiB on a chip of 16.
    model = {**SMALL["model"], "vocab_size": 65536, "layers": 1}
    phases = [{**SMALL["phases"][0], "batch_size": 256, "sequence_length": 512}]
    plan = make_plan(from_dict(Config, {"model": model, "phases": phases}), parse_topology("v5e:1x1"))
    with pytest.raises(OutOfMemory) as refused:
        compile_phase(plan, plan.phases[0])
    assert refused.value.used > refused.value.capacity > 15 * GIB


def test_a_torus_with_sparse_cores_gathers_and_scatters_beside_computation():
    """Without the torus' links, libtpu compiles gathers as all-reduces; without SparseCores, reduce-scatters."""
    found = {}
    options = dict.fromkeys(compiler.OPTIONS["TPU v5"], "")
    for name, compiler_options in (("default", {}), ("none", options)):
        model = SMALL["model"] | {"d_model": 1024, "d_ff": 4096, "remat": "dots"}
        phases = [{**SMALL["phases"][0], "batch_size": 64, "sequence_length": 512}]
        config = {"model": model, "phases": phases, "mesh": {"data": 1, "fsdp": -1}}
        plan = make_plan(
            from_dict(Config, config | {"compiler_options": compiler_options}), parse_topology("v5p:4x4x4")
        )
        _, report = explain_phase(plan, plan.phases[0])
        by_kind = {kind: sum(row.wire for row in report.traffic if row.kind == kind) for kind in KINDS}
        found[name] = by_kind, report.wire(overlapped=True) / report.wire()
    (with_cores, beside), (without, waiting) = found["default"], found["none"]
    assert with_cores["all-gather"] > 0.5 * sum(with_cores.values()) and with_cores["reduce-scatter"] > 0
    assert with_cores["all-reduce"] < 0.02 * sum(with_cores.values()) and beside > 0.6
    assert without["all-reduce"] > 1.5 * with_cores["reduce-scatter"] and waiting < 0.1


def test_drope_16b_fits_v5e_16x16(capsys):
    assert command.main([f"--config={DROPE}", "--topology=v5e:16x16"]) == 0
    text = capsys.readouterr().out
    assert "memory, compiled: the step that trains 'pretrain', for v5e:16x16 by libtpu" in text
    assert "\nFITS: the step that trains 'pretrain' needs" in text and "of 16.00 GiB a chip" in text
    needed = float(text.split("trains 'pretrain' needs ")[1].split()[0])
    plan = make_plan(load_config(DROPE, {}), parse_topology("v5e:16x16"))
    estimate = plan.phases[0].memory.total / GIB
    assert needed < 7 and needed == pytest.approx(estimate, rel=0.25)


@pytest.mark.parametrize("topology", ["v5e:16x16", "v5p:4x4x4"])
@pytest.mark.parametrize("recipe", ["drope_olmo.py:model=olmo3_7b", "p_rope_gemma.py:model=4b"])
def test_windows_and_two_encodings_by_layer_fit_two_slices(recipe, topology):
    """4 minutes each. Every layer has splash, in windows and without: no kernel of another kind, and none left out."""
    plan = make_plan(load_config(f"configs/{recipe}"), parse_topology(topology))
    (phase,) = plan.phases
    compiled, report = explain_phase(plan, phase)
    assert compiled.needed <= plan.topology.chip.memory
    layers = phase.model.config.layers * phase.plan.config.accumulate
    again = phase.model.config.remat != "dots_attention"
    runs = {name.removeprefix("splash_mha_").removeprefix("splash_mqa_"): n for name, n in report.kernels.items()}
    assert runs == {
        "fwd_residuals": layers * (1 + again), "dq_no_residuals": layers, "dkv_no_residuals": layers,
    }, report.kernels  # fmt: skip


def test_drope_16b_evaluates_128k_tokens_on_sixteen_chips(capsys, tmp_path):
    out = tmp_path / "plan.json"
    argv = [f"--config={DROPE}", "--topology=v5e:4x4", "--evaluate-length=128k", f"--json={out}"]
    assert command.main(argv) == 0
    text = capsys.readouterr().out
    assert "\nFITS: a pass over 131,072 tokens, sharded over 16 (attention by pallas_tpu) needs" in text
    found = json.loads(out.read_text())["compiled"]["pretrain"]
    assert found["fits"] and found["attention"] == ["pallas_tpu"]
    phase = make_plan(load_config(DROPE, {}), parse_topology("v5e:4x4")).phases[0]
    estimate = sequence_memory(phase.model, phase.plan.schedule.structure, 2**17, 16)
    assert found["temporaries"] == pytest.approx(estimate.at_once, rel=0.25)


@pytest.mark.parametrize(("remat", "forward"), [("dots", 2), ("dots_attention", 1), ("full", 2)])
def test_kernels_of_a_layer_by_what_it_keeps(remat, forward):
    phases = [{**SMALL["phases"][0], "sequence_length": 512}]
    config = {"model": SMALL["model"] | {"remat": remat}, "phases": phases}
    plan = make_plan(from_dict(Config, config), parse_topology("v5e:2x2"))
    _, report = explain_phase(plan, plan.phases[0])
    runs = {("fwd" in name): count for name, count in report.kernels.items()}
    assert runs == {True: 2 * forward, False: 2}  # two layers
    assert any(one.source.startswith(("attention", "mlp")) for one in report.buffers)


RING = {"pe_lab_attention_flash", "pe_lab_attention_gradient_query", "pe_lab_attention_gradient_key"}
SPLASH = {"splash_mha_fwd_residuals", "splash_mha_dq_no_residuals", "splash_mha_dkv_no_residuals"}


# Of two layers: four steps of three pairs of half-blocks in a ring; by heads, one call.
@pytest.mark.parametrize(("way", "kernels", "runs"), [("ring", RING, 2 * 4 * 3), ("auto", SPLASH, 2)])
def test_attention_across_a_context_axis_is_a_kernel_in_both_passes(way, kernels, runs):
    """20 s each. A ring calls pe_lab's kernels, forward and backward; by heads, each device calls splash."""
    model = SMALL["model"] | {"d_model": 512, "heads": 8, "kv_heads": 4, "remat": "dots_attention"}
    phases = [{**SMALL["phases"][0], "batch_size": 1, "sequence_length": 8192}]
    mesh = {"data": 1, "context": 4, "context_attention": way}
    config = from_dict(Config, {"model": model, "phases": phases, "mesh": mesh})
    plan = make_plan(config, parse_topology("v5p:2x2x1"))
    _, report = explain_phase(plan, plan.phases[0])
    assert report.kernels == dict.fromkeys(sorted(kernels), runs)
    # 2 products forward, 3 and 4 in the two kernels of the backward pass, over half of all pairs.
    assert report.attention_flops == pytest.approx(2 * 9 * 2 * 512 * 8192 / 2 * 8192 / 4, rel=1e-3)
    sent_in_ring, sent_by_heads = sent((8, 4, 64), 2, 4, 1, False, True)
    kind, of_token = ("collective-permute", sent_in_ring) if way == "ring" else ("all-to-all", sent_by_heads)
    rows = [row for row in report.traffic if row.kind == kind and "attend" in row.source]
    assert sum(row.wire for row in rows) == pytest.approx(2 * 8192 // 4 * of_token, rel=0.01)
    # Beside computation: by default libtpu waits for every all-to-all.
    assert sum(row.overlapped for row in rows) > 0.25 * sum(row.wire for row in rows)


# Of the compiled steps of benchmarks/README.md: the MiB that a device sends (MaxText's: 9,976, 22,264 and 84,716), the
# peak in GB, and the runs of attention kernels for a layer, forward and backward.
BOUNDS = {"494m-8": (2_600, 4.7, (2, 1)), "1.5b-8": (8_500, 25.8, (2, 2)), "8b-8": (42_000, 52.5, (2, 2))}


@pytest.mark.parametrize(("name", "sent", "peak", "kernels"), [(name, *bounds) for name, bounds in BOUNDS.items()])
def test_the_step_does_not_get_worse(name, sent, peak, kernels):
    """20 to 70 s each."""
    report = tpu_step.ours(name, "dots")
    plan = tpu_step.plan_of(name)
    assert report.wire() / 2**20 < sent and report.peak_bytes / 1e9 < peak
    forward = sum(count for kernel, count in report.kernels.items() if "fwd" in kernel)
    backward = sum(report.kernels.values()) - forward
    layers = plan.model.config.layers
    assert forward <= kernels[0] * layers and backward <= kernels[1] * layers
    # Six FLOPs for each weight of a product and token: nothing but attention is computed twice.
    weights = plan.model.num_parameters - (0 if plan.model.config.tie_embeddings else plan.embedding_parameters // 2)
    tokens = plan.phases[0].plan.tokens_per_step // plan.topology.count
    assert report.product_flops == pytest.approx(6 * weights * tokens, rel=0.01)
