"""The tables of docs/attention.md are those that the program prints. PE_LAB_WRITE_DOCS=1 writes them."""

import os
from pathlib import Path

import pytest

from pe_lab.attention.__main__ import choices, main, markdown, table

PAGE = Path(__file__).parents[1] / "docs/attention.md"


def section(name: str) -> str:
    page = PAGE.read_text(encoding="utf-8")
    return page.split(f"<!-- {name} -->\n")[1].split(f"<!-- end of {name} -->")[0].strip()


def choices_of_all() -> str:
    columns = [choices(platform, 64, 8192) for platform in ("tpu", "gpu", "cpu")]
    head = ("", *(f"{platform}, {way}" for platform in ("TPU", "GPU", "CPU") for way in ("evaluating", "training")))
    rows = [(rows[0][0], *(cell for row in rows for cell in row[1:])) for rows in zip(*columns, strict=True)]
    return markdown([head, *rows[1:]])


@pytest.mark.parametrize(("name", "text"), [("implementations", markdown(table())), ("choices", choices_of_all())])
def test_the_page_has_the_tables(name, text):
    if os.environ.get("PE_LAB_WRITE_DOCS"):
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(f"<!-- {name} -->\n")
        after = rest.split(f"<!-- end of {name} -->")[1]
        PAGE.write_text(f"{before}<!-- {name} -->\n{text}\n<!-- end of {name} -->{after}", encoding="utf-8")
    assert section(name) == text


@pytest.mark.parametrize("arguments", [[], ["--platform=tpu", "--head-dim=48"], ["--platform=gpu", "--markdown"]])
def test_the_verb_prints_what_serves_and_what_does_not(arguments, capsys):
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "pallas_tpu" in said and "What `auto` takes on" in said and "What does not run there" in said


def test_bad_input_is_one_line(capsys):
    assert main(["--head-dim=7"]) == 2
    assert "--head-dim must be even" in capsys.readouterr().err
