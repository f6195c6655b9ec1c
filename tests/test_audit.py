"""`pe_lab.audit`, the command: what it prints, its status, its files, and bad input."""

import json
import sys

import numpy as np
import pytest
import transformers_environments
from checkpoints.external import DATA, copy_of, golden

from pe_lab.audit import main
from pe_lab.checkpoints import parity

TOKENS, FOUND = golden("smollm3")
SMOLLM3, LOGITS = f"hf:{DATA / 'smollm3'}", f"--runtime=logits:{DATA / 'smollm3' / 'logits.npz'}"


def test_sound_logits(capsys):
    assert main([SMOLLM3, LOGITS]) == 0
    out = capsys.readouterr().out
    assert "Sound: 'logits.npz' computes what the config says." in out and "1 forward passes." in out
    assert "Not seen: positions in bfloat16" in out  # 40 tokens


def test_a_fault_is_named_with_its_layers(tmp_path, capsys):
    edited = copy_of("smollm3", tmp_path / "edited", no_rope_layers=[1, 1, 1, 1])
    assert main([f"hf:{edited}", LOGITS, f"--json={tmp_path / 'answer.json'}"]) == 1
    out = capsys.readouterr().out
    assert "Fault: rotated layers not rotated. Layer 3 is not rotated" in out
    assert "Look at `no_rope_layers`" in out and "beyond rounding from token 1 on" in out
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["verdict"] == "fault" and answer["faults"] == ["rotated layers not rotated"]
    assert answer["hypotheses"][0]["layers"] == [3] and answer["hypotheses"][0]["explains"]
    assert len(answer["error_by_token"]) == 40 and answer["error_by_token"][0] < 1e-5 < answer["error_by_token"][1]
    assert answer["batches"] == [{"tokens": [2, 40], "last_position": 39}]


def test_logits_of_the_last_tokens(tmp_path, capsys):
    np.savez(tmp_path / "last.npz", tokens=TOKENS, logits=FOUND[:, -5:], at=np.arange(35, 40))
    assert main([SMOLLM3, f"--runtime=logits:{tmp_path / 'last.npz'}"]) == 0
    assert "Not seen: how much the runtime rounds" in capsys.readouterr().out


@pytest.mark.slow  # 3 s
def test_what_no_known_fault_explains(tmp_path, capsys):
    """Other weights of attention: 8 s, of which most are hypotheses in pairs."""
    edited = copy_of("smollm3", tmp_path / "edited", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    assert main([f"hf:{edited}", LOGITS]) == 1
    out = capsys.readouterr().out
    assert "differs from what the config says, and no known fault explains it: none of" in out
    assert "Nearest, with" in out and "beyond rounding from token 1 on" in out


def test_tokens_for_a_runtime_elsewhere(tmp_path, capsys):
    file = tmp_path / "tokens"
    assert main([SMOLLM3, f"--write-tokens={file}", "--length=12", "--tokens=36"]) == 0
    with np.load(file) as stored:
        assert stored["tokens"].shape == (3, 12) and stored["positions"].tolist() == list(range(12))
    assert "tokens [3, 12] at positions 0 to 11" in capsys.readouterr().out


BAD_FILES = {
    "another vocabulary": (
        {"tokens": TOKENS, "logits": FOUND[..., :60]},
        "logits are of a vocabulary of 60; the model's",
    ),
    "tokens out of range": ({"tokens": TOKENS + 30, "logits": FOUND}, "the model's vocabulary has 64"),
    "negative tokens": ({"tokens": TOKENS - 5, "logits": FOUND}, "tokens range from -"),
    "other shapes": ({"tokens": TOKENS[:, :30], "logits": FOUND}, "logits [2, 40, 64] and tokens [2, 30] disagree"),
    "NaN": ({"tokens": TOKENS, "logits": np.where(FOUND > 3, np.nan, FOUND)}, "logits are NaN or infinite"),
    "infinite": ({"tokens": TOKENS, "logits": np.where(FOUND > 3, np.inf, FOUND)}, "logits are NaN or infinite"),
    "whole logits": ({"tokens": TOKENS, "logits": FOUND.astype(int)}, "give floating-point numbers [B, T, V]"),
    "tokens with fractions": ({"tokens": TOKENS + 0.5, "logits": FOUND}, "give whole numbers [B, T]"),
    "no logits": ({"tokens": TOKENS, "scores": FOUND}, "has no array 'logits'; it has scores, tokens."),
    "one token": ({"tokens": TOKENS[:, :1], "logits": FOUND[:, :1]}, "one token a sequence shows no position"),
    "positions": ({"tokens": TOKENS, "logits": FOUND, "positions": np.arange(39)}, "give whole numbers [T]"),
    "far positions": ({"tokens": TOKENS, "logits": FOUND, "positions": np.arange(40) - 1}, "positions range from -1"),
    "no tokens": ({"tokens": TOKENS[:0], "logits": FOUND[:0]}, "of shape [0, 40]; give whole numbers [B, T]"),
    "logits of fewer tokens": ({"tokens": TOKENS, "logits": FOUND[:, -3:]}, "the array at [P] of the tokens"),
    "at a token that is not there": (
        {"tokens": TOKENS, "logits": FOUND[:, -2:], "at": np.array([39, 40])},
        "at must have ascending numbers from 0 to 39",
    ),
    "at tokens in no order": (
        {"tokens": TOKENS, "logits": FOUND[:, -2:], "at": np.array([39, 38])},
        "at must have ascending numbers from 0 to 39",
    ),
    "at with fractions": ({"tokens": TOKENS, "logits": FOUND[:, -1:], "at": np.array([39.0])}, "at is float64"),
    "objects": ({"tokens": np.array([{}], object), "logits": FOUND}, "no npz file that can be read"),
}


@pytest.mark.parametrize(("arrays", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_of_logits_that_does_not_fit(arrays, message, tmp_path, capsys):
    np.savez(tmp_path / "bad.npz", **arrays)
    assert main([SMOLLM3, f"--runtime=logits:{tmp_path / 'bad.npz'}"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


BAD_LINES = {
    "nothing": ([], "Give a checkpoint to audit, or --self-test alone."),
    "both": ([SMOLLM3, "--self-test"], "Give a checkpoint to audit, or --self-test alone."),
    "another runtime": ([SMOLLM3, "--runtime=vllm"], "give transformers, gguf:FILE or logits:FILE.npz"),
    "a runtime without a file": ([SMOLLM3, "--runtime=gguf:"], "give transformers, gguf:FILE or logits:FILE.npz"),
    "transformers with a file": ([SMOLLM3, "--runtime=transformers:x"], "give transformers, gguf:FILE or logits"),
    "no file": ([SMOLLM3, "--runtime=logits:nowhere.npz"], "there is no file 'nowhere.npz'"),
    "no checkpoint": (["hf:nowhere", LOGITS], "There is no directory 'nowhere'"),
    "no length": ([SMOLLM3, "--length=1"], "'1' is not a whole number from 2"),
    "no tolerance": ([SMOLLM3, "--tolerance=0"], "'0' is not a number"),
    "no interpreter": ([SMOLLM3, "--python=/nowhere/python"], "--python '/nowhere/python' cannot be run"),
    "no llama.cpp": ([SMOLLM3, f"--runtime=gguf:{__file__}", f"--python={sys.executable}"], "cannot import llama_cpp"),
    "no place for tokens": ([SMOLLM3, "--write-tokens=/proc/nowhere/x.npz"], "--write-tokens"),
    "no place": ([SMOLLM3, LOGITS, "--json=/proc/nowhere/x.json"], "--json"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_bad_lines(line, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(line) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_files_that_are_damaged(tmp_path, capsys):
    whole = (DATA / "smollm3" / "logits.npz").read_bytes()
    for content in (whole[: len(whole) // 2], whole[:30], b"", b"no zip", whole[:-30]):
        (tmp_path / "damaged.npz").write_bytes(content)
        assert main([SMOLLM3, f"--runtime=logits:{tmp_path / 'damaged.npz'}"]) == 2
        assert "is no npz file that can be read" in capsys.readouterr().err
    np.save(tmp_path / "one.npy", FOUND)
    assert main([SMOLLM3, f"--runtime=logits:{tmp_path / 'one.npy'}"]) == 2


@pytest.mark.parametrize(
    ("runtime", "needs"), [("transformers", "transformers and torch"), ("gguf:x", "llama-cpp-python")]
)
def test_packages_that_are_not_there(runtime, needs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").touch()
    monkeypatch.setattr(parity.importlib.util, "find_spec", lambda name: None)
    assert main([SMOLLM3, f"--runtime={runtime}"]) == 2
    error = capsys.readouterr().err
    assert f"needs {needs}, which this Python does not have" in error and "--python=PYTHON" in error


def test_a_checkpoint_of_pe_lab_is_exported_first(tmp_path, capsys):
    assert main([str(tmp_path), "--python=python"]) == 2
    assert "Export it (python -m pe_lab.convert" in capsys.readouterr().err


def python(version: str) -> str:
    return f"--python={transformers_environments.environment(version)}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_yarn", "smollm3_window", "gemma3", "gpt2", "bloom"])
def test_transformers_computes_what_the_config_says(name, capsys):
    """About 12 s each."""
    assert main([f"hf:{DATA / name}", python("5"), "--length=48"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_transformers_4_reads_a_config_of_5_with_base_10000(capsys):
    """The file has `rope_parameters` alone, which transformers 4 ignores; its logits come from it. 10 s."""
    assert main([f"hf:{DATA / 'llama_yarn'}", python("4.56"), "--length=48"]) == 1
    assert "Fault: base and scaling ignored." in capsys.readouterr().out
