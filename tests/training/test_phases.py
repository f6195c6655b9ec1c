"""Phases that edit what was before: encodings dropped on some layers, a QK-norm added, and what may not be."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from tiny_runs import compilations_kept, opened, records, tiny, train, trained  # noqa: F401

from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.config import Config, MeshConfig, PhaseConfig
from pe_lab.errors import UserError
from pe_lab.positional import Layer, NoPE, Rope, Yarn, drop, pattern, rescale, rnope_swa
from pe_lab.training.plan import given_layers, plan_phases

pytestmark = pytest.mark.usefixtures("compilations_kept")


def with_phases(config: Config, *phases: PhaseConfig) -> Config:
    return dataclasses.replace(config, phases=phases)


@pytest.fixture
def config(tmp_path):
    return tiny(tmp_path / "recipe", model__layers=4, model__qk_norm="none")


def test_edits_refer_to_the_phase_before(config):
    first, second = config.phases
    chosen = dataclasses.replace(first, positional=pattern(["rope/window=8"] * 3 + ["rope"]))
    dropped = dataclasses.replace(second, positional=drop(layers=range(2, 4)))
    scaled = dataclasses.replace(second, name="scaled", positional=rescale(Yarn(2.0, 300)))
    plans = plan_phases(with_phases(config, chosen, dropped, scaled))
    assert plans[0].layers == (*[Layer(Rope(), 8)] * 3, Layer(Rope()))
    assert plans[1].layers == (*[Layer(Rope(), 8)] * 2, Layer(NoPE(), 8), Layer(NoPE()))
    assert plans[2].layers == (*[Layer(Rope(scaling=Yarn(2.0, 300)), 8)] * 2, Layer(NoPE(), 8), Layer(NoPE()))
    assert [s.rotates for s in plans[1].schedule.structure] == [True, True, False, False]
    swa = plan_phases(with_phases(config, dataclasses.replace(first, positional=rnope_swa(8))))[0]
    assert [layer.window for layer in swa.layers] == [8, 8, 8, None] and swa.layers[3].encoding == NoPE()


def test_an_edit_with_nothing_before_it_says_what_to_do(config):
    first, second = config.phases
    with pytest.raises(UserError, match=r"phases\[0\] .'pretrain'.: drop.*edits the layers of the phase"):
        plan_phases(with_phases(config, dataclasses.replace(first, positional="drop")))
    elsewhere = dataclasses.replace(second, positional=drop(), init_from="runs/nowhere")
    with pytest.raises(UserError, match=r"phases\[1\].*an init_from whose checkpoint exists"):
        plan_phases(with_phases(config, first, elsewhere))
    with pytest.raises(UserError, match=r"drop: there is no layer 4; the model has layers 0 to 3"):
        plan_phases(with_phases(config, first, dataclasses.replace(second, positional=drop([4]))))


@pytest.mark.slow
def test_an_edit_refers_to_the_checkpoint_that_a_phase_starts_from(trained, tmp_path):  # noqa: F811
    config = tiny(tmp_path / "recipe")
    phase = dataclasses.replace(config.phases[1], positional=drop([1]), init_from=str(trained / "pretrain"), steps=3)
    changed = with_phases(config, phase)
    assert plan_phases(changed, given_layers(changed))[0].layers == (Layer(Rope()), Layer(NoPE()))
    last = train(changed, tmp_path / "run")
    assert open_checkpoint(last).layers == (Layer(Rope()), Layer(NoPE()))


@pytest.mark.slow
@pytest.mark.parametrize("init", ["matched", "ones"])
def test_a_phase_adds_a_qk_norm_and_says_what_that_did(config, tmp_path, init):
    first, second = (dataclasses.replace(phase, steps=4) for phase in config.phases)
    normed = with_phases(
        config, first, dataclasses.replace(second, positional=drop(), qk_norm="head", qk_norm_init=init)
    )
    assert [plan.qk_norm for plan in plan_phases(normed)] == ["none", "head"]
    train(normed, tmp_path / "run")
    before = open_checkpoint(tmp_path / "run/pretrain")
    child, after = (open_checkpoint(tmp_path / "run/recalibrate/checkpoints" / step) for step in ("0", "4"))
    assert (before.model.qk_norm, child.model.qk_norm, after.model.qk_norm) == ("none", "head", "head")
    same = {k: v for k, v in child.params["layers"]["attention"].items() if not k.endswith("_norm")}
    for name, weights in same.items():
        np.testing.assert_array_equal(weights, before.params["layers"]["attention"][name])
    assert (child.params["layers"]["attention"]["key_norm"]["scale"] == 1).all() == (init == "ones")
    what = child.metadata["lineage"][-1]["what"]
    assert "rope(base=10000) -> nope on layers 0-3; QK-norm none -> head: loss " in what
    # The first record of the phase is the loss of the normed child. A resumed phase continues from it.
    assert records(tmp_path / "run/recalibrate/metrics.jsonl")[0]["validation_loss"] == pytest.approx(
        float(what.rpartition(" on ")[0].rpartition("-> ")[2]), abs=2e-2
    )
    again = train(normed, tmp_path / "run")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), open_checkpoint(again).params, after.params))


def test_a_qk_norm_stays_with_the_phases_after(config):
    first, second = config.phases
    third = dataclasses.replace(second, name="third")
    fresh = dataclasses.replace(second, name="fresh", init_from="random")
    plans = plan_phases(with_phases(config, first, dataclasses.replace(second, qk_norm="flat"), third, fresh))
    assert [plan.qk_norm for plan in plans] == ["none", "flat", "flat", "none"]
    with pytest.raises(UserError, match=r"phases\[1\].*model.qk_norm is 'flatt'.*'flat'"):
        plan_phases(with_phases(config, first, dataclasses.replace(second, qk_norm="flatt")))


@pytest.mark.slow
def test_a_checkpoint_of_another_qk_norm_needs_the_phases_own(trained, tmp_path):  # noqa: F811
    config = tiny(tmp_path / "recipe", model__qk_norm="none")
    phase = dataclasses.replace(config.phases[1], init_from=str(trained / "pretrain"), steps=3)
    with pytest.raises(UserError, match="qk_norm head -> none.*set the phase's own qk_norm"):
        opened(with_phases(config, phase), tmp_path / "run")
    removed = with_phases(config, dataclasses.replace(phase, qk_norm="none"))
    last = train(removed, tmp_path / "run")
    assert open_checkpoint(last).model.qk_norm == "none"


@pytest.mark.slow
def test_a_qk_norm_is_fitted_alike_on_a_mesh(tmp_path):
    """On fsdp and tensor axes, which shard heads and sequences, constants and losses are those of one device."""
    config = tiny(tmp_path / "recipe", model__qk_norm="none")
    first, second = (dataclasses.replace(phase, steps=3) for phase in config.phases)
    found = {}
    for name, mesh, devices in (("one", {}, 1), ("four", {"fsdp": 2, "tensor": 2}, 4)):
        changed = with_phases(
            dataclasses.replace(config, mesh=MeshConfig(**mesh)),
            first,
            dataclasses.replace(second, positional=drop(), qk_norm="flat"),
        )
        train(changed, tmp_path / name, jax.devices()[:devices])
        child = open_checkpoint(tmp_path / name / "recalibrate/checkpoints/0")
        scale = child.params["layers"]["attention"]["query_norm"]["scale"]
        found[name] = np.asarray(scale), child.metadata["lineage"][-1]["what"]
    scale = found["one"][0]
    assert scale.shape == (2, 2, 8) and len(np.unique(scale.round(4))) == 4  # one constant a head, not one in all
    np.testing.assert_allclose(found["four"][0], found["one"][0], rtol=1e-4)
    losses = {
        name: [float(x) for x in re.findall(r"loss ([\d.]+) -> ([\d.]+)", what)[0]] for name, (_, what) in found.items()
    }
    assert losses["four"] == pytest.approx(losses["one"], abs=2e-4)


def test_a_logit_scale_that_is_no_number_is_refused():
    layer = Layer(NoPE())
    object.__setattr__(layer, "logit_scale", abs)  # Layer(...) itself checks its types, but only under test
    with pytest.raises(UserError, match="Layer.logit_scale is <built-in .*must lie in .*, or be Beta"):
        layer.__post_init__()
