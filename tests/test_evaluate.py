"""The command: what it finds, measures, prints and refuses."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "evaluation"))
import tiny  # noqa: E402

from pe_lab.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from pe_lab.checkpoints.surgery import write_child  # noqa: E402
from pe_lab.config import DataConfig, from_dict  # noqa: E402
from pe_lab.data.tokenizers import load_tokenizer, save_tokenizer  # noqa: E402
from pe_lab.evaluate import main  # noqa: E402
from pe_lab.evaluation.targets import locate, locate_all  # noqa: E402
from pe_lab.positional import NoPE, Rope, layers  # noqa: E402

QUICK = ["--lengths=1x,2x", "--tokens=256", "--windows=8", "--fit-tokens=64"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("command")
    return tiny.save_run(root / "runs" / "tiny", tiny.corpus(root / "corpus"))


def rows(directory: Path, suite: str) -> list[dict]:
    return [json.loads(line) for line in (directory / f"{suite}.jsonl").read_text().splitlines()]


def test_a_run_is_measured_and_printed(run, capsys):
    assert main([f"--from={run}", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "Perplexity on" in out and "Needle accuracy on needles" in out
    for label in ("RoPE + YaRN", "cropped context", "DroPE, β"):
        assert label in out
    assert "16 (1x)" in out and "32 (2x)" in out
    found = rows(run / "evaluation", "perplexity")
    assert {r["checkpoint"] for r in found} == {"pretrain/checkpoints/3", "recalibrate/checkpoints/3"}
    assert {r["run"] for r in found} == {"tiny"} and {r["model"] for r in found} == {"RoPE", "DroPE"}
    assert len(rows(run / "evaluation", "needles")) == 16 and len(rows(run / "evaluation", "beta")) == 1

    assert "is kept in" in out and (run / "recalibrate" / "logit_scale.json").is_file()
    before = (run / "evaluation" / "perplexity.jsonl").read_bytes()
    assert main([f"--from={run}", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "33 of them were measured before" in out and "RoPE + YaRN" in out
    assert (run / "evaluation" / "perplexity.jsonl").read_bytes() == before


def test_a_phase_or_a_step_means_that_checkpoint_of_its_run(run):
    step = run / "recalibrate" / "checkpoints" / "3"
    for given in (run / "recalibrate", step.parent, step):
        assert (locate(given).root, locate(given).paths) == (run, (str(step),))
    assert locate(run).paths == (str(run / "pretrain" / "checkpoints" / "3"), str(step))


@pytest.mark.slow
def test_every_kept_checkpoint_is_measured(run, tmp_path, capsys):
    run = shutil.copytree(run, tmp_path / "run", symlinks=True)
    data = from_dict(DataConfig, open_checkpoint(run / "pretrain").metadata["config"]["data"])
    earlier = tiny.checkpoint(Rope(), data, phase_index=0, step=1, tokens=160, id="earlier", seed=2)
    tiny.save(earlier, run / "pretrain")
    argv = [f"--from={run}", f"--out={tmp_path}", "--suite=perplexity", "--lengths=1x", "--tokens=64",
            "--variants=as-trained"]  # fmt: skip
    assert main([*argv, "--steps=all"]) == 0
    assert "RoPE (pretrain/checkpoints/1)" in capsys.readouterr().out
    found = rows(tmp_path, "perplexity")
    assert [(r["phase"], r["step"], r["tokens_trained"], r["model"]) for r in found] == [
        ("pretrain", 1, 160, "RoPE"),
        ("pretrain", 3, 480, "RoPE"),
        ("recalibrate", 3, 480, "DroPE"),
    ]
    assert len({r["nll"] for r in found}) == 3
    paths = [str(run / "pretrain" / "checkpoints" / step) for step in "13"]
    assert list(locate(run, steps=(1,)).paths) == paths[:1] and list(locate(run / "pretrain", steps=()).paths) == paths
    # A method that is possible for some of the checkpoints alone leaves out the others.
    assert main([*argv[:-1], "--variants=paper-beta", "--steps=1,3"]) == 0
    assert "pretrain/checkpoints/1 left out" in capsys.readouterr().out
    for steps, message in (
        ("2", "keeps no checkpoint of step 2. It keeps pretrain: 1, 3"),
        ("x", "write all, or steps"),
    ):
        assert main([*argv, f"--steps={steps}"]) == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_weights_under_another_encoding_are_rows_of_their_own(run, tmp_path, capsys):
    """Beside those of the model as it is, not instead of them."""
    out = tmp_path / "out"
    argv = [f"--from={run / 'pretrain'}", "--suite=perplexity", "--lengths=1x,2x", "--tokens=64", f"--out={out}"]
    assert main([*argv, "--variants=as-trained"]) == 0
    assert main([*argv, "--positional=rope:base=500", "--positional=nope"]) == 0
    printed = capsys.readouterr().out
    assert "RoPE with rope:base=500" in printed and "RoPE with nope" in printed
    found = rows(out, "perplexity")
    assert {(r["label"], r["variant"], r["positional"]) for r in found} == {
        ("RoPE", "as trained", "rope(base=10000)"),
        ("RoPE with rope:base=500", "rope:base=500", "rope(base=500)"),
        ("RoPE with nope", "nope", "nope"),
    }
    assert len({r["checkpoint_id"] for r in found}) == 1 and len({r["perplexity"] for r in found}) == 6
    # Methods apply to the model's own encoding; a description applies at every length.
    assert main([*argv, "--variants=NTK", "--positional=rope:base=500"]) == 0
    assert {r["label"] for r in rows(out, "perplexity")} == {r["label"] for r in found} | {"RoPE + NTK"}
    assert main([*argv[:1], "--suite=beta", "--positional=nope"]) == 2
    assert "Add --fit-scale to fit it for that one" in capsys.readouterr().err


@pytest.mark.slow
def test_two_runs_of_one_name_are_told_apart(run, tmp_path, capsys):
    for seed in ("seed1", "seed2"):
        shutil.copytree(run, tmp_path / seed, symlinks=True)
    both = f"{tmp_path / 'seed1' / 'pretrain'},{tmp_path / 'seed2' / 'pretrain'}"
    assert [target.display_name for target in locate_all(both)] == ["seed1", "seed2"]
    assert [target.run for target in locate_all(both)] == ["tiny", "tiny"]
    assert [target.display_name for target in locate_all(f"{run / 'pretrain'},{run / 'recalibrate'}")] == [
        "tiny",
        "tiny",
    ]
    out = tmp_path / "out"
    argv = ["--suite=perplexity", "--lengths=1x", "--tokens=64", "--variants=as-trained", f"--out={out}"]
    assert main([f"--from={both}", *argv]) == 0
    assert sorted(os.listdir(out)) == ["seed1", "seed2"]
    assert "seed1: RoPE" in (printed := capsys.readouterr().out) and "seed2: RoPE" in printed


def test_external_models_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate("hf:meta-llama/Llama-3.1-8B").root == Path("runs/Llama-3.1-8B")
    assert locate("gguf:models/SmolLM2-1.7B.Q4.gguf").root == Path("runs/SmolLM2-1.7B.Q4")
    for at in ("out1", "out2"):
        (tmp_path / at / "checkpoint-500").mkdir(parents=True)
    first = locate("hf:out1/checkpoint-500")
    first.write_marker()
    assert first.root == Path("runs/checkpoint-500") == locate("hf:out1/checkpoint-500").root
    assert locate("hf:out2/checkpoint-500").root == Path("runs/out2-checkpoint-500")
    (tmp_path / "runs" / "demo").mkdir()
    (tmp_path / "runs" / "demo" / "run.json").write_text("{}")
    assert locate("hf:exports/demo").root == Path("runs/exports-demo")  # not the trained run of that name


@pytest.mark.slow
def test_a_child_of_surgery_keeps_its_own_rows(run, tmp_path, capsys):
    parent = open_checkpoint(run / "pretrain")
    what = "rope(base=10000) -> nope on layers 0-1"
    write_child(parent, layers(NoPE(), 2), tmp_path / "dropped", what)
    assert main([f"--from={tmp_path / 'dropped'}", "--suite=needles", "--variants=as-trained", *QUICK]) == 0
    found = rows(tmp_path / "dropped" / "evaluation", "needles")
    assert {(r["checkpoint"], r["model"], r["run"]) for r in found} == {("checkpoints/0", "DroPE", "dropped")}
    assert main([f"--from={tmp_path / 'dropped'}", "--suite=needles", "--variants=as-trained",
                 f"--out={tmp_path / 'elsewhere'}", *QUICK]) == 0  # fmt: skip
    assert os.listdir(tmp_path / "elsewhere") == ["needles.jsonl"]


@pytest.mark.slow
def test_text_files_of_ones_own_are_measured_whole(run, tmp_path, capsys):
    texts = [(f"{n}. The ship sailed on, and nobody asked where to. " * 20)[: 900 + n] for n in range(3)]
    for n, text in enumerate(texts):
        (tmp_path / f"{n}.txt").write_text(text)
    run = shutil.copytree(run, tmp_path / "run", symlinks=True, ignore=shutil.ignore_patterns("tokenizer"))
    arguments = [f"--from={run / 'pretrain'}", f"--text={tmp_path}/*.txt", f"--out={tmp_path / 'out'}"]
    assert main(arguments) == 2 and "came without a tokenizer" in capsys.readouterr().err
    save_tokenizer(load_tokenizer("bytes"), run / "tokenizer")
    chosen = ["--suite=perplexity", "--lengths=1x,2x", "--variants=as-trained,dropped", "--tokens=100000"]
    assert main([*arguments, *chosen]) == 0
    found = rows(tmp_path / "out", "perplexity")
    # Of all the text (a byte is a token), the larger part is scored, and the rest kept to fit a logit scale on.
    (scored,) = {r["tokens"] for r in found}
    assert sum(map(len, texts)) / 2 < scored < sum(map(len, texts))
    by = {(r["variant"], r["length"]): r["perplexity"] for r in found}
    assert len(by) == 4 and by["dropped", 16] != by["as trained", 16]
    assert "dropped and not recalibrated" in capsys.readouterr().out


def test_an_external_checkpoint_is_measured_on_text_that_is_given(tmp_path, capsys, monkeypatch):
    llama = Path(__file__).parent / "data" / "hf" / "llama"
    assert main([f"--from=hf:{llama}"]) == 2
    assert "Measure it on a text: --text=GLOB" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert (locate(f"hf:{llama}").root, locate(f"hf:{llama}").paths) == (Path("runs/llama"), (f"hf:{llama}",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite=needle"], "Did you mean 'needles'?"),
        (["--suite=no.py:SUITE"], "there is no file"),
        (["--variants=yarm"], "Did you mean 'yarn'?"),
        (["--lengths=3q"], "'3q' is no length"),
        (["--lengths=1x,1g"], "'1g' is no length"),
        (["--lengths=5000x"], "too few for a sequence of 80,000"),
        (["--tokens=0"], "argument --tokens: '0' is not"),
        (["--windows=-1"], "argument --windows: '-1' is not"),
        (["--stride=17"], "--stride=17 is more than the shortest length, 16"),
        (["--suite=documents"], "--suite=documents needs a text"),
        (["--from=,"], "names nothing"),
        (["--suite=niah", "--haystack=noise", "--lengths=1x"], "the shortest take"),
        (["--suite=niah", "--haystack=nothing/*.txt"], "matches no file"),
        (["--suite=longbench"], "--longbench=DIR"),
        (["--positional=yarm:factor=2"], "yarm"),
        (["--attention=splash"], "'splash' runs on tpu, and this is for cpu. Choose one of auto, reference, dense"),
        (["--attention=chunkd"], "Did you mean 'chunked'?"),
    ],
)
def test_bad_input_is_one_message_and_status_2(run, tmp_path, capsys, arguments, message):
    save_tokenizer(load_tokenizer("bytes"), run / "tokenizer")
    assert main([f"--from={run}", f"--out={tmp_path / 'out'}", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_perplexity_by_position(run, tmp_path, capsys):
    argv = [f"--from={run}", f"--out={tmp_path / 'out'}", "--suite=perplexity", "--lengths=32", "--variants=as-trained"]
    assert main([*argv, "--by-position", "--attention=reference"]) == 0
    printed = " ".join(capsys.readouterr().out.split())  # a title is as wide as its table
    assert "Perplexity by position in sequences of 32 tokens" in printed and "0 .. 32" in printed


def test_no_checkpoint_there(run, tmp_path, capsys):
    assert main([f"--from={tmp_path / 'nothing'}"]) == 2
    assert "is not a directory" in capsys.readouterr().err
    assert main([f"--from={tmp_path}"]) == 2
    assert "no checkpoint" in capsys.readouterr().err
    (tmp_path / "run.json").write_text("{}")
    assert main([f"--from={tmp_path}"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err
    assert main([f"--from={run / 'run.json'}"]) == 2
