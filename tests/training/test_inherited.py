"""What a recipe takes over from the checkpoint that it starts from, and what happens if it contradicts it."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import compilations_kept, opened, train_on_one_device, trained  # noqa: F401

import pe_lab.train
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.config import Config as RunConfig
from pe_lab.config import from_dict, to_json
from pe_lab.errors import UserError
from pe_lab.positional import Rope, Yarn
from pe_lab.recipes import load_config
from pe_lab.storage.manifest import sealed

HF = Path(__file__).parents[1] / "data" / "hf"
RECIPE = """
def get_config(arg=""):
    needles = dict(pairs=1, queries=1, keys=4, values=4, filler_symbols=8, branches=2)
    return dict(
        name="tuned",
        data=dict(sources=[dict(source="needles", options=needles)]),
        phases=[dict(name="tune", init_from=arg, steps=2, batch_size=8, optimizer=dict(warmup_steps=1))],
    )
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tune.py"
    path.write_text(RECIPE)
    return path


def load(recipe: Path, start: object, workdir: Path | None = None, **overrides: object) -> RunConfig:
    texts = {key.replace("__", "."): str(value) for key, value in overrides.items()}
    return load_config(f"{recipe}:{start}", texts, inherits=True, workdir=workdir)


def test_a_recipe_has_what_its_checkpoint_has(recipe, trained, tmp_path):  # noqa: F811
    config = load(recipe, trained / "pretrain")
    model, phase = config.model, config.phases[0]
    assert (model.layers, model.d_model, model.heads, model.vocab_size, model.qk_norm) == (2, 16, 2, 384, "head")
    assert (phase.positional, phase.sequence_length) == (Rope(), 16)
    assert config.data.tokenizer == f"saved:{trained / 'tokenizer'}"
    assert model.dtype == "bfloat16"  # of the computation: the recipe's
    assert from_dict(RunConfig, json.loads(json.dumps(to_json(config)))) == config
    run = opened(config, tmp_path / "run")
    assert run.models[0].num_parameters > 0 and run.tokenizer.vocab_size == 257
    assert load(recipe, trained / "recalibrate", phases__0__sequence_length=12).phases[0].sequence_length == 12


def test_an_external_checkpoint_gives_its_scaling_and_its_length_before_it(recipe):
    config = load(recipe, f"hf:{HF / 'llama_yarn'}", data__tokenizer="bytes")
    facts = json.loads((HF / "llama_yarn/config.json").read_text())
    assert (config.model.layers, config.model.d_model) == (facts["num_hidden_layers"], facts["hidden_size"])
    assert isinstance(config.phases[0].positional.scaling, Yarn)
    assert config.phases[0].sequence_length == config.phases[0].positional.scaling.original_length


def test_a_run_that_has_begun_does_without_its_checkpoint(recipe, trained, tmp_path):  # noqa: F811
    parent, workdir = shutil.copytree(trained, tmp_path / "parent"), tmp_path / "run"
    config = load(recipe, parent)
    workdir.mkdir()
    (workdir / "run.json").write_text(json.dumps(sealed({"config": to_json(config)})))
    shutil.copytree(parent / "tokenizer", workdir / "tokenizer")
    shutil.rmtree(parent)
    again = load(recipe, parent, workdir)
    assert (again.model, again.phases) == (config.model, config.phases)
    assert again.data.tokenizer == f"saved:{workdir / 'tokenizer'}"
    assert load(recipe, parent, workdir, model__layers=4).model.layers == 4  # a change, which is refused as such


@pytest.mark.slow
def test_a_run_is_trained_on_where_its_checkpoint_is_not(recipe, trained, tmp_path, monkeypatch):  # noqa: F811
    """About 5 s."""
    train_on_one_device(monkeypatch)
    parent, argv = shutil.copytree(trained, tmp_path / "parent"), [f"--workdir={tmp_path / 'run'}"]
    argv += [f"--config={recipe}:{parent}", "--config.phases.0.optimizer.final_fraction=0.1"]
    assert pe_lab.train.main(argv) == 0
    shutil.rmtree(parent)
    assert pe_lab.train.main([*argv, "--until=4"]) == 0
    last = open_checkpoint(tmp_path / "run")
    assert (last.step, last.model.qk_norm, last.tokenizer) == (4, "head", f"saved:{tmp_path / 'run/tokenizer'}")
    whats = [entry["what"] for entry in last.metadata["lineage"]]
    assert whats[-2].startswith("prolonged from 2 to 4 steps (rewarm); continued with data.tokenizer saved:")


def test_without_the_checkpoint_the_message_lists_what_is_missing(recipe, tmp_path):
    needs = r"phases\[0\] takes sequence_length, positional, layers, d_model, .* from its init_from 'runs/none', which "
    with pytest.raises(UserError, match=needs + "cannot be read: .*no such directory.*pe_lab.convert imports one"):
        load(recipe, "runs/none")
    whole = dict.fromkeys(("layers", "d_ff", "heads", "kv_heads"), 2) | {"d_model": 16}
    phase = {"phases__0__positional": "rope", "phases__0__sequence_length": 8, "data__tokenizer": "bytes"}
    config = load(recipe, "runs/none", **{f"model__{key}": value for key, value in whole.items()}, **phase)
    assert config.model.d_model == 16 and config.model.norm == "rms"
    with pytest.raises(UserError, match="There is no checkpoint at 'runs/none'"):
        opened(config, tmp_path / "run")


def test_a_contradiction_is_one_message(recipe, trained, tmp_path):  # noqa: F811
    config = load(recipe, trained, model__layers=4, model__activation="gelu")
    with pytest.raises(UserError, match="layers 2 -> 4, activation silu -> gelu. Leave these fields of"):
        opened(config, tmp_path / "run")


def test_another_tokenizer_is_one_message_and_can_be_meant(recipe, trained, tmp_path):  # noqa: F811
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<|endoftext|>"])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    other = f"hf:{tmp_path / 'tokenizer.json'}"
    with pytest.raises(UserError, match="trained with another tokenizer .bytes-257.*set the phase's other_tokenizer"):
        opened(load(recipe, trained, data__tokenizer=other), tmp_path / "run")
    meant = load(recipe, trained, data__tokenizer=other, phases__0__other_tokenizer=True)
    assert opened(meant, tmp_path / "run").tokenizer.fingerprint.startswith("hf-")
