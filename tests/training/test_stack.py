"""A stack of runs: each cell has the logs and the checkpoints of the same run alone, whatever the others do."""

import contextlib
import dataclasses
import json
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import arrays, compilations_kept, records, tiny, train, train_on_one_device  # noqa: F401

from pe_lab.checkpoints.store import Store
from pe_lab.errors import ConfigError, SaveFailed, TrainingDiverged
from pe_lab.parallel.stopping import Stopped, StopRequests, stop_requests
from pe_lab.parallel.topology import chip_of
from pe_lab.training import fit, loop, stack
from pe_lab.training.plan import plan_here
from pe_lab.training.run import Run
from pe_lab.training.stability import Event, Monitor
from pe_lab.training.stack import PhaseStack, rates, train_together
from pe_lab.training.step import RandomPositions, place_batch

pytestmark = pytest.mark.usefixtures("compilations_kept")

# Three cells that differ in all that is an argument of a step, and in their numbers of steps.
DIFFER = {
    "a": {"seed": 1, "data__seed": 1, "phases__0__optimizer__learning_rate": 1e-2},
    "b": {
        "seed": 2,
        "phases__0__optimizer__warmup_steps": 0,
        "phases__0__optimizer__weight_decay": 0.0,
        "phases__0__positional": "'rope:base=100'",
        "phases__1__optimizer__schedule": "constant",
    },
    "c": {
        "phases__0__steps": 5,
        "phases__0__optimizer__schedule": "wsd",
        "phases__0__optimizer__final_fraction": 0.1,
        "phases__0__optimizer__weight_decay": 0.5,
    },
}


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    train_on_one_device(monkeypatch)


def config_of(directory, name, **more):
    return tiny(directory / "recipe", **{**DIFFER[name], **more})


def stacked(configs, directory):
    """Trains runs together in `directory`/NAME; returns what each has returned or raised."""
    outcomes = {}
    with stop_requests() as stops:
        runs = {n: fit.run_steps(config, directory / n, stops, stacked=True) for n, config in configs.items()}
        train_together(runs, stops, lambda name: contextlib.nullcontext(), outcomes.__setitem__)
    return outcomes


def assert_alike(one, other, phases=("pretrain", "recalibrate")):
    """Two runs have the same logs and checkpoints: losses up to 1e-5, parameters up to a part of an update."""
    for phase in phases:
        left, right = (records(run / phase / "metrics.jsonl") for run in (one, other))
        assert [[*record] for record in left] == [[*record] for record in right]
        for a, b in zip(left, right, strict=True):
            for key, value in a.items():
                if "loss" in key or key == "grad_norm":
                    assert np.isclose(value, b[key], rtol=1e-5, atol=1e-5), (phase, a["step"], key, value, b[key])
                else:
                    assert value == b[key], (phase, a["step"], key)
        steps = [sorted(int(p.name) for p in (run / phase / "checkpoints").iterdir()) for run in (one, other)]
        assert steps[0] == steps[1]
        for item in ("params", "optimizer"):
            a, b = (arrays(run / phase / "checkpoints" / str(steps[0][-1]), item) for run in (one, other))
            assert a.keys() == b.keys()
            for name in a:
                assert np.allclose(a[name], b[name], rtol=1e-3, atol=1e-4), (phase, item, name)
        assert json.loads((other / phase / "phase.json").read_text())["status"] == "complete"


@pytest.fixture(scope="module")
def alone(tmp_path_factory, compilations_kept):  # noqa: F811
    directory = tmp_path_factory.mktemp("alone")
    for name in DIFFER:
        train(config_of(directory, name), directory / name)
    return directory


@pytest.fixture(scope="module")
def together(tmp_path_factory, compilations_kept):  # noqa: F811
    directory = tmp_path_factory.mktemp("together")
    with pytest.MonkeyPatch.context() as patch:
        train_on_one_device(patch)
        outcomes = stacked({name: config_of(directory, name) for name in DIFFER}, directory)
    assert all(isinstance(outcome, Run) for outcome in outcomes.values()), outcomes
    return directory


@pytest.mark.slow
def test_each_cell_is_the_same_run_alone(alone, together):
    """Three cells of two phases, one of which begins its second phase before the others; 60 s, mostly compiling."""
    for name in DIFFER:
        # `alone` was trained by `train_phase`: no ledger, no run.json.
        assert_alike(alone / name, together / name)
        assert (together / name / "run.json").exists() and (together / name / "ledger.jsonl").exists()
        assert not (together / name / "lease.json").exists()
    speed = records(together / "a/pretrain/speed.jsonl")
    assert speed[-1]["step"] == 8 and speed[0]["tokens_per_second"] > 0


@pytest.mark.slow
def test_a_cell_goes_on_alone_and_in_another_stack(alone, together, tmp_path):
    """Cells that were stopped at different steps, and one that is complete."""
    shutil.copytree(together, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "a/recalibrate")
    for step in (6, 8):
        shutil.rmtree(tmp_path / "a/pretrain/checkpoints" / str(step))
    for step in (4, 6):
        shutil.rmtree(tmp_path / "b/recalibrate/checkpoints" / str(step))
    shutil.copytree(tmp_path / "b", tmp_path / "b_alone")
    fit.fit(config_of(tmp_path, "b"), tmp_path / "b_alone")
    assert_alike(alone / "b", tmp_path / "b_alone")
    outcomes = stacked({name: config_of(tmp_path, name) for name in DIFFER}, tmp_path)
    assert all(isinstance(outcome, Run) for outcome in outcomes.values()), outcomes
    for name in DIFFER:
        assert_alike(alone / name, tmp_path / name)


@pytest.mark.slow
def test_cells_that_start_from_checkpoints_of_their_own(alone, tmp_path):
    """As the arms of a claim: one phase from another run's last checkpoint, with another encoding; 15 s."""
    configs = {}
    for name in ("a", "b"):
        config = config_of(tmp_path, name)
        child = dataclasses.replace(config.phases[1], init_from=str(alone / name / "pretrain"))
        configs[name] = dataclasses.replace(config, phases=(child,))
    outcomes = stacked(configs, tmp_path)
    assert all(isinstance(outcome, Run) for outcome in outcomes.values()), outcomes
    for name, config in configs.items():
        fit.fit(config, tmp_path / f"{name}_alone")
        assert_alike(tmp_path / f"{name}_alone", tmp_path / name, ["recalibrate"])
        lineage = json.loads((tmp_path / name / "recalibrate/phase.json").read_text())["lineage"]
        assert str(alone / name) in json.dumps(lineage)


@pytest.mark.slow
def test_a_request_to_stop_lets_all_cells_save(alone, tmp_path, monkeypatch):
    compute = PhaseStack.compute

    def computing(self, calls):
        compute(self, calls)
        if next(iter(calls.values())).step == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(PhaseStack, "compute", computing)
    configs = {name: config_of(tmp_path, name) for name in ("a", "b")}
    outcomes = stacked(configs, tmp_path)
    for name, outcome in outcomes.items():
        assert isinstance(outcome, Stopped) and "stopped at step 3 of 8" in str(outcome)
        assert (tmp_path / name / "pretrain/checkpoints/3").is_dir()
    monkeypatch.undo()
    train_on_one_device(monkeypatch)
    fit.fit(configs["a"], tmp_path / "a")
    monkeypatch.undo()
    log, same = (records(run / "pretrain/metrics.jsonl") for run in (tmp_path / "a", alone / "a"))
    assert [r["loss"] for r in log if "loss" in r] == pytest.approx([r["loss"] for r in same if "loss" in r], abs=1e-5)


def test_a_request_to_stop_before_the_first_step_ends_all_cells(tmp_path, monkeypatch):
    """Where nothing is to be saved, nothing is compiled either, which may take minutes."""
    starting = loop.start_phase

    def start(run, *args):
        if run.workdir.name == "b":
            signal.raise_signal(signal.SIGTERM)
        return starting(run, *args)

    monkeypatch.setattr(loop, "start_phase", start)
    monkeypatch.setattr(PhaseStack, "compute", lambda self, calls: pytest.fail("computed"))
    outcomes = stacked({name: config_of(tmp_path, name) for name in DIFFER}, tmp_path)
    assert all(isinstance(outcome, Stopped) for outcome in outcomes.values()) and len(outcomes) == 3
    assert not list(tmp_path.glob("*/lease.json"))


@pytest.mark.slow
def test_a_cell_that_diverges_or_cannot_save_ends_alone(alone, tmp_path, monkeypatch):
    """Four cells of one phase: the loss of one is not finite, a save of another fails, a third goes back once."""
    save, judge = Store.save, Monitor.judge

    def saving(self, step, *args, **keys):
        if "full" in str(self.directory) and step == 4:
            raise SaveFailed("Checkpoint 4 could not be written (No space left on device).")
        return save(self, step, *args, **keys)

    def judging(self, step, metrics):
        if self._config.on_spike == "rewind" and step == 5 and not seen:
            seen.append(step)
            return Event(step, "rewind", "spike", 9.0, 9.0, None, None)
        return judge(self, step, metrics)

    seen = []
    monkeypatch.setattr(Store, "save", saving)
    monkeypatch.setattr(Monitor, "judge", judging)
    one = config_of(tmp_path, "a").phases[:1]
    configs = {name: dataclasses.replace(config_of(tmp_path, "a"), phases=one) for name in ("well", "full", "back")}
    wild = dataclasses.replace(one[0].optimizer, learning_rate=1e3, weight_decay=1e3)
    wild = dataclasses.replace(one[0], optimizer=wild)
    configs["wild"] = dataclasses.replace(configs["well"], phases=(wild,))
    stability = dataclasses.replace(configs["back"].stability, on_spike="rewind")
    configs["back"] = dataclasses.replace(configs["back"], stability=stability)
    outcomes = stacked(configs, tmp_path)
    assert isinstance(outcomes["wild"], TrainingDiverged) and "lower config.phases.0" in str(outcomes["wild"])
    assert isinstance(outcomes["full"], SaveFailed)
    assert isinstance(outcomes["well"], Run) and isinstance(outcomes["back"], Run) and seen == [5]
    assert_alike(alone / "a", tmp_path / "well", ["pretrain"])
    events = [r for r in records(tmp_path / "back/pretrain/metrics.jsonl") if r.get("event") == "rewind"]
    assert len(events) == 1 and events[0]["step"] == 5
    assert sorted(int(p.name) for p in (tmp_path / "full/pretrain/checkpoints").iterdir()) == [2]


def first_steps(directory, configs):
    """The loops of runs at their first step, and what the step of each is alone: (calls, states, metrics)."""
    stops, calls, found = StopRequests(), {}, {}
    opened = {n: fit.run_steps(config, directory / n, stops, stacked=True) for n, config in configs.items()}
    for name, steps in opened.items():
        call = calls[name] = next(steps)
        state = jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), call.state)  # which is donated
        batch = place_batch(call.batch, call.programs.shardings.batch)
        found[name] = jax.device_get(call.programs.train_step(state, batch, call.inputs))
    return opened, calls, found


RECIPES = {
    "adamw": {},
    "random positions": {"phases__0__random_positions": 40},
    "muon": {  # in bfloat16 its iteration makes 2% of an update of a difference in the last bit
        "phases__0__optimizer__name": "muon",
        "phases__0__optimizer__muon__cautious_decay": True,
        "phases__0__optimizer__muon__dtype": "float32",
    },
    "skips": {"stability__on_spike": "skip", "stability__on_nonfinite": "skip"},
    "micro-batches": {"phases__0__accumulate": 2, "model__loss_chunks": 2, "model__scan": False},
    "multipliers": {"phases__0__optimizer__vector_multiplier": 0.5, "phases__0__positional": "'alibi'"},
    "a learned encoding": {"phases__0__positional": "'rope/with=t5'"},
    "a transition": {"phases__0__transition": "{'start': 'nope', 'until': 0.5}"},
    "gradients twice": {"stability__replay_every": 1},
    "muP": {"model__mup_base_width": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_of_each_recipe_from_the_same_state(recipe, tmp_path):
    """3 s each, mostly compiling. Losses and gradients' norms within 1e-6 of themselves, as 1e-5 of the moments."""
    differ = {"a": {}, "b": {"seed": 3, "data__seed": 3, "phases__0__optimizer__weight_decay": 0.4}}
    differ["b"]["phases__0__optimizer__learning_rate"] = 3e-3
    configs = {n: tiny(tmp_path / "recipe", **RECIPES[recipe], **more) for n, more in differ.items()}
    opened, calls, single = first_steps(tmp_path, configs)
    PhaseStack().compute(calls)
    for name, call in calls.items():
        assert call.cells == 2
        state, metrics = jax.device_get(call.take())
        state, expected = jax.device_get(state.whole()), single[name]
        for key, value in expected[1].items():
            assert np.isclose(metrics[key], value, rtol=1e-6, atol=1e-7), (key, metrics[key], value)
        norm = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected[0].optimizer) if x.dtype.kind == "f")
        for a, b in zip(jax.tree.leaves(state.optimizer), jax.tree.leaves(expected[0].optimizer), strict=True):
            assert a.dtype == b.dtype and np.allclose(a, b, rtol=1e-5, atol=1e-6 * norm)
        rate = configs[name].phases[0].optimizer.learning_rate
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected[0].params), strict=True):
            assert np.abs(a - b).max() <= 0.01 * rate, np.abs(a - b).max()
    for steps in opened.values():
        steps.close()


def test_learning_rates_are_those_of_the_compiled_step_bit_for_bit(tmp_path):
    for name in DIFFER:
        run = plan_here(config_of(tmp_path, name), jax.devices()[:1])
        for phase in run.phases:
            schedule, steps = run.learning_rate(phase), phase.config.steps
            compiled = jax.jit(lambda step, schedule=schedule: -1 * schedule(step))
            assert np.array_equal(-rates(schedule, steps), [compiled(np.int32(n)) for n in range(steps)])


def test_random_positions_are_those_of_a_single_run_bit_for_bit():
    alone = [RandomPositions(90, (seed, 1)).draw(jnp.int32(7), 32) for seed in (0, 5, 2**32 - 1)]
    draw = jax.jit(jax.vmap(lambda seed: RandomPositions(90, (seed, 1)).draw(jnp.int32(7), 32)))
    assert np.array_equal(draw(np.asarray([0, 5, 2**32 - 1], np.uint32)), np.stack(alone))


@pytest.mark.slow
def test_cells_on_a_mesh_of_two_devices(tmp_path, monkeypatch):
    """Two cells on data=2, and on fsdp=2: 20 s."""
    two = lambda config: plan_here(config, jax.devices()[:2])  # noqa: E731
    monkeypatch.setattr(fit, "plan_here", two)
    for axis in ("data", "fsdp"):
        more = {f"mesh__{axis}": 2, "mesh__data": 2 if axis == "data" else 1}
        more |= {"phases__0__steps": 4, "phases__1__steps": 2, "phases__1__optimizer__warmup_steps": 1}
        configs = {name: config_of(tmp_path / axis, name, **more) for name in ("a", "b")}
        outcomes = stacked(configs, tmp_path / axis)
        assert all(isinstance(outcome, Run) for outcome in outcomes.values()), outcomes
        for name, config in configs.items():
            train(config, tmp_path / axis / f"{name}_alone", jax.devices()[:2])
            assert_alike(tmp_path / axis / f"{name}_alone", tmp_path / axis / name)


def test_what_is_no_stack_is_refused(tmp_path, monkeypatch):
    configs = {"a": config_of(tmp_path, "a"), "b": config_of(tmp_path, "b", model__d_ff=48)}
    outcomes = stacked(configs, tmp_path)
    for outcome in outcomes.values():
        assert isinstance(outcome, ConfigError) and "are no stack" in str(outcome)

    chip = chip_of(jax.devices()[0])
    monkeypatch.setattr(stack, "chip_of", lambda device: dataclasses.replace(chip, memory=300_000))
    outcomes = stacked({name: config_of(tmp_path, name) for name in ("a", "c")}, tmp_path / "full")
    assert all("Give at most --stack=" in str(outcome) for outcome in outcomes.values()), outcomes
