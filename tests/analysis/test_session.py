"""Analyses of models as a user runs them: sequences, intervals, parts that survive a kill, and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import REPOSITORY, compilations_kept, trained  # noqa: F401

from pe_lab import analyze
from pe_lab.analysis import frequency_use
from pe_lab.analysis.analysis import Parts
from pe_lab.analysis.sequences import find_copy
from pe_lab.analysis.session import distinct_names
from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.results.findings import read_findings
from pe_lab.results.statistics import interval

pytestmark = pytest.mark.usefixtures("compilations_kept")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """A text of 2,000 bytes, which the tokenizer `bytes` reads as so many tokens."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("".join(chr(97 + i % 26) if i % 5 else " " for i in range(2000)))
    return str(path)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Figures have tests of their own, and take seconds."""
    monkeypatch.setattr(analyze.figure_files, "render", lambda figure, form: b"")


def run(*arguments: str) -> int:
    return analyze.main(["--format=png", *arguments])


def test_the_interval_is_students(capsys):
    """Of 1, 2, 3, 6: mean 3, standard deviation sqrt(14/3), t of 3 degrees of freedom 3.182446."""
    around = interval(np.array([1.0, 2.0, 3.0, 6.0]))
    half = 3.182446 * np.sqrt(14 / 3) / 2
    np.testing.assert_allclose([around.mean, around.low, around.high], [3, 3 - half, 3 + half], rtol=1e-6)
    assert around.words("{:.2f}") == "3.00 [-0.44, 6.44]" and around.cell("{:.1f}") == "3.0 ± 3.4"
    one = interval(np.array([[2.0, 5.0]]))
    assert one[1].words("{:.0f}") == one[1].cell("{:.0f}") == "5" and np.isnan(one.low).all()


def test_the_copy_of_an_answer_is_its_last_and_longest():
    tokens = np.array([5, 1, 2, 3, 9, 1, 2, 3, 8, 2, 3])
    assert find_copy(tokens, np.array([7, 1, 2, 3])) == (5, 3)  # the first token is joined with a space
    assert find_copy(tokens, np.array([5, 1])) == (0, 2)
    assert find_copy(tokens, np.array([4])) == (0, 0)


def test_an_analysis_writes_numbers_with_their_lineage(trained, text, tmp_path, capsys):  # noqa: F811
    argv = [f"--from={trained}/pretrain,{trained}/recalibrate", f"--text={text}", "--length=24", "--sequences=3"]
    argv.append(f"--out={tmp_path / 'a'}")
    assert run("frequency_use", *argv, "--variants=as-trained,dropped") == 0
    printed = capsys.readouterr().out
    assert "Share of the norm" in printed and "peak memory" in printed
    found = read_findings(tmp_path / "a")
    names = [model["name"] for model in found.about["models"]]
    assert names == ["RoPE (pretrain)", "RoPE, dropped and not recalibrated (pretrain)", "DroPE (recalibrate)"]
    assert [m["step"] for m in found.about["models"]] == [8, 8, 6] and "nope" in found.about["models"][2]["lineage"][-1]
    assert (
        found.about["sequences"] == "3 windows of text:a.txt, 24 tokens" or "3 windows of" in found.about["sequences"]
    )
    assert found.findings.numbers["query_0"].shape == (3, 2, 2, 4)
    assert {path.suffix for path in (tmp_path / "a").iterdir() if path.is_file()} == {".json", ".npz", ".png"}
    # The windows are the text's own bytes, at even distances.
    ids = np.asarray([*ByteTokenizer().encode(Path(text).read_text().strip()), ByteTokenizer().eos_id])
    tiles = ids[: len(ids) // 25 * 25].reshape(-1, 25)
    lm = frequency_use_of(trained, np.stack([tiles[int((i + 0.5) * len(tiles) / 3)][:24] for i in range(3)]))
    np.testing.assert_allclose(found.findings.numbers["query_0"], lm, rtol=1e-5)


def frequency_use_of(trained, ids):  # noqa: F811
    import pe_lab

    return frequency_use.measure(pe_lab.load(trained / "pretrain"), ids).query


def test_what_was_measured_is_not_measured_again(trained, text, tmp_path, monkeypatch):  # noqa: F811
    calls = []
    whole = frequency_use.measure

    def counted(lm, tokens, *rest, **more):
        calls.append(len(tokens))  # the tests' eight devices measure eight sequences at once
        return whole(lm, tokens, *rest, **more)

    monkeypatch.setattr(frequency_use, "measure", counted)
    argv = ["frequency_use", f"--from={trained}/pretrain", f"--text={text}", "--length=24", f"--out={tmp_path}"]
    assert run(*argv, "--sequences=2") == 0
    assert calls == [8]
    first = read_findings(tmp_path).findings.numbers
    assert run(*argv, "--sequences=2") == 0
    assert calls == [8] and read_findings(tmp_path).about["parts_reused"] == 2
    for name, value in read_findings(tmp_path).findings.numbers.items():
        np.testing.assert_array_equal(value, first[name])
    # Another encoding makes other parts; a damaged part is measured again.
    assert run(*argv, "--sequences=2", "--variants=as-trained,dropped") == 0
    assert len(calls) == 2
    damaged = sorted((tmp_path / "parts").iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert run(*argv, "--sequences=2", "--variants=as-trained,dropped") == 0
    assert len(calls) == 3
    assert run(*argv, "--sequences=2", "--again") == 0
    assert len(calls) == 4


@pytest.mark.slow  # 25 s: two processes
def test_a_killed_analysis_goes_on_where_it_was(trained, text, tmp_path):  # noqa: F811
    argv = ["-m", "pe_lab.analyze", "frequency_use", f"--from={trained}/pretrain", f"--text={text}"]
    argv += ["--length=48", "--sequences=40", "--variants=as-trained,dropped", f"--out={tmp_path}", "--format=png"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
    env.pop("XLA_FLAGS", None)
    process = subprocess.Popen([sys.executable, *argv], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parts = tmp_path / "parts"
    deadline = time.monotonic() + 300
    while not parts.is_dir() or len(list(parts.glob("[!.]*.npz"))) < 5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "analysis.json").exists()
    before = {path.name: path.stat().st_mtime_ns for path in parts.glob("[!.]*.npz")}
    done = subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    after = {path.name: path.stat().st_mtime_ns for path in parts.glob("[!.]*.npz")}
    assert len(after) == 80 and {name: after[name] for name in before} == before
    assert read_findings(tmp_path).about["parts_reused"] == len(before)


@pytest.mark.slow
def test_random_initializations_have_the_shape_and_not_the_weights(trained, text, tmp_path):  # noqa: F811
    argv = [f"--from={trained}/pretrain", f"--text={text}", "--length=24", "--sequences=1", f"--out={tmp_path}"]
    under = ["--variants=as-trained", "--positional=half:rope:fraction=0.5"]
    assert run("frequency_use", *argv, *under, "--init=2") == 0
    found = read_findings(tmp_path)
    names = [f"{name} (initialization {seed})" for seed in range(2) for name in ("RoPE", "half")]
    assert [model["name"] for model in found.about["models"]] == names
    a, b = (found.findings.numbers[f"query_{n}"] for n in (0, 2))
    assert a.shape == b.shape and np.abs(a - b).max() > 0.1 * a.mean()


@pytest.mark.usefixtures("as_users_run_it")  # of a variant, only what names it
def test_names_tell_variants_apart():
    class Subject:
        run, path = "r", "pretrain/checkpoints/8"

    class Variant:
        subject = Subject
        label = "RoPE"

    assert distinct_names([Variant], False) == ["RoPE"]
    assert distinct_names([Variant, Variant], False) == ["RoPE (pretrain 8) #0", "RoPE (pretrain 8) #1"]
    assert distinct_names([Variant], True) == ["RoPE (r)"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frequency_use"], "frequency_use needs a model: --from=RUN"),
        (["frequency_use", "--from=RUN/recalibrate"], "none of the chosen layers of DroPE rotates"),
        (["frequency_use", "--from=RUN", "--layers=0,2"], "--layers: there is no layer 2; the model has 2"),
        (["frequency_use", "--from=RUN", "--layers=x"], "--layers: 'x' is not a number or a range"),
        (["heads", "--from=RUN/pretrain", "--heads=0.2"], "--heads: there is no head 0.2 among the layers"),
        (["frequency_use", "--from=RUN/pretrain", "--heads=3"], "--heads: '3' is no head. Write LAYER.HEAD"),
        (["logit_bounds", "--from=RUN", "--length=4"], "logit_bounds needs sequences of at least 8 tokens"),
        (["heads", "--from=RUN", "--length=4k"], "tokens, too few for 4 sequences of 4,096"),
        (["heads", "--from=RUN", "--sequences=0"], "--sequences: '0' is not a whole number from 1"),
        (["heads", "--from=RUN", "--init=0"], "--init: '0' is not a whole number from 1"),
        (["heads", "--from=RUN", "--suite=niah"], "--text and --suite each give the sequences"),
        (["heads", "--from=RUN", "--variants=cropped"], "cropped reads shorter sequences: give a shorter --len"),
        (["heads", "--from=nowhere"], "--from 'nowhere' is not a directory"),
    ],
)
def test_bad_input_is_one_message_and_status_2(trained, text, tmp_path, capsys, arguments, message):  # noqa: F811
    argv = [argument.replace("RUN", str(trained)) for argument in arguments]
    assert run(*argv, f"--text={text}", f"--out={tmp_path / 'out'}") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_that_holds_out_no_text_needs_one(trained, tmp_path, capsys):  # noqa: F811
    assert run("heads", f"--from={trained}", f"--out={tmp_path / 'out'}") == 2
    assert "holds out no text. Give one: --text=GLOB" in capsys.readouterr().err
    assert run("heads", f"--from={trained}", "--suite=ruler:vt", f"--out={tmp_path / 'out'}") == 2
    assert "name one task with one needle, niah:standard or another, or needles" in capsys.readouterr().err


def test_parts_are_whole_or_not_there(tmp_path):
    parts = Parts(tmp_path)
    identity = {"a": 1}
    assert parts.find(identity) is None
    parts.put(identity, {"x": np.arange(3)})
    np.testing.assert_array_equal(Parts(tmp_path).find(identity)["x"], [0, 1, 2])
    assert Parts(tmp_path).find({"a": 2}) is None and Parts(tmp_path, again=True).find(identity) is None
    path = parts.path(identity)
    for content in (b"", path.read_bytes()[:-30], b"no zip", json.dumps({}).encode()):
        path.write_bytes(content)
        assert Parts(tmp_path).find(identity) is None
