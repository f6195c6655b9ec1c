"""Both transformers read tests/data/hf as it was made, and their environments are what the other slow tests trust."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers_environments
from checkpoint_tables import ONLY_IN_5
from transformers_environments import generate, read, read_several

HF = Path(__file__).parent / "data" / "hf"
NAMES = sorted(path.name for path in HF.iterdir() if path.is_dir())
UNREADABLE = {
    # Its architecture is DroPE's own code, and none that comes with a checkpoint is run.
    ("4.56", "llama_drope"): "trust_remote_code",
    ("5", "llama_drope"): "trust_remote_code",
    # p-RoPE came with transformers 5.
    ("4.56", "llama_proportional"): "KeyError: 'proportional'",
} | {("4.56", name): "does not recognize this architecture" for name in ONLY_IN_5}


def directory_for(version: str, name: str, scratch: Path) -> Path:
    """A model directory with the configuration that this release of transformers writes."""
    if version != "4.56":
        return HF / name
    directory = scratch / name
    shutil.copytree(HF / name, directory)
    if (HF / name / "config.v4.json").exists():
        shutil.copy(HF / name / "config.v4.json", directory / "config.json")
    elif name not in ONLY_IN_5:
        config = json.loads((directory / "config.json").read_text())
        parameters = config.pop("rope_parameters")
        config |= {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def stored(name: str) -> tuple[np.ndarray, np.ndarray]:
    arrays = np.load(HF / name / "logits.npz")
    return arrays["tokens"], arrays["logits"]


def differences(version: str, directories: dict[str, Path]) -> dict[str, float]:
    computed = read_several(version, [(directory, stored(name)[0]) for name, directory in directories.items()])
    return {
        name: float(np.abs(logits - stored(name)[1]).max()) for name, logits in zip(directories, computed, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.56", "5"])
def test_each_transformers_computes_the_logits_that_are_stored(version, tmp_path):
    readable = [name for name in NAMES if (version, name) not in UNREADABLE]
    found = differences(version, {name: directory_for(version, name, tmp_path) for name in readable})
    assert not {name: value for name, value in found.items() if not value < 1e-4}


@pytest.mark.slow
@pytest.mark.parametrize("version, name", UNREADABLE)
def test_a_transformers_refuses_what_it_cannot_read(version, name, tmp_path):
    with pytest.raises(RuntimeError, match=UNREADABLE[version, name]):
        read(version, directory_for(version, name, tmp_path), stored(name)[0])


@pytest.mark.slow
def test_transformers_5_reads_a_configuration_of_4(tmp_path):
    names = [name for name in NAMES if (HF / name / "config.v4.json").exists() and ("5", name) not in UNREADABLE]
    found = differences("5", {name: directory_for("4.56", name, tmp_path) for name in names})
    assert not {name: value for name, value in found.items() if not value < 1e-4}


@pytest.mark.slow
def test_transformers_4_takes_a_configuration_of_5_for_another_model():
    # Why an export says everything twice: 4.56 does not know rope_parameters, does not say so, and rotates by its
    # defaults. Even p-RoPE's, whose name it would refuse in rope_scaling.
    rotating = [name for name in NAMES if "rope_parameters" in (HF / name / "config.json").read_text()]
    found = differences("4.56", {name: HF / name for name in rotating if name not in ("llama_drope", *ONLY_IN_5)})
    assert not {name: value for name, value in found.items() if not value > 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.56", "5"])
def test_the_greedy_continuation_is_the_argmax_of_the_logits(version, tmp_path):
    directory = directory_for(version, "llama_longrope", tmp_path)
    tokens, _ = stored("llama_longrope")
    continuation = generate(version, directory, tokens, 4)
    logits = read(version, directory, np.concatenate([tokens, continuation], axis=1), last=5)
    np.testing.assert_array_equal(continuation, logits[:, :4].argmax(-1))


@pytest.mark.slow
def test_a_tensor_that_is_missing_is_an_error(tmp_path):
    # The configuration of a model with biases, the tensors of one without.
    shutil.copytree(HF / "llama", tmp_path / "model")
    shutil.copy(HF / "llama_bias" / "config.json", tmp_path / "model" / "config.json")
    with pytest.raises(RuntimeError, match=r"missing_keys(?s:.*)self_attn\.k_proj\.bias"):
        read("5", tmp_path / "model", np.zeros((1, 2), int))


@pytest.mark.slow
def test_an_environment_is_made_once_and_again_when_a_pin_changes(tmp_path, monkeypatch):
    # Small packages in place of torch and transformers: what is tested is when pip runs.
    monkeypatch.setenv("PE_LAB_TEST_CACHE", str(tmp_path))
    monkeypatch.setattr(transformers_environments, "SHARED", ("markupsafe",))
    monkeypatch.setattr(transformers_environments, "PROOF", "import markupsafe")
    monkeypatch.setattr(transformers_environments, "PINS", {"5": ("jinja2",)})
    make = transformers_environments.environment.__wrapped__
    python = make("5")
    found = subprocess.run([python, "-I", "-c", "import jinja2, markupsafe"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    stamp = python.parents[1] / "stamp.json"
    made = stamp.stat().st_mtime_ns
    assert make("5") == python and stamp.stat().st_mtime_ns == made
    monkeypatch.setattr(transformers_environments, "PINS", {"5": ("packaging",)})
    make("5")
    assert stamp.stat().st_mtime_ns > made
    found = subprocess.run([python, "-I", "-c", "import packaging, jinja2"], capture_output=True, text=True)
    assert "jinja2" in found.stderr


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_says_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PE_LAB_TEST_CACHE", str(tmp_path))
    monkeypatch.setattr(transformers_environments, "SHARED", ("pe-lab-has-no-such-package==1",))
    with pytest.raises(RuntimeError, match="(?s)cannot be made.*pe-lab-has-no-such-package.*PIP_FIND_LINKS"):
        transformers_environments.environment.__wrapped__("5")
    python = tmp_path / f"python{sys.version_info.major}.{sys.version_info.minor}" / "torch"
    assert not (python / "stamp.json").exists()
