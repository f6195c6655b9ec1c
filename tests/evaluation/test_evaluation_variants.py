import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import tiny

from pe_lab.errors import UserError
from pe_lab.evaluation import targets
from pe_lab.evaluation.command_line import parse_variants
from pe_lab.evaluation.variants import (
    LABEL_WIDTH,
    Subject,
    all_variants,
    layers_under,
    model_name,
    paper_coefficient,
    parse_description,
    possible_variants,
    short_description,
    variants_of,
)
from pe_lab.model import Model
from pe_lab.positional import NTK, PI, Alibi, Beta, Layer, NoPE, Rope, Yarn, build_schedule, frequencies, layers
from pe_lab.results.variants import label

ROPE = layers(Rope(base=5000.0), 3)
NOPE = layers(NoPE(), 3)


@pytest.mark.parametrize(("method", "scaling"), [("PI", PI(4.0)), ("NTK", NTK(4.0)), ("YaRN", Yarn(4.0, 128))])
def test_a_stretch_is_the_scaling_of_the_length_over_the_training_length(method, scaling):
    schedule = build_schedule(layers_under(method, ROPE, 512, 128), 2, 1, 16)
    inv_freq, gain = frequencies(Rope(base=5000.0, scaling=scaling), 16)
    np.testing.assert_allclose(schedule.inv_freq, np.broadcast_to(inv_freq, (3, 2, 8)), rtol=1e-6)
    np.testing.assert_allclose(schedule.gain, np.broadcast_to(gain, (3, 2, 8)), rtol=1e-6)
    plain = build_schedule(ROPE, 2, 1, 16)
    assert not np.allclose(schedule.inv_freq, plain.inv_freq, rtol=1e-3)


def test_pi_divides_every_frequency_by_the_factor():
    stretched, plain = (build_schedule(x, 1, 1, 8) for x in (layers_under("PI", ROPE, 300, 100), ROPE))
    np.testing.assert_allclose(np.asarray(plain.inv_freq) / stretched.inv_freq, 3, rtol=1e-6)


@pytest.mark.parametrize("method", ["as trained", "cropped", "PI", "NTK", "YaRN", "beta"])
@pytest.mark.parametrize("length", [50, 100])
def test_up_to_the_training_length_every_method_leaves_the_model_as_it_is(method, length):
    for given in (ROPE, NOPE):
        assert layers_under(method, given, length, 100, beta=1.7) == given


def test_beta_scales_the_logits_of_every_layer():
    scaled = (Layer(NoPE()), Layer(NoPE(), logit_scale=2.0))
    assert [x.logit_scale for x in layers_under("beta", scaled, 200, 100, beta=1.5)] == [1.5, 3.0]


def test_which_methods_make_sense():
    assert possible_variants(ROPE, 100) == ("as trained", "cropped", "PI", "NTK", "YaRN", "beta", "dropped")
    assert possible_variants(NOPE, 100) == ("as trained", "beta", "paper beta")
    assert possible_variants(layers(Alibi(), 2), 100) == ("as trained",)
    # A scale of its own is not multiplied by another, nor replaced by a fit of what it leaves.
    scaled = tuple(dataclasses.replace(layer, logit_scale=Beta(0.1, 100)) for layer in NOPE)
    assert possible_variants(scaled, 100) == ("as trained",)
    assert possible_variants(layers(Rope(fraction=0.0), 2), 100) == ("as trained",)
    # Nothing rotates over distances that training did not show.
    swa = (Layer(Rope(), window=64), Layer(NoPE()))
    assert possible_variants(swa, 100) == ("as trained", "cropped", "beta", "dropped")
    assert possible_variants((Layer(Rope()), Layer(Alibi())), 100) == (
        "as trained",
        "cropped",
        "PI",
        "NTK",
        "YaRN",
        "dropped",
    )
    assert possible_variants((Layer(Rope(scaling=PI(2.0))),), 100) == ("as trained", "cropped", "dropped")


def test_a_scale_that_only_the_dropped_model_has_is_not_asked_of_the_other(monkeypatch):
    rope, dropped = (Subject(tiny.language_model(tiny.checkpoint(one)), "tiny", "x") for one in (Rope(), NoPE()))
    fitted = {id(dropped.checkpoint): Beta(0.1, 16)}
    monkeypatch.setattr("pe_lab.evaluation.variants.read_logit_scale", lambda checkpoint: fitted.get(id(checkpoint)))
    assert [one.subject for one in all_variants([rope, dropped], ["beta"], [])] == [dropped]
    fitted.clear()
    with pytest.raises(UserError, match="no fitted logit scale"):
        all_variants([rope, dropped], ["beta"], [])


def test_a_layer_with_a_short_window_is_not_stretched():
    mixed = (Layer(Rope(), window=64), Layer(Rope(), window=200), Layer(Rope()), Layer(NoPE()))
    read = layers_under("PI", mixed, 400, 100)
    assert read[0] == mixed[0] and read[3] == mixed[3]
    assert read[1].encoding.scaling == read[2].encoding.scaling == PI(4.0)


def test_model_names_and_labels():
    dropped = ["trained 5 steps of 'pretrain' with rope", "rope(base=10000) -> nope on layers 0-2"]
    assert model_name(ROPE) == "RoPE"
    assert model_name(NOPE, dropped[:1]) == "NoPE"
    assert model_name(NOPE, dropped) == "DroPE"
    assert model_name(layers(Alibi(), 2)) == "ALiBi"
    assert model_name((Layer(Rope()), Layer(NoPE())), dropped) == "RoPE/NoPE"
    assert model_name(layers(Rope(scaling=Yarn(2.0, 64)), 2)) == "RoPE (YaRN 2)"
    assert label("RoPE", "YaRN") == "RoPE + YaRN"
    assert label("RoPE", "cropped") == "RoPE, cropped context"
    assert label("DroPE", "beta") == "DroPE, β"
    assert label("DroPE", "as trained") == "DroPE"


def test_parsing_methods():
    assert parse_variants("as-trained, PI,yarn,pi") == ("as trained", "PI", "YaRN")
    with pytest.raises(UserError, match="Did you mean 'yarn'"):
        parse_variants("yarm")
    with pytest.raises(UserError, match="empty"):
        parse_variants(" , ")


@pytest.mark.parametrize(
    ("lineage", "coefficient"),
    [
        (["trained 5 steps of 'pretrain' with rope(base=10000)", tiny.DROPPED], 0.412),
        (["converted from hf:SmolLM-360M", tiny.DROPPED, "trained 5 steps of 'recalibrate' with nope"], 0.103),
        (["read from hf:SmolLM-DroPE", tiny.DROPPED], 0.103),
    ],
)
def test_the_papers_scale_follows_the_lineage(lineage, coefficient):
    """DroPE, appendix C.2: 0.412 for its model trained from scratch, 0.103 for SmolLM-DroPE."""
    assert paper_coefficient(lineage) == coefficient
    dropped = Subject(
        tiny.language_model(tiny.checkpoint(NoPE(), lineage=lineage)), "tiny", "recalibrate/checkpoints/3"
    )
    (variant,) = variants_of(dropped, ["paper beta"], [], lambda variant: None)
    assert variant.label == f"DroPE, paper's β (c = {coefficient})" and variant.name == "paper beta"
    (scale,) = {layer.logit_scale for layer in variant.layers_at(4 * tiny.LENGTH)}
    assert scale == pytest.approx(1 + coefficient * np.log(4))


def test_labels_of_descriptions_are_short():
    subject = Subject(tiny.language_model(tiny.checkpoint()), "tiny", "pretrain/checkpoints/3")
    assert parse_description(subject, "rope:base=500").label == "RoPE with rope:base=500"
    assert parse_description(subject, "yarn:factor=2").layers[0].encoding.scaling == Yarn(2, tiny.LENGTH)
    named = parse_description(subject, "half:rope:base=500+nope")
    assert (named.label, named.name) == ("RoPE with half", "rope:base=500+nope")
    assert named.layers == parse_description(subject, "rope:base=500+nope").layers
    with pytest.raises(UserError, match="rpoe"):
        parse_description(subject, "rpoe:base=500")

    def short(items):
        return short_description(
            "+".join(items), [Layer(NoPE()) if item == "nope" else Layer(Rope()) for item in items]
        )

    every_fourth = (["rope"] * 3 + ["nope"]) * 8
    assert short(every_fourth[:8]) == "rope 0-2,4-6; nope 3,7"
    assert short(every_fourth).startswith("rope on 24 layers; nope on 8 layers #")
    based = ["rope:base=123456" if item == "rope" else item for item in every_fourth]
    lengths = [len(short(items)) for items in (every_fourth, based, ["rope", "nope"] * 500)]
    assert max(lengths) <= LABEL_WIDTH and short(based) != short(every_fourth)


def test_weights_are_sharded_until_a_third_of_a_device_holds_them(monkeypatch):
    model = dataclasses.replace(tiny.MODEL, heads=4, kv_heads=4)
    size = 4 * Model(model).num_parameters  # bytes in float32

    def tensor_axis(memory):
        device = SimpleNamespace(memory_stats=lambda: None if memory is None else {"bytes_limit": memory})
        monkeypatch.setattr(targets.jax, "local_devices", lambda: [device] * 8)
        monkeypatch.setattr(targets, "open_source", lambda path: SimpleNamespace(model=model))
        made = []
        monkeypatch.setattr(targets, "make_mesh", lambda config, devices: made.append(config))
        targets.mesh_for("runs/any")
        return made[0].tensor

    assert [tensor_axis(memory) for memory in (None, 3 * size, 3 * size - 1, 0.8 * size)] == [1, 1, 2, 4]
    assert tensor_axis(0.1 * size) == 4  # no further than the KV heads
