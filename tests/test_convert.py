"""`python -m pe_lab.convert`: in, edited, out; the logit gate; what training and surgery make of foreign weights."""

import dataclasses
import json
import stat
import sys

import jax
import numpy as np
import pytest
from checkpoints.foreign import DATA, NAMES, Memory, copy_of, golden, logits, read_tensors
from tiny_runs import arrays, compilations_kept, tiny, train  # noqa: F401

from pe_lab import surgery
from pe_lab.checkpoints import logit_gate, open_checkpoint
from pe_lab.checkpoints.hf_write import plan_export, write_huggingface
from pe_lab.config import ModelConfig
from pe_lab.convert import main
from pe_lab.positional import Layer, NoPE, Rope, drop

LLAMA = f"hf:{DATA / 'llama'}"


def listing(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("name", ["llama_sharded", "llama_tied_bf16", "qwen3", "gpt_neox", "smollm3_window"])
def test_in_and_out_again_changes_no_byte(name, tmp_path, capsys):
    assert main([f"--from=hf:{DATA / name}", f"--to={tmp_path / 'ours'}", "--gate=off"]) == 0
    out = capsys.readouterr().out
    assert "parameters" in out and "It came without a tokenizer." in out and "--gate=off" in out
    tokens, expected = golden(name)
    converted = open_checkpoint(tmp_path / "ours")
    assert converted.converted and converted.tokenizer == ""
    assert np.abs(logits(converted, tokens) - expected).max() <= 2e-4
    assert [entry["what"] for entry in converted.metadata["lineage"]] == [f"converted from hf:{DATA / name}"]
    assert main([f"--from={tmp_path / 'ours'}", f"--to=hf:{tmp_path / 'theirs'}", "--gate=off"]) == 0
    assert read_tensors(tmp_path / "theirs") == read_tensors(DATA / name)
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    before = json.loads((DATA / name / "config.json").read_text())
    for key in ("model_type", "architectures", "hidden_size", "tie_word_embeddings", "dtype", "layer_types"):
        assert config.get(key) == before.get(key), key
    assert listing(tmp_path) == ["ours", "theirs"]  # and nothing beside them


def test_dropped_by_surgery_and_taken_out(tmp_path, capsys):
    assert surgery.main([f"--from={LLAMA}", f"--to={tmp_path / 'dropped'}", "--drop", "--layers=1"]) == 0
    child = open_checkpoint(tmp_path / "dropped")
    assert child.layers == (Layer(Rope(500.0)), Layer(NoPE()))
    whats = [entry["what"] for entry in child.metadata["lineage"]]
    assert whats == [f"read from {LLAMA}", "rope(base=500) -> nope on layer 1"]
    assert main([f"--from={tmp_path / 'dropped'}", f"--to=hf:{tmp_path / 'out'}", "--gate=off"]) == 0
    assert "as SmolLM3ForCausalLM, float32" in capsys.readouterr().out
    tokens, expected = golden("llama")
    found = logits(open_checkpoint(tmp_path / "out"), tokens)
    assert (found == logits(child, tokens)).all() and np.abs(found - expected).max() > 0.01
    assert read_tensors(tmp_path / "out") == read_tensors(DATA / "llama")


def test_another_type_and_another_family(tmp_path):
    assert main([f"--from={LLAMA}", f"--to=hf:{tmp_path / 'out'}", "--gate=off", "--dtype=bfloat16"]) == 0
    assert {kind for kind, _, _ in read_tensors(tmp_path / "out").values()} == {"BF16"}
    options = ["--family=smollm3", "--gate=off"]
    assert main([f"--from=hf:{tmp_path / 'out'}", f"--to=hf:{tmp_path / 'again'}", *options]) == 0
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == "smollm3"
    tokens, expected = golden("llama")  # whose weights bfloat16 holds
    assert np.abs(logits(open_checkpoint(tmp_path / "again"), tokens) - expected).max() <= 2e-4


WRONG = {
    "a directory that is not empty": (["--to={full}"], r"--to '.*full' is there and not empty"),
    "one to take out to": (["--to=hf:{full}"], r"--to '.*full' is there and not empty"),
    "a file in the way": (["--to={full}/file"], r"--to '.*file' is there and not empty"),
    "below a file": (["--to={full}/file/new"], r"--to '.*new' cannot be written"),
    "an object store": (["--to=gs://bucket/x"], "is an address, and a path is needed"),
    "a family for what comes in": (["--to={new}", "--family=llama"], "--family goes with --to=hf:DIR"),
    "a type for what comes in": (["--to={new}", "--dtype=float16"], "--dtype goes with --to=hf:DIR"),
    "a length of nothing": (["--to=hf:{new}", "--length=0"], "--length is 0; give a positive number"),
    "a family that cannot": (["--to=hf:{new}", "--family=qwen3"], "qwen3 cannot hold this model: qk_norm is 'none'"),
    "no such interpreter": (["--to={new}", "--gate-python=/nowhere/python"], "'/nowhere/python' cannot be run"),
    "an interpreter without packages": (
        ["--to={new}", "--gate-python={false}"],
        "cannot import transformers and torch",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_one_message_and_leaves_nothing(case, tmp_path, capsys):
    arguments, message = WRONG[case]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("kept")
    places = {"full": tmp_path / "full", "new": tmp_path / "new", "false": "/bin/false"}
    assert main([f"--from={LLAMA}", "--gate=auto", *(a.format(**places) for a in arguments)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and len(err.splitlines()) == 1
    import re

    assert re.search(message, err)
    assert listing(tmp_path) == ["full"] and listing(tmp_path / "full") == ["file"]
    assert (tmp_path / "full/file").read_text() == "kept"


def test_what_a_killed_process_left_is_replaced(tmp_path):
    (tmp_path / ".ours.partial/checkpoints").mkdir(parents=True)
    (tmp_path / "ours").mkdir()  # empty
    assert main([f"--from={LLAMA}", f"--to={tmp_path / 'ours'}", "--gate=off"]) == 0
    assert listing(tmp_path) == ["ours"]
    assert main([f"--from={tmp_path / 'ours'}", f"--to={tmp_path / 'copy'}", "--gate=off"]) == 2  # ours already


# The gate, with an interpreter that has given logits for an answer.
SCRIPT = """#!{python}
import sys
import numpy as np

if sys.argv[1] == "-c":
    sys.exit(0 if sys.argv[2] == "import transformers, torch" else 1)
options = dict(arg[2:].split("=", 1) for arg in sys.argv[2:])
assert open(options["model"] + "/config.json").read()
assert (np.load(options["tokens"]) == np.load("{here}/tokens.npy")).all()
{then}
np.save(options["out"], np.load("{here}/logits.npy"))
"""


@pytest.fixture
def fake(tmp_path):
    """Makes an interpreter that answers with the right logits plus an error."""
    here = tmp_path / "fake"
    here.mkdir()
    tokens = logit_gate.fixed_batch(64)
    right = logits(open_checkpoint(LLAMA), tokens)

    def make(error=0.0, then=""):
        np.save(here / "tokens.npy", tokens)
        found = right.copy()
        found[1, 5, 7] += error
        np.save(here / "logits.npy", found)
        (here / "python").write_text(SCRIPT.format(python=sys.executable, here=here, then=then))
        (here / "python").chmod(stat.S_IRWXU)
        return f"--gate-python={here / 'python'}"

    return make


def test_the_gate_passes_what_computes_the_same(fake, tmp_path, capsys):
    for to, error in ((tmp_path / "ours", 0.0), (f"hf:{tmp_path / 'out'}", 1.5e-4)):
        assert main([f"--from={LLAMA}", f"--to={to}", fake(error), "--gate=require"]) == 0
        out = capsys.readouterr().out
        assert "Logits compared with transformers': largest difference of a logit" in out
        assert "most probable next tokens equal at 100.0% of 128 positions" in out
    assert listing(tmp_path) == ["fake", "ours", "out"]


def test_the_gate_keeps_nothing_that_differs(fake, tmp_path, capsys):
    for to, error, said in ((tmp_path / "ours", 1e-3, "0.001"), (f"hf:{tmp_path / 'out'}", np.nan, "nan")):
        assert main([f"--from={LLAMA}", f"--to={to}", fake(error)]) == 2
        err = capsys.readouterr().err
        assert f"The logits differ from transformers': largest difference of a logit {said} " in err
        assert "The result was not kept" in err
    assert listing(tmp_path) == ["fake"]


def test_the_gate_says_in_a_line_why_transformers_could_not(fake, tmp_path, capsys):
    python = fake(then="print('loading', file=sys.stderr); raise ValueError('no such kernel')")
    assert main([f"--from={LLAMA}", f"--to={tmp_path / 'ours'}", python]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and err.endswith("ValueError: no such kernel\n")
    assert f"transformers cannot read '{DATA / 'llama'}'" in err
    assert listing(tmp_path) == ["fake"]


def test_the_gate_is_left_out_where_it_may_be(fake, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logit_gate.importlib.util, "find_spec", lambda name: None)
    assert main([f"--from={LLAMA}", f"--to={tmp_path / 'ours'}", "--gate=require"]) == 2
    assert "--gate=require: transformers and torch are not installed here" in capsys.readouterr().err
    assert main([f"--from={LLAMA}", f"--to={tmp_path / 'ours'}"]) == 0
    assert "Logits not compared: transformers and torch are not installed here" in capsys.readouterr().out
    assert main([f"--from={LLAMA}", f"--to={tmp_path / 'off'}", "--gate=off", fake(1.0)]) == 0
    assert "Logits not compared: --gate=off." in capsys.readouterr().out


def test_the_batch_of_the_gate_never_changes():
    batch = logit_gate.fixed_batch(49152)
    assert batch.shape == (2, 64) and batch.dtype == np.int32 and batch.min() >= 0 and batch.max() < 49152
    assert (batch == logit_gate.fixed_batch(49152)).all()
    assert batch[0, :4].tolist() == [41809, 31307, 25123, 13260]


# Foreign weights as a beginning.


@pytest.mark.usefixtures("compilations_kept")
def test_a_phase_starts_from_a_hugging_face_directory(tmp_path):
    shape = dict(layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, qk_norm="none", dtype="float32")
    memory = Memory(ModelConfig(vocab_size=384, **shape), (Layer(Rope(500.0)),) * 2, 16)
    (tmp_path / "theirs").mkdir()
    write_huggingface(memory, plan_export(memory), tmp_path / "theirs")
    config = tiny(tmp_path / "recipe", model__qk_norm="none", model__vocab_size=384)
    phase = dataclasses.replace(config.phases[1], positional=drop(), init_from=f"hf:{tmp_path / 'theirs'}", steps=3)
    # So slow that what it starts from is what it ends with.
    phase = dataclasses.replace(phase, optimizer=dataclasses.replace(phase.optimizer, learning_rate=1e-30))
    last = train(dataclasses.replace(config, phases=(phase,)), tmp_path / "run")
    found = open_checkpoint(last)
    assert found.layers == (Layer(NoPE()),) * 2
    for name, array in arrays(last, "params").items():
        path = ".".join(part.strip("'") for part in name.strip("[]").split("]["))
        np.testing.assert_allclose(array, memory.arrays[path], atol=1e-20, err_msg=path)
    whats = [entry["what"] for entry in found.metadata["lineage"]]
    assert any("rope(base=500) -> nope on layers 0-1" in what for what in whats), whats
    assert jax.tree.all(jax.tree.map(lambda x: bool(np.isfinite(x).all()), found.params))


def test_every_committed_model_has_its_files():
    """A model that lost one would be passed over by the tests above."""
    assert len(NAMES) == 23
    for name in NAMES:
        assert (DATA / name / "logits.npz").is_file() and list((DATA / name).glob("*.safetensors")), name


def test_a_source_is_never_touched(tmp_path, capsys):
    theirs = copy_of("llama", tmp_path / "theirs")
    before = {path.name: path.read_bytes() for path in theirs.iterdir()}
    assert main([f"--from=hf:{theirs}", f"--to={tmp_path / 'ours'}", "--gate=off"]) == 0
    assert main([f"--from={theirs}", f"--to=hf:{theirs}", "--gate=off"]) == 2
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == before


def test_the_gate_does_not_ask_transformers_for_what_it_does_not_have(fake, tmp_path, capsys):
    """DroPE's layout needs DroPE's own code, which nobody runs here; its checkpoints come in all the same."""
    refuses = fake(then="raise ValueError('trust_remote_code')")
    assert main([f"--from=hf:{DATA / 'llama_drope'}", f"--to={tmp_path / 'ours'}", refuses]) == 0
    assert "Logits not compared: transformers has no DroPELlamaForCausalLM" in capsys.readouterr().out
    assert main([f"--from=hf:{DATA / 'llama_drope'}", f"--to={tmp_path / 'must'}", refuses, "--gate=require"]) == 2
    assert listing(tmp_path) == ["fake", "ours"]
