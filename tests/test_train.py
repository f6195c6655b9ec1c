"""`python -m pe_lab.train`: its files, its messages, and the input that it refuses."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import compilations_kept, fingerprint, train_on_one_device, write_recipe  # noqa: F401

from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.checkpoints.locating import steps_in
from pe_lab.data.tokenizers import load_saved_tokenizer
from pe_lab.errors import TrainingDiverged
from pe_lab.parallel.stopping import Stopped
from pe_lab.train import main
from pe_lab.training import fit

pytestmark = pytest.mark.usefixtures("compilations_kept")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture
def one_device(monkeypatch):
    train_on_one_device(monkeypatch)


SHORT = [
    "--config.checkpoint.every_steps=3",
    "--config.checkpoint.keep=1",
    "--config.checkpoint.milestones=[4]",
    "--config.log.validate_every_steps=3",
]


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory, compilations_kept):  # noqa: F811
    workdir = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        train_on_one_device(patch)
        assert main([f"--config={recipe}", f"--workdir={workdir}", *SHORT]) == 0
    return workdir


def test_a_run_says_what_it_was(finished, recipe):
    run = json.loads((finished / "run.json").read_text())
    assert run["name"] == "tiny" and run["config"]["phases"][0]["steps"] == 8
    assert run["command"].startswith(f"python -m pe_lab.train --config={recipe} --workdir=")
    assert run["command"].endswith("--config.log.validate_every_steps=3")
    assert {"python", "jax", "flax", "optax", "orbax-checkpoint", "grain"} <= run["versions"].keys()
    assert run["machine"]["platform"] == "cpu" and run["machine"]["cpus"] >= 1
    assert load_saved_tokenizer(finished / "tokenizer").vocab_size > 255
    assert sorted(p.name for p in finished.iterdir()) == [
        "ledger.jsonl",
        "pretrain",
        "recalibrate",
        "run.json",
        "tokenizer",
    ]


def test_milestones_are_saved_and_kept(finished):
    """Step 4 is no multiple of every_steps, and keep=1 deletes 3 and 6."""
    saved = {phase: steps_in(finished / phase / "checkpoints") for phase in ("pretrain", "recalibrate")}
    assert saved == {"pretrain": [4, 8], "recalibrate": [4, 6]}


@pytest.mark.slow
def test_a_branch_starts_at_a_milestone(finished, recipe, one_device, tmp_path):
    """As drope_16b:from=... does at the milestones of table1."""
    start = f"'init_from': '{finished}/pretrain/checkpoints/4', 'positional': 'nope'"
    shape = "'sequence_length': 16, 'batch_size': 8, 'optimizer': {'warmup_steps': 1}"
    phases = f"--config.phases=[{{'name': 'recalibrate', 'steps': 2, {start}, {shape}}}]"
    assert main([f"--config={recipe}", f"--workdir={tmp_path / 'run'}", phases]) == 0
    lineage = open_checkpoint(tmp_path / "run").metadata["lineage"]
    assert [entry["what"].split(" with ")[0] for entry in lineage[1:]] == [
        "trained 4 steps of 'pretrain'", "rope(base=10000) -> nope on layers 0-1", "trained 2 steps of 'recalibrate'"
    ]  # fmt: skip


def test_a_cpu_has_no_mfu(finished):
    phase = json.loads((finished / "pretrain" / "phase.json").read_text())
    assert (phase["peak_flops"], phase["peak_source"]) == (None, "unknown for a CPU")
    speed = [json.loads(line) for line in (finished / "pretrain" / "speed.jsonl").read_text().splitlines()]
    assert speed and all(record["mfu_full"] is record["mfu_causal"] is None for record in speed)


def test_a_diverged_loss_is_no_bad_input(recipe, one_device, tmp_path, monkeypatch, capsys):
    def diverge(*args):
        raise TrainingDiverged("The loss is nan.")

    monkeypatch.setattr(fit, "train_phase", diverge)
    assert main([f"--config={recipe}", f"--workdir={tmp_path / 'run'}"]) == 1
    assert capsys.readouterr().err.endswith("error: The loss is nan.\n")


def test_a_run_that_was_stopped_and_saved_is_neither_complete_nor_failed(
    recipe, one_device, tmp_path, monkeypatch, capsys
):
    def stop(*args):
        raise Stopped("saved; run it again to continue")

    monkeypatch.setattr(fit, "train_phase", stop)
    assert main([f"--config={recipe}", f"--workdir={tmp_path / 'run'}"]) == 75  # EX_TEMPFAIL of sysexits.h
    assert capsys.readouterr().out.endswith("tiny: saved; run it again to continue\n")


def test_the_same_command_again_says_that_all_is_done(finished, recipe, one_device, capsys):
    before = fingerprint(finished)
    assert main([f"--config={recipe}", f"--workdir={finished}", *SHORT]) == 0
    out = capsys.readouterr().out
    assert "pretrain: complete at step 8, nothing to do" in out and "tiny: complete" in out
    after = fingerprint(finished)
    assert {k for k in before | after if before.get(k) != after.get(k)} <= {"run.json"}


def test_a_damaged_tokenizer_of_a_run_is_written_anew(finished, recipe, one_device, tmp_path, capsys):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    file = max((copy / "tokenizer").iterdir(), key=lambda path: path.stat().st_size)
    before = file.read_bytes()
    file.write_bytes(before[: len(before) // 2])
    assert main([f"--config={recipe}", f"--workdir={copy}"]) == 0
    assert "tokenizer' is damaged; it is now 'tokenizer.damaged-" in capsys.readouterr().out
    assert file.read_bytes() == before and main([f"--config={recipe}", f"--workdir={copy}"]) == 0


def test_another_config_keeps_out_of_its_workdir(finished, recipe, one_device, capsys):
    before = fingerprint(finished)
    assert main([f"--config={recipe}", f"--workdir={finished}", "--config.model.d_ff=9", "--config.seed=1"]) == 2
    err = capsys.readouterr().err
    assert (
        "belongs to another config" in err and "model.d_ff: 32 there, 9 here" in err and "seed: 0 there, 1 here" in err
    )
    assert err.count("\n") == 1 and err.startswith("error: ")
    assert fingerprint(finished) == before


@pytest.mark.slow
def test_runs_lie_under_their_name_by_default(recipe, one_device, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one_phase = (
        "[{'name': 'only', 'steps': 2, 'sequence_length': 16, 'batch_size': 8, 'optimizer': {'warmup_steps': 1}}]"
    )
    assert main([f"--config={recipe}", "--config.name=mine", f"--config.phases={one_phase}"]) == 0
    assert (tmp_path / "runs" / "mine" / "only" / "checkpoints" / "2").is_dir()


TEXT = "[{{'source': 'text:{}'}}]"
BAD = {
    "unknown key": (["--config.phase.0.steps=3"], "config has no key 'phase'. Did you mean 'phases'?"),
    "unknown nested key": (["--config.phases.0.optimizer.beta1=3"], "config.phases[0].optimizer has no key 'beta1'"),
    "wrong type": (["--config.model.layers=two"], "config.model.layers is 'two'; it must be of type int"),
    "no such item": (["--config.phases.5.steps=3"], "'5' is not one of the 2 items"),
    "no value": (["--config.seed"], "give a value"),
    "odd head_dim": (["--config.model.head_dim=7"], "model.head_dim is 7; it must be even"),
    "kv heads": (["--config.model.heads=4", "--config.model.kv_heads=3"], "kv_heads must divide heads"),
    "heads do not divide": (["--config.model.heads=6", "--config.model.kv_heads=6"], "does not divide into 6 heads"),
    "no kv heads": (["--config.model.kv_heads=0"], "config.model.kv_heads is 0; it must be positive"),
    "dtype": (["--config.model.dtype=float16"], "must be float32 or bfloat16"),
    "remat": (["--config.model.remat=some"], "model.remat is 'some'. Allowed: auto, dots"),
    "batch and mesh": (["--config.phases.1.batch_size=12"], "config.phases[1] ('recalibrate'): batch_size 12"),
    "micro-batches": (["--config.phases.0.accumulate=2"], "Make batch_size a multiple of 16"),
    "mesh": (["--config.mesh.data=3"], "data * fsdp * tensor * context = 8"),
    "two free axes": (["--config.mesh.fsdp=-1"], "at most one is -1"),
    "uneven cut": (["--config.mesh.tensor=2", "--config.model.d_ff=33"], "does not divide over 2 devices"),
    "warm-up": (["--config.phases.1.optimizer.warmup_steps=6"], "('recalibrate'): optimizer.warmup_steps is 6"),
    "learning-rate schedule": (["--config.phases.0.optimizer.schedule=linear"], "must be cosine, wsd or constant"),
    "steps": (["--config.phases.0.steps=0"], "steps is 0; it must be positive"),
    "interval": (["--config.log.every_steps=0"], "config.log.every_steps is 0; it must be positive"),
    "checkpoints": (["--config.checkpoint.keep=0"], "config.checkpoint.keep is 0; it must be positive"),
    "milestone": (["--config.checkpoint.milestones=[0]"], "config.checkpoint.milestones[0] is 0; it must be positive"),
    "start of the QK-norm": (["--config.phases.1.qk_norm_init=zeros"], "qk_norm_init is 'zeros'"),
    "no phases": (["--config.phases=[]"], "each phase needs a name of its own"),
    "two of a name": (["--config.phases.1.name=pretrain"], "each phase needs a name of its own"),
    "a name that is a path": (
        ["--config.phases.1.name=a/b"],
        "config.phases[1].name is 'a/b'; a directory gets",
    ),
    "a hidden name": (["--config.phases.1.name=.b"], "config.phases[1].name is '.b'; a directory gets this name"),
    "a name that leads out": (["--config.name=../../x"], "config.name is '../../x'; a directory gets this name"),
    "encoding": (["--config.phases.0.positional=roep"], "'rope'? One of your own is registered by the file"),
    "pattern": (["--config.phases.1.positional=['rope','nope','rope']"], "does not tile 2 layers"),
    "missing start": (["--config.phases.0.init_from=nowhere"], "There is no checkpoint at 'nowhere'"),
    "missing corpus": ([f"--config.data.sources={TEXT.format('nowhere/*.txt')}"], "nowhere/*.txt"),
    "empty corpus": ([f"--config.data.sources={TEXT.format('empty.txt')}"], "empty"),
    "no such source": (["--config.data.sources=[{'source': 'fineweb'}]"], "fineweb"),
    "no sources": (["--config.data.sources=[]"], "data.sources is empty"),
    "needles' option": (["--config.data.sources.0.options.pair=2"], "Did you mean 'pairs'?"),
    "needles' window": (["--config.phases.1.sequence_length=4"], "sequence_length=4 is too short for needles"),
    "text window": (
        [f"--config.data.sources={TEXT.format('short.txt')}", "--config.data.cache_dir=../cache"],
        "less than one window of sequence_length=16",
    ),
    "vocabulary": (["--config.model.vocab_size=128"], "config.model.vocab_size is 128, but the data has"),
    "workdir is a file": (["--workdir=empty.txt"], "is a file; give a directory"),
    "workdir is a bucket": (["--workdir=gs://bucket"], "is a whole bucket; give a directory in it"),
    "workdir is no run": (["--workdir=photos"], "holds cat.jpg and no run.json"),
}


@pytest.mark.parametrize(("arguments", "says"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_writes_nothing(recipe, tmp_path, monkeypatch, capsys, arguments, says):
    here = tmp_path / "here"
    (here / "photos").mkdir(parents=True)
    (here / "photos" / "cat.jpg").touch()
    (here / "empty.txt").touch()
    (here / "short.txt").write_text("short")
    monkeypatch.chdir(here)
    before = fingerprint(here)
    assert main([f"--config={recipe}", *arguments]) == 2
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if not line.startswith("preparing ")]
    assert len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0], err
    assert fingerprint(here) == before


def test_there_is_no_such_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--config=nowhere.py"]) == 2
    assert "there is no file 'nowhere.py'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_source_of_another_shape_is_refused(finished, recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    start = f"--config.phases.0.init_from={finished / 'pretrain'}"
    assert main([f"--config={recipe}", start, "--config.model.layers=4"]) == 2
    assert "is a model of another shape: layers 2 -> 4" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
