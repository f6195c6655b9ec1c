"""The prompted suites through the command: options, files, what is printed, and a page of it all."""

import json
import re
import sys
from pathlib import Path

import pytest
from lm_eval_tasks import write_tasks
from small_benchmarks import write_all
from test_resume import finish
from tiny_runs import start

sys.path.insert(0, str(Path(__file__).parent / "evaluation"))
import tiny  # noqa: E402

from pe_lab.data.tokenizers import load_tokenizer, save_tokenizer  # noqa: E402
from pe_lab.evaluate import main  # noqa: E402
from pe_lab.evaluation import targets  # noqa: E402
from pe_lab.evaluation.suites.longbench import TASKS
from pe_lab.evaluation.suites.ruler import TASKS as RULER


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("suites")
    made = tiny.save_run(root / "tiny", tiny.corpus(root / "corpus"))
    save_tokenizer(load_tokenizer("bytes"), made / "tokenizer")
    return made


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Eight virtual ones would answer every prompt eight times."""
    monkeypatch.setattr(targets, "mesh_for", lambda path: None)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_needles_of_two_models_under_two_variants(run, tmp_path, capsys):
    out = tmp_path / "out"
    argv = [f"--from={run / 'pretrain'},{run / 'recalibrate'}", "--suite=niah:standard", "--haystack=noise",
            "--lengths=640", "--samples=2", "--depths=0,100", f"--out={out}"]  # fmt: skip
    assert main([*argv, "--variants=as-trained", "--positional=rope:base=500"]) == 0
    printed = capsys.readouterr().out
    assert "niah:standard for RoPE (pretrain/checkpoints/3), RoPE with rope:base=500" in printed
    assert "tokens/s" in printed and "DroPE" in printed and "Needle in a haystack" in printed
    found = lines(out / "tiny" / "samples" / "niah.jsonl")
    assert len(found) == 8 and {line["length"] for line in found} == {640}
    assert {line["positional"] for line in found} == {"rope(base=10000)", "rope(base=500)", "nope"}
    assert [line["depth"] for line in found[:2]] == [[0.0], [100.0]]
    assert {row["label"] for row in lines(out / "tiny" / "niah.jsonl")} >= {"RoPE", "DroPE"}
    assert main([*argv, "--variants=as-trained", "--positional=rope:base=500"]) == 0
    assert "4 of 4 samples were answered before" in capsys.readouterr().out


@pytest.mark.slow
def test_documents_one_by_one(run, tmp_path, capsys):
    texts = ["A short one.", "x", "A longer one, of " + "many words and " * 8]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    argv = [f"--from={run / 'pretrain'}", f"--text=jsonl:{tmp_path}/texts.jsonl", "--suite=documents",
            "--lengths=1x,4x", f"--out={tmp_path / 'out'}"]  # fmt: skip
    assert main(argv) == 0
    assert "Perplexity of documents" in capsys.readouterr().out
    found = lines(tmp_path / "out" / "samples" / "documents.jsonl")
    assert [(line["length"], line["scored"]) for line in found] == [
        (length, len(text) - 1) for length in (16, 64) for text in texts
    ]
    short, none, long = found[3:]
    assert none["nll"] is None and short["perplexity"] > 1
    row = next(row for row in lines(tmp_path / "out" / "documents.jsonl") if row["length"] == 64)
    total = short["nll"] * short["scored"] + long["nll"] * long["scored"]
    assert row["nll"] == pytest.approx(total / row["tokens"], abs=1e-5) and row["documents"]["count"] == 2
    before = (tmp_path / "out" / "samples" / "documents.jsonl").read_bytes()
    assert main(argv) == 0 and (tmp_path / "out" / "samples" / "documents.jsonl").read_bytes() == before


@pytest.mark.slow
def test_sliding_windows_score_the_same_text_with_more_context(run, tmp_path, capsys):
    argv = [f"--from={run / 'pretrain'}", "--suite=perplexity", "--lengths=16,64", "--tokens=512", f"--out={tmp_path}",
            "--variants=as-trained,cropped"]  # fmt: skip
    assert main([*argv, "--stride=4"]) == 0 and main(argv) == 0
    assert "windows sliding by 4" in capsys.readouterr().out
    rows = {
        (row["variant"], row["length"], "sliding" in row["source"]): row for row in lines(tmp_path / "perplexity.jsonl")
    }
    whole, sliding = (rows["as trained", 64, slides] for slides in (False, True))
    assert whole["nll"] == sliding["nll"] and whole["tokens"] == sliding["tokens"]  # one window is all of a text
    assert (
        rows["as trained", 16, True]["nll"] == rows["cropped", 64, True]["nll"] != rows["as trained", 16, False]["nll"]
    )
    assert rows["as trained", 16, True]["position_edges"][-1] == 64


def test_rulers_own_files_are_scored_without_a_model(tmp_path, capsys):
    directory = tmp_path / "4096" / "pred"
    directory.mkdir(parents=True)
    answers = [("It is 42.", ["42", "43"]), ("", ["1"])]
    (directory / "niah_multiquery.jsonl").write_text(
        "".join(json.dumps({"pred": pred, "outputs": outputs}) + "\n" for pred, outputs in answers)
    )
    assert main([f"--predictions={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "niah_multiquery" in printed and "25.0%" in printed and "4,096" in printed
    for model, pred in (("a", "42 43"), ("b", "no")):
        other = tmp_path / "models" / model / "4096" / "pred"
        other.mkdir(parents=True)
        (other / "vt.jsonl").write_text(json.dumps({"pred": pred, "outputs": ["42", "43"]}) + "\n")
    assert main([f"--predictions={tmp_path / 'models'}"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^. a +.* 100\.0%", printed, re.M) and re.search(r"^. b +.* 0\.0%", printed, re.M)
    assert main([f"--predictions={tmp_path / 'nothing'}"]) == 2 and "is no directory" in capsys.readouterr().err


@pytest.mark.slow
def test_answers_of_every_checkpoint_are_files_of_their_own(run, tmp_path):
    source = f"--from={run / 'pretrain'},{run / 'recalibrate'}"
    argv = ["--suite=ruler:niah_single_1", "--lengths=600", "--samples=1", f"--out={tmp_path / 'out'}"]
    assert main([source, *argv, f"--ruler-files={tmp_path / 'files'}"]) == 0
    found = sorted(str(path.relative_to(tmp_path / "files")) for path in (tmp_path / "files").rglob("pred/*.jsonl"))
    assert found == [
        "tiny-pretrain-checkpoints-3-RoPE/600/pred/niah_single_1.jsonl",
        "tiny-recalibrate-checkpoints-3-DroPE/600/pred/niah_single_1.jsonl",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--from is missing"),
        (["--suite=niah:standart", "--haystack=noise"], "Did you mean 'standard'"),
        (["--suite=ruler:vt", "--haystack=noise"], "each of RULER's tasks has its own haystack"),
        (["--suite=ruler:qa_1", "--lengths=4k"], "--qa=DIR"),
        (["--suite=many_shot", "--problems=none.jsonl"], "none.jsonl"),
        (["--suite=niah", "--haystack=noise", "--variants=yarm"], "Did you mean 'yarn'"),
        (["--suite=niah", "--haystack=noise", "--variants=beta", "--lengths=1k"], "no logit scale was fitted"),
        (["--suite=niah", "--haystack=noise", "--attention=splash", "--lengths=1k"], "'splash' runs on tpu"),
    ],
)
def test_bad_input_is_one_message_and_status_2(run, tmp_path, capsys, argv, message):
    source = [f"--from={run / 'pretrain'}"] if argv else []
    assert main([*source, f"--out={tmp_path / 'out'}", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_every_task_of_every_suite_runs_and_the_page_shows_it(run, tmp_path):
    """In processes of their own, on one device: eight virtual ones would answer every prompt eight times."""
    write_all(tmp_path / "small", list(TASKS), records=1)
    write_tasks(tmp_path / "yaml")
    (tmp_path / "essays.txt").write_text("He wrote of many things. Some were true! " * 200)
    argv = [f"--from={run / 'pretrain'}", f"--longbench={tmp_path}/small/longbench", f"--qa={tmp_path}/small/qa",
            f"--problems={tmp_path}/small/problems.jsonl", "--samples=1", "--max-new-tokens=8", "--buffer=100",
            f"--ruler-files={tmp_path}/files", f"--lm-eval-tasks={tmp_path}/yaml", "--lengths=3000",
            f"--haystack={tmp_path}/essays.txt"]  # fmt: skip
    argv.append(f"--nolima={tmp_path}/small/nolima")
    suites = "--suite=niah,ruler,longbench,nolima,many_shot,lm_eval:local_choices,local_passages,local_questions"
    printed = finish(start(["pe_lab.evaluate", *argv, suites], tmp_path))
    assert "prompts were cut, as the protocol requires" in printed  # two Chinese texts have more bytes than that
    rows = {
        name: lines(run / "evaluation" / f"{name}.jsonl")
        for name in ("niah", "ruler", "longbench", "nolima", "many_shot")
    }
    assert {row["source"] for row in rows["ruler"]} == set(RULER)
    assert {row["source"] for row in rows["longbench"]} == set(TASKS)
    assert len(rows["niah"]) == 5 and len(rows["many_shot"]) == 2
    assert all(0 <= row["score"] <= 1 and row["low"] <= row["score"] <= row["high"] for r in rows.values() for row in r)
    assert len(list((tmp_path / "files").rglob("pred/*.jsonl"))) == len(RULER)
    assert "mean of 13" in finish(start(["pe_lab.evaluate", f"--predictions={tmp_path}/files"], tmp_path))
    finish(start(["pe_lab.report", str(run)], tmp_path))
    page = (run / "report.html").read_text(encoding="utf-8")
    for words in ("Needles by depth", "NoLiMa", "niah multikey 3", "passage retrieval zh", "local passages"):
        assert words in page, words
