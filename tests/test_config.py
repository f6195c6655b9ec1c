"""Recipes to frozen dataclasses: overrides, types, names nearly right, and the hash that names an experiment."""

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny_runs import tiny, write_recipe

from pe_lab.config import (
    Config,
    MeshConfig,
    OptimizerConfig,
    SourceConfig,
    from_dict,
    to_json,
)
from pe_lab.errors import ConfigError, UserError
from pe_lab.identity import config_hash, identity
from pe_lab.positional import NoPE, Rope
from pe_lab.recipes import load_config, split_overrides
from pe_lab.terminal import command


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("modle.layers", "model"),
        ("model.layer", "layers"),
        ("data.tokeniser", "tokenizer"),
        ("data.sources.0.weigth", "weight"),
        ("mesh.tensr", "tensor"),
        ("phases.0.step", "steps"),
        ("phases.1.optimizer.learning_rat", "learning_rate"),
        ("checkpoint.every_step", "every_steps"),
        ("log.validate_every", "validate_every_steps"),
        ("evaluation.factor", "factors"),
        ("notes.papers", "paper"),
        ("phases.0.optimizer.lr", "learning_rate"),
        ("phases.0.seq_len", "sequence_length"),
        ("model.num_hidden_layers", "layers"),
    ],
)
def test_a_misspelt_key_names_the_nearest_one(tmp_path, key, nearest):
    with pytest.raises(UserError, match=f"Did you mean '{nearest}'") as refused:
        load_config(str(write_recipe(tmp_path)), {key: "1"})
    with pytest.raises(UserError) as early:  # the command line alone is enough
        split_overrides([f"--config.{key}=1"])
    assert str(early.value) == str(refused.value)


@pytest.mark.parametrize("module", ["pe_lab", "pe_lab.train", "pe_lab.plan", "pe_lab.sweep"])
def test_a_misspelt_key_is_told_before_jax_is_imported(module, tmp_path):
    """A `jax` that cannot be imported comes first on the path. 1 s each."""
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')")
    argv = [sys.executable, "-m", module, *(["train"] if module == "pe_lab" else []), "--config.model.layrs=3"]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: config.model has no key 'layrs'. Did you mean 'layers'?\n")


@pytest.mark.parametrize("key", ["phases.0.positional.base", "data.sources.0.options.pairs", "compiler_options.xla_x"])
def test_a_key_inside_a_description_or_a_free_set_of_keys_is_not_judged_early(key):
    assert split_overrides([f"--config.{key}=1"]) == ([], {key: "1"})


def test_a_key_like_no_other_lists_what_is_allowed(tmp_path):
    allowed = "context, context_attention, data, fsdp, slices, tensor"
    with pytest.raises(UserError, match=rf"config.mesh has no key 'zzz'. Allowed: {allowed}"):
        load_config(str(write_recipe(tmp_path)), {"mesh.zzz": "1"})


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        ("model.layers", "two", r"config.model.layers is 'two'; it must be of type int"),
        ("model.layers", "2.5", "type int"),
        ("model.layers", "True", "type int"),
        ("model.qk_norm", "1", "type str"),
        ("model.dtype", "32", "type str"),
        ("model", "3", "it must be a set of keys: vocab_size"),
        ("phases", "3", "it must be a list"),
        ("data.sources", "[dict(source='stdlib')]", "it must be a list. Write it as a Python literal"),
        ("phases.0.optimizer.learning_rate", "fast", r"config.phases\[0\].optimizer.learning_rate is 'fast'"),
        ("data.sources.0.options", "[1]", "it must be a set of keys and values"),
        ("evaluation.factors", "[1, 'x']", r"config.evaluation.factors\[1\] is 'x'"),
        ("phases.2.steps", "3", "'2' is not one of the 2 items, numbered from 0"),
        ("phases.x.steps", "3", "'x' is not one of the 2 items"),
        ("phases.2", "3", "'2' is not one of the 2 items"),
        ("seed.deep.er", "3", "'seed' is a single value and has nothing inside"),
    ],
)
def test_a_value_of_another_kind_is_refused_where_it_stands(tmp_path, key, text, says):
    recipe = str(write_recipe(tmp_path))
    if key.startswith("seed"):
        recipe_text = (tmp_path / "tiny.py").read_text().replace("return config", "config.seed = 0\n    return config")
        (tmp_path / "tiny.py").write_text(recipe_text)
    with pytest.raises(UserError, match=says):
        load_config(recipe, {key: text})


def test_overrides_are_read_as_python_or_as_text(tmp_path):
    config = tiny(
        tmp_path,
        phases__0__steps="1e3",
        phases__1__optimizer__learning_rate="1e-3",
        phases__1__optimizer__b2="1",
        phases__0__positional="['rope', 'nope']",
        model__scan="false",
        model__tie_embeddings="False",
        evaluation__factors="(1, 16)",
        mesh__data="-1",
        data__sources__0__source="text:books/*.txt",
        data__sources__0__options__keys="8",
        name="other",
    )
    assert config.phases[0].steps == 1000 and type(config.phases[0].steps) is int
    assert config.phases[1].optimizer.learning_rate == 1e-3
    assert type(config.phases[1].optimizer.b2) is float
    assert config.phases[0].positional == ["rope", "nope"]
    assert config.model.scan is False and config.model.tie_embeddings is False
    assert config.evaluation.factors == (1, 16)
    assert config.mesh == MeshConfig(data=-1)
    assert config.data.sources[0].source == "text:books/*.txt"
    assert config.data.sources[0].options["keys"] == 8 and config.data.sources[0].options["values"] == 4
    assert config.name == "other"


def test_command_lines_give_up_their_overrides():
    rest, overrides = split_overrides(
        ["--config=a.py:x", "--config.notes.paper=1=2", "--config.seed", "-3", "--workdir", "w"]
    )
    assert rest == ["--config=a.py:x", "--workdir", "w"]
    assert overrides == {"notes.paper": "1=2", "seed": "-3"}
    for argv in (["--config.seed"], ["--config.seed", "--workdir"]):
        with pytest.raises(UserError, match="give a value, as in --config.seed=VALUE"):
            split_overrides(argv)


def test_recipes_of_the_installation_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = load_config("configs/drope_laptop.py:quick")
    assert quick == load_config("pe_lab/configs/drope_laptop.py:quick") and quick.name == "drope_laptop_quick"
    for elsewhere in ("drope_laptop.py", "other/configs/drope_laptop.py"):
        with pytest.raises(UserError, match="there is no file"):
            load_config(elsewhere)
    mine = tmp_path / "configs/drope_laptop.py"
    mine.parent.mkdir()
    mine.write_text("def get_config(arg):\n    return {'name': 'mine'}\n")
    assert load_config("configs/drope_laptop.py").name == "mine"


def test_recipes_that_are_none(tmp_path):
    known = "NAME of claims, drope_16b, drope_laptop"
    with pytest.raises(UserError, match=f"there is no file 'configs/nowhere.py'.*{known}"):
        load_config("configs/nowhere.py")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match="is not a Python file"):
        load_config(str(tmp_path / "notes.txt"))
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="defines no get_config"):
        load_config(str(tmp_path / "empty.py"))
    (tmp_path / "number.py").write_text("def get_config(arg):\n    return 3\n")
    with pytest.raises(UserError, match="returns 3; it must return a ConfigDict"):
        load_config(str(tmp_path / "number.py"), {"seed": "1"})


RECIPE_THAT_EDITS = """
from pe_lab.positional import NoPE
from pe_lab.recipes import phase
from .tiny import get_config as tiny


def get_config(arg=""):
    config = tiny()
    if not arg:
        config.phases = [phase(**keys) for keys in config.phases]
    config.phases[1].positional = NoPE()
    config.phases[1].optimizer.learning_rate = 1
    return config
"""


def test_a_recipe_edits_the_phases_of_another(tmp_path):
    before = load_config(str(write_recipe(tmp_path)))
    (tmp_path / "edited.py").write_text(RECIPE_THAT_EDITS)
    edited = load_config(str(tmp_path / "edited.py")).phases
    optimizer = dataclasses.replace(before.phases[1].optimizer, learning_rate=1.0)
    assert edited == (before.phases[0], dataclasses.replace(before.phases[1], positional=NoPE(), optimizer=optimizer))
    with pytest.raises(ConfigError, match=r"sets an attribute of a dict .* Make phases with pe_lab.recipes.phase"):
        load_config(f"{tmp_path / 'edited.py'}:dicts")


def test_the_argument_after_the_colon_reaches_the_recipe(tmp_path):
    (tmp_path / "a.py").write_text(
        textwrap.dedent("""
        def get_config(arg=""):
            return dict(name=arg or "none")
        """)
    )
    assert load_config(f"{tmp_path / 'a.py'}:quick:er").name == "quick:er"
    assert load_config(str(tmp_path / "a.py")).name == "none"


def test_plain_json_comes_back_as_the_same_config(tmp_path):
    config = tiny(tmp_path)
    assert from_dict(Config, to_json(config)) == config
    assert to_json(Rope(base=5.0))["kind"] == "rope"
    assert dataclasses.asdict(from_dict(SourceConfig, {"source": "stdlib"}))["weight"] == 1.0


def test_the_hash_follows_what_a_result_depends_on(tmp_path):
    config = tiny(tmp_path)
    assert config_hash(config) == config_hash(tiny(tmp_path / "again"))
    assert len(config_hash(config)) == 12 and int(config_hash(config), 16) >= 0
    for key in (
        "seed",
        "model__init_std",
        "data__seed",
        "data__sources__0__options__keys",
        "phases__1__steps",
        "phases__0__optimizer__b1",
        "phases__0__positional",
    ):
        value = "alibi" if key.endswith("positional") else 0.5 if key.endswith("b1") else 3
        assert config_hash(tiny(tmp_path, **{key: value})) != config_hash(config), key
    for key in (
        "name",
        "log__every_steps",
        "checkpoint__keep",
        "mesh__data",
        "data__cache_dir",
        "data__workers",
        "evaluation__seed",
        "notes__paper",
    ):
        value = "x" if key in ("name", "data__cache_dir", "notes__paper") else 3
        assert config_hash(tiny(tmp_path, **{key: value})) == config_hash(config), key
    changed = identity(tiny(tmp_path, phases__1__optimizer__b1=0.5))
    assert {k for k in changed if changed[k] != identity(config)[k]} == {"phases.1.optimizer.b1"}


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OptimizerConfig().b1 = 0.5


def test_a_command_says_bad_input_on_one_line_and_exits_with_2(capsys):
    @command
    def example(argv):
        if argv:
            raise UserError("no such thing.")
        return 0

    assert example(["x"]) == 2
    assert capsys.readouterr().err == "error: no such thing.\n"
    assert example([]) == 0
    with pytest.raises(ZeroDivisionError):  # a fault of ours keeps its traceback
        command(lambda argv: 1 // 0)([])
