"""A suite in a person's own file, as docs/evaluation.md shows it: measured, resumed, printed, in a config, refused."""

import json
import sys
from pathlib import Path

import pytest
import tiny

from pe_lab.config import Config, EvaluationConfig, to_json
from pe_lab.data.tokenizers import load_tokenizer, save_tokenizer
from pe_lab.errors import ConfigError, UserError
from pe_lab.evaluate import main
from pe_lab.evaluation import suites, targets
from pe_lab.evaluation.suites import check_options, load_suite, parse_suites
from pe_lab.positional import Rope

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "copying.py"
PROMPTS = """
from pe_lab.evaluation.generation.tasks import Lazy, Sample
from pe_lab.evaluation.suite import PromptSuite, SuiteMetric


class Echo:
    suite, name, metric, sized, settings = "echoes", "word", "exact", False, {}

    def samples(self, tokenizer, length, count, seed):
        def make(index):
            return Sample(index, "Say a:", tokenizer.encode_prompt("Say a:"), ("a",), 2)

        return Lazy(make, min(count, 3))

    def score(self, sample, output):
        return {"exact": float(output == sample.references[0])}


class Echoes(PromptSuite):
    name, title, tasks = "echoes", "Echoes", ("word",)
    metrics = (SuiteMetric("score", "exact", unit="%", interval="wilson"),)

    def open(self, names, settings, limits=(None,)):
        return [Echo()]


SUITE = Echoes()
"""


@pytest.fixture(autouse=True)
def own(monkeypatch):
    """Suites that a test loads are gone after it, and those that other tests have loaded are there again."""
    monkeypatch.setattr(targets, "mesh_for", lambda path: None)
    known = dict(suites.SUITES)
    modules = {name: module for name, module in sys.modules.items() if name.startswith("pe_lab_suite_")}
    yield
    for name in set(suites.SUITES) - set(known):
        del suites.SUITES[name]
    for name in [name for name in sys.modules if name.startswith("pe_lab_suite_") and name not in modules]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("own")
    made = tiny.save_run(root / "tiny", tiny.corpus(root / "corpus"))
    save_tokenizer(load_tokenizer("bytes"), made / "tokenizer")
    return made


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_page_shows_the_file():
    assert f"<!-- copying.py -->\n```python\n{FILE.read_text()}```" in (ROOT / "docs" / "evaluation.md").read_text()


def test_a_file_is_a_suite_of_the_command(run, tmp_path, capsys):
    argv = [f"--from={run}", f"--suite={FILE}:SUITE", "--lengths=1x,2x", "--copies=4", f"--out={tmp_path}"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "Copying, 95% intervals" in printed and "RoPE + YaRN" in printed and "cropped" not in printed
    found = lines(tmp_path / "copying.jsonl")
    assert {one["settings"]["copies"] for one in found} == {4} and {one["queries"] for one in found} == {4 * 7, 4 * 15}
    assert main(argv) == 0
    assert f"{len(found)} of them were measured before" in capsys.readouterr().out
    assert main([*argv[:3], "--copies=3", argv[-1]]) == 0
    assert "measured before" not in capsys.readouterr().out


def test_a_config_names_it_and_its_options(tmp_path):
    data = tiny.corpus(tmp_path / "corpus")
    evaluation = EvaluationConfig((1, 2), (f"{FILE}:SUITE",), ("as-trained",), {"copies": 5})
    config = to_json(Config(name="tiny", model=tiny.MODEL, data=data, evaluation=evaluation))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "run.json").write_text(json.dumps({"name": "tiny"}))
    tiny.save(tiny.checkpoint(Rope(), data, config=config), tmp_path / "tiny" / "pretrain")
    assert main([f"--from={tmp_path / 'tiny'}"]) == 0
    found = lines(tmp_path / "tiny" / "evaluation" / "copying.jsonl")
    assert [(one["variant"], one["length"], one["settings"]["copies"]) for one in found] == [
        ("as trained", 16, 5),
        ("as trained", 32, 5),
    ]


def test_a_suite_of_prompts(run, tmp_path, capsys):
    (tmp_path / "echoes.py").write_text(PROMPTS)
    argv = [f"--from={run / 'pretrain'}", f"--suite={tmp_path / 'echoes.py'}:SUITE:word", f"--out={tmp_path / 'out'}"]
    assert main(argv) == 0
    assert "Echoes: word (exact)" in capsys.readouterr().out
    assert [one["samples"] for one in lines(tmp_path / "out" / "echoes.jsonl")] == [3]
    assert len(lines(tmp_path / "out" / "samples" / "echoes.jsonl")) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SUITE = 3", "has no suite 'SUITE'"),
        ("raise ValueError('no')", "cannot be imported: ValueError: no"),
        ("from pe_lab.evaluation.suite import TokenSuite\nSUITE = TokenSuite()", "a name of lower-case letters"),
        (PROMPTS.replace('name, title, tasks = "echoes"', 'name, title, tasks = "niah"'), "another suite is called"),
    ],
)
def test_a_file_that_is_no_suite_is_refused(tmp_path, text, message):
    (tmp_path / "wrong.py").write_text(text)
    with pytest.raises(UserError, match=message):
        load_suite(str(tmp_path / "wrong.py"), "SUITE")


def test_a_missing_file_and_an_unknown_option_are_refused(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        parse_suites(f"{tmp_path}/no.py:SUITE")
    with pytest.raises(ConfigError, match="no suite has an option 'token'. Did you mean 'tokens'"):
        check_options({"token": 3})
    with pytest.raises(ConfigError, match=r"evaluation.options.tokens \(--tokens\) is -1"):
        check_options({"tokens": -1})
