"""requirements.lock, and requirements-gpu.lock beside it; launch/venv.sh installs the right ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tiny_runs import REPOSITORY


def pins(name: str) -> dict[tuple[str, str], set[str]]:
    """{(package, version): markers} of a lock."""
    found: dict[tuple[str, str], set[str]] = {}
    for line in (REPOSITORY / name).read_text().splitlines():
        if match := re.match(r"([a-z0-9._-]+)==(\S+)(?: ; (.*?))? \\$", line):
            found.setdefault((match[1], match[2]), set()).add(match[3] or "")
    return found


def test_the_cuda_packages_are_those_of_the_locked_jax() -> None:
    core, gpu = pins("requirements.lock"), pins("requirements-gpu.lock")
    assert len(core) > 150 and len(gpu) > 20
    names = {name for name, _ in core}
    for pin, markers in gpu.items():
        if pin[0] in names:
            assert core[pin] == markers, pin
    for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        assert {v: gpu[name, v] for n, v in gpu if n == name} == {v: core["jax", v] for n, v in core if n == "jax"}


def test_no_cuda_package_is_installed_by_default() -> None:
    assert not [name for name, _ in pins("requirements.lock") if re.match("nvidia|.*cuda|.*cudnn", name)]


# A Python whose `-m venv` copies it, and a pip that writes down what it gets.
PYTHON = """#!/bin/sh
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-m pip install"*) echo "$*" >> calls ;;
  --version) echo Python 3.12.0 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for path in ("launch/venv.sh", "requirements-gpu.lock"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / path, tmp_path / path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def set_up(checkout: Path, **variables: str) -> list[str]:
    """What pip was asked to install."""
    (checkout / "calls").unlink(missing_ok=True)
    environment = {k: v for k, v in os.environ.items() if k != "EXTRA"}
    environment |= {"PYTHON": str(checkout / "python"), "UV": "no"} | variables
    subprocess.run(
        ["sh", "launch/venv.sh"], cwd=checkout, env=environment, check=True, capture_output=True, timeout=300
    )
    return [line.removeprefix("-m pip install --quiet ") for line in (checkout / "calls").read_text().splitlines()]


def test_an_extra_is_installed_after_the_lock_and_kept(checkout: Path) -> None:
    always = ["-r requirements.lock", "--no-deps -e ."]
    assert set_up(checkout) == always
    assert set_up(checkout, EXTRA="gpu") == [*always, "-r requirements-gpu.lock"]
    # An update of the lock also updates the CUDA packages.
    assert set_up(checkout) == [*always, "-r requirements-gpu.lock"]
    assert set_up(checkout, EXTRA="tpu") == [*always, "-e .[tpu]"]  # no lock contains it
    assert (checkout / ".venv" / ".installed").read_text().strip() == str(checkout)
