"""The gauntlet finds what it looks for, its cases are reproducible, and a sample of it is green."""

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tensorstore
from gauntlet import damages, disk_full, kills
from gauntlet.outcome import content, differences
from gauntlet.world import REPOSITORY, Ended, draw, with_sources

from pe_lab.storage.manifest import manifest_of


def write_step(run: Path, step: int, weight: float) -> None:
    """A checkpoint of one array, with its manifest."""
    where = run / "pretrain" / "checkpoints" / str(step)
    (where / "metadata").mkdir(parents=True)
    (where / "metadata" / "metadata").write_text(f'{{"id": "{weight}", "step": {step}}}')
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{where / 'params'}/", "path": "layer/"}}
    array = tensorstore.open(spec, create=True, dtype=tensorstore.float32, shape=[3]).result()
    array.write([0.5, weight, 0.25]).result()
    manifest_of(where, {"step": step}).write(where)


@pytest.fixture
def run(tmp_path):
    for step in (5, 10):
        write_step(tmp_path / "run", step, 1.0)
    (tmp_path / "run/pretrain/metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "seconds": 3.0}\n')
    return tmp_path / "run"


def test_equal_results_do_not_differ(run, tmp_path):
    other = Path(shutil.copytree(run, tmp_path / "other"))
    (other / "pretrain/metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "seconds": 4.0}\n')
    assert differences(content(run), content(other)) == []
    assert any("params layer" in name for name in content(run))


def test_a_changed_weight_record_or_checkpoint_is_a_difference(run, tmp_path):
    expected = content(run)
    for step, weight, wrong in ((10, 1.0 + 2**-23, 1), (5, 2.0, 1), (10, 1.0, 0)):
        shutil.rmtree(run / f"pretrain/checkpoints/{step}")
        write_step(run, step, weight)
        assert len(differences(expected, content(run))) >= wrong
        assert all(f"checkpoints/{step}/params layer" in name for name in differences(expected, content(run)))
        shutil.rmtree(run / f"pretrain/checkpoints/{step}")
        write_step(run, step, 1.0)
    (run / "pretrain/metrics.jsonl").write_text('{"step": 1, "loss": 2.6}\n')
    assert differences(expected, content(run)) == ["pretrain/metrics.jsonl, line 1"]


def test_an_earlier_checkpoint_may_be_missing_and_the_last_may_not(run):
    expected = content(run)
    shutil.rmtree(run / "pretrain/checkpoints/5")
    assert differences(expected, content(run)) == []
    (run / "pretrain/checkpoints/15.saving").mkdir()
    assert differences(expected, content(run)) == ["left over: pretrain/checkpoints/15.saving is too much"]
    data = next((run / "pretrain/checkpoints/10/params").rglob("manifest.ocdbt"))
    data.write_bytes(data.read_bytes()[:-1])
    assert any("pretrain/checkpoints/10/params" in name for name in differences(expected, content(run)))


def test_cases_are_reproducible_and_cover_every_command_and_kind():
    assert draw(0, "kill-1").random() == draw(0, "kill-1").random() != draw(1, "kill-1").random()
    counted = Counter()
    for command, count in kills.cases(100):
        counted[command] += count
    assert counted.total() == 100 and set(counted) == set(with_sources(["evaluate", "surgery", "import"]))
    assert counted["train"] == 60
    chosen = [damages.chosen(0, number) for number in range(60)]
    assert chosen == [damages.chosen(0, number) for number in range(60)]
    assert {target for target, _ in chosen} == set(damages.TARGETS)
    assert {kind for _, kind in chosen} == set(damages.STEP_KINDS)


def test_an_ended_process_is_judged_by_its_status_and_its_messages():
    assert Ended(2, "reading\nerror: no such file\n", 1.0).wrong == ""
    assert Ended(0, "done\n", 1.0).wrong == ""
    assert Ended(2, "reading\n", 1.0).wrong == "0 messages"
    assert Ended(3, "error: a\nerror: b\n", 1.0).wrong == "2 messages"
    assert Ended(1, "Traceback (most recent call last):\n", 1.0).wrong == Ended(-11, "", 1.0).wrong == "traceback"
    assert Ended(None, "", 1.0).wrong == "hang"


def test_a_training_that_is_to_go_on_may_end_at_the_ends_of_a_phase_alone():
    said = "error: Checkpoint {} of '/disk/patient/{}/checkpoints' could not be written ([Errno 28] No space left)."
    for step, phase in ((30, "pretrain"), (20, "recalibrate"), (0, "recalibrate")):
        assert disk_full._ends_a_phase(said.format(step, phase))
    assert not disk_full._ends_a_phase(said.format(20, "pretrain"))
    assert not disk_full._ends_a_phase("error: No space left on device. Free some space, or write elsewhere.")


@pytest.mark.slow
def test_a_sample_is_green(tmp_path):
    """5 kills of a training, 3 damages and 1 full disk. 90 s."""
    argv = ["--kills=5", "--damages=3", "--store-failures=0", "--disk-full=1", f"--out={tmp_path / 'table.md'}"]
    sample = [sys.executable, "-m", "tests.gauntlet", "--seed=0", *argv]
    done = subprocess.run(sample, cwd=REPOSITORY, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert len([line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| kill-")]) == 5
