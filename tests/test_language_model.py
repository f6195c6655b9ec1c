"""`pe_lab.load`: the loaded model under any encoding, compiled once."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tiny_runs import compilations_kept, trained  # noqa: F401

import pe_lab
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.data.tokenizers import load_tokenizer
from pe_lab.errors import UserError
from pe_lab.language_model import _compiled
from pe_lab.model import Model
from pe_lab.positional import (
    NTK,
    PI,
    Alibi,
    Beta,
    DynamicNTK,
    HeadEdit,
    Layer,
    Llama3,
    NoPE,
    PartialRope,
    Rope,
    Uniform,
    Yarn,
    build_schedule,
    drop,
    layers,
    rescale,
)

pytestmark = pytest.mark.usefixtures("compilations_kept")


@pytest.fixture(scope="module")
def run(trained):  # noqa: F811
    """A phase that ended with RoPE."""
    return trained / "pretrain"


@pytest.fixture(scope="module")
def lm(run):
    return pe_lab.load(run)


TOKENS = np.random.default_rng(0).integers(0, 300, (2, 24)).astype(np.int32)


def test_logits_are_those_of_the_model(lm, run):
    checkpoint = open_checkpoint(run)
    model = Model(checkpoint.model)
    schedule = build_schedule(checkpoint.layers, 2, 2, 8)
    expected = jax.jit(model.apply)(checkpoint.params, TOKENS, None, None, schedule)
    logits = lm.logits(TOKENS)
    assert logits.shape == (2, 24, 384) and logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(lm.logits(TOKENS[0]), expected[:1], atol=1e-5)
    np.testing.assert_allclose(lm.logits(TOKENS[0].tolist()), expected[:1], atol=1e-5)
    np.testing.assert_allclose(lm.logits(TOKENS.tolist()), expected, atol=1e-5)


def test_the_loss_of_each_token_given_those_before_it(lm):
    logits = np.asarray(lm.logits(TOKENS), np.float64)[:, :-1]
    chosen = np.take_along_axis(logits, TOKENS[:, 1:, None], -1)[..., 0]
    expected = np.log(np.exp(logits).sum(-1)) - chosen
    assert lm.loss_by_position(TOKENS).shape == (2, 23)
    np.testing.assert_allclose(lm.loss_by_position(TOKENS), expected, atol=1e-5)


def test_strings_go_through_the_tokenizer(lm):
    ids = lm.encode("needle")
    assert ids.tolist() == list(load_tokenizer("bytes").encode("needle"))
    np.testing.assert_array_equal(lm.logits("needle"), lm.logits(ids))
    bare = dataclasses.replace(lm, tokenizer=None)
    with pytest.raises(UserError, match="came without a tokenizer; pass token ids"):
        bare.logits("needle")


TEN = {
    "rope": Rope(),
    "nope": NoPE(),
    "p-rope": Rope(fraction=0.5),
    "partial rope": PartialRope(fraction=0.5),
    "pi": Rope(scaling=PI(4.0)),
    "ntk": Rope(scaling=NTK(4.0)),
    "dynamic ntk": Rope(scaling=DynamicNTK(8)),
    "yarn": Rope(scaling=Yarn(2.0, 300)),
    "llama3": Rope(scaling=Llama3(4.0, original_length=64)),
    "a mix": [Layer(Rope()), Layer(NoPE())],
    "beta": Layer(NoPE(), logit_scale=Beta(0.4, 8)),
}


def test_switching_among_ten_encodings_compiles_once(run):
    """Every encoding one can think of is the same program on other arrays."""
    _compiled.cache_clear()
    lm = pe_lab.load(run)
    found = {name: np.asarray(lm.with_positional(e).logits(TOKENS)) for name, e in TEN.items()}
    found["rope, beta"] = np.asarray(lm.with_positional(Rope(), logit_scale=1.5).logits(TOKENS))
    assert lm.compilations == 1 and len(found) > 10
    names = list(found)
    for i, a in enumerate(names):
        for b in names[:i]:
            assert np.abs(found[a] - found[b]).max() > 1e-6, f"{a} reads as {b}"
    np.testing.assert_allclose(found["rope"], lm.logits(TOKENS), atol=1e-6)
    # The counter counts: a window is another program.
    lm.with_positional("rope/window=4").logits(TOKENS)
    assert lm.compilations == 2


def test_what_follows_the_length_follows_it(lm):
    """A dynamic scheme and a Beta are read at the length of the text, not at that of an earlier one."""
    dynamic = lm.with_positional(Rope(scaling=DynamicNTK(8)), logit_scale=Beta(0.4, 8))
    for length in (6, 8, 16, 24):
        scaling = NTK(length / 8) if length > 8 else None
        beta = 1 + 0.4 * np.log(max(1, length / 8))
        fixed = lm.with_positional(Rope(scaling=scaling), logit_scale=float(beta))
        np.testing.assert_allclose(dynamic.logits(TOKENS[:, :length]), fixed.logits(TOKENS[:, :length]), atol=1e-5)
    here = dynamic.loss_by_position(TOKENS)
    assert here.shape == (2, 23) and np.isfinite(here).all()


def test_edits_of_the_layers_there_are(lm):
    mixed = lm.with_positional(["rope/window=8", "alibi"])
    assert mixed.with_positional(drop(layers=[0])).layers == (Layer(NoPE(), 8), Layer(Alibi()))
    assert mixed.with_positional(rescale(PI(2.0))).layers == (Layer(Rope(scaling=PI(2.0)), 8), Layer(Alibi()))
    assert mixed.with_positional("drop").layers == (Layer(NoPE(), 8), Layer(NoPE()))


@pytest.mark.parametrize(
    "description", [NoPE(), Alibi(), PartialRope(fraction=0.5), "yarn:factor=2,original_length=16"]
)
def test_another_encoding_is_the_same_weights_under_another_schedule(lm, description):
    other = lm.with_positional(description)
    schedule = build_schedule(layers(description, 2), 2, 2, 8)
    expected = jax.jit(Model(lm.config).apply)(lm.checkpoint.params, TOKENS, None, None, schedule)
    np.testing.assert_allclose(other.logits(TOKENS), expected, atol=1e-5)
    assert lm.layers == (Layer(Rope()),) * 2  # nothing changed in place
    assert other.checkpoint.params is lm.checkpoint.params


def test_what_is_dropped_and_saved_comes_back(lm, tmp_path):
    partly = lm.drop_positional([1])
    assert partly.layers == (Layer(Rope()), Layer(NoPE()))
    bare = lm.drop_positional()
    assert bare.layers == (Layer(NoPE()),) * 2 and "nope" in bare.describe()
    path = bare.save(tmp_path / "dropped")
    again = pe_lab.load(tmp_path / "dropped")
    assert path == tmp_path / "dropped" / "checkpoints" / "0"
    assert again.layers == bare.layers and again.training_length == lm.training_length == 16
    np.testing.assert_array_equal(again.logits(TOKENS), bare.logits(TOKENS))
    np.testing.assert_array_equal(again.logits("text"), bare.logits("text"))  # the tokenizer went along
    assert again.checkpoint.metadata["lineage"][-1]["what"] == "rope(base=10000) -> nope on layers 0-1"
    dataclasses.replace(lm, tokenizer=None).save(tmp_path / "whole")  # the checkpoint's own goes along as well
    assert pe_lab.load(tmp_path / "whole").tokenizer.fingerprint == lm.tokenizer.fingerprint
    scaled = lm.with_positional(Rope(), logit_scale=1.25)
    scaled.save(tmp_path / "scaled")
    assert pe_lab.load(tmp_path / "scaled").layers == (Layer(Rope(), logit_scale=1.25),) * 2
    with pytest.raises(UserError, match="not empty"):
        bare.save(tmp_path / "dropped")


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([], "have shape"),
        (np.zeros((1, 2, 3), np.int32), "have shape"),
        (np.zeros((2, 0), np.int32), "have shape"),
        (np.asarray(5), "have shape"),
        ([0, 384], "range from 0 to 384; the vocabulary has 384"),
        ([-1, 5], "range from -1"),
        (np.asarray([0.5, 1.0]), "are of type float64"),
        ([[1, 2], [3]], "are no array of ids"),
        (np.asarray([2**40]), "the vocabulary has 384"),
    ],
)
def test_tokens_that_are_none(lm, tokens, says):
    with pytest.raises(UserError, match=says):
        lm.logits(tokens)


def test_other_bad_input(lm, tmp_path):
    with pytest.raises(UserError, match="at least two tokens"):
        lm.loss_by_position([3])
    with pytest.raises(UserError, match="no such directory"):
        pe_lab.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="does not tile"):
        lm.with_positional(["rope", "rope", "rope"])
    with pytest.raises(UserError, match="there is no layer 7"):
        lm.drop_positional([7])
    assert json.loads(json.dumps(lm.checkpoint.metadata["phase"])) == "pretrain"


def test_a_representation_fits_a_line_and_a_notebook(lm):
    assert len(repr(lm)) < 300 and "2 layers" in repr(lm) and "rope(base=10000)" in repr(lm)
    mixed = lm.with_positional([Rope(), NoPE()])
    assert "rope(base=10000) on layer 0; nope on layer 1" in repr(mixed)
    assert repr(mixed) in mixed._repr_html_().replace("&#x27;", "'") and "<pre>layers" in mixed._repr_html_()


def test_a_saved_model_is_the_one_that_was_measured(lm, tmp_path):
    """The schedule follows from the layers: they cannot disagree, and saving cannot lose an edit."""
    with pytest.raises(TypeError):
        dataclasses.replace(lm, schedule=lm.build(layers(NoPE(), 2)))
    edited = lm.with_positional([Layer(Rope(50.0), heads=(HeadEdit((1,), Uniform()),)), Layer(NoPE())])
    again = pe_lab.load(edited.save(tmp_path / "edited"))
    np.testing.assert_array_equal(again.logits(TOKENS), edited.logits(TOKENS))
    assert np.abs(again.logits(TOKENS) - lm.logits(TOKENS)).max() > 1e-3
