"""Every code block of the README and of docs/: each line is checked here in a moment, and run as a slow test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import documented_code as documented
import pytest

BLOCKS = [block for page in documented.PAGES for block in documented.blocks(page)]
RUN = [page for page in documented.PAGES if {b.language for b in BLOCKS if b.page == page} & {"shell", "python"}]
# Of a minute or two each; the analysis that docs/claims.md trains takes four.
PARTS = {"README.md": 4, "docs/dope.md": 3}
PARTS |= dict.fromkeys(("docs/claims.md", "docs/evaluation.md", "docs/recipes.md", "docs/sweeps.md"), 2)


def test_every_block_names_its_language():
    known = documented.SHOWN | {"shell", "python"}
    assert [f"{b.page}:{b.line}: '{b.language}'" for b in BLOCKS if b.language not in known] == []
    assert len(BLOCKS) > 50 and len(RUN) > 10


@pytest.mark.parametrize("page", RUN)
def test_every_line_is_valid(page, monkeypatch):
    """3 s for all pages: flags, recipes, keys, suites, variants, launchers, targets of make."""
    monkeypatch.chdir(documented.ROOT)
    wrong = []
    for block in (block for block in BLOCKS if block.page == page):
        if block.language == "python":
            compile(block.code, f"{page}:{block.line}", "exec")
        for statement in documented.statements(block) if block.language == "shell" else []:
            try:
                documented.check(statement.words)
            except Exception as error:
                wrong.append(f"{statement.where}: {statement.line}: {error}")
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        "python -m pe_lab.train --confg=configs/drope_16b.py",
        "python -m pe_lab.train --config=configs/drope_17b.py",
        "python -m pe_lab.train --config=configs/drope_16b.py --config.model.layer=4",
        "python -m pe_lab.train --config=configs/table1.py:method=rop",
        "python -m pe_lab.evaluate --from=runs/x --suite=rular",
        "python -m pe_lab.evaluate --from=runs/x --variants=yarm",
        "python -m pe_lab.analyze dope --from=runs/x --grid=ranks=1",
        "python -m pe_lab.surgeon --from=runs/x",
        "pe_lab tran",
        "launch/slrm.sh --nodes=4",
        "launch/slurm.sh -- python -m pe_lab.train --config=configs/drope_17b.py",
        "make demos",
        "pip install pe-lab[gsc]",
        "wget page.html",
    ],
)
def test_a_line_with_a_mistake_is_found(line, monkeypatch):
    monkeypatch.chdir(documented.ROOT)
    block = documented.Block("x.md", 1, "shell", line)
    with pytest.raises((Exception,)):
        for statement in documented.statements(block):
            documented.check(statement.words)


def test_lines_go_on_are_separated_and_have_variables():
    lines = [
        "DIR=a  # where",
        'export X="b c" Y=d',
        "",
        "python -m pe_lab.train --config=$DIR/x \\",
        '  --out="$X"  # why',
        "make test && A=1 make lint",
    ]
    code = "\n".join(lines)
    found = documented.statements(documented.Block("x.md", 10, "shell", code))
    assert [(one.where, one.words) for one in found] == [
        ("x.md:14", ["python", "-m", "pe_lab.train", "--config=a/x", "--out=b c"]),
        ("x.md:16", ["make", "test"]),
        ("x.md:16", ["make", "lint"]),
    ]
    assert found[0].variables == {"DIR": "a", "X": "b c", "Y": "d"}
    parts = [documented.part_of("docs/evaluation.md", f"{i}/2") for i in (1, 2)]
    assert sum(parts, []) == documented.blocks("docs/evaluation.md") and all(parts)


def _run(page: str, directory: Path, part: str = "1/1") -> str:
    """A page's lines in a process of their own, on one device, compiled as quickly as possible."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    words = [sys.executable, str(documented.ROOT / "tests/documented_code.py"), page, str(directory), part]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("documented") / "sandbox"
    _run("sandbox", directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "part"), [(p, f"{i + 1}/{PARTS.get(p, 1)}") for p in RUN for i in range(PARTS.get(p, 1))]
)
def test_the_blocks_of_a_page_run(page, part, sandbox, tmp_path):
    """5 minutes for all, one page at a time: stand-ins of a few thousand weights, and the replacements of
    `documented_sizes`."""
    shutil.copytree(sandbox, tmp_path / "here", symlinks=True)
    out = _run(page, tmp_path / "here", part)
    shown = [block for block in documented.part_of(page, part) if block.language not in documented.SHOWN]
    assert out.count(" s\n") >= len(shown) > 0


# The README's blocks as a reader runs them, at the size of a test: what is replaced, and what a reader has to have.
SIZES = {
    "git clone https://github.com/pe-lab/pe_lab && cd pe_lab": "true",
    "make demo ": "make demo QUICK=1 ",
    "make test ": "make test ARGS=tests/test_words.py ",
    "max_new_tokens=16": "max_new_tokens=4",
    "data=text:'docs/*.md' --workdir=runs/finetuned": "data=text:'docs/*.md',steps=2,length=64,batch=2 "
    "--config.evaluation.options.tokens=128 --config.evaluation.factors=[1,2] --config.log.validation_batches=1 "
    "--workdir=runs/finetuned",
    "--length=4x": "--length=2x --sequences=2",
    "--tokens=50M": "--tokens=50M --dry-run",
}
HAS_TO_HAVE = {"launch/slurm.sh": "a cluster"}


def test_the_readme_asks_for_a_cluster_only_where_it_says_so():
    (asking,) = [b.code for b in documented.blocks("README.md") if any(words in b.code for words in HAS_TO_HAVE)]
    text = (documented.ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("On a cluster") < text.index(asking)


@pytest.mark.slow
def test_the_readme_works_in_order_from_a_fresh_clone(tmp_path):
    """Each block by bash, or by Python, with SmolLM2 from the Python index: 8 minutes."""
    where = tmp_path / "pe_lab"
    subprocess.run(["git", "clone", "-q", str(documented.ROOT), str(where)], check=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS", "JAX_PLATFORMS")}
    blocks = [b for b in documented.blocks("README.md") if b.language in ("shell", "python")]
    asking = [b for b in blocks if any(words in b.code for words in HAS_TO_HAVE)]
    code = {b.line: b.code for b in blocks if b not in asking}
    for words, small in SIZES.items():
        assert any(words in text for text in code.values()), f"README.md has no {words!r} any more"
        code = {line: text.replace(words, small) for line, text in code.items()}
    assert len(code) > 6
    for block in blocks:
        if block in asking:
            continue
        how = [".venv/bin/python", "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
        active = "" if block.language == "python" or "make demo" in code[block.line] else "source .venv/bin/activate\n"
        done = subprocess.run([*how, active + code[block.line]], cwd=where, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"README.md:{block.line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
