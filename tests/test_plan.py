"""The plan: its numbers by hand, its errors, and the compilers."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from pe_lab import plan as command
from pe_lab import prepare
from pe_lab.config import Config, DistillConfig, from_dict
from pe_lab.errors import ConfigError
from pe_lab.parallel import compiler
from pe_lab.parallel.topology import GIB, parse_topology, placeholder_mesh
from pe_lab.planning import tables
from pe_lab.planning.memory import OutOfMemory
from pe_lab.planning.plan import choose_phases, explain_phase, make_plan, step_advice
from pe_lab.planning.tables import training_text
from pe_lab.recipes import load_config
from pe_lab.training.plan import plan_run

DROPE = "configs/drope_16b.py"

RECIPE = """
from ml_collections import ConfigDict

def get_config(arg=""):
    phase = dict(steps=100, sequence_length=32, batch_size=16, optimizer=dict(warmup_steps=10))
    return ConfigDict(dict(
        name="tiny",
        model=dict(vocab_size=256, layers=2, d_model=64, d_ff=128, heads=4, kv_heads=2, remat="full"),
        mesh=dict(data=-1, fsdp=2),
        phases=[dict(name=n, positional=p, **phase) for n, p in (("first", "nope"), ("second", "rope"))],
    ))
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(RECIPE)
    return str(path)


def _plan(text: str = "v5e:16x16", **overrides: str):
    settings = {"model.remat": "dots", "model.loss_chunks": "8"}  # the recipe's are "auto"
    return make_plan(load_config(DROPE, settings | overrides), parse_topology(text))


# -- by hand -----------------------------------------------------------------------------------------------


def test_494m_by_hand():
    plan = _plan()
    # Queries and outputs 896 x 896, keys and values 896 x 128, three matrices 896 x 4864, two norms.
    layer = 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864 + 2 * 896
    assert plan.embedding_parameters == 151936 * 896 == 136_134_656
    assert plan.model.num_parameters == 24 * layer + 136_134_656 + 896 == 494_005_120
    pretrain, recalibrate = plan.phases
    # Six per weight of a product (norms are none, the tied embedding is one), and 12 per channel and key: 24
    # layers of 14 x 64 channels, 1024 keys, or 512.5 on average that the mask leaves.
    products = 6 * (494_005_120 - 24 * 2 * 896 - 896)
    assert pretrain.flops.full == products + 12 * 24 * 896 * 1024 == 3_228_008_448
    assert pretrain.flops.causal == products + 12 * 24 * 896 * 512.5 == 3_096_016_896
    assert (pretrain.tokens, recalibrate.tokens) == (14_000 * 2**20, 2_000 * 2**20)
    assert recalibrate.total_flops == 3_228_008_448 * 2_000 * 2**20
    # 5.4e19 FLOPs at 40% of 197e12 FLOP/s.
    assert plan.chip_hours(197e12, 0.4) == pytest.approx(3_228_008_448 * 16_000 * 2**20 / 78.8e12 / 3600)


def test_untied_embeddings_count_twice():
    tied, untied = _plan(), _plan(**{"model.tie_embeddings": "False"})
    assert untied.embedding_parameters == 2 * tied.embedding_parameters
    assert untied.model.num_parameters - tied.model.num_parameters == tied.embedding_parameters


def test_estimate_of_the_state_is_its_size():
    estimate = _plan().phases[0].memory
    norms = (2 * 24 + 1) * 896  # on every chip; all others are sharded over fsdp = 8
    assert estimate.parameters == 4 * ((494_005_120 - norms) // 8 + norms)
    assert estimate.optimizer - 2 * estimate.parameters in range(4, 17)  # two moments and a step count or two
    assert estimate.batch == 3 * 4 * 4 * 1024  # three arrays of four windows
    assert _plan(**{"data.segments": "True"}).phases[0].memory.batch == 5 * 4 * 4 * 1024


@pytest.mark.slow
def test_muon_has_one_moment_of_its_matrices_and_its_iteration_is_counted(capsys):
    adamw, muon = _plan().phases[0], _plan(**{"phases.0.optimizer.name": "muon"}).phases[0]
    matrices = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
    assert adamw.memory.optimizer - muon.memory.optimizer == pytest.approx(4 * matrices // 8, abs=16)
    head = 4 * 64 * 64 * 896 + 2 * 64**3  # of queries, keys and values, each on its own
    square, mlp = 6 * 896**3, 4 * 896**2 * 4864 + 2 * 896**3
    assert muon.newton_schulz == 24 * 5 * ((14 + 2 + 2) * head + square + 3 * mlp)
    assert muon.total_flops - adamw.total_flops == 14_000 * muon.newton_schulz
    argv = [f"--config={DROPE}", "--topology=v5e:16x16", "--no-compile", "--config.phases.0.optimizer.name=muon"]
    assert command.main(argv) == 0
    counted = "Newton-Schulz iteration in 'pretrain': 6.69e+12 FLOPs a step, 0.20% of the model's (counted)"
    assert counted in capsys.readouterr().out


def test_estimate_follows_the_settings_that_shrink_a_step():
    base = _plan().phases[0].memory
    by_remat = [_plan(**{"model.remat": r}).phases[0].memory.activations for r in ("none", "dots", "full")]
    assert by_remat[0] > by_remat[1] > by_remat[2] == 24 * 4 * 1024 * 896 * 2  # the layers' inputs, in bfloat16
    more_fsdp = _plan(**{"mesh.fsdp": "16"}).phases[0].memory
    norms = 4 * (2 * 24 + 1) * 896  # on every chip
    assert (more_fsdp.parameters - norms) * 2 == base.parameters - norms
    assert more_fsdp.activations == base.activations
    halves = _plan(**{"phases.0.accumulate": "2"}).phases[0].memory
    assert halves.activations * 2 == base.activations and halves.parameters == base.parameters
    whole = _plan(**{"model.loss_chunks": "1"}).phases[0].memory
    assert whole.working > 6 * 4 * 1024 * 151936 > base.working  # all logits, in float32, and gradients, in bfloat16
    kept = _plan(**{"model.remat": "dots_attention"}).phases[0].memory.activations - base.activations
    assert kept == 24 * 4 * 1024 * 14 * (64 * 2 + 4)  # attention's output and logsumexp
    assert _plan(**{"model.remat": "dots_offload"}).phases[0].memory.activations == by_remat[2]
    ungated = {"model.gated_mlp": "False"}
    plain = [_plan(**{"model.remat": r} | ungated).phases[0].memory.activations for r in ("none", "dots")]
    gate = 24 * 4 * 1024 * 4864 * 2  # one array [B, T, F] a layer, in bfloat16
    assert [bare + gate for bare in plain] == by_remat[:2]


def test_the_working_set_by_hand():
    """DroPE's step on v5e:16x16 takes four windows a chip: the loss is the largest set, with 64 chunks a layer."""
    loss = 512 * 151936 * (4 + 2) + 151936 * 896 * (2 + 4) + 2 * 4096 * 896 * 2
    assert _plan().phases[0].memory.working == loss
    found = _plan(**{"model.attention": "reference", "model.loss_chunks": "64"}).phases[0].memory
    # Channels of a token, in bfloat16: six arrays [D]; queries, keys and values, gate and up, each with its gradient.
    # The probabilities are bfloat16, the logits float32, each with its gradient. The layer's weights are gathered.
    channels = 6 * 896 + 2 * (14 + 2 * 2) * 64 + 2 * 2 * 4864
    token = 2 * channels + 2 * 14 * 1024 * (2 + 4)
    weights = 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864 + 2 * 896
    assert found.working == found.parameters + 4 * 1024 * token + weights * 2


def test_estimate_shards_heads_and_mlp_over_tensor():
    base = from_dict(Config, {"model": {"vocab_size": 1024, "remat": "none"}, "mesh": {"tensor": 2, "data": 1}})
    plan = make_plan(base, parse_topology("h100:2"))
    alone = dataclasses.replace(plan.run, mesh=placeholder_mesh(Config().mesh, 1))
    one = alone.memory(alone.phases[0])
    assert plan.phases[0].memory.parameters < 0.6 * one.parameters
    assert 0.5 < plan.phases[0].memory.activations / one.activations < 0.75  # D stays whole


def test_largest_phase_is_compiled_and_rotation_breaks_ties(recipe):
    plan = make_plan(load_config(recipe), parse_topology("cpu:8"))
    assert [p.plan.name for p in choose_phases(plan, None)] == ["second"]
    assert [p.plan.name for p in choose_phases(plan, "all")] == ["first", "second"]
    longer = make_plan(load_config(recipe, {"phases.0.sequence_length": "64"}), parse_topology("cpu:8"))
    assert [p.plan.name for p in choose_phases(longer, None)] == ["first"]


def test_vocabulary_size_comes_from_the_tokenizers_name():
    needles = [{"source": "needles", "options": {"keys": 64, "values": 64}}] * 2
    config = from_dict(
        Config,
        {"data": {"sources": [{}, *needles], "tokenizer": "sentencepiece:train:1000"}, "mesh": {"data": 1}},
    )
    size = make_plan(config, parse_topology("cpu:1")).model.config.vocab_size
    assert size % 128 == 0 and size - 128 < 1000 + 130 + _filler() <= size


def test_steps_of_epochs_and_the_vocabulary_come_from_prepared_data(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("x" * 1000)
    data = tmp_path / "data"
    source = [f"--source=text:{tmp_path}/a.txt", "--tokenizer=bytes", "--validation-fraction=0"]
    assert prepare.main([*source, f"--out={data}", "--workers=1"]) == 0
    phase = {"epochs": 3, "batch_size": 4, "sequence_length": 10, "optimizer": {"warmup_steps": 1}}
    for wanted, sources in ((75, f"prepared:{data}"), (1000, f"text:{tmp_path}/a.txt")):
        recipe = {"data": {"sources": [{"source": sources}]}, "phases": [phase], "mesh": {"data": 1}}
        plan = make_plan(from_dict(Config, recipe), parse_topology("cpu:1"))
        assert plan.phases[0].plan.config.steps == wanted and plan.model.config.vocab_size == 384
        assert ("1,000 are assumed" in training_text(plan, 0.4)) == (wanted == 1000)


def _filler() -> int:
    from pe_lab.data.needles import NeedleOptions

    return NeedleOptions().filler_symbols


# -- the command ----------------------------------------------------------------------------------------------


def test_no_compile_prints_the_numbers(capsys, tmp_path):
    out = tmp_path / "plan.json"
    argv = [f"--config={DROPE}", "--topology=v5e:16x16", "--no-compile", f"--json={out}"]
    assert command.main(argv) == 0
    text = capsys.readouterr().out
    for part in (
        "256 x TPU v5e, 16 GiB each, mesh data 32 x fsdp 8 x tensor 1",
        "parameters 494,005,120: embedding 136,134,656 (tied), others 357,870,464",
        "rope(base=1e+06)",
        "14.7B",
        "16.8B",
        "3.228e+09",
        "3.096e+09",
        "5.416e+19",
        "0.75 hours of 256 x TPU v5e",
        "kept activations, remat=dots_attention",
        "not compiled: --no-compile",
    ):
        assert part in text, part
    assert "FIT" not in text
    numbers = json.loads(out.read_text())
    assert numbers["fits"] is None and numbers["compiled"] == {}
    assert numbers["parameters"] == {"total": 494005120, "embedding": 136134656}
    assert [p["tokens"] for p in numbers["phases"]] == [14_000 * 2**20, 2_000 * 2**20]
    assert re.search(r"micro-batches +1 +1\n +layers +in a scan +in a scan\n", text)
    assert [(p["accumulate"], p["remat"], p["scan"]) for p in numbers["phases"]] == [(1, "dots_attention", True)] * 2


def test_without_libtpu_there_is_an_estimate_and_advice(capsys, monkeypatch):
    monkeypatch.setattr(compiler, "libtpu_version", lambda: "")
    assert command.main([f"--config={DROPE}", "--topology=v5e:16x16"]) == 0
    text = capsys.readouterr().out
    assert "not compiled: libtpu is not installed: pip install 'pe-lab[aot]'" in text
    assert "estimated from shapes" in text and "FIT" not in text


def test_without_the_cuda_plugin_gpus_are_estimated(capsys, monkeypatch):
    monkeypatch.setattr(compiler, "_version", lambda package: "" if package == "jax-cuda13-plugin" else "1")
    assert command.main([f"--config={DROPE}", "--topology=gpu:8"]) == 0
    text = capsys.readouterr().out
    assert "8 x NVIDIA H100 80GB, 72 GiB each, mesh data 1 x fsdp 8" in text  # 90% of 80 GiB
    assert re.search(r"micro-batches +2 +2\n +layers +unrolled +unrolled\n", text)  # so that no layer is computed twice
    assert "not compiled: without jax-cuda13-plugin: pip install 'pe-lab[gpu]' (Linux), no GPU needed" in text
    assert "FIT" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology=v5x:16x16"], "no chip is called 'v5x'. Did you mean 'v5p'? Examples: v4:4x4x4, v5e:16x16"),
        (["--topology=v5e:16"], "'v5e:16' has 1 dimension; v5e takes 2 numbers, as in v5e:4x4"),
        (["--topology=v5e:16x16x2"], "For 2 slices of 16x16: --topology=v5e:16x16 --slices=2."),
        (["--topology=h100:8", "--slices=2"], "--slices=2: it is the number of TPU slices"),
        (["--topology=v5e:16x16", "--slices=2", "--config.mesh.fsdp=512"], "2 slices do not divide data = 1"),
        (["--topology=v5e:16x16", "--config.mesh.slices=3"], "config.mesh.slices is 3; the devices are in 1"),
        (["--topology=v5p"], "'v5p' has no shape. Write it as in v5p:2x2x1"),
        (["--topology=h100:0"], "'h100:0' has no number of chips. Write it as in h100:8"),
        (["--topology=h100:12"], "'h100:12' is no number of whole nodes. More than 8 GPUs are a multiple of 8."),
        (["--topology=v5e:2x2"], "config.mesh so that data * fsdp * tensor * context = 4"),
        (["--topology=v5e:16x16", "--config.phases.1.batch_size=1000"], "'recalibrate'): batch_size 1000"),
        (["--topology=v5e:16x16", "--config.mesh.fsdp=256"], "Choose a mesh whose 'fsdp' divides 896"),
        (["--topology=v5e:16x16", "--phase=recalibrat"], "the phases are pretrain, recalibrate; or use all"),
        (["--topology=v5e:16x16", "--mfu=40"], "is not a number from 1e-06 to 1.0"),
        (["--topology=v5e:16x16", "--json=nowhere/plan.json"], "there is no directory 'nowhere'"),
        (["--topology=v5e:16x16", "--config.model.vocab_size=0"], "model.vocab_size"),
        (["--topology=v5e:16x16", "--config.model.layer=2"], "Did you mean 'layers'?"),
        (
            ["--topology=v5e:16x16", "--evaluate-length=long"],
            "'long' is no length. Write 8192, 128k or 1m",
        ),
    ],
)
def test_bad_input_is_one_message_and_status_2(arguments, message, capsys):
    assert command.main([f"--config={DROPE}", "--no-compile", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err
    assert not captured.out


@pytest.mark.parametrize(
    ("text", "slices", "devices", "chip"),
    [
        ("v4:2x2x1", 1, 4, "TPU v4"),
        ("v4:4x4x4", 1, 64, "TPU v4"),
        ("v4:4x4x8", 2, 256, "TPU v4"),
        ("v5e:1x1", 1, 1, "TPU v5e"),
        ("v5e:2x4", 4, 32, "TPU v5e"),
        ("v5e:16x16", 1, 256, "TPU v5e"),
        ("v5e:16x16", 4, 1024, "TPU v5e"),
        ("v5p:2x2x1", 2, 8, "TPU v5p"),
        ("v5p:4x4x4", 1, 64, "TPU v5p"),
        ("v5p:4x4x8", 3, 384, "TPU v5p"),
        ("v6e:4x4", 1, 16, "TPU v6e"),
        ("trillium:16x16", 2, 512, "TPU v6e"),
        ("tpu7x:2x2x1", 1, 8, "TPU7x"),
        ("ironwood:4x4x4", 4, 512, "TPU7x"),
        # refused, each with one message
        ("v5e:3x4", 1, "no slice is 'v5e:3x4'", ""),
        ("v5e:16x16x2", 1, "For 2 slices of 16x16: --topology=v5e:16x16 --slices=2.", ""),
        ("v5p:4x4", 1, "'v5p:4x4' has 2 dimensions; v5p takes 3 numbers", ""),
        ("v9:4x4", 1, "no chip is called 'v9'", ""),
        ("v6e:8x8", 0, "--slices=0: it is the number of TPU slices", ""),
        ("h100:8", 2, "--slices=2: it is the number of TPU slices", ""),
    ],
)
def test_topologies_plan_or_are_refused(text, slices, devices, chip, recipe):
    if isinstance(devices, str):
        with pytest.raises(ConfigError, match=re.escape(devices)) as refused:
            compiler.topology_devices(parse_topology(text, slices))
        assert "\n" not in str(refused.value)
        return
    found = parse_topology(text, slices)
    assert (found.count, found.chip.name) == (devices, chip)
    assert len(compiler.topology_devices(found)) == devices
    sizes = {"mesh.fsdp": "1", "phases.0.batch_size": str(devices), "phases.1.batch_size": str(devices)}
    plan = make_plan(load_config(recipe, sizes), found)
    assert plan.mesh_shape == {"data": devices, "fsdp": 1, "tensor": 1, "context": 1}


def test_64_slices_are_planned(capsys):
    sizes = ["--config.phases.0.batch_size=65536", "--config.phases.1.batch_size=65536"]
    assert command.main([f"--config={DROPE}", "--topology=v5e:16x16", "--slices=64", "--no-compile", *sizes]) == 0
    assert (
        "drope_16b on 64 x v5e:16x16: 16384 x TPU v5e, 16 GiB each, mesh data 2048 x fsdp 8" in capsys.readouterr().out
    )


def test_slice_of_a_shape_that_does_not_exist(capsys):
    # Twelve chips divide the mesh (12 x 1) and the batch, but no v5e slice is 3 x 4.
    argv = [
        f"--config={DROPE}",
        "--topology=v5e:3x4",
        "--config.mesh.fsdp=1",
        "--config.phases.0.batch_size=48",
    ]
    assert command.main([*argv, "--config.phases.1.batch_size=48"]) == 2
    assert "no slice is 'v5e:3x4'" in capsys.readouterr().err


def test_evaluating_many_tokens_by_hand(capsys):
    argv = [f"--config={DROPE}", "--topology=v5e:4x4", "--evaluate-length=128k", "--no-compile"]
    assert command.main(argv) == 0
    text = capsys.readouterr().out
    # 24 layers x keys and values x 2 heads x 64 channels x 2 bytes: 12 KiB a token.
    assert "bfloat16: 512 bytes; 24 layers" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["131,072"][1:3] == ["1.50", "GiB"] and rows["1,048,576"][1:3] == ["12.00", "GiB"]
    assert text.count("longest") == 1 and "not compiled: --no-compile" in text


def test_weights_that_do_not_fit(capsys):
    """Llama2-7B in float32 is larger than a v5e's memory."""
    argv = ["--config=configs/drope_llama2.py", "--topology=v5e:4x4", "--evaluate-length=8k", "--no-compile"]
    assert command.main([*argv, "--config.mesh.fsdp=-1", "--config.mesh.data=1"]) == 0
    assert "DOES NOT FIT" in capsys.readouterr().out


# -- compilers ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiles_for_virtual_cpus_the_step_that_trains(recipe, capsys, tmp_path):
    out = tmp_path / "plan.json"
    assert command.main([f"--config={recipe}", "--topology=cpu:8", f"--json={out}"]) == 0
    captured = capsys.readouterr()
    assert "compiling the step that trains 'second', for 8 x CPU device ..." in captured.err
    assert "memory, compiled: the step that trains 'second', for cpu:8 by XLA of jax" in captured.out
    assert (
        "the step that trains 'second' needs" in captured.out and "Not compiled: first, estimated above" in captured.out
    )
    numbers = json.loads(out.read_text())
    compiled, estimated = numbers["compiled"]["second"], numbers["phases"][1]["memory_estimate"]
    state = estimated["parameters"] + estimated["optimizer"]
    # The state, its step, the batch and the schedule go in; the state comes out in its place.
    assert compiled["arguments"] == pytest.approx(state + estimated["batch"], rel=0.05)
    assert compiled["aliased"] == pytest.approx(state, rel=0.01)
    assert numbers["fits"] is None  # a CPU device has no memory of its own


@pytest.mark.slow
def test_a_teacher_is_compiled_into_the_step(recipe):
    """Its parameters are arguments that come out nowhere, and its forward pass is computed. 10 s."""
    config, found = load_config(recipe), []
    for distill in (None, DistillConfig(logits=1.0, hidden=1.0)):
        phases = (config.phases[0], dataclasses.replace(config.phases[1], distill=distill))
        plan = make_plan(dataclasses.replace(config, phases=phases), parse_topology("cpu:2"))
        found.append((plan.phases[1], explain_phase(plan, plan.phases[1])))
    (alone, (without, steps)), (taught, (compiled, its_steps)) = found
    parameters = alone.memory.parameters
    assert compiled.arguments - without.arguments == pytest.approx(parameters, rel=0.02)
    assert compiled.aliased == without.aliased
    assert taught.memory.batch - alone.memory.batch > parameters  # the estimate has the same, and the output of norms
    # A forward pass is a third of a step; remat="full" computes another one either way.
    assert its_steps.product_flops / steps.product_flops == pytest.approx(5 / 4, abs=0.06)


@pytest.mark.slow
def test_a_step_is_explained_and_compared_with_its_own_file(recipe, capsys, tmp_path):
    out = tmp_path / "step.json"
    argv = [f"--config={recipe}", "--topology=cpu:8", "--explain"]
    assert command.main([*argv, f"--json={out}"]) == 0
    text = capsys.readouterr().out
    assert "the compiled step: tiny, phase 'second', on cpu:8, by XLA of jax" in text
    step = json.loads(out.read_text())["compiled"]["second"]["step"]
    # Two layers of 64 x (64 + 32 + 32 + 64 + 3 x 128) weights, and the tied embedding, six times for 2 x 32 tokens;
    # four times more for the layers, which are computed again; attention in XLA counts too.
    weights = 2 * 64 * (2 * 64 + 2 * 32 + 3 * 128)
    assert step["product_flops"] >= 2 * 64 * (4 * weights + 3 * 64 * 256)
    assert {row["axes"] for row in step["traffic"]} >= {"data", "fsdp"}
    assert {"mlp/gate, backward", "mlp/gate, recomputed"} & {row["source"] for row in step["traffic"]}
    assert command.main([*argv, f"--against={out}"]) == 0
    assert "of a device and step" in capsys.readouterr().out
    more = ["--config.phases.1.batch_size=32"]
    assert command.main([*argv, f"--against={out}", *more]) == 1  # twice the FLOPs
    assert command.main([*argv, "--against=none.json"]) == 2
    assert "--against=none.json: No such file" in capsys.readouterr().err
    assert command.main([*argv, "--no-compile"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind"), [("ring", "collective-permute"), ("ulysses", "all-to-all")])
def test_a_sharded_sequence_is_not_gathered(recipe, way, kind):
    """Of the sequence, a ring sends keys and values alone; or tokens are exchanged for heads. 3 s each."""
    mesh = {"mesh.fsdp": "2", "mesh.context": "2", "mesh.context_attention": way}
    plan = make_plan(load_config(recipe, mesh), parse_topology("cpu:8"))
    traffic = explain_phase(plan, plan.phases[1])[1].traffic
    assert any(row.kind == kind and row.axes == "context" for row in traffic)
    assert not [row for row in traffic if row.kind == "all-gather" and "context" in row.axes]


@pytest.mark.slow
def test_auto_is_the_fastest_that_fits():
    at_once = {"phases.0.accumulate": "1", "phases.1.accumulate": "1"}
    auto = {"model.remat": "auto", "model.loss_chunks": "auto", **at_once}
    model = _plan(**auto).phases[0].model.config
    assert (model.remat, model.scan, model.loss_chunks) == ("dots_attention", True, 1)
    # Eight times the sequences of a chip: everything but the inputs of the layers is computed again, in parts.
    larger = {"phases.0.batch_size": "8192", "phases.1.batch_size": "8192"}
    found = _plan(**auto, **larger).phases[0]
    assert found.memory.total <= 0.92 * 16 * GIB and found.model.config.loss_chunks > 1
    one_up = {"full": "dots", "dots": "dots_attention"}[found.model.config.remat]
    for chunks in ("1", "16", "128"):
        changed = {"model.remat": one_up, "model.loss_chunks": chunks}
        assert _plan(**changed, **larger, **at_once).phases[0].memory.total > 0.92 * 16 * GIB
    # What cannot fit is planned with what needs the least, and advised; a run is refused.
    huge = _plan(**auto, **{"phases.0.batch_size": "262144"})
    assert huge.phases[0].memory.total > 16 * GIB and huge.phases[0].model.config.remat == "full"
    accumulate = int(re.search(r"phases\.0\.accumulate=(\d+)", step_advice(huge, huge.phases[0], None))[1])
    fitting = {"phases.0.batch_size": "262144", "phases.0.accumulate": str(accumulate)}
    assert _plan(**(auto | fitting)).phases[0].memory.total <= 16 * GIB
    with pytest.raises(
        ConfigError, match="phase 'pretrain': with any remat and loss_chunks, a step needs at least about"
    ):
        plan_run(huge.config, huge.run.mesh, huge.run.given, huge.topology.chip, must_fit=True)
    # In more micro-batches, no layer is: half as many would not do.
    found = _plan(**larger).phases[0]
    accumulate, remat = found.plan.config.accumulate, found.model.config.remat
    assert remat != "full" and accumulate > 1
    for chunks in ("1", "16", "128"):
        fewer = {"phases.0.accumulate": str(accumulate // 2), "model.remat": remat, "model.loss_chunks": chunks}
        assert _plan(**fewer, **larger).phases[0].memory.total > 0.92 * 16 * GIB
    with pytest.raises(ConfigError, match="batch_size 1023 in 1 micro-batches does not divide"):
        _plan(**{"phases.0.batch_size": "1023"})
    with pytest.raises(ConfigError, match="model.loss_chunks is 'some'; it must be 'auto' or of type int"):
        _plan(**{"model.loss_chunks": "some"})


REFUSALS = [
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for "
    "HLO temporaries (17.29G) exceeds available HBM (15.75G). HLO module: jit_step.",
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.29G "
    "of 15.75G hbm. Exceeded hbm capacity by 1.54G.\n\nTotal hbm usage >= 17.54G:",
]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_the_numbers_of_a_refusal(refusal, recipe, capsys, monkeypatch):
    def refuse(*_):
        raise OutOfMemory(refusal)

    monkeypatch.setattr(tables, "compile_phase", refuse)
    assert command.main([f"--config={recipe}", "--topology=v5e:2x2", "--config.model.remat=dots"]) == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT: the step that trains 'second' needs 17.29 GiB of 15.75 GiB a chip" in text
    assert "Try --config.model.remat=full" in text


def test_a_refusal_without_numbers_is_quoted():
    refused = OutOfMemory("RESOURCE_EXHAUSTED: no numbers")
    assert (refused.used, refused.capacity) == (None, None)
    assert str(refused) == "RESOURCE_EXHAUSTED: no numbers"
