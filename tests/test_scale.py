"""docs/scale.md: every command of the page, as far as it goes without the machines."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pe_lab import evaluate, plan, train
from pe_lab.parallel.topology import parse_topology
from pe_lab.planning.plan import make_plan
from pe_lab.recipes import load_config, split_overrides
from pe_lab.training import plan_phases

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_page(line, capsys, monkeypatch):
    """9 s for all."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)
    if words[0] == "make":
        _succeeds(["make", "--dry-run", *words[1:]])
    elif words[0].startswith("launch/"):
        end = words.index("--")
        _succeeds([*words[:end], "--dry-run", *words[end:]])
        _program(words[end + 1 :])
    else:
        _program(words)


def _succeeds(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


def _program(words: list[str]) -> None:
    """Plans without compiling; of other programs, reads the options, the recipe and its phases."""
    assert words[:2] == ["python", "-m"], words
    module, arguments = words[2], words[3:]
    if module == "pe_lab.plan":
        plan.parser().parse_args(split_overrides(arguments)[0])
        compiled = ("--explain", "--json=", "--against=")
        assert plan.main([*(one for one in arguments if not one.startswith(compiled)), "--no-compile"]) == 0
    elif module == "pe_lab.train":
        rest, overrides = split_overrides(arguments)
        assert plan_phases(load_config(train.parser().parse_args(rest).config, overrides))
    else:
        assert module == "pe_lab.evaluate"
        evaluate.parser().parse_args(arguments)


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        ("h100:1", "38 hours on one H100"),
        ("h100:8", "4.75 hours on eight"),
        ("h100:32", "1.2 hours on 32 H100"),
        ("v5e:16x16", "45 minutes on 256 chips"),
    ],
)
def test_the_hours_of_the_page_are_the_plans(topology, text):
    parsed = parse_topology(topology)
    overrides = {"mesh.fsdp": "1"} if parsed.count == 1 else {}
    found = make_plan(load_config(str(ROOT / "configs/drope_16b.py"), overrides), parsed)
    hours = found.chip_hours(parsed.chip.peak, 0.4) / parsed.count
    number, unit = re.match(r"([\d.]+) (\w+)", text).groups()
    assert text in PAGE
    assert hours * (60 if unit == "minutes" else 1) == pytest.approx(float(number), rel=0.02)
