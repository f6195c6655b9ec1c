"""Every recipe in configs/, under every argument that its text mentions."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from pathlib import Path

import jax
import pytest

from pe_lab.config import Config, UserError, load_config, to_json
from pe_lab.parallel import AxisRules, check_batch
from pe_lab.parallel.topology import CHIPS, parse_topology, placeholder_mesh
from pe_lab.positional import Alibi, NoPE, Rope
from pe_lab.training import compile_train_step, make_optimizer
from pe_lab.training.memory import step_inputs
from pe_lab.training.planning import make_plan

CONFIGS = Path(__file__).parent.parent / "configs"


def _references() -> list[str]:
    """`configs/x.py` and each `configs/x.py:ARG` or `:ARG` that the file itself mentions."""
    found = []
    for path in sorted(CONFIGS.glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        arguments = re.findall(rf"configs/{path.stem}\.py:([\w=./-]*[\w/])|`:([\w./-]+)`", text)
        arguments = [one or other for one, other in arguments]
        found += [path.name, *(f"{path.name}:{argument}" for argument in dict.fromkeys(arguments))]
    return found


def _load(reference: str) -> Config:
    return load_config(f"{CONFIGS}/{reference}")


def _devices(config: Config) -> int:
    """The fewest devices, at least eight, that the recipe's mesh can be laid over."""
    sizes = dataclasses.astuple(config.mesh)
    fixed = math.prod(size for size in sizes if size != -1)
    return fixed * -(-8 // fixed) if -1 in sizes else fixed


def test_references_include_documented_arguments():
    assert {"drope_laptop.py", "drope_laptop.py:quick", "drope_laptop.py:full"} <= set(_references())
    assert "drope_16b.py:from=runs/rope_16b/pretrain/checkpoints/14000" in _references()


@pytest.mark.parametrize("reference", _references())
def test_recipe_says_what_it_reproduces(reference):
    config = _load(reference)
    for field, text in to_json(config.notes).items():
        assert text.strip(), f"config.notes.{field} of {reference} is empty"
    path = reference.partition(":")[0]
    assert f"--config=configs/{path}" in config.notes.command
    assert ast.get_docstring(ast.parse((CONFIGS / path).read_text()))


@pytest.mark.parametrize("reference", _references())
def test_recipe_traces_on_its_mesh(reference):
    config = _load(reference)
    plan = make_plan(config, parse_topology(f"h100:{_devices(config)}"))
    model, mesh = plan.model, placeholder_mesh(config.mesh, _devices(config))
    structures = set()
    for phase in (numbers.plan for numbers in plan.phases):
        check_batch(phase.config.batch_size, phase.config.accumulate, mesh, phase.name)
        optimizer = make_optimizer(phase.config.optimizer, phase.config.steps, model.axes)
        shape = (phase.schedule.structure, phase.config.batch_size, phase.config.sequence_length)
        if shape in structures:
            continue  # the same program
        structures.add(shape)
        inputs = step_inputs(model, optimizer, phase, config.data.segments)
        step = compile_train_step(model, optimizer, mesh, AxisRules(), phase.config.accumulate)
        state, metrics = jax.eval_shape(step, *inputs)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
            lambda x: (x.shape, x.dtype), inputs[0]
        )
        assert metrics["loss"].shape == () and metrics["loss"].dtype == "float32"


@pytest.mark.parametrize("name", ["rope_16b", "nope_16b", "alibi_16b"])
def test_recipe_without_arguments_refuses_one(name):
    with pytest.raises(UserError, match="takes no argument"):
        _load(f"{name}.py:from=somewhere")


@pytest.mark.parametrize("argument", ["fro=somewhere", "from=", "quick"])
def test_drope_16b_refuses_an_unknown_argument(argument):
    with pytest.raises(UserError, match="from=CHECKPOINT"):
        _load(f"drope_16b.py:{argument}")


# The paper's budget: 16.8B tokens, of which 2.10B after the drop (Table 4), at 2^20 tokens a step.
BUDGETS = {
    "rope_16b.py": [("pretrain", Rope(base=1e6), 16_000, 3e-4, 520)],
    "nope_16b.py": [("pretrain", NoPE(), 16_000, 3e-4, 520)],
    "alibi_16b.py": [("pretrain", Alibi(), 16_000, 3e-4, 520)],
    "drope_16b.py": [
        ("pretrain", Rope(base=1e6), 14_000, 3e-4, 520),
        ("recalibrate", NoPE(), 2_000, 1e-3, 70),
    ],
    "drope_16b.py:from=x": [("recalibrate", NoPE(), 2_000, 1e-3, 70)],
}


@pytest.mark.parametrize("reference", BUDGETS)
def test_16b_phases_are_the_papers(reference):
    config = _load(reference)
    found = [
        (p.name, p.positional, p.steps, p.optimizer.learning_rate, p.optimizer.warmup_steps) for p in config.phases
    ]
    assert found == BUDGETS[reference]
    for phase in config.phases:
        assert (phase.batch_size, phase.sequence_length) == (1024, 1024)
        adamw = phase.optimizer
        assert (adamw.b1, adamw.b2, adamw.epsilon, adamw.weight_decay) == (0.9, 0.95, 1e-8, 0.1)
        assert adamw.schedule == "cosine"
    tokens = sum(p.steps * p.batch_size * p.sequence_length for p in config.phases)
    if "from=" in reference:
        assert f"{tokens / 1e9:.2f}" == "2.10"
        assert config.phases[0].init_from == "x"
    else:
        assert f"{tokens / 1e9:.1f}B tokens" == "16.8B tokens"
        text = " ".join((CONFIGS / reference).read_text().split())
        assert "16.8B tokens" in text
    assert (config.model.qk_norm, config.model.attention_bias, config.data.segments) == (False,) * 3


def test_16b_baselines_differ_from_drope_in_the_encoding_alone():
    drope = _load("drope_16b.py")
    for name in ("rope_16b", "nope_16b", "alibi_16b"):
        baseline = _load(f"{name}.py")
        for part in ("seed", "model", "data", "mesh", "checkpoint", "log", "evaluation"):
            assert getattr(baseline, part) == getattr(drope, part), (name, part)
        longer = dataclasses.replace(drope.phases[0], steps=16_000, positional=baseline.phases[0].positional)
        assert baseline.phases == (longer,)


def test_drope_16b_branch_is_the_second_phase_on_other_windows():
    drope, branch = _load("drope_16b.py"), _load("drope_16b.py:from=x")
    assert branch.phases == (dataclasses.replace(drope.phases[1], init_from="x"),)
    assert branch.data.seed != drope.data.seed
    assert branch.name != drope.name


@pytest.mark.parametrize("reference", BUDGETS)
def test_16b_costs_are_what_the_plan_computes(reference):
    config = _load(reference)
    plan = make_plan(config, parse_topology("v5e:16x16"))
    hours = plan.chip_hours(CHIPS["v5e"].peak, 0.4)
    assert config.notes.cost == f"{hours:.0f} v5e chip-hours at 40% MFU"
    if "from=" not in reference:
        text = " ".join((CONFIGS / reference).read_text().split())
        assert f"{sum(p.total_flops for p in plan.phases):.2e}".replace("+", "") + " FLOPs" in text
        assert f"{hours:.0f} v5e chip-hours at 40% MFU ({hours / 256 * 60:.0f} minutes of v5e:16x16)" in text
        assert f"{plan.chip_hours(CHIPS['h100'].peak, 0.4):.0f} H100-hours" in text


def test_16b_recipes_cut_evenly_on_8_gpus_and_on_one():
    config = _load("drope_16b.py")
    make_plan(config, parse_topology("h100:8"))
    one = load_config(f"{CONFIGS}/drope_16b.py", {"mesh.fsdp": "1"})
    make_plan(one, parse_topology("h100:1"))
