"""A whole run on an object store: trained with kills, then everything that commands do with it."""

from __future__ import annotations

import contextlib

import pytest
from object_stores import new_bucket, store_servers  # noqa: F401
from tiny_runs import arrays, finish, start, write_recipe

from pe_lab import evaluate, report, storage


def train(recipe, workdir, cwd, environment, lines=None):
    """Trains to the end; or, with `lines`, until so many with a loss are printed, when the process is killed."""
    process = start(["pe_lab.train", f"--config={recipe}", f"--workdir={workdir}"], cwd, **environment)
    if lines is None:
        return finish([process])[0]
    for line in process.stdout:
        lines -= "loss" in line
        if lines <= 0:
            break
    process.kill()
    process.communicate()
    assert process.returncode == -9


@pytest.mark.slow
@pytest.mark.parametrize("scheme, kills", [("gs", (3, 4, 5)), ("s3", (4,))])
def test_a_run_that_was_killed_on_a_store_ends_as_one_on_a_disk(
    scheme,
    kills,
    store_servers,
    tmp_path,
    monkeypatch,
    capsys,  # noqa: F811
):
    """Five and three processes train a tiny recipe: 60 s and 40 s."""
    monkeypatch.setenv("PE_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with contextlib.contextmanager(new_bucket)(scheme, store_servers, monkeypatch) as bucket:
        recipe, run = write_recipe(tmp_path / "recipe"), f"{bucket.url}/runs/tiny"
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
        compiled |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        train(recipe, "local", tmp_path, compiled)
        for lines in (*kills, None):
            train(recipe, run, tmp_path, {**compiled, **bucket.environment}, lines)
        root, local = storage.path("--workdir", run), tmp_path / "local"
        for phase, last in (("pretrain", "8"), ("recalibrate", "6")):
            metrics = storage.read_log(root / phase / "metrics.jsonl")
            assert metrics == (local / phase / "metrics.jsonl").read_bytes()
            copy = storage.local_copy(root / phase / "checkpoints" / last)
            for item in ("params", "optimizer"):
                found, expected = arrays(copy, item), arrays(local / phase / "checkpoints" / last, item)
                assert found.keys() == expected.keys() and found
                assert all(found[name].tobytes() == expected[name].tobytes() for name in found)

        scores = []
        for where in (run, "local"):
            assert evaluate.main([f"--from={where}", "--suite=needles", "--lengths=16", "--tokens=256"]) == 0
            found = storage.read_records(storage.path("--from", where) / "evaluation" / "needles.jsonl")
            scores.append([record["accuracy"] for record in found])
        assert scores[0] == scores[1] and scores[0]
        assert report.main([run]) == 0
        page = storage.read_bytes(root / "report.html").decode()
        assert "recalibrate" in page and "could not be read" not in page
        assert f"Wrote {run}/report.html" in capsys.readouterr().out
