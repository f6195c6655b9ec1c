"""Steps that XLA compiled for H100s that are not here. The parts of the compiler are downloaded (0.9 GB) once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_material import cuda_compiler

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WEIGHTS = 494_005_120  # of Qwen2 0.5B, embedding tied
NORMS = 49 * 896 + 24 * (896 + 2 * 128)  # and the biases of queries, keys and values: they are replicated
PLAN = [
    "--config=configs/drope_16b.py", "--explain", "--config.phases.0.batch_size=128",
    "--config.phases.1.batch_size=128",
]  # fmt: skip


def planned(tmp_path, *arguments: str, recipe: list[str] = PLAN, phase: str = "pretrain") -> tuple[dict, str]:
    """The step of `pe_lab.plan` and its text. 10 s."""
    environment = {**os.environ, "PYTHONPATH": str(cuda_compiler()), "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "pe_lab.plan", *recipe, *arguments, f"--json={tmp_path / 'plan.json'}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = json.loads((tmp_path / "plan.json").read_text())["compiled"][phase]
    assert compiled["fits"]
    return compiled["step"], done.stdout


def wire(step: dict, kind: str, network: str) -> float:
    return sum(row["wire"] for row in step["traffic"] if (row["kind"], row["network"]) == (kind, network))


def test_a_node_of_eight(tmp_path):
    step, text = planned(tmp_path, "--topology=h100:8")
    assert "FITS: the step that trains 'pretrain' needs" in text and "of 72.00 GiB a chip" in text
    # cuDNN's attention: remat="auto" keeps its output, so that the forward pass is not computed again.
    assert step["kernels"] == {"dot_product_attention_bwd": 24, "dot_product_attention_fwd": 24}
    tokens = 128 * 1024 // 8
    assert step["product_flops"] == pytest.approx(6 * WEIGHTS * tokens, rel=0.01)
    # Causal attention of 24 layers of 14 heads of 64 channels: 2 products forward, and 5 backward.
    assert step["attention_flops"] == pytest.approx(24 * 7 * 14 * 64 * 2 * 1024 / 2 * tokens, rel=0.01)
    # bfloat16 weights are gathered twice, the tied embedding for the loss alone; gradients are scattered once.
    embedding = 151_936 * 896
    gathered = 2 * (2 * (WEIGHTS - NORMS - embedding) + embedding) * 7 / 8
    assert wire(step, "all-gather", "ICI") == pytest.approx(gathered, rel=0.01)
    assert wire(step, "reduce-scatter", "ICI") == pytest.approx(2 * (WEIGHTS - NORMS) * 7 / 8, rel=0.01)
    assert not any(row["network"] != "ICI" for row in step["traffic"])
    assert any(row["source"].startswith("mlp/") for row in step["buffers"])
    gathers = [row for row in step["traffic"] if row["kind"] == "all-gather"]
    beside = sum(row["overlapped"] for row in gathers) / sum(row["wire"] for row in gathers)
    assert beside > 0.5  # 0.96 of JAX 0.10, 0.56 of JAX 0.12; without parallel/compiler.py nothing


def test_two_nodes_exchange_gradients_alone(tmp_path):
    step, text = planned(tmp_path, "--topology=h100:16", "--config.mesh.data=2")
    assert "network" in text and "NVLink" in text
    # A device has an eighth of the gradients, and adds those of its counterpart in the other node.
    crossing = sum(row["crossing"] for row in step["traffic"])
    assert 0.9 < crossing / (2 * (WEIGHTS - NORMS) / 8) < 2.1  # bfloat16, or float32
    assert {row["axes"] for row in step["traffic"] if row["network"] == "DCN" and row["wire"] > 2**20} == {"data"}


def test_one_group_over_two_nodes(tmp_path):
    step, _ = planned(tmp_path, "--topology=h100:16", "--config.mesh.fsdp=16", "--config.mesh.data=1")
    gathers = [row for row in step["traffic"] if row["kind"] == "all-gather" and row["payload"] > 2**20]
    assert {row["network"] for row in gathers} == {"ICI+DCN"}
    # Eight rings, of which each leaves a node once for both nodes' 16 devices.
    assert sum(row["crossing"] for row in gathers) == pytest.approx(sum(row["wire"] for row in gathers) / 8, rel=0.01)


RING = [f"pe_lab_attention_{name}" for name in ("flash", "key_gradient", "query_gradient")]
CUDNN = [f"dot_product_attention_{name}" for name in ("bwd", "fwd")]


# KiB that a device sends of each of its tokens and a layer, and kernels of a layer: in a ring, of eight steps of three.
@pytest.mark.parametrize(
    ("way", "kind", "kibibytes", "kernels", "runs"),
    [("auto", "all-to-all", 42, CUDNN, 1), ("ring", "collective-permute", 248, RING, 8 * 3)],
)
def test_a_sequence_over_eight_gpus(tmp_path, way, kind, kibibytes, kernels, runs):
    """30 s each. SmolLM2-1.7B's shape at 131,072 tokens: by heads with cuDNN, in a ring with pe_lab's kernels."""
    recipe = [
        "--config=configs/drope_smollm.py:model=1.7b", "--topology=h100:8", "--explain", "--config.mesh.fsdp=1",
        "--config.mesh.context=8", "--config.phases.0.sequence_length=131072", "--config.phases.0.batch_size=8",
        "--config.phases.0.positional=rope:base=130000", f"--config.mesh.context_attention={way}",
    ]  # fmt: skip
    step, text = planned(tmp_path, recipe=recipe, phase="recalibrate")
    assert step["kernels"] == dict.fromkeys(kernels, 8 * 24 * runs)
    assert wire(step, kind, "ICI") == pytest.approx(8 * 131_072 // 8 * 24 * kibibytes * 1024, rel=0.01)
    if way == "auto":
        assert "across the context axis: ulysses on layers 0-23 (a device sends for each token and layer 42.0" in text
        assert "What limits the step is compute: 81% of its FLOPs are those of attention." in text
