"""A whole run on an object store: trained with kills, then everything that commands do with it."""

from __future__ import annotations

import contextlib
import time

import pytest
from object_stores import new_bucket, store_servers  # noqa: F401
from tiny_runs import REPOSITORY, arrays, finish, start, write_recipe

from pe_lab import evaluate, report, storage, surgery
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.checkpoints.locating import steps_in
from pe_lab.recipes import load_config

WRITES = {
    "arrays": r"^(POST|PUT) .*(/|%2F)d(/|%2F)",  # of a checkpoint, by tensorstore
    "log": r"^(POST|PUT) .*metrics\.jsonl\.segments",
    "manifest": r"^(POST|PUT) .*manifest\.json",  # which commits a checkpoint
}


def train(recipe, workdir, cwd, environment, bucket=None, at="", skip=1, more=()):
    """Trains to the end; or, with `at`, until such a write after `skip` others, in which the process is killed."""
    argv = ["pe_lab.train", f"--config={recipe}", f"--workdir={workdir}", *more]
    if not at:
        return finish([start(argv, cwd, **environment)])[0]
    fault = bucket.inject("stall", WRITES[at], skip=skip, seconds=60.0)
    process = start(argv, cwd, **environment)
    for _ in range(1500):
        if fault.met or process.poll() is not None:
            break
        time.sleep(0.1)
    process.kill()
    out = process.communicate()[0]
    assert process.returncode == -9, out[-4000:]
    bucket.proxy.faults.clear()


def assert_same_bytes(root, local, steps):
    """The logs, parameters and optimizer states of a run on a store are those of one on the disk, bit by bit."""
    for phase, last in steps.items():
        assert storage.read_log(root / phase / "metrics.jsonl") == (local / phase / "metrics.jsonl").read_bytes()
        copy = storage.local_copy(root / phase / "checkpoints" / last)
        for item in ("params", "optimizer"):
            found, expected = arrays(copy, item), arrays(local / phase / "checkpoints" / last, item)
            assert found.keys() == expected.keys() and found
            assert all(found[name].tobytes() == expected[name].tobytes() for name in found)


@pytest.mark.slow
def test_the_demos_recipe_on_gcs_with_three_kills_and_a_damaged_checkpoint(store_servers, tmp_path, monkeypatch):  # noqa: F811
    """Five processes: two minutes."""
    monkeypatch.setenv("PE_LAB_CACHE", str(tmp_path / "cache"))
    recipe = f"{REPOSITORY / 'configs/drope_laptop.py'}:quick"
    more = ["--config.checkpoint.every_steps=20", f"--config.data.cache_dir={tmp_path / 'data'}"]
    compiled = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    compiled |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    train(recipe, "local", tmp_path, compiled, more=more)
    with contextlib.contextmanager(new_bucket)("gs", store_servers, monkeypatch) as bucket:
        run, environment = f"{bucket.url}/runs/demo", {**compiled, **bucket.environment}
        train(recipe, run, tmp_path, environment, bucket, "manifest", skip=2, more=more)
        root = storage.path("--workdir", run)
        checkpoints = root / "pretrain" / "checkpoints"
        newest = checkpoints / str(max(steps_in(checkpoints)))
        entries = storage.listing(newest / "params")
        damaged = newest / "params" / max(entries, key=lambda name: entries[name].size)
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(bytes(content))
        train(recipe, run, tmp_path, environment, bucket, "arrays", skip=9, more=more)
        train(recipe, run, tmp_path, environment, bucket, "log", more=more)
        out = train(recipe, run, tmp_path, environment, more=more)
        assert "complete" in out
        steps = {phase.name: str(phase.steps) for phase in load_config(recipe).phases}
        assert_same_bytes(root, tmp_path / "local", steps)
        assert any(path.name.startswith(newest.name) for path in (root / "pretrain" / "unreadable").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("scheme, kills", [("gs", ("log", "arrays", "manifest")), ("s3", ("manifest",))])
def test_a_run_that_was_killed_on_a_store_ends_as_one_on_a_disk(scheme, kills, request, tmp_path, monkeypatch, capsys):
    """Five and three processes train a tiny recipe, and stop at the writes above: about 80 s and 50 s."""
    monkeypatch.setenv("PE_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    servers = request.getfixturevalue("store_servers")
    with contextlib.contextmanager(new_bucket)(scheme, servers, monkeypatch) as bucket:
        recipe, run = write_recipe(tmp_path / "recipe"), f"{bucket.url}/runs/tiny"
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
        compiled |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        train(recipe, "local", tmp_path, compiled)
        for at in (*kills, ""):
            train(recipe, run, tmp_path, {**compiled, **bucket.environment}, bucket, at)
        root = storage.path("--workdir", run)
        assert_same_bytes(root, tmp_path / "local", {"pretrain": "8", "recalibrate": "6"})
        scores = []
        for where in (run, "local"):
            assert evaluate.main([f"--from={where}", "--suite=needles", "--lengths=16", "--tokens=256"]) == 0
            found = storage.read_records(storage.path("--from", where) / "evaluation" / "needles.jsonl")
            scores.append([record["accuracy"] for record in found])
        assert scores[0] == scores[1] and scores[0]
        assert surgery.main([f"--from={run}/pretrain", f"--to={bucket.url}/dropped", "--drop"]) == 0
        assert open_checkpoint(f"{bucket.url}/dropped").metadata["lineage"][-1]["what"].endswith("nope on layers 0-1")
        assert report.main([run]) == 0
        page = storage.read_bytes(root / "report.html").decode()
        assert "recalibrate" in page and "could not be read" not in page
        assert f"Wrote {run}/report.html" in capsys.readouterr().out
