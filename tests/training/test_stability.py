"""Spikes and losses that are not finite: what is one, and that skips and rewinds end in the same bytes after a kill."""

import itertools
import json
import re
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import (  # noqa: F401
    REPOSITORY,
    arrays,
    assert_same_training,
    compilations_kept,
    finish,
    losses,
    opened,
    records,
    start_together,
    tiny,
    train,
    write_recipe,
)

from pe_lab.config import MeshConfig, ModelConfig, OptimizerConfig, StabilityConfig
from pe_lab.data import pipeline as pipeline_module
from pe_lab.errors import ConfigError, TrainingDiverged
from pe_lab.model import Model
from pe_lab.parallel import AxisRules, make_mesh
from pe_lab.positional import Rope, build_schedule, layers
from pe_lab.training import loop
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.stability import (
    MOST_REWINDS,
    MOST_SKIPS,
    Monitor,
    empty_history,
    is_spike,
    push,
)
from pe_lab.training.step import compile_train_step, init_state

pytestmark = pytest.mark.usefixtures("compilations_kept")
BATCH = 8
STEPS = 24


# ---------------------------------------------------------------------------------------------------------------------
# The judgement


@pytest.mark.parametrize("xp", [np, jnp], ids=["host", "device"])
def test_a_spike_is_some_deviations_above_the_last_accepted_steps(xp):
    draw = np.random.default_rng(1)
    losses, norms = draw.normal(3, 0.1, 20).astype(np.float32), draw.normal(1, 0.2, 20).astype(np.float32)
    history = empty_history(8, xp)
    for n, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        if n < 4:  # less than half a window
            assert not is_spike(history, np.float32(1e9), norm, 2.0, xp)
        history = push(history, loss, norm, True, xp)
    history = push(history, np.float32(50), np.float32(50), False, xp)  # refused: leaves no trace
    assert int(history.count) == 8

    def limit(values):
        return statistics.mean(map(float, values[-8:])) + 2.0 * statistics.stdev(map(float, values[-8:]))

    calm = np.float32(0)
    for values, judge in (
        (losses, lambda x: is_spike(history, np.float32(x), calm, 2.0, xp)),
        (norms, lambda x: is_spike(history, calm, np.float32(x), 2.0, xp)),
    ):
        assert not judge(limit(values) - 1e-4) and judge(limit(values) + 1e-4)
    for nothing in (np.float32("nan"), calm):
        assert not is_spike(history, nothing, calm, 2.0, xp)


def test_a_monitor_that_was_saved_goes_on_as_one_that_was_not():
    config = StabilityConfig(window=16)
    draw = np.random.default_rng(0)
    metrics = [{"loss": float(np.float32(x)), "grad_norm": float(np.float32(x * x))} for x in draw.normal(2, 0.3, 80)]
    metrics[60]["loss"] = 9.0
    whole, events = Monitor(config), []
    for step, each in enumerate(metrics):
        events.append(whole.judge(step, each))
    for cut in (1, 7, 40, 60, 61):
        first = Monitor(config)
        found = [first.judge(step, metrics[step]) for step in range(cut)]
        second = Monitor(config, json.loads(json.dumps(first.state())))
        found += [second.judge(step, metrics[step]) for step in range(cut, 80)]
        assert found == events
        assert second.state() == whole.state()
    assert [event.step for event in events if event] == [60]
    assert events[60].action == "warn" and "loss 9" in events[60].sentence


@pytest.mark.parametrize(
    ("key", "value"), [("window", 3), ("rewind_batches", 0), ("replay_every", -1), ("spike_sigma", 0)]
)
def test_senseless_settings_are_refused(tmp_path, key, value):
    with pytest.raises(ConfigError, match=rf"stability\.{key} is "):
        tiny(tmp_path, **{f"stability__{key}": value})


# ---------------------------------------------------------------------------------------------------------------------
# The compiled step

SHAPE = ModelConfig(64, 2, 16, 32, 2, 2, dtype="float32", qk_norm="head")


def compiled(policy):
    model = Model(SHAPE)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=0), 20, model.axes)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    step = compile_train_step(model, optimizer, mesh, AxisRules(), 1, None, None, policy)
    return step, init_state(model, optimizer, model.init(jax.random.key(0)), policy)


def random_batch(number: int, weight: float = 1.0) -> dict[str, jax.Array]:
    windows = np.random.default_rng(number).integers(0, 64, (4, 17)).astype(np.int32)
    weights = np.full((4, 16), weight, np.float32)
    return {"tokens": jnp.array(windows[:, :-1]), "targets": jnp.array(windows[:, 1:]), "weights": jnp.array(weights)}


def leaves(state):
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}


@pytest.mark.slow
def test_a_step_that_is_not_skipped_is_that_of_no_policy_and_a_skipped_one_changes_nothing():
    schedule = build_schedule(layers(Rope(), 2), 2, 2, 8)
    plain, one = compiled(None)
    guarded, other = compiled(StabilityConfig(on_nonfinite="skip", on_spike="skip", spike_sigma=6.0, window=8))
    assert jax.tree.structure(one.history) == jax.tree.structure(())  # the step without a policy has no history
    for number in range(4):
        one, metrics = plain(one, random_batch(number), schedule)
        other, guarded_metrics = guarded(other, random_batch(number), schedule)
        assert int(guarded_metrics.pop("skipped")) == 0
        # XLA fuses another program, and rounds some moments otherwise in the last bit (docs/decisions.md).
        theirs = leaves((other[:3], guarded_metrics))
        for name, mine in leaves((one[:3], metrics)).items():
            np.testing.assert_allclose(mine, theirs[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert int(other.history.count) == 4
    before = leaves(other)
    other, metrics = guarded(other, random_batch(9, weight=float("nan")), schedule)
    assert int(metrics["skipped"]) == 1 and not np.isfinite(metrics["loss"])
    changed = {path for path, array in leaves(other).items() if array.tobytes() != before[path].tobytes()}
    # The step, and the place in the schedule of the learning rate: the run ends where it was planned to.
    assert len(changed) == 2 and ".step" in changed and all(before[path].shape == () for path in changed)


@pytest.mark.slow
def test_a_step_that_may_skip_overwrites_the_moments_without_copying_them():
    step, state = compiled(StabilityConfig(on_nonfinite="skip", on_spike="skip", spike_sigma=6.0, window=8))
    schedule = build_schedule(layers(Rope(), 2), 2, 2, 8)
    program = step.lower(state, random_batch(0), schedule).compile().as_text()
    assert re.findall(r"\w+\[[\d,]+\]\S* copy\(%state_optimizer\w+", program) == []


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs. Windows of needles come in the order of their numbers, so batch b has the windows 8 b to 8 b + 7.


def poison(monkeypatch, batches: dict[int, str]) -> None:
    """Makes batches of the training data bad: nan has weights that are no numbers, wild has other targets."""
    gather = pipeline_module.gather_batch

    def poisoned(windows, source, window, *args):
        found = gather(windows, source, window, *args)
        for row, number in enumerate(window):
            kind = batches.get(int(number) // BATCH)
            if kind == "nan":
                found["weights"][row] = np.nan
            elif kind == "wild":
                found["targets"][row] = 7  # never met
        return found

    monkeypatch.setattr(pipeline_module, "gather_batch", poisoned)


PHASES = (
    f"[{{'name': 'pretrain', 'steps': {STEPS}, 'positional': 'rope', 'sequence_length': 16, 'batch_size': {BATCH}, "
    "'optimizer': {'learning_rate': 0.01, 'warmup_steps': 2}}]"
)


def config(directory: Path, steps: int = STEPS, every: int = 5, **stability):
    phases = PHASES.replace(f"'steps': {STEPS}", f"'steps': {steps}")
    keys = {f"stability__{key}": value for key, value in {"window": 8, **stability}.items()}
    return tiny(directory, phases=phases, checkpoint__every_steps=every, checkpoint__keep=20, **keys)


class Killed(Exception):
    """Stands for SIGKILL."""


def train_killed_at(monkeypatch, settings, workdir: Path, number: int) -> None:
    """Trains until the `number`-th step of this process is about to run."""
    compile_train_step, count = loop.compile_train_step, itertools.count(1)

    def compiling(*args):
        step = compile_train_step(*args)

        def counted(*args):
            if next(count) == number:
                raise Killed
            return step(*args)

        return counted

    with monkeypatch.context() as patch:
        patch.setattr(loop, "compile_train_step", compiling)
        with pytest.raises(Killed):
            train(settings, workdir)


def events(run: Path) -> list[dict]:
    return [record for record in records(run / "pretrain/metrics.jsonl") if "event" in record]


def final(run: Path) -> dict[str, bytes]:
    return {k: v.tobytes() for k, v in arrays(run / f"pretrain/checkpoints/{STEPS}", "params").items()}


@pytest.mark.slow  # 5 s
def test_a_rewound_run_is_one_that_never_met_the_batch(tmp_path, monkeypatch):
    settings = config(tmp_path / "recipe", on_nonfinite="rewind", on_spike="rewind")
    with monkeypatch.context() as patch:
        opening = loop.open_pipeline
        patch.setattr(loop, "open_pipeline", lambda *args: (found := opening(*args), found.leave_out([6, 17]))[0])
        train(settings, tmp_path / "without")
    poison(monkeypatch, {6: "nan", 17: "wild"})
    train(settings, tmp_path / "run")
    assert final(tmp_path / "run") == final(tmp_path / "without")
    first, second = events(tmp_path / "run")
    assert (first["step"], first["event"], first["cause"], first["batches"]) == (7, "rewind", "nonfinite", [6])
    assert first["at"]["loss"] == "nan"
    # Batch 17 is the 17th after batch 6 was left out.
    assert (second["step"], second["event"], second["cause"], second["batches"]) == (17, "rewind", "spike", [17])
    assert second["at"]["loss"] > second["before"]["loss"] + 1
    plain = [r for r in records(tmp_path / "run/pretrain/metrics.jsonl") if "event" not in r]
    assert plain == records(tmp_path / "without/pretrain/metrics.jsonl")

    # What a person looks at: the sequences themselves.
    looked_at = records(tmp_path / "run/pretrain/spikes.jsonl")
    assert [(r["batch"], r["sequence"], r["window"]) for r in looked_at] == [
        (b, n, BATCH * b + n) for b in (6, 17) for n in range(BATCH)
    ]
    run = opened(settings, tmp_path / "x")
    with_all = loop.open_pipeline(run.plan, run.phases[0])
    for batch in range(18):
        expected = next(with_all)["tokens"]
        if batch in (6, 17):
            mine = [r["tokens"][:-1] for r in looked_at if r["batch"] == batch]
            np.testing.assert_array_equal(mine, expected)
    with_all.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "bad"),
    [
        ({"on_nonfinite": "rewind", "on_spike": "rewind"}, {6: "nan", 8: "wild", 17: "wild"}),
        ({"on_nonfinite": "rewind", "rewind_batches": 3}, {1: "nan", 13: "nan"}),
        ({"on_nonfinite": "skip", "on_spike": "skip"}, {6: "nan", 9: "nan", 17: "wild"}),
        ({"on_nonfinite": "skip"}, {9: "nan", 17: "wild"}),
        ({}, {17: "wild"}),
    ],
    ids=["rewind", "rewind 3", "skip", "skip and warn", "warn"],
)
def test_a_kill_anywhere_ends_in_the_same_bytes(tmp_path, monkeypatch, policy, bad):
    """Each policy trains 24 steps once undisturbed and once in six pieces: 12 s."""
    poison(monkeypatch, bad)
    settings = config(tmp_path / "recipe", **policy)
    train(settings, tmp_path / "whole")
    found = events(tmp_path / "whole")
    assert sorted({record["cause"] for record in found}) == sorted(
        {"nan": "nonfinite", "wild": "spike"}[kind] for kind in set(bad.values())
    )
    for number in (3, 7, 9, 8, 9):
        train_killed_at(monkeypatch, settings, tmp_path / "killed", number)
    train(settings, tmp_path / "killed")
    assert_same_training(tmp_path / "whole", tmp_path / "killed", ["pretrain"])
    if "skip" in policy.values() or "rewind" in policy.values():
        spikes = [(tmp_path / run / "pretrain/spikes.jsonl").read_bytes() for run in ("whole", "killed")]
        assert spikes[0] == spikes[1] != b""
    else:
        assert not (tmp_path / "whole/pretrain/spikes.jsonl").exists()


@pytest.mark.slow
def test_a_skipped_step_leaves_the_weights_and_the_next_steps_go_on(tmp_path, monkeypatch):
    """Trains two runs of 24 steps: 4 s."""
    poison(monkeypatch, {6: "nan", 17: "wild"})
    settings = config(tmp_path / "recipe", every=1, on_nonfinite="skip", on_spike="skip")
    train(settings, tmp_path / "run")
    assert [(r["step"], r["event"], r["cause"], r["batches"]) for r in events(tmp_path / "run")] == [
        (7, "skip", "nonfinite", [6]),
        (18, "skip", "spike", [17]),
    ]
    for before, after, same in ((6, 7, True), (7, 8, False), (17, 18, True), (16, 17, False)):
        one, other = (arrays(tmp_path / f"run/pretrain/checkpoints/{step}", "params") for step in (before, after))
        assert all(one[name].tobytes() == other[name].tobytes() for name in one) == same
    assert all(
        np.isfinite(array).all()
        for array in arrays(tmp_path / f"run/pretrain/checkpoints/{STEPS}", "optimizer").values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_a_run_that_only_meets_bad_batches_stops_and_says_so(tmp_path, monkeypatch, action):
    """Trains 17 steps, or 11 times five: 5 s."""
    poison(monkeypatch, dict.fromkeys(range(7, 100), "nan"))
    settings = config(tmp_path / "recipe", on_nonfinite=action)
    expected = {
        "skip": rf"{MOST_SKIPS} updates in a row were skipped, up to step {7 + MOST_SKIPS} of 'pretrain'",
        "rewind": rf"At step 8: loss nan.*for the {MOST_REWINDS + 1}th time without a new one",
    }
    with pytest.raises(TrainingDiverged, match=expected[action]):
        train(settings, tmp_path / "run")


@pytest.mark.slow
def test_two_processes_rewind_as_one_does(tmp_path):
    """Each process meets its own half of a bad batch, and both go back: three processes; 55 s beside other work."""
    (tmp_path / "poisoned.py").write_text(
        "import pytest, sys\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(REPOSITORY / 'tests')!r}]\n"
        "from test_stability import poison\n"
        "from pe_lab.train import main\n"
        "poison(pytest.MonkeyPatch(), {6: 'nan', 17: 'wild'})\n"
        "main()\n"
    )
    settings = {"on_nonfinite": "rewind", "on_spike": "rewind", "window": 8}
    options = [f"--config.stability.{key}={value}" for key, value in settings.items()]
    options += [f"--config={write_recipe(tmp_path / 'recipe')}", f"--config.phases={PHASES}"]
    for count, run in ((1, "one"), (2, "two")):
        finish(start_together(["poisoned", f"--workdir={run}", *options], [tmp_path] * count))
    one, two = ([(e["step"], e["cause"], e["batches"]) for e in events(tmp_path / run)] for run in ("one", "two"))
    assert one == two == [(7, "nonfinite", [6]), (17, "spike", [17])]
    spikes = [(tmp_path / run / "pretrain/spikes.jsonl").read_bytes() for run in ("one", "two")]
    assert spikes[0] == spikes[1] != b""
    np.testing.assert_allclose(losses(tmp_path / "two/pretrain"), losses(tmp_path / "one/pretrain"), rtol=1e-5)
