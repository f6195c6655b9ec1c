"""`pe_lab.load`: the weights in the hand, under any encoding, without compiling again."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tiny_runs import compilations_kept, trained  # noqa: F401

import pe_lab
from pe_lab.checkpoints import open_checkpoint
from pe_lab.config import UserError
from pe_lab.data.tokenizers import load_tokenizer
from pe_lab.language_model import _compiled
from pe_lab.model import Model
from pe_lab.positional import PI, Alibi, Layer, NoPE, PartialRope, Rope, Yarn, build_schedule, layers

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


def test_texts_go_through_the_tokenizer(lm):
    ids = lm.encode("needle")
    assert ids.tolist() == list(load_tokenizer("bytes").encode("needle"))
    np.testing.assert_array_equal(lm.logits("needle"), lm.logits(ids))
    bare = dataclasses.replace(lm, tokenizer=None)
    with pytest.raises(UserError, match="came without a tokenizer; pass token ids"):
        bare.logits("needle")


def test_switching_encodings_traces_once(lm, monkeypatch):
    # Every encoding one can think of is the same program on other arrays.
    _compiled.cache_clear()
    traces, hidden = [], Model.hidden

    def counted(self, *args):
        traces.append(1)
        return hidden(self, *args)

    monkeypatch.setattr(Model, "hidden", counted)
    mixed = [Layer(Rope()), Layer(NoPE())]
    encodings = [Rope(), NoPE(), Rope(scaling=Yarn(factor=2.0, original_length=16)), Rope(fraction=0.5), mixed,
                 Rope(scaling=PI(factor=4.0))]  # fmt: skip
    found = [np.asarray(lm.with_positional(e).logits(TOKENS)) for e in encodings]
    found.append(np.asarray(lm.with_positional(Rope(), logit_scale=1.5).logits(TOKENS)))
    assert len(traces) == 1
    for i, a in enumerate(found):
        for b in found[:i]:
            assert np.abs(a - b).max() > 1e-6
    np.testing.assert_allclose(found[0], lm.logits(TOKENS), atol=1e-6)
    _compiled.cache_clear()


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
