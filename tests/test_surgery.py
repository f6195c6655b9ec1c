"""`python -m pe_lab.surgery`: an edited child, an untouched source, and training that starts from the child."""

import errno
import glob
import json
import math
import os
import re
import shutil
import time

import jax
import numpy as np
import pytest
from tiny_runs import (  # noqa: F401
    arrays,
    compilations_kept,
    fingerprint,
    records,
    start,
    tiny,
    train,
    trained,
)

import pe_lab
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.errors import UserError
from pe_lab.model import model_schedule
from pe_lab.positional import Alibi, Bands, Gaussian, Layer, NoPE, Rope, Uniform, Yarn
from pe_lab.positional.codec import numbers_and_ranges
from pe_lab.surgery import main

pytestmark = pytest.mark.usefixtures("compilations_kept")


@pytest.fixture
def run(trained):  # noqa: F811
    """A phase that ended with RoPE."""
    return trained / "pretrain"


def same_weights(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b))


def test_drop_writes_a_child_and_never_touches_its_source(run, tmp_path, capsys):
    before = fingerprint(run)
    assert main([f"--from={run}", f"--to={tmp_path / 'dropped'}", "--drop"]) == 0
    assert fingerprint(run) == before
    parent, child = open_checkpoint(run), open_checkpoint(tmp_path / "dropped")
    assert child.layers == (Layer(NoPE()),) * 2 and parent.layers == (Layer(Rope()),) * 2
    assert same_weights(parent.params, child.params)
    left, right = (arrays(c.path, "params") for c in (parent, child))  # as Orbax reads the files, without us
    assert left.keys() == right.keys() and all((left[k] == right[k]).all() for k in left)
    *ancestors, last = child.metadata["lineage"]
    assert ancestors == parent.metadata["lineage"]
    assert last == {
        "id": child.metadata["id"],
        "what": "rope(base=10000) -> nope on layers 0-1",
        "path": str(tmp_path / "dropped/checkpoints/0"),
        "step": 0,
    }
    assert child.metadata["id"] != parent.metadata["id"]
    for name in ("config", "config_hash", "mixture", "tokenizer", "vocab_size", "training_length"):
        assert child.metadata[name] == parent.metadata[name]
    out = capsys.readouterr().out
    assert "nope" in out and "child of" in out
    # The tokenizer comes along: the child is whole without its parent.
    assert fingerprint(tmp_path / "dropped" / "tokenizer") == fingerprint(run.parent / "tokenizer") != {}


def test_drop_on_some_layers_and_other_encodings(run, tmp_path):
    assert main([f"--from={run}", f"--to={tmp_path / 'a'}", "--drop", "--layers=1"]) == 0
    assert open_checkpoint(tmp_path / "a").layers == (Layer(Rope()), Layer(NoPE()))
    yarn = "yarn:factor=2,original_length=16"
    assert main([f"--from={run / 'checkpoints'}", f"--to={tmp_path / 'b'}", f"--positional={yarn}"]) == 0
    scaled = Layer(Rope(scaling=Yarn(factor=2.0, original_length=16)))
    assert open_checkpoint(tmp_path / "b").layers == (scaled, scaled)
    # A child of a child, one encoding for each layer of a pattern.
    assert main([f"--from={tmp_path / 'a'}", f"--to={tmp_path / 'c'}", "--positional=alibi+rope"]) == 0
    grandchild = open_checkpoint(tmp_path / "c")
    assert grandchild.layers == (Layer(Alibi()), Layer(Rope()))
    assert [e["what"] for e in grandchild.metadata["lineage"]][2:] == [
        "rope(base=10000) -> nope on layer 1",
        "rope(base=10000) -> alibi on layer 0; nope -> rope(base=10000) on layer 1",
    ]


def test_a_drop_tells_what_it_keeps_and_drops_it_if_asked(run, tmp_path, capsys):
    extra = "rope/window=8/with=learned_alibi"
    main([f"--from={run}", f"--to={tmp_path / 'with'}", f"--positional={extra}+rope/with=sink"])
    described = capsys.readouterr().out
    assert re.search(r"learned_alibi\.slopes +0 +2 +0\.0039\d* \.\. 0\.0625, mean 0\.03\d*", described)
    children = {}
    for how in ("--drop", "--drop=all"):
        main([f"--from={tmp_path / 'with'}", f"--to={tmp_path / how}", how])
        children[how] = (open_checkpoint(tmp_path / how), capsys.readouterr().out)
    child, out = children["--drop"]
    assert [layer.encoding for layer in child.layers] == [NoPE()] * 2 and all(layer.extras for layer in child.layers)
    rest = "window=8 on layer 0, with=sink on layer 1; --drop=all leaves out what stands after with=."
    assert f"Kept in the layers without encoding: with=learned_alibi on layer 0, {rest}" in out
    child, out = children["--drop=all"]
    assert child.layers == (Layer(NoPE(), window=8), Layer(NoPE())) and "positional" not in child.params["layers"]
    assert "Kept in the layers without encoding: window=8 on layer 0." in out
    main([f"--from={run}", f"--to={tmp_path / 'plain'}", "--drop"])
    assert "Kept" not in capsys.readouterr().out


@pytest.mark.slow
def test_training_starts_from_the_child(run, tmp_path):
    main([f"--from={run}", f"--to={tmp_path / 'dropped'}", "--drop"])
    config = tiny(tmp_path / "recipe", phases="[{'name': 'recalibrate', 'steps': 2, 'batch_size': 8, "
                  f"'sequence_length': 16, 'positional': 'nope', 'init_from': '{tmp_path / 'dropped'}', "
                  "'optimizer': {'warmup_steps': 1}}]")  # fmt: skip
    train(config, tmp_path / "run")
    result = open_checkpoint(tmp_path / "run")
    child = open_checkpoint(tmp_path / "dropped")
    assert same_weights(child.params, open_checkpoint(tmp_path / "run/recalibrate/checkpoints/0").params)
    assert child.metadata["id"] in [e["id"] for e in result.metadata["lineage"]]
    log = records(tmp_path / "run/recalibrate/metrics.jsonl")
    assert log[0]["validation_loss"] == records(run.parent / "recalibrate/metrics.jsonl")[0]["validation_loss"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--from=nowhere", "--to=b", "--drop"], "There is no checkpoint at 'nowhere'"),
        (["--from=RUN", "--to=ftp://bucket/b", "--drop"], "addresses begin with gs:// or s3://"),
        (["--from=RUN", "--to=full", "--drop"], "full' exists and is not empty"),
        (["--from=RUN", "--to=full/file", "--drop"], "exists and is not empty"),
        (["--from=RUN", "--to=b", "--drop", "--layers=2"], "there is no layer 2; the model has layers 0 to 1"),
        (["--from=RUN", "--to=b", "--drop", "--layers=1-0"], "'1-0' is not a number or a range"),
        (["--from=RUN", "--to=b", "--positional=rope", "--layers=0"], "--layers goes with --drop"),
        (["--from=RUN", "--to=b", "--positional=rope"], "already has these encodings"),
        (["--from=RUN", "--to=b", "--positional=rpoe"], "Did you mean 'rope'"),
        (["--from=RUN", "--to=b", "--positional=rope+nope+rope"], "does not tile 2 layers"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(run, tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    before = fingerprint(tmp_path)
    assert main([a.replace("RUN", str(run)) for a in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err
    assert fingerprint(tmp_path) == before


def test_a_damaged_source_writes_nothing(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / "8" / "params" / "d")
    before = fingerprint(tmp_path)
    assert main([f"--from={copy / 'checkpoints' / '8'}", f"--to={tmp_path / 'b'}", "--drop"]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert fingerprint(tmp_path) == before


def test_layers_on_the_command_line():
    assert numbers_and_ranges("0,2,8-11", "--layers") == [0, 2, 8, 9, 10, 11]
    for text in ("", "a", "1-", "-1", "1,,2", "3-2"):
        with pytest.raises(UserError, match="is not a number or a range"):
            numbers_and_ranges(text, "--layers")


def test_metadata_is_plain_json(run):
    metadata = open_checkpoint(run).metadata
    assert json.loads(json.dumps(metadata)) == metadata


# --- QK-norm ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_qk_norm_is_removed_and_added_with_the_change_in_loss(run, tmp_path, capsys):
    """The tiny recipe has one per head; its needles are the text that constants are fitted on."""
    before = fingerprint(run)
    assert main([f"--from={run}", f"--to={tmp_path / 'bare'}", "--remove-qk-norm"]) == 0
    out = capsys.readouterr().out
    told = re.search(r"QK-norm head -> none: loss ([\d.]+) -> ([\d.]+) on 128 tokens, logits off by \d+%", out)
    assert told and fingerprint(run) == before
    bare = open_checkpoint(tmp_path / "bare")
    assert bare.model.qk_norm == "none" and "query_norm" not in bare.params["layers"]["attention"]
    assert told.group(0) in bare.metadata["lineage"][-1]["what"]
    assert main([f"--from={tmp_path / 'bare'}", f"--to={tmp_path / 'flat'}", "--drop", "--add-qk-norm=flat"]) == 0
    flat = open_checkpoint(tmp_path / "flat")
    assert flat.model.qk_norm == "flat" and flat.layers == (Layer(NoPE()),) * 2
    assert flat.params["layers"]["attention"]["query_norm"]["scale"].shape == (2, 2, 8)
    what = flat.metadata["lineage"][-1]["what"]
    assert what.startswith("rope(base=10000) -> nope on layers 0-1; QK-norm none -> flat: loss ")
    arguments = [f"--from={tmp_path / 'bare'}", f"--to={tmp_path / 'ones'}", "--add-qk-norm", "--qk-norm-init=ones"]
    assert main(arguments) == 0
    assert (open_checkpoint(tmp_path / "ones").params["layers"]["attention"]["key_norm"]["scale"] == 1).all()
    # The losses are those of the child's encodings.
    loss = re.findall(r"loss ([\d.]+) -> ([\d.]+)", what)[0]
    assert float(loss[0]) != pytest.approx(float(told.group(2)), abs=1e-4)


@pytest.mark.slow
def test_a_text_to_fit_on(run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("def needle(haystack): return haystack[3]\n" * 10)
    arguments = [f"--from={run}", f"--to={tmp_path / 'bare'}", "--remove-qk-norm", f"--text={text}"]
    assert main(arguments) == 0
    assert "on 128 tokens" in capsys.readouterr().out  # 8 windows of 16


@pytest.mark.parametrize("search", ["greedy", pytest.param("first-order", marks=pytest.mark.slow)])
def test_layers_are_dropped_for_a_budget(run, tmp_path, capsys, search):
    """The prices are checked in tests/analysis/test_layers_study.py."""
    text = tmp_path / "text.txt"
    text.write_text("def needle(haystack): return haystack[3]\n" * 40)
    chosen = ["--drop=auto", "--budget=1000", "--most=1", "--sequences=4", "--length=2x", f"--by={search}"]
    assert main([f"--from={run}", f"--to={tmp_path / 'child'}", f"--text={text}", *chosen]) == 0
    told = re.search(r"layer ([01]): 1 dropped cost", capsys.readouterr().out)
    child = open_checkpoint(tmp_path / "child").layers
    assert [layer.encoding for layer in child] == [NoPE() if n == int(told[1]) else Rope() for n in range(2)]
    assert not (tmp_path / ".child.sensitivity").exists()
    # Of a run, the last phase's model is edited, which has no encoding left.
    assert main([f"--from={run.parent}", f"--to={tmp_path / 'none'}", f"--text={text}", *chosen]) == 2
    assert "No layer of this model has an encoding to drop" in capsys.readouterr().err


def test_divisors_are_searched_on_held_out_text(run, tmp_path, capsys):
    """The child has the best candidate's table beyond the training length, and equals its parent up to it; 5 s."""
    (tmp_path / "texts").mkdir()
    for n in range(12):
        (tmp_path / f"texts/{n}.txt").write_text(f"def needle_{n}(haystack): return haystack[{n}]\n" * 5)
    chosen = ["--search", "--length=4x", "--population=8", "--iterations=1", "--objective=text", "--sequences=2"]
    command = [f"--from={run}", f"--text={tmp_path}/texts/*.txt", *chosen]
    assert main([*command, f"--to={tmp_path / 'child'}"]) == 0
    out = capsys.readouterr().out
    assert "objective: 128 targets of 2 (text) sequences of 64 tokens" in out and "generation 1 of 1" in out
    first, *candidates = map(json.loads, (tmp_path / "child.search/search.jsonl").read_text().splitlines())
    best = min(candidates, key=lambda one: one["loss"])
    assert len(candidates) == 12 and first["length"] == 64
    child, parent = open_checkpoint(tmp_path / "child"), open_checkpoint(run)
    for layer in child.layers:
        assert layer.encoding.scaling.long_factor == tuple(best["divisors"])
        assert layer.scale_at(64) == pytest.approx(best["scale"])
    for length, same in ((16, True), (64, False)):
        schedules = [model_schedule(one.model, one.layers, length) for one in (child, parent)]
        assert np.array_equal(schedules[0].inv_freq, schedules[1].inv_freq) == same
    assert {file.name for file in (tmp_path / "child.search").iterdir()} == {"search.jsonl", "search.svg", "search.png"}
    # The same command in another place measures nothing that is known.
    shutil.copytree(tmp_path / "child.search", tmp_path / "again.search")
    assert main([*command, f"--to={tmp_path / 'again'}"]) == 0
    assert "generation" not in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "again").layers == child.layers


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--drop", "--budget=0.1"], "--budget goes with --drop=auto"),
        (["--drop=auto", "--population=9"], "--population goes with --search"),
        (["--search", "--by=greedy"], "--by goes with --drop=auto"),
        (["--positional=nope", "--length=2x"], "--length goes with --drop=auto or --search"),
        (["--search", "--length=1x"], "a search is for more than the training length, 16 tokens"),
        (["--search", "--objective=words"], "--objective: there is no 'words'"),
        (["--drop=auto", "--layers=0"], "--drop=auto chooses them"),
        (["--drop=gates", "--layers=0"], "--drop=gates chooses them"),
        (["--drop=gates"], "has no gates"),
        (["--add-qk-norm"], "qk_norm is 'head' already"),
        (["--add-qk-norm=heads"], "model.qk_norm is 'heads'"),
        (["--remove-qk-norm", "--text=nowhere.txt"], "'nowhere.txt' cannot be read"),
        (["--remove-qk-norm", "--text=short.txt"], "has 16 tokens; one window needs 17"),
        ([], "Nothing to do: give --drop"),
        (["--drop", "--dope-seed=3"], "--dope-seed and --dope-sigma go with --mask-heads"),
        (["--mask-heads=scores.json", "--dope=gaussian", "--dope-sigma=0"], "Gaussian.sigma is 0.0"),
        (["--drop", "--qk-norm-init=ones"], "--qk-norm-init=ones goes with --add-qk-norm"),
        (["--mask-heads=nowhere.json"], "'nowhere.json' cannot be read"),
        (["--mask-heads=scores.json", "--count=5"], "count is 5; there are 4 heads"),
        (["--mask-heads=wrong.json"], "this model needs 2 lists of 2 numbers"),
    ],
)
def test_bad_edits_of_heads_and_norms_write_nothing(run, tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("sixteen letters.")
    (tmp_path / "scores.json").write_text("[[1, 2], [3, 0]]")
    (tmp_path / "wrong.json").write_text("[[1, 2, 3], [3, 0, 1]]")
    before = fingerprint(tmp_path)
    assert main([f"--from={run}", "--to=b", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err
    assert fingerprint(tmp_path) == before


# --- Heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dope", "order", "head", "kind"),
    [
        pytest.param("all-nope", "ascending", (1, 1), NoPE(), marks=pytest.mark.slow),
        pytest.param("all-uniform", "descending", (1, 0), Uniform(), marks=pytest.mark.slow),
        pytest.param("parts-fast", "ascending", (1, 1), Bands(2 * math.pi / 16, "fast"), marks=pytest.mark.slow),
        pytest.param("parts-slow", "ascending", (1, 1), Bands(2 * math.pi / 16, "slow"), marks=pytest.mark.slow),
        ("gaussian", "ascending", (1, 1), None),
        pytest.param("gaussian-unit", "ascending", (1, 1), Gaussian(42, 1.0, same=True), marks=pytest.mark.slow),
        ("gaussian-unit --dope-seed=7 --dope-sigma=0.5", "ascending", (1, 1), Gaussian(7, 0.5, same=True)),
    ],
)
def test_heads_are_masked_by_their_scores(run, tmp_path, capsys, dope, order, head, kind):
    scores = tmp_path / "scores.json"
    scores.write_text(json.dumps({"scores": [[1.0, 2.0], [3.0, 0.5]], "of": "truncated entropy"}))
    assert main([f"--from={run}", f"--to={tmp_path / 'b'}", f"--mask-heads={scores}", f"--order={order}",
                 *f"--dope={dope}".split()]) == 0  # fmt: skip
    child = open_checkpoint(tmp_path / "b")
    (edit,) = child.layers[head[0]].heads
    assert edit.heads == head[1:] and child.layers[1 - head[0]].heads == ()
    assert edit.to == kind if kind else isinstance(edit.to, Gaussian)
    assert f"heads {head[1]}: " in capsys.readouterr().out
    # Opened again, it reads as the edit says, and otherwise than its parent.
    lm, parent = pe_lab.load(tmp_path / "b"), pe_lab.load(run)
    tokens = np.random.default_rng(0).integers(0, 300, (1, 40)).astype(np.int32)
    assert np.abs(lm.logits(tokens) - parent.logits(tokens)).max() > 1e-4
    np.testing.assert_array_equal(lm.logits(tokens), parent.with_positional(child.layers).logits(tokens))


def test_a_failure_leaves_nothing_that_refuses_a_repetition(run, tmp_path, monkeypatch, capsys):
    command = [f"--from={run}", f"--to={tmp_path / 'new' / 'dropped'}", "--drop"]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "tokenizer")

    with monkeypatch.context() as patched:
        patched.setattr("pe_lab.data.tokenizers.save_tokenizer", full)  # the last file to be written
        assert main(command) == 2
    said = capsys.readouterr().err
    assert "cannot be written (No space left on device)" in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert main(command) == 0


@pytest.mark.slow
def test_killed_at_any_moment_it_can_be_repeated_and_two_do_not_ruin_each_other(run, tmp_path):
    """Six processes, of which four are killed: 40 s."""
    to = tmp_path / "out" / "dropped"
    command = ["pe_lab.surgery", f"--from={run}", f"--to={to}", "--drop"]
    moments = ("*", "*/checkpoints", "*/checkpoints/0*", "*/tokenizer")
    for moment in moments:
        process = start(command, tmp_path)
        deadline = time.monotonic() + 60
        # Path.glob raises when the process sweeps a directory that is being listed; glob.glob does not.
        partial = str(to.parent / f".dropped.partial-{moment}")
        while not glob.glob(partial) and time.monotonic() < deadline:
            if process.poll() is not None:
                break
        process.kill()
        process.communicate()
        assert not to.exists() or process.returncode == 0
        if to.exists():  # it was faster than the poll
            shutil.rmtree(to)
    both = [start(command, tmp_path) for _ in range(2)]
    out = sorted((process.communicate(timeout=300)[0], process.returncode) for process in both)
    assert sorted(status for _, status in out) == [0, 2], out
    refusal = next(text for text, status in out if status == 2)
    assert "exists and is not empty" in refusal and "Traceback" not in refusal
    assert [p.name for p in to.parent.iterdir()] == ["dropped"]
    assert open_checkpoint(to).layers == (Layer(NoPE()),) * 2
    assert fingerprint(to / "tokenizer") == fingerprint(run.parent / "tokenizer")
