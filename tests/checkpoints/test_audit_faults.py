"""The audit of real runtimes with real faults: transformers with one line patched, and what llama.cpp converts."""

import os
import subprocess
from pathlib import Path

import pytest
import runtime_environments
import transformers_environments
from checkpoints.external import DATA, copy_of
from data.faulty_transformers import INJECTED

from pe_lab.audit import main
from pe_lab.checkpoints.audit.observed import saved
from pe_lab.checkpoints.audit.search import HypothesisRunner, Search
from pe_lab.checkpoints.checkpoint import open_checkpoint

SCRIPTS = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> Path:
    """The files of logits that transformers 5 computes with each fault: 40 s."""
    out = tmp_path_factory.mktemp("faulty")
    python = transformers_environments.environment("5")
    command = [python, "-I", SCRIPTS / "faulty_transformers.py", f"--models={DATA}", f"--out={out}"]
    subprocess.run(command, env=transformers_environments.variables(), check=True, capture_output=True, text=True)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", INJECTED)
def test_a_fault_of_transformers_is_named(name, faulty):
    """2 to 6 s each."""
    injected = INJECTED[name]
    checkpoint = open_checkpoint(f"hf:{DATA / injected.model}")
    observed = saved(faulty / f"{name}.npz", checkpoint.model.vocab_size)
    audit = Search(HypothesisRunner(checkpoint, observed.batches), observed.logits).run()
    assert not audit.sound and not audit.elsewhere
    assert (injected.answer,) in audit.found.names, audit.found
    assert injected.layers in (None, audit.found.hypothesis.layers)


# What llama.cpp computes of a GGUF file that its own converter made (see "What runtimes make of it" in
# docs/checkpoints.md): the base of Gemma, GPT-NeoX and StableLM is not written, nor are LongRoPE's table without its
# model's architecture, dynamic NTK, YaRN's betas, and most windows; SmolLM3's unrotated layers are each fourth.
DROPPED = {
    "gemma": ["base ignored"],
    "gpt_neox": ["base ignored"],
    "stablelm_parallel": ["base ignored"],
    "llama_longrope": ["scaling ignored"],
    "llama_dynamic": ["scaling ignored"],
    "llama_yarn_betas": ["YaRN's ramp"],
    "llama_proportional": ["proportional and partial"],
    "mistral": ["windows ignored"],
    "qwen2_window": ["windows ignored"],
    "smollm3_every_second": ["unrotated layers rotated"],
    "smollm3_window": ["windows ignored", "unrotated layers rotated"],
}
WRITTEN = [
    "llama",
    "llama_yarn",
    "llama_llama3",
    "qwen3",
    "smollm3",
    "olmo3",
    "gemma4",
    "gemma4_shared",
    "glm4",
    "bloom",
]  # bloom: GELU in 16 bits


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """The models, and the GGUF files that llama.cpp's converter makes of them: 20 s."""
    package = runtime_environments.package
    root = tmp_path_factory.mktemp("converted")
    for name in (*DROPPED, *WRITTEN):
        if name == "smollm3_every_second":
            copy_of("smollm3", root / name, no_rope_layers=[1, 0, 1, 0])
        else:
            copy_of(name, root / name)
    source = package("llama-cpp-python") / "vendor" / "llama.cpp"
    convert = (
        "import sys; sys.path[:0] = sys.argv[1:4]; from read_with_llama_cpp import convert\n"
        "for directory in sys.argv[4:]: convert(directory, directory + '.gguf')"
    )
    folders = [str(folder) for folder in (SCRIPTS, source, source / "gguf-py")]
    models = [str(root / name) for name in (*DROPPED, *WRITTEN)]
    # transformers 5 has other keys for GPT-NeoX than the converter asks for.
    command = [transformers_environments.environment("4.56"), "-c", convert, *folders, *models]
    subprocess.run(command, env=transformers_environments.variables(), check=True, capture_output=True)
    return root


@pytest.fixture
def llama_cpp(tmp_path, monkeypatch) -> str:
    """--python of an interpreter that imports `llama_cpp`: its bindings, on the library of xllamacpp."""
    package = runtime_environments.package
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(
        f"import pathlib, sys\nsys.path.append({str(SCRIPTS)!r})\nfrom read_with_llama_cpp import library\n"
        f"library(pathlib.Path({str(package('llama-cpp-python') / 'llama_cpp')!r}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(package("xllamacpp"))]))
    return f"--python={transformers_environments.environment('4.56')}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DROPPED, *WRITTEN])
def test_what_llama_cpp_makes_of_a_converted_file(name, converted, llama_cpp, capsys):
    """2 to 15 s each."""
    status = main([f"hf:{converted / name}", f"--runtime=gguf:{converted / name}.gguf", llama_cpp, "--length=300"])
    out = capsys.readouterr().out
    if name in DROPPED:
        assert status == 1 and f"Fault: {' and '.join(DROPPED[name])}. " in out, out
    else:
        assert status == 0 and "Sound: llama.cpp computes what the config says." in out, out
