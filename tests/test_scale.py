"""docs/scale.md: the hours that the page names. Its commands are run by test_documented_code.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pe_lab.parallel.topology import parse_topology
from pe_lab.planning.plan import make_plan
from pe_lab.recipes import load_config

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")


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
