"""The tables of docs/attention.md equal those that the command prints. PE_LAB_WRITE_DOCS=1 writes them."""

import os
import sys
from pathlib import Path

import pytest

from pe_lab.attention import __main__ as attention_command
from pe_lab.attention.__main__ import REQUESTS, capabilities, choices, main, markdown, on_platform
from pe_lab.attention.preferences import preference
from pe_lab.errors import UserError

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks are no part of the package

from benchmarks.document import Place  # noqa: E402

PAGE = ROOT / "docs/attention.md"


def choices_of_all() -> str:
    columns = [choices(platform, 64, 8192) for platform in ("tpu", "h100", "a100", "cpu")]
    head = (
        "",
        *(f"{platform}, {mode}" for platform in ("TPU", "H100", "A100", "CPU") for mode in ("evaluation", "training")),
    )
    rows = [(rows[0][0], *(cell for row in rows for cell in row[1:])) for rows in zip(*columns, strict=True)]
    return markdown([head, *rows[1:]])


@pytest.mark.parametrize(
    ("name", "text"), [("implementations", markdown(capabilities())), ("choices", choices_of_all())]
)
def test_the_page_has_the_tables(name, text):
    place = Place(PAGE, name)
    if os.environ.get("PE_LAB_WRITE_DOCS"):
        place.write(text)
    assert place.text == text


@pytest.mark.parametrize("name", ["planned", "compiled", "gpu", "cpu"])
def test_the_page_has_a_place_for_the_tables_of_benchmarks(name):
    assert Place(PAGE, name).text


def test_choices_are_for_the_length_and_the_head_dim_that_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(attention_command, "choose", lambda name, request: asked.append(request) or name)
    choices("tpu", 96, 777)
    lengths, channels = {"1M tokens": 2**20, "one sequence of 1,000 tokens": 1000}, {"heads of 256 channels": 256}
    assert [request.length for request in asked[::2]] == [lengths.get(name, 777) for name in REQUESTS]
    assert [request.head_dim for request in asked[::2]] == [channels.get(name, 96) for name in REQUESTS]
    assert {(request.platform, request.capability) for request in asked} == {("tpu", 0.0)}


def test_a_choice_comes_with_its_reasons(capsys):
    assert main(["--platform=h100", "--why"]) == 0
    said = capsys.readouterr().out
    for row in {preference(request).requests for request in on_platform("h100", 64, 8192).values()}:
        assert f"{row}: " in said
    assert "measured, forward, 8,192 tokens: cudnn 420.5, pallas_gpu 286.9 TFLOP/s (benchmarks/results/h100/att" in said
    assert "- an ALiBi layer: tokamax\n      cudnn has no slopes, which this layer needs\n" in said


def test_a_place_is_filled_and_nothing_beside_it(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->\nold\n<!-- end of a -->\nafter\n<!-- ab -->\n<!-- end of ab -->\n")
    Place(page, "a").write("new\nlines\n")
    assert page.read_text() == (
        "before\n<!-- a -->\nnew\nlines\n<!-- end of a -->\nafter\n<!-- ab -->\n<!-- end of ab -->\n"
    )
    with pytest.raises(UserError, match="no place for this: <!-- b -->"):
        Place(page, "b")
    with pytest.raises(UserError, match="cannot be read"):
        Place(tmp_path / "none.md", "a")


@pytest.mark.parametrize("arguments", [[], ["--platform=tpu", "--head-dim=48"], ["--platform=gpu", "--markdown"]])
def test_the_command_prints_the_choices_and_the_reasons(arguments, capsys):
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("pallas_tpu", "The choice of `auto` on", "These do not run there"))


def test_bad_input_is_one_line(capsys):
    assert main(["--head-dim=7"]) == 2
    assert "--head-dim must be even" in capsys.readouterr().err
