"""`python -m pe_lab.convert`: import, edit, export; the parity check; training and surgery from external weights."""

import argparse
import dataclasses
import json
import stat
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from checkpoints.external import DATA, NAMES, Memory, copy_of, golden, logits, read_tensors
from tiny_runs import arrays, compilations_kept, tiny, train  # noqa: F401
from transformers_environments import tokenize

import pe_lab
from pe_lab import convert, surgery
from pe_lab.checkpoints import parity
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.checkpoints.hf_export import plan_export, write_huggingface
from pe_lab.config import ModelConfig
from pe_lab.convert import main
from pe_lab.data.tokenizers import ByteTokenizer, check_vocabulary, export_tokenizer
from pe_lab.data.tokenizers.companions import Companions
from pe_lab.data.tokenizers.hugging_face import HuggingFaceTokenizer
from pe_lab.errors import CheckpointError
from pe_lab.model import Model
from pe_lab.positional import Layer, NoPE, Rope, build_schedule, drop

LLAMA = f"hf:{DATA / 'llama'}"


def listing(directory):
    return sorted(path.name for path in directory.iterdir())


MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama_sharded", "qwen3", "gpt_neox")]


@pytest.mark.parametrize("name", ["llama_tied_bf16", "smollm3_window", *MORE])
def test_import_and_export_change_no_byte(name, tmp_path, capsys, caplog):
    assert main([f"--from=hf:{DATA / name}", f"--to={tmp_path / 'ours'}", "--parity=off"]) == 0
    out = capsys.readouterr().out
    assert "parameters" in out and "It has no tokenizer." in out and "--parity=off" in out
    tokens, expected = golden(name)
    converted = open_checkpoint(tmp_path / "ours")
    assert converted.converted and converted.tokenizer == ""
    assert np.abs(logits(converted, tokens) - expected).max() <= 2e-4
    assert [entry["what"] for entry in converted.metadata["lineage"]] == [f"converted from hf:{DATA / name}"]
    assert main([f"--from={tmp_path / 'ours'}", f"--to=hf:{tmp_path / 'theirs'}", "--parity=off"]) == 0
    assert read_tensors(tmp_path / "theirs") == read_tensors(DATA / name)
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    before = json.loads((DATA / name / "config.json").read_text())
    for key in ("model_type", "architectures", "hidden_size", "tie_word_embeddings", "dtype", "layer_types"):
        assert config.get(key) == before.get(key), key
    assert listing(tmp_path) == ["ours", "theirs"]  # and nothing beside them
    assert caplog.text == ""  # a warning of Orbax is none for the user


def test_dropped_by_surgery_and_exported(tmp_path, capsys):
    assert surgery.main([f"--from={LLAMA}", f"--to={tmp_path / 'dropped'}", "--drop", "--layers=1"]) == 0
    child = open_checkpoint(tmp_path / "dropped")
    assert child.layers == (Layer(Rope(500.0)), Layer(NoPE()))
    assert child.metadata["tokens"] == 0  # none of them trained here
    whats = [entry["what"] for entry in child.metadata["lineage"]]
    assert whats == [f"read from {LLAMA}", "rope(base=500) -> nope on layer 1"]
    assert main([f"--from={tmp_path / 'dropped'}", f"--to=hf:{tmp_path / 'out'}", "--parity=off"]) == 0
    assert "as SmolLM3ForCausalLM, float32" in capsys.readouterr().out
    tokens, expected = golden("llama")
    found = logits(open_checkpoint(tmp_path / "out"), tokens)
    assert (found == logits(child, tokens)).all() and np.abs(found - expected).max() > 0.01
    assert read_tensors(tmp_path / "out") == read_tensors(DATA / "llama")


def test_another_type_and_another_family(tmp_path):
    assert main([f"--from={LLAMA}", f"--to=hf:{tmp_path / 'out'}", "--parity=off", "--dtype=bfloat16"]) == 0
    assert {kind for kind, _, _ in read_tensors(tmp_path / "out").values()} == {"BF16"}
    options = ["--family=smollm3", "--parity=off"]
    assert main([f"--from=hf:{tmp_path / 'out'}", f"--to=hf:{tmp_path / 'again'}", *options]) == 0
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == "smollm3"
    tokens, expected = golden("llama")  # whose weights bfloat16 holds
    assert np.abs(logits(open_checkpoint(tmp_path / "again"), tokens) - expected).max() <= 2e-4


def test_generation_reads_the_same_ids_and_length_everywhere(tmp_path, capsys):
    """A tokenizer without model_input_names gives token_type_ids, which `generate` of transformers 4.56 refuses."""
    theirs = copy_of("llama", tmp_path / "theirs")
    export_tokenizer(ByteTokenizer(), theirs)
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "generation_config.json").write_text('{"eos_token_id": [256, 10], "do_sample": true, "top_p": 0.9}')
    with pytest.raises(CheckpointError):  # 64 embeddings, and 257 ids
        check_vocabulary(ByteTokenizer(), config["vocab_size"], "theirs")
    memory = Memory(dataclasses.replace(open_checkpoint(LLAMA).model, vocab_size=300), (Layer(NoPE()),) * 2, 256)
    write_huggingface(memory, plan_export(memory), theirs)
    arguments = [f"--from=hf:{theirs}", f"--to=hf:{tmp_path / 'out'}", "--parity=off", "--max-length=4096"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "Declared for 4,096 tokens" in out and "vLLM (0.33.0): right" in out
    config, generation, tokenizer = (
        json.loads((tmp_path / "out" / name).read_text())
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    )
    for key, value in {"eos_token_id": [256, 10], "bos_token_id": None, "pad_token_id": None}.items():
        assert config[key] == generation[key] == value
    assert generation["do_sample"] is True and generation["top_p"] == 0.9  # of the checkpoint
    assert config["max_position_embeddings"] == tokenizer["model_max_length"] == 4096
    assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]


@pytest.mark.parametrize(("pad", "id"), [("b", 3), ("<unk>", 0), ("é", None), ("ab", None)])
def test_a_token_that_pads_is_one_of_the_vocabulary(pad, id):
    """Characters that a tokenizer does not know have one id as well, that of unknown ones."""
    vocabulary = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3}
    characters = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    characters.add_special_tokens(["<unk>", "</s>"])
    settings = {"tokenizer_config.json": json.dumps({"eos_token": "</s>", "pad_token": pad}).encode()}
    tokenizer = HuggingFaceTokenizer(characters.to_str(), Companions("t", settings))
    assert convert._token_ids(tokenizer, {"vocab_size": 4})["pad_token_id"] == id


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.56", "5"])
def test_transformers_generates_from_the_files_of_an_export(version, tmp_path):
    """`generate(**tokenizer(text))` with nothing set aside. About 15 s each."""
    memory = Memory(dataclasses.replace(open_checkpoint(LLAMA).model, vocab_size=300), (Layer(NoPE()),) * 2, 256)
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    theirs.mkdir()
    write_huggingface(memory, plan_export(memory), theirs)
    export_tokenizer(ByteTokenizer(), theirs)
    assert main([f"--from=hf:{theirs}", f"--to=hf:{out}", "--parity=off"]) == 0
    found = tokenize(version, out, "Hello", new_tokens=4)
    expected = pe_lab.load(f"hf:{theirs}").generate(np.asarray(found["plain"]), max_new_tokens=4)
    assert found["answer"][: len(expected)] == expected.tolist()


WRONG = {
    "a directory that is not empty": (["--to={full}"], r"--to '.*full' exists and is not empty"),
    "the same for an export": (["--to=hf:{full}"], r"--to '.*full' exists and is not empty"),
    "a file in the way": (["--to={full}/file"], r"--to '.*file' exists and is not empty"),
    "below a file": (["--to={full}/file/new"], r"--to '.*new' cannot be written"),
    "a whole bucket": (["--to=gs://bucket"], "is a whole bucket; give a directory in it"),
    "a family for an import": (["--to={new}", "--family=llama"], "--family goes with --to=hf:DIR"),
    "a longest sequence for an import": (["--to={new}", "--max-length=64"], "--max-length goes with --to=hf:DIR"),
    "runtimes for an import": (["--to={new}", "--for=vllm"], "--for goes with --to=hf:DIR"),
    "a repository for an import": (["--to={new}", "--push=org/name"], "--push goes with --to=hf:DIR"),
    "an unknown runtime": (["--to=hf:{new}", "--for=vllm,sglan"], "'sglan' is not known. Did you mean 'sglang'"),
    "no runtime": (["--to=hf:{new}", "--for=,"], "it names no runtime of transformers, llama.cpp, vllm, sglang"),
    "no repository": (["--to=hf:{new}", "--push=name"], "--push=name: give a repository as ORG/NAME"),
    "a dtype for an import": (["--to={new}", "--dtype=float16"], "--dtype goes with --to=hf:DIR"),
    "a length of nothing": (["--to=hf:{new}", "--length=0"], "argument --length: '0' is not a whole number"),
    "a family that cannot": (["--to=hf:{new}", "--family=qwen3"], "qwen3 cannot hold this model: qk_norm is 'none'"),
    "no such interpreter": (["--to={new}", "--parity-python=/nowhere/python"], "'/nowhere/python' cannot be run"),
    "an interpreter without packages": (
        ["--to={new}", "--parity-python={false}"],
        "cannot import transformers and torch",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_one_message_and_leaves_nothing(case, tmp_path, capsys):
    arguments, message = WRONG[case]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("kept")
    places = {"full": tmp_path / "full", "new": tmp_path / "new", "false": "/bin/false"}
    assert main([f"--from={LLAMA}", "--parity=auto", *(a.format(**places) for a in arguments)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and len(err.splitlines()) == 1
    import re

    assert re.search(message, err)
    assert listing(tmp_path) == ["full"] and listing(tmp_path / "full") == ["file"]
    assert (tmp_path / "full/file").read_text() == "kept"


def test_what_a_killed_process_left_is_replaced(tmp_path):
    (tmp_path / ".ours.partial-1234/checkpoints").mkdir(parents=True)
    (tmp_path / "ours").mkdir()  # empty
    assert main([f"--from={LLAMA}", f"--to={tmp_path / 'ours'}", "--parity=off"]) == 0
    assert listing(tmp_path) == ["ours"]
    assert main([f"--from={tmp_path / 'ours'}", f"--to={tmp_path / 'copy'}", "--parity=off"]) == 2  # ours already


# The parity check, with an interpreter that returns given logits.
SCRIPT = """#!{python}
import sys
import numpy as np

if sys.argv[1] == "-c":
    sys.exit(0 if sys.argv[2] == "import transformers, torch" else 1)
options = dict(arg[2:].split("=", 1) for arg in sys.argv[2:])
assert np.load(options["positions"]).shape == (2, 64)
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
    tokens = parity.fixed_batch(64)
    checkpoint = open_checkpoint(LLAMA)
    model, shape = Model(checkpoint.model), checkpoint.model
    schedule = build_schedule(checkpoint.layers, shape.heads, shape.kv_heads, shape.head_dim)
    near, far = parity.compared_positions(256)
    right = np.stack(
        [
            model.apply(checkpoint.params, jnp.asarray(tokens), jnp.asarray(at)[None], None, schedule)
            for at in (near, far)
        ]
    )

    def make(error=0.0, then="", at=0):
        np.save(here / "tokens.npy", tokens)
        found = right.copy()
        found[at, 1, 5, 7] += error
        np.save(here / "logits.npy", found)
        (here / "python").write_text(SCRIPT.format(python=sys.executable, here=here, then=then))
        (here / "python").chmod(stat.S_IRWXU)
        return f"--parity-python={here / 'python'}"

    return make


@pytest.mark.parametrize(("script", "library"), [(parity.SCRIPT, "torch"), (parity.LLAMA_CPP, "llama_cpp")])
def test_libraries_in_a_parity_script_import_no_packages_of_ours(script, library, tmp_path, monkeypatch):
    """transformers imports `gguf`; a script's own directory is searched first. Half a second each."""
    (tmp_path / library).mkdir()
    (tmp_path / library / "__init__.py").write_text("import gguf\nraise SystemExit(gguf.__file__)\n")
    (tmp_path / "gguf.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    zeros = np.zeros((1, 1), np.int32)
    with pytest.raises(CheckpointError) as raised:
        parity.script_logits(script, sys.executable, ["--model=x"], [(zeros, zeros)], "ended")
    assert str(raised.value) == f"ended: {tmp_path / 'gguf.py'}"


@pytest.mark.slow
def test_the_parity_check_passes_equal_logits(fake, tmp_path, capsys):
    for to, error in ((tmp_path / "ours", 0.0), (f"hf:{tmp_path / 'out'}", 1.5e-4)):
        assert main([f"--from={LLAMA}", f"--to={to}", fake(error), "--parity=require"]) == 0
        out = capsys.readouterr().out
        assert "Logits compared with transformers': largest difference of a logit" in out
        assert "most probable next tokens equal at 100.0% of 128 positions up to 63;" in out
        assert "most probable next tokens equal at 100.0% of 128 positions up to 510;" in out
    assert listing(tmp_path) == ["fake", "ours", "out"]


@pytest.mark.slow
def test_the_parity_check_removes_a_result_that_differs(fake, tmp_path, capsys):
    for to, error, shown in ((tmp_path / "ours", 1e-3, "0.001"), (f"hf:{tmp_path / 'out'}", np.nan, "nan")):
        assert main([f"--from={LLAMA}", f"--to={to}", fake(error)]) == 2
        err = capsys.readouterr().err
        assert f"The logits differ from transformers': largest difference of a logit {shown} " in err
        assert "The result was removed" in err
    assert listing(tmp_path) == ["fake"]


@pytest.mark.slow
def test_the_parity_check_covers_positions_beyond_the_training_length(fake, tmp_path, capsys):
    """A wrong scaling leaves 64 consecutive tokens nearly as they are."""
    assert main([f"--from={LLAMA}", f"--to=hf:{tmp_path / 'out'}", fake(1e-2, at=1)]) == 2
    assert "positions up to 510" in capsys.readouterr().err
    near, far = parity.compared_positions(8192)
    assert near.tolist() == list(range(64))
    assert (np.diff(far) > 0).all() and far[0] == 0 and 2 * 8192 - 2 <= far[-1] < 2 * 8192 + 2
    assert parity.compared_positions(4)[1][-1] == 126  # longer than the other in any case


def test_the_parity_check_ends_where_rounding_would_hide_a_wrong_scaling(capsys):
    far = parity.compared_positions(2**20)[1]
    assert far[-1] == parity.LAST_POSITION == 131_072 and (np.diff(far) > 0).all()
    assert not parity.Parity(difference=0.02, largest=1.0, agreement=1.0, last=int(far[-1])).passed
    verdicts = [parity.Parity(0.0, 1.0, 1.0, last) for last in (63, 131_072)]
    for judged, shown in ((verdicts, True), (verdicts[:1], False)):
        options = argparse.Namespace(parity="require")
        convert._check_parity(options, "python", Model(ModelConfig(vocab_size=8)), lambda python, judged=judged: judged)
        assert ("Not compared: positions beyond 131,072" in capsys.readouterr().out) == shown


@pytest.mark.slow
def test_a_failure_of_transformers_is_one_line(fake, tmp_path, capsys):
    python = fake(then="print('loading', file=sys.stderr); raise ValueError('no such kernel')")
    assert main([f"--from={LLAMA}", f"--to={tmp_path / 'ours'}", python]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and err.endswith("ValueError: no such kernel\n")
    assert f"transformers cannot read '{DATA / 'llama'}'" in err
    assert listing(tmp_path) == ["fake"]


@pytest.mark.slow
def test_the_parity_check_may_be_left_out(fake, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(parity.importlib.util, "find_spec", lambda name: None)
    assert main([f"--from={LLAMA}", f"--to={tmp_path / 'ours'}", "--parity=require"]) == 2
    assert "--parity=require: transformers and torch are not installed" in capsys.readouterr().err
    assert main([f"--from={LLAMA}", f"--to={tmp_path / 'ours'}"]) == 0
    assert "Logits not compared: transformers and torch are not installed here" in capsys.readouterr().out
    assert main([f"--from={LLAMA}", f"--to={tmp_path / 'off'}", "--parity=off", fake(1.0)]) == 0
    assert "Logits not compared: --parity=off." in capsys.readouterr().out
    asked = []
    monkeypatch.setattr(parity, "fits_twice", lambda size: asked.append(size))
    assert main([f"--from={LLAMA}", f"--to={tmp_path / 'large'}", "--parity=auto", fake(1.0)]) == 0
    assert "Logits not compared: memory cannot hold the model twice" in capsys.readouterr().out
    assert asked == [4 * Model(open_checkpoint(tmp_path / "large").model).num_parameters]  # bytes in float32


def test_the_batch_of_the_parity_check_never_changes():
    batch = parity.fixed_batch(49152)
    assert batch.shape == (2, 64) and batch.dtype == np.int32 and batch.min() >= 0 and batch.max() < 49152
    assert (batch == parity.fixed_batch(49152)).all()
    assert batch[0, :4].tolist() == [41809, 31307, 25123, 13260]


# External weights as a beginning.


@pytest.mark.usefixtures("compilations_kept")
@pytest.mark.slow
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
    assert len(NAMES) == 49
    for name in NAMES:
        assert (DATA / name / "logits.npz").is_file() and list((DATA / name).glob("*.safetensors")), name


def test_a_source_is_never_touched(tmp_path, capsys):
    theirs = copy_of("llama", tmp_path / "theirs")
    before = {path.name: path.read_bytes() for path in theirs.iterdir()}
    assert main([f"--from=hf:{theirs}", f"--to={tmp_path / 'ours'}", "--parity=off"]) == 0
    assert main([f"--from={theirs}", f"--to=hf:{theirs}", "--parity=off"]) == 2
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == before


@pytest.mark.slow
def test_the_parity_check_skips_architectures_with_remote_code(fake, tmp_path, capsys):
    """DroPE's layout needs DroPE's own code, which is not installed; its checkpoints are imported nevertheless."""
    refuses = fake(then="raise ValueError('trust_remote_code')")
    assert main([f"--from=hf:{DATA / 'llama_drope'}", f"--to={tmp_path / 'ours'}", refuses]) == 0
    assert "Logits not compared: transformers has no DroPELlamaForCausalLM" in capsys.readouterr().out
    assert main([f"--from=hf:{DATA / 'llama_drope'}", f"--to={tmp_path / 'must'}", refuses, "--parity=require"]) == 2
    assert listing(tmp_path) == ["fake", "ours"]
