"""Recipes that take any checkpoint, on tiny ones of each kind of positions: fine-tuned, and dropped and recalibrated.

Slow: 20 s a family.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import REPOSITORY, train_on_one_device
from tokenizers import Tokenizer
from tokenizers.models import BPE

from pe_lab.checkpoints.checkpoint import open_source
from pe_lab.positional import Drop, NoPE
from pe_lab.train import main as train

pytestmark = pytest.mark.slow

HF = Path(__file__).parent / "data" / "hf"
FAMILIES = (
    "gpt2",  # learned positions, 64 of them
    "bloom",  # ALiBi
    "olmo2",  # a flat QK-norm, norms after the branches
    "olmo3",  # windows, and YaRN without them
    "gemma3",  # two bases
    "gemma4",  # p-RoPE without windows, heads of two widths
    "phi3",  # LongRoPE, fused projections
    "granite_swa",  # sinks
    "cohere2",  # no rotation in full layers
    "glm4",  # partial rotation, adjacent pairs
)
LETTERS = " abcdefghijklmnopqrstuvwxyz.,\n"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that gives a family's checkpoint a tokenizer, and the arguments of training on a text with it."""
    train_on_one_device(monkeypatch)
    (tmp_path / "text.txt").write_text("a quick brown fox, and twelve lazy dogs.\n" * 400)

    def make(name: str) -> tuple[str, str]:
        directory = shutil.copytree(HF / name, tmp_path / name)
        tokenizer = Tokenizer(BPE({"</s>": 0} | {letter: n + 1 for n, letter in enumerate(LETTERS)}, []))
        tokenizer.add_special_tokens(["</s>"])
        tokenizer.save(str(directory / "tokenizer.json"))
        return f"hf:{directory}", f"from=hf:{directory},data=text:{tmp_path}/text.txt,steps=3,batch=8,rate=1e-3"

    return make


def trained(recipe: str, workdir: Path) -> list[float]:
    """The training losses of a run of one phase."""
    options = [f"--config.data.cache_dir={workdir.parent / 'cache'}", f"--workdir={workdir}"]
    assert train([f"--config={REPOSITORY}/configs/{recipe}", *options]) == 0
    (log,) = workdir.glob("*/metrics.jsonl")
    return [record["loss"] for line in log.read_text().splitlines() if "loss" in (record := json.loads(line))]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_finetuned_and_recalibrated_without_positions(name, start, tmp_path, capsys):
    source, arguments = start(name)
    before = open_source(source)
    losses = trained(f"finetune.py:{arguments},length=24", tmp_path / "tuned")
    tuned = open_source(str(tmp_path / "tuned"))
    assert tuned.layers == before.layers and tuned.model.qk_norm == before.model.qk_norm
    assert len(losses) == 3 and losses[-1] < losses[0]
    if name == "gpt2":
        assert "learned_positions.table" in capsys.readouterr().out

    shorter = ",length=256" if name == "bloom" else ""  # its own are 2048
    losses = trained(f"drope_smollm.py:model=own,{arguments}{shorter}", tmp_path / "dropped")
    dropped = open_source(str(tmp_path / "dropped"))
    assert dropped.layers == Drop().apply(before.layers) and {one.encoding for one in dropped.layers} == {NoPE()}
    assert [one.window for one in dropped.layers] == [one.window for one in before.layers]
    length = 256 if shorter else before.training_length
    assert (dropped.training_length, dropped.model.qk_norm) == (length, before.model.qk_norm)
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_more_tokens_than_learned_positions_are_refused(start, tmp_path, capsys):
    """3 s; and dropped, the model has no such limit."""
    _, arguments = start("gpt2")
    recipe = f"{REPOSITORY}/configs/finetune.py:{arguments},length=100"
    assert train([f"--config={recipe}", f"--workdir={tmp_path / 'run'}"]) == 2
    assert "learned_positions has 64 positions, and the sequences have 100 tokens" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    losses = trained(f"drope_smollm.py:model=own,{arguments},length=100", tmp_path / "dropped")
    assert len(losses) == 3 and losses[-1] < losses[0]
