"""`pe_lab.evaluate` killed with SIGKILL, twice, and run again: the samples' file ends as if nothing had happened."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "evaluation"))
import tiny  # noqa: E402
from test_resume import finish, kill, line_count, wait_until  # noqa: E402
from tiny_runs import start  # noqa: E402

from pe_lab.data.tokenizers import load_tokenizer, save_tokenizer  # noqa: E402

pytestmark = pytest.mark.slow


def command(run: Path, out: Path) -> list[str]:
    return ["pe_lab.evaluate", f"--from={run / 'pretrain'}", "--suite=niah:standard,multi_value", "--haystack=noise",
            "--lengths=900,1000", "--samples=20", f"--out={out}"]  # fmt: skip


def without_seconds(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_two_kills_later_the_lines_are_those_of_an_undisturbed_run(tmp_path):
    run = tiny.save_run(tmp_path / "tiny", tiny.corpus(tmp_path / "corpus"))
    save_tokenizer(load_tokenizer("bytes"), run / "tokenizer")
    whole, cut = (tmp_path / name / "samples" / "niah.jsonl" for name in ("whole", "cut"))
    printed = finish(start(command(run, whole.parents[1]), tmp_path))
    assert "were answered before" not in printed and line_count(whole) == 80
    for lines in (1, 30):
        process = start(command(run, cut.parents[1]), tmp_path)
        wait_until(process, lambda lines=lines: line_count(cut) >= lines)
        kill(process)
    left = line_count(cut)
    assert 30 <= left < 80
    printed = finish(start(command(run, cut.parents[1]), tmp_path))
    assert f"{left} of 80 samples were answered before" in printed
    assert without_seconds(cut) == without_seconds(whole)
    # Byte for byte, once the one field is taken out that a clock has written.
    assert [json.dumps(line) for line in without_seconds(cut)] == [json.dumps(line) for line in without_seconds(whole)]
