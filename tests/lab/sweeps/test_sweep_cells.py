"""The cells of a sweep and sweep.json: what is set, what is refused, and what a second command may add."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from tiny_runs import REPOSITORY, write_recipe

from pe_lab import recipes
from pe_lab.config import to_json
from pe_lab.errors import ConfigError, DataError
from pe_lab.lab.sweeps import load_sweep, make_sweep, parse_axes, save_sweep, summarize
from pe_lab.lab.sweeps.state import phases_of
from pe_lab.recipes import load_config

RATE = "phases.0.optimizer.learning_rate"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = write_recipe(tmp_path_factory.mktemp("recipe"))
    by_argument = path.with_name("methods.py")
    by_argument.write_text(
        "from pe_lab.recipes import recipe_arguments\n\nfrom .tiny import get_config as tiny\n\n\n"
        "def get_config(arg=''):\n    config = tiny()\n"
        "    method = recipe_arguments(arg, method=('rope', 'nope'))['method']\n"
        "    config.phases[0]['positional'] = method\n    config.name = method\n    return config\n"
    )
    return str(path)


def test_cells_set_the_grid_and_the_seeds(recipe, tmp_path):
    sweep = make_sweep(recipe, {RATE: ["1e-3", 0.003]}, 2, tmp_path / "sweep", {"model.layers": "1"})
    assert [cell.name for cell in sweep.asked] == [
        "learning_rate=1e-3__seed=0",
        "learning_rate=1e-3__seed=1",
        "learning_rate=0.003__seed=0",
        "learning_rate=0.003__seed=1",
    ]
    config = sweep.cells[3].config
    assert (config.seed, config.data.seed, config.model.layers) == (1, 1, 1)
    assert (config.phases[0].optimizer.learning_rate, config.evaluation.seed) == (0.003, 0)
    command = sweep.cells[3].command(sweep.directory)
    assert command[1:4] == ["-m", "pe_lab.train", f"--config={recipe}"] and "--config.data.seed=1" in command
    assert command[-1] == f"--workdir={tmp_path / 'sweep' / 'learning_rate=0.003__seed=1'}"
    assert not (tmp_path / "sweep").exists()


def test_without_seeds_the_recipes_are_kept(recipe, tmp_path):
    (cell,) = make_sweep(recipe, {"model.layers": [1]}, (), tmp_path / "s", {"seed": "5"}).cells
    assert cell.seed is None and cell.name == "layers=1" and (cell.config.seed, cell.config.data.seed) == (5, 0)
    (cell,) = make_sweep(recipe, {"phases.0.epochs": [1.5]}, (), tmp_path / "s").cells
    assert phases_of(cell) == {"pretrain": 0, "recalibrate": 6}  # the data decide how many steps an epoch has


def test_a_cell_inherits_what_its_recipe_leaves_to_a_checkpoint(recipe, tmp_path, monkeypatch):
    short = Path(recipe).with_name("short.py")
    short.write_text(Path(recipe).read_text().replace(" d_ff=32,", ""))
    monkeypatch.setattr(recipes, "_of_checkpoint", lambda index, path, wanted: {("model", "d_ff"): 48})
    sweep = make_sweep(str(short), {}, 2, tmp_path / "s", {"phases.0.init_from": str(tmp_path / "checkpoint")})
    assert [cell.config.model.d_ff for cell in sweep.cells] == [48, 48]


def test_an_argument_of_the_recipe_is_an_axis(recipe, tmp_path):
    methods = recipe.replace("tiny.py", "methods.py")
    sweep = make_sweep(methods, {":method": ["rope", "nope"]}, (), tmp_path / "s")
    assert [cell.config.phases[0].positional for cell in sweep.cells] == ["rope", "nope"]
    assert [cell.reference for cell in sweep.cells] == [f"{methods}:method=rope", f"{methods}:method=nope"]


@pytest.mark.parametrize(
    ("grid", "seeds", "overrides", "message"),
    [
        ({}, (), {}, "Nothing varies"),
        ({"model.layerz": [1, 2]}, (), {}, "has no key 'layerz'. Did you mean 'layers'?"),
        ({"model.layers": [1, 2]}, (), {"model.layers": "3"}, "sets a key that the grid or --seeds varies"),
        ({"model.layers": [1]}, 2, {"seed": "3"}, "sets a key that the grid or --seeds varies"),
        ({"model.layers": [2, "2.0"]}, (), {}, "'layers=2' and 'layers=2.0' are the same run"),
        ({"log.every_steps": [1, 2]}, (), {}, "are the same run"),
        ({"model.layers": [1, 0, -1]}, (), {}, "2 of 3 cells would not train, and none was started. layers=0: "),
        ({"model.heads": [3, 5, 2]}, (0, 1), {}, "heads=3__seed=0 and 1 more: "),
    ],
)
def test_what_is_refused(recipe, tmp_path, grid, seeds, overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_sweep(recipe, grid, seeds, tmp_path / "s", overrides)


def test_a_directory_that_is_no_sweep_is_refused(recipe, tmp_path):
    for name, file, message in (("run", "run.json", "is a run"), ("other", "notes.txt", "holds notes.txt and no")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
        with pytest.raises(ConfigError, match=message):
            make_sweep(recipe, {}, 2, tmp_path / name)
    with pytest.raises(ConfigError, match="is a file"):
        make_sweep(recipe, {}, 2, tmp_path / "run" / "run.json")
    with pytest.raises(DataError, match="is no sweep"):
        load_sweep(tmp_path / "run")


def test_a_sweep_is_read_as_it_was_written(recipe, tmp_path):
    sweep = save_sweep(
        make_sweep(recipe, {RATE: [0.1]}, 2, tmp_path / "s", evaluation=["--suite=needles"]), "a command"
    )
    read = load_sweep(tmp_path / "s")
    assert read.cells == sweep.cells and read.evaluation == ("--suite=needles",)
    written = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert written["commands"] == ["a command"] and written["seeds"] == [0, 1] and written["grid"] == {RATE: ["0.1"]}
    assert written["cells"][1]["config"] == to_json(load_config(recipe, {RATE: "0.1", "seed": "1", "data.seed": "1"}))
    (tmp_path / "s" / "sweep.json").write_text('{"cells": [{"name": "x"}]}')
    with pytest.raises(DataError, match="is damaged"):
        make_sweep(recipe, {RATE: [0.1]}, 2, tmp_path / "s")


def test_another_grid_adds_cells_and_changes_none(recipe, tmp_path):
    where = tmp_path / "s"
    first = save_sweep(make_sweep(recipe, {RATE: ["1e-3"]}, 1, where))
    # 0.001 is the run that is there; with the layers of the recipe, too.
    wider = save_sweep(make_sweep(recipe, {RATE: ["0.001", "0.1"], "model.layers": [2, 3]}, 1, where))
    assert [cell.name for cell in wider.cells] == [
        "learning_rate=1e-3__seed=0",
        "learning_rate=0.001__layers=3__seed=0",
        "learning_rate=0.1__layers=2__seed=0",
        "learning_rate=0.1__layers=3__seed=0",
    ]
    again = make_sweep(recipe, {RATE: ["1e-3"]}, 1, where)
    assert len(again.cells) == 4 and [cell.name for cell in again.asked] == ["learning_rate=1e-3__seed=0"]
    assert again.asked[0].config == first.cells[0].config
    with pytest.raises(ConfigError, match="is another sweep .model.d_ff: absent there, 64 here"):
        make_sweep(recipe, {RATE: ["1e-3"]}, 1, where, {"model.d_ff": "64"})
    with pytest.raises(ConfigError, match="is another sweep .recipe: tiny.py there, methods.py here"):
        make_sweep(recipe.replace("tiny", "methods"), {RATE: ["1e-3"]}, 1, where)
    changed = Path(recipe).with_name("changed") / "tiny.py"
    changed.parent.mkdir()
    changed.write_text(Path(recipe).read_text().replace("d_ff=32", "d_ff=64"))
    with pytest.raises(ConfigError, match="model.d_ff: 32 there, 64 here.*may add cells and changes none"):
        make_sweep(str(changed), {RATE: ["1e-3"]}, 1, where)
    # A key that no result depends on may change.
    assert make_sweep(recipe, {RATE: ["1e-3"]}, 1, where, {"log.every_steps": "2"}).asked[0].config.log.every_steps == 2


def test_equal_values_are_one_setting_and_a_new_axis_has_the_values_of_earlier_cells(recipe, tmp_path):
    save_sweep(make_sweep(recipe, {RATE: ["1e-3"]}, 2, tmp_path / "s"))
    wider = make_sweep(recipe, {RATE: ["0.001"], "model.layers": ["2.0", "3"]}, [1, 2], tmp_path / "s")
    found = [(*one.values.values(), one.missing) for one in summarize(wider, []).numbers.rows.values()]
    assert found == [("0.001", "2", 3), ("0.001", "3", 2)]
    assert summarize(wider, [], baseline="learning_rate=1e-3,layers=3").baseline == "learning_rate=0.001, layers=3"


def test_a_sweep_that_began_meanwhile_is_not_mixed_up_with_another(recipe, tmp_path):
    made = [make_sweep(recipe, {RATE: [0.1]}, 1, tmp_path / "s", {"model.d_ff": size}) for size in ("32", "64")]
    save_sweep(made[0])
    with pytest.raises(ConfigError, match="is another sweep .model.d_ff: 32 there, 64 here"):
        save_sweep(made[1])
    assert load_sweep(tmp_path / "s").cells == made[0].cells


def test_commands_that_save_at_once_lose_no_cells(recipe, tmp_path):
    one, other = (make_sweep(recipe, {RATE: [rate]}, 1, tmp_path / "s") for rate in (0.1, 0.2))
    save_sweep(one)
    assert len(save_sweep(other).cells) == 2 == len(load_sweep(tmp_path / "s").cells)
    assert dataclasses.replace(other).names == {"learning_rate=0.2__seed=0"}


def test_the_grids_of_lists_in_the_documentation_make_cells(tmp_path):
    """Every `--grid ...` of docs/sweeps.md whose values have commas inside brackets or quotes."""
    text = (REPOSITORY / "docs" / "sweeps.md").read_text()
    paragraph = text[text.index("Commas inside quotes") :].partition("\n\n")[0].replace("\n", " ")
    grids = [parse_axes(shlex.split(line)[1:]) for line in re.findall(r"`(--grid [^`]+)`", paragraph)]
    assert len(grids) == 4 and all(len(values) == 2 for grid in grids for values in grid.values())
    recipe = str(write_recipe(tmp_path / "recipe"))
    for grid in grids:
        if not next(iter(grid)).startswith(":"):  # an argument that this recipe does not have
            made = make_sweep(recipe, grid, directory=tmp_path / "s", overrides={"model.layers": "2"})
            assert len(made.cells) == 2
    with pytest.raises(ConfigError, match="are the same run"):
        make_sweep(recipe, {"checkpoint.milestones": ["[1,2]", "[3]"]}, directory=tmp_path / "s")
