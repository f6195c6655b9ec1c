"""Every recipe in configs/, under every argument in its docstring. The papers' numbers are in test_configs_papers."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from pathlib import Path

import jax
import pytest

from pe_lab.config import Config, from_dict, to_json
from pe_lab.errors import UserError
from pe_lab.identity import config_hash
from pe_lab.lab.claims.claim import claim_names, load_claim
from pe_lab.model import preset
from pe_lab.parallel import AxisRules, check_batch
from pe_lab.parallel.sharding import AXES
from pe_lab.parallel.topology import CHIPS, parse_topology, placeholder_mesh
from pe_lab.planning.plan import Plan, make_plan
from pe_lab.positional import NoPE, drop
from pe_lab.recipes import load_config, read_recipe, recipe_arguments, split_overrides
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.plan import MARGIN, plan_phases, step_shapes
from pe_lab.training.step import compile_train_step

CONFIGS = Path(__file__).parent.parent / "configs"


def _text(path: str) -> str:
    """The docstring of a recipe, on one line."""
    return " ".join((ast.get_docstring(ast.parse((CONFIGS / path).read_text())) or "").split())


def _references() -> list[str]:
    """`configs/x.py` and each `configs/x.py:ARG` or `:ARG` that the file itself mentions."""
    found = []
    for path in sorted(CONFIGS.glob("*.py")):
        arguments = re.findall(rf"configs/{path.stem}\.py:([\w=./,:*-]*[\w/])|`:([\w./-]+)`", _text(path.name))
        arguments = [one or other for one, other in arguments]
        found += [path.name, *(f"{path.name}:{argument}" for argument in dict.fromkeys(arguments))]
    return found


def _plan_commands() -> list[tuple[str, str]]:
    """The command lines of `pe_lab.plan` that the recipes' texts give: (recipe, arguments)."""
    found = [(path.name, re.findall(r"pe_lab\.plan ((?:--\S+ ?)+)", _text(path.name))) for path in CONFIGS.glob("*.py")]
    return [(name, line) for name, lines in sorted(found) for line in lines]


def _load(reference: str) -> Config:
    return from_dict(Config, _with_shape(read_recipe(f"{CONFIGS}/{reference}")))


def _with_shape(tree: dict) -> dict:
    """The tree of a recipe whose model is a checkpoint's, which is not here, with SmolLM2's shape and layers."""
    phase = tree["phases"][0]
    if phase.get("init_from") and "layers" not in tree["model"]:
        tree["model"] = preset("smollm2_135m") | tree["model"]
        if phase.get("positional") == drop():
            phase["positional"] = NoPE()
    return tree


def _devices(config: Config) -> int:
    """The fewest devices, at least eight, that the recipe's mesh can be laid over."""
    sizes = [getattr(config.mesh, axis) for axis in AXES]
    fixed = math.prod(size for size in sizes if size != -1)
    return fixed * -(-8 // fixed) if -1 in sizes else fixed


@functools.cache
def _plan(reference: str) -> Plan:
    config = _load(reference)
    return make_plan(config, parse_topology(f"h100:{_devices(config)}"))


def test_references_include_documented_arguments():
    found = set(_references())
    assert {"drope_laptop.py", "drope_laptop.py:quick", "drope_laptop.py:full"} <= found
    assert "drope_16b.py:from=runs/table1_rope/pretrain/checkpoints/14000" in found
    assert {"table1.py:method=rnope_swa", "table1.py:method=drope,size=laptop"} <= found
    assert "drope_smollm.py:model=135m,from=runs/smollm2_135m,data=data/my-text" in found
    laptop = {"drope_laptop.py", "claims.py", "ladder.py"}
    assert {path.name for path in CONFIGS.glob("*.py")} - laptop == {name for name, _ in _plan_commands()}


@pytest.mark.parametrize("path", [path.name for path in sorted(CONFIGS.glob("*.py"))])
def test_a_recipe_read_from_its_json_is_the_same_experiment(path):
    for reference in [r for r in _references() if r.partition(":")[0] == path]:
        config = _load(reference)
        read = from_dict(Config, json.loads(json.dumps(to_json(config))))
        wanted = [(plan.config, plan.layers, plan.qk_norm) for plan in plan_phases(config)]
        assert config_hash(read) == config_hash(config)
        assert [(plan.config, plan.layers, plan.qk_norm) for plan in plan_phases(read)] == wanted


@pytest.mark.parametrize("reference", _references())
def test_recipe_has_notes_and_a_docstring(reference):
    config = _load(reference)
    for field, text in to_json(config.notes).items():
        assert text.strip(), f"config.notes.{field} of {reference} is empty"
    assert f"python -m pe_lab.train --config=configs/{reference}" == config.notes.command
    assert _text(reference.partition(":")[0])


@pytest.mark.parametrize("name", claim_names())
def test_the_recipes_of_a_claims_arms(name):
    """3 s for all. configs/extend.py needs a checkpoint."""
    claim = load_claim(name)
    for size in ("laptop", "paper") if claim.recipes else ("laptop",):
        for arm in claim.at(size).all_arms:
            if not arm.recipe.startswith("configs/extend.py"):
                assert load_config(arm.reference(size, Path("runs"), seed=0)).phases


def test_finetuning_on_chats():
    for source in ("jsonl:chats.jsonl", "data/chats"):
        data = _load(f"finetune.py:data={source},chat=prompt/completion").data
        assert (data.sources[0].chat, data.packing, data.segments) == ("prompt/completion", "best_fit", True)
        assert data.prepared == ("" if ":" in source else source)
    assert not _load("finetune.py").data.segments


def test_finetuning_with_a_teacher():
    config = _load("finetune.py:from=runs/half,teacher=runs/smollm2,data=prose")
    (phase,) = config.phases
    assert (phase.init_from, phase.distill.teacher, phase.distill.hidden) == ("runs/half", "runs/smollm2", 1.0)
    assert config.data.sources[0].source == "prose" and _load("finetune.py").phases[0].distill is None


_traced: set[object] = set()  # programs that an earlier reference has had already


LAPTOP = [f"table1.py:method={m},size=laptop" for m in ("nope", "alibi", "rnope_swa", "p_rope", "partial_rope")]


VARIANTS = [reference for reference in (*_references(), *LAPTOP) if ":" in reference]


@pytest.mark.parametrize(
    "reference",
    [path.name for path in sorted(CONFIGS.glob("*.py"))]
    + [pytest.param(reference, marks=pytest.mark.slow) for reference in VARIANTS],
)
def test_recipe_traces_on_its_mesh(reference):
    config, plan = _load(reference), _plan(reference)
    mesh = placeholder_mesh(config.mesh, _devices(config))
    for numbers in plan.phases:
        model, phase = numbers.model, numbers.plan
        check_batch(phase.config.batch_size, phase.config.accumulate, mesh, phase.name)
        shape = (phase.config.batch_size, phase.config.sequence_length, phase.config.accumulate)
        program = (model.config, config.mesh, phase.schedule.structure, phase.schedule.same_rotation, shape)
        if program in _traced:
            continue
        _traced.add(program)
        optimizer = make_optimizer(phase.config.optimizer, phase.config.steps, model.axes)
        inputs = *step_shapes(model, optimizer, phase.config, config.data.segments), phase.schedule
        step = compile_train_step(model, optimizer, mesh, AxisRules(), phase.config.accumulate)
        state, metrics = jax.eval_shape(step, *inputs)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
            lambda x: (x.shape, x.dtype), inputs[0]
        )
        assert metrics["loss"].shape == () and metrics["loss"].dtype == "float32"


@pytest.mark.parametrize("reference", _references())
def test_costs_are_what_the_plan_computes(reference):
    """In the notes, and the same figure in the text."""
    config = _load(reference)
    if config.notes.cost.endswith("python -m pe_lab.plan"):  # that of a checkpoint which the user has
        assert "model=own" in reference or reference.startswith("extend.py")
        return
    if "CPU" in config.notes.cost or "a GPU" in config.notes.cost:
        assert "minutes" in config.notes.cost
        return
    hours = _plan(reference).chip_hours(CHIPS["v5e"].peak, 0.4)
    figure = f"{hours:.0f}" if hours >= 10 else f"{hours:.1f}"
    assert config.notes.cost == f"{figure} v5e chip-hours at 40% MFU"
    text = _text(reference.partition(":")[0])
    assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", text)


@pytest.mark.parametrize("path", [p.name for p in sorted(CONFIGS.glob("*.py")) if p.name != "drope_laptop.py"])
def test_docstrings_have_the_costs_of_the_plan(path):
    """FLOPs, hours of v5e:16x16 and H100-hours of the recipe without arguments, if the docstring has them."""
    text, plan = _text(path), _plan(path)
    flops = sum(phase.total_flops for phase in plan.phases)
    for figure in re.findall(r"([\d.]+e\d+) FLOPs", text):
        assert figure == f"{flops:.2e}".replace("+", "")
    for figure in re.findall(r"(\d+) H100-hours", text):
        assert figure == f"{plan.chip_hours(CHIPS['h100'].peak, 0.4):.0f}"
    hours = plan.chip_hours(CHIPS["v5e"].peak, 0.4) / 256
    for figure, unit in re.findall(r"MFU \(([\d.]+) (minutes|hours) of v5e:16x16\)", text):
        assert abs(float(figure) / (60 if unit == "minutes" else 1) - hours) <= 0.03 * hours


@pytest.mark.parametrize(("path", "line"), _plan_commands())
def test_planned_commands_fit_by_estimate(path, line):
    rest, overrides = split_overrides(line.split())
    options = dict(option.removeprefix("--").split("=", 1) for option in rest)
    assert options["config"].startswith(f"configs/{path}")
    config = from_dict(Config, _with_shape(read_recipe(str(CONFIGS.parent / options["config"]), overrides)))
    plan = make_plan(config, parse_topology(options["topology"]))
    for phase in plan.phases:
        assert phase.memory.total <= MARGIN * plan.topology.chip.memory


# The docstrings' settings for nodes with 8 GPUs, and for one GPU.
ON_EIGHT = [
    ("drope_16b.py", "h100:8", {}),
    ("drope_16b.py", "h100:1", {"mesh.fsdp": "1"}),
    ("table1.py", "h100:8", {}),
    ("table11.py", "h100:8", {}),
    ("drope_smollm.py", "h100:8", {}),
    ("drope_smollm.py:model=1.7b", "h100:8", {}),
    ("drope_smollm.py:model=135m", "h100:1", {}),
    ("drope_llama2.py", "h200:8", {"mesh.fsdp": "8"}),
    ("drope_olmo.py", "h200:8", {"mesh.fsdp": "8"}),
    ("drope_olmo.py:model=olmo3_7b", "h200:8", {"mesh.fsdp": "8"}),
    ("p_rope_gemma.py:model=4b", "h100:8", {"mesh.fsdp": "8"}),
    ("p_rope.py", "h100:8", {"mesh.fsdp": "8"}),
    ("partial_rope.py:length=8192", "h200:8", {}),
    ("partial_rope.py:model=llama_8b", "h200:8", {"mesh.fsdp": "8"}),
    ("speedrun.py", "h100:1", {}),
]


@pytest.mark.parametrize(("reference", "topology", "overrides"), ON_EIGHT)
def test_recipes_fit_a_node_with_the_settings_of_their_docstrings(reference, topology, overrides):
    plan = make_plan(load_config(f"{CONFIGS}/{reference}", overrides), parse_topology(topology))
    for phase in plan.phases:
        assert phase.memory.total <= MARGIN * plan.topology.chip.memory
        # GPUs of 80 GB and more never compute the layers again: they take more micro-batches.
        assert phase.model.config.remat == "dots_attention" and not phase.model.config.scan
    text = _text(reference.partition(":")[0])
    assert all(f"--config.{key}={value}" in text for key, value in overrides.items())


# -- arguments -------------------------------------------------------------------------------------------------

CHOICES = {"method": ("rope", "nope"), "size": ("", "big", "small"), "from": "runs/x"}


@pytest.mark.parametrize(
    ("arg", "found"),
    [
        ("", {"method": "rope", "size": "", "from": "runs/x"}),
        ("size=small", {"method": "rope", "size": "small", "from": "runs/x"}),
        ("from=a=b/c,method=nope", {"method": "nope", "size": "", "from": "a=b/c"}),
        ("from=gguf:a/b.gguf,size=big", {"method": "rope", "size": "big", "from": "gguf:a/b.gguf"}),
        ("from='text:{a,b}/*.md',size=big", {"method": "rope", "size": "big", "from": "text:{a,b}/*.md"}),
        ('from="o\'n",method=nope', {"method": "nope", "size": "", "from": "o'n"}),
        ("from=it's", {"method": "rope", "size": "", "from": "it's"}),
    ],
)
def test_arguments_are_completed_with_defaults(arg, found):
    assert recipe_arguments(arg, **CHOICES) == found


@pytest.mark.parametrize(
    ("arg", "says"),
    [
        ("method=nop", "Did you mean 'nope'?"),
        ("metod=nope", "Did you mean 'method'?"),
        ("method", "Allowed: nope, rope."),
        ("size=", "Allowed: big, small."),
        ("from=", "from=TEXT"),
        ("zzz", "Allowed: from, method, size."),
        ("size=big,quick", "'quick' is no argument"),
    ],
)
def test_arguments_that_are_not_allowed_name_those_that_are(arg, says):
    with pytest.raises(UserError) as refused:
        recipe_arguments(arg, **CHOICES)
    assert says in str(refused.value)
    assert str(refused.value).endswith("It takes method=rope|nope, size=big|small, from=TEXT.")


@pytest.mark.parametrize("path", [path.name for path in sorted(CONFIGS.glob("*.py"))])
def test_every_recipe_refuses_an_unknown_argument(path):
    for arg in ("fro=somewhere", "quik"):
        with pytest.raises(UserError, match=f"{path}.*(It takes|it takes)"):
            _load(f"{path}:{arg}")
