import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from pe_lab.data.held_out import held_out_tokens
from pe_lab.errors import UserError
from pe_lab.evaluation.scoring.forward import Forward
from pe_lab.evaluation.suites import perplexity as pp
from pe_lab.model import Model
from pe_lab.positional import LongRope, NoPE, Rope, Yarn, build_schedule, layers

ROPE = layers(Rope(), tiny.MODEL.layers)


@pytest.fixture(scope="module")
def forward():
    return Forward(Model(tiny.MODEL).config, devices=tiny.one_device())


def naive_losses(tokens, targets, described):
    """Log-softmax of the model's logits, in numpy."""
    model = Model(tiny.MODEL)
    schedule = build_schedule(described, model.config.heads, model.config.kv_heads, model.config.head_dim)
    logits = np.asarray(tiny.apply(tiny.parameters(), jnp.asarray(tokens), schedule), np.float64)
    logsumexp = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return logsumexp - np.take_along_axis(logits, targets[..., None], -1)[..., 0]


def held_out(count=3, longest=32, seed=0, **kwargs):
    tokens = np.random.default_rng(seed).integers(0, 250, (count, longest + 1)).astype(np.int32)
    return pp.HeldOut("text", tokens, tokens[:0], tuple(range(count)), (), **kwargs)


def test_losses_are_the_cross_entropy_of_the_logits(forward):
    windows = pp.cut(held_out().score, 16)
    losses = forward.losses(tiny.parameters(), pp.as_batch(held_out(), windows), ROPE)
    assert losses.shape == (6, 16)
    np.testing.assert_allclose(losses, naive_losses(windows[:, :-1], windows[:, 1:], ROPE), atol=2e-5)


def test_batch_size_and_padding_do_not_matter(forward):
    batch = pp.as_batch(held_out(5), pp.cut(held_out(5).score, 16))
    whole = forward.losses(tiny.parameters(), batch, ROPE)
    for rows in (1, 3, 7):
        part = {name: array[:rows] for name, array in batch.items()}
        np.testing.assert_allclose(forward.losses(tiny.parameters(), part, ROPE), whole[:rows], atol=1e-5)


def test_sharding_over_devices_does_not_matter(forward):
    batch = pp.as_batch(held_out(5), pp.cut(held_out(5).score, 16))
    several = Forward(Model(tiny.MODEL).config, devices=jax.devices()[:2])
    losses = several.losses(several.place(tiny.parameters()), batch, ROPE)
    np.testing.assert_allclose(losses, forward.losses(tiny.parameters(), batch, ROPE), atol=1e-5)


def test_a_large_vocabulary_is_split_in_chunks(monkeypatch, forward):
    monkeypatch.setattr("pe_lab.model.loss.LOGITS", 2**12)
    small = Forward(Model(tiny.MODEL).config, devices=tiny.one_device())
    batch = pp.as_batch(held_out(1), pp.cut(held_out(1).score, 16))
    losses = small.losses(tiny.parameters(), batch, ROPE)
    np.testing.assert_allclose(losses, forward.losses(tiny.parameters(), batch, ROPE), atol=1e-5)


def test_every_length_scores_the_same_targets_once():
    tiles = np.arange(2 * 65).reshape(2, 65)
    wanted = sorted(np.concatenate([tiles[0, 1:], tiles[1, 1:]]))
    for length in (8, 16, 32, 64):
        windows = pp.cut(tiles, length)
        assert windows.shape == (128 // length, length + 1)
        assert sorted(windows[:, 1:].ravel()) == wanted
        assert (np.diff(windows) == 1).all()
    assert pp.cut(tiles, 24).shape == (4, 25)  # 16 targets a tile are left over


def test_lengths_that_do_not_divide_each_other_score_the_same_tokens_where_they_can(tmp_path):
    data = tiny.corpus(tmp_path)
    found = pp.held_out(data, 0, "text", (64, 96), 512, 256, 256)
    assert found.tile == 192 and found.missing((64, 96), 512) == []
    scored = [sorted(map(tuple, pp.cut(found.score, n)[:, 1:].reshape(-1, 32))) for n in (64, 96)]
    assert scored[0] == scored[1]
    other = pp.held_out(data, 0, "text", (64, 97), 512, 256, 256)  # 6,208 tokens have no two tiles in 512
    (told,) = other.missing((64, 97), 512)
    assert other.tile == 97 and told.startswith(
        "text: not all lengths score the same tokens. Of each 97 tokens, 33 at 64 are not scored."
    )
    short = pp.held_out(data, 0, "text", (1000, 1500), 6000, 256, 256)  # less than two tiles of 3,000 are held out
    assert short.tile == 1500 and "500 at 1,000 are not scored" in short.missing((1000, 1500), 6000)[-1]


@pytest.mark.parametrize(("tiles", "score", "fit"), [(100, 8, 2), (10, 8, 2), (5, 64, 16), (2, 8, 8), (3, 1, 50)])
def test_tiles_to_fit_on_are_never_scored(tiles, score, fit):
    scored, fitted = pp.choose_tiles(tiles, score, fit)
    assert scored and fitted and not set(scored) & set(fitted)
    assert max(scored + fitted) < tiles and len(scored + fitted) == min(tiles, score + fit)
    if tiles >= score + fit:
        assert (len(scored), len(fitted)) == (score, fit)


def test_one_tile_is_scored_and_leaves_none_to_fit_on():
    assert pp.choose_tiles(1, 4, 4) == ((0,), ())


def test_held_out_tiles_are_disjoint_and_evenly_spaced(tmp_path):
    data = tiny.corpus(tmp_path)
    found = pp.held_out(data, 0, "text", (64,), 512, 256, 256)
    all_tokens = held_out_tokens(data, 0, 10**6)
    assert found.score.shape == (8, 65) and found.fit.shape == (4, 65)
    for tiles, index in ((found.score, found.score_index), (found.fit, found.fit_index)):
        for tile, i in zip(tiles, index, strict=True):
            np.testing.assert_array_equal(tile, all_tokens[i * 65 : (i + 1) * 65])
    assert not set(found.score_index) & set(found.fit_index)
    assert max(found.score_index) > len(all_tokens) // 65 // 2
    with pytest.raises(UserError, match=r"has [\d,]+ held-out tokens, too few for a sequence of 50,000 \+ 1"):
        pp.held_out(data, 0, "text", (50_000,), 512, 256, 256)


def test_summary_against_plain_arithmetic():
    rng = np.random.default_rng(1)
    losses = rng.gamma(2.0, 1.0, (6, 64))
    found = pp.summarize(losses, np.ones_like(losses), 3)
    assert found["nll"] == pytest.approx(losses.mean())
    assert found["perplexity"] == pytest.approx(math.exp(losses.mean()))
    assert found["stderr"] == pytest.approx(losses.mean(1).std(ddof=1) / math.sqrt(6))
    assert found["tokens"] == 384 and found["windows"] == 6
    np.testing.assert_allclose(found["nll_by_tile"], losses.reshape(3, 128).mean(1))
    edges = found["position_edges"]
    for i, value in enumerate(found["nll_by_position"]):
        assert value == pytest.approx(losses[:, edges[i] : edges[i + 1]].mean())
    np.testing.assert_allclose(np.average(found["nll_by_position"], weights=np.diff(edges)), losses.mean())


def test_tokens_of_weight_zero_do_not_count():
    losses = np.random.default_rng(2).gamma(2.0, 1.0, (4, 16))
    weights = np.ones_like(losses)
    weights[:, :4], weights[2, 9] = 0, 0
    found = pp.summarize(losses, weights, 4)
    assert found["nll"] == pytest.approx(losses[weights > 0].mean()) and found["tokens"] == 47
    assert found["nll_by_position"][0] is None


def test_one_window_has_no_standard_error():
    assert pp.summarize(np.ones((1, 8)), np.ones((1, 8)), 1)["stderr"] is None


@pytest.mark.parametrize("length", [2, 5, 16, 64, 100, 1024])
def test_position_edges_cover_every_position(length):
    edges = pp.bin_edges([0, 4, 8, 16], 4, length)
    assert edges[0] == 0 and edges[-1] == length and (np.diff(edges) > 0).all()


def test_powers_of_two_are_edges():
    assert {32, 64, 128, 256} <= set(pp.bin_edges([0, 4, 8, 16], 4, 512))


def test_cropping_at_the_training_length_changes_nothing(forward):
    tiles = held_out()

    def losses(batch):
        return forward.losses(tiny.parameters(), batch, ROPE)

    for length in (8, 16):
        cropped, _ = pp.Cropped(tiles, 16, 4, losses)(length)
        np.testing.assert_array_equal(cropped, pp.window_losses(tiles, length, losses)[0])


@pytest.mark.parametrize("stride", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16))])
def test_cropped_losses_are_those_of_the_last_tokens_alone(stride):
    tiles = held_out(2, 32)

    def losses(batch):
        return naive_losses(batch["tokens"], batch["targets"], ROPE)

    crops = pp.Cropped(tiles, 16, stride, losses)
    for length in (24, 32):
        cropped, weights = crops(length)
        assert cropped.shape == weights.shape == (2, length)
        for t in range(length):
            # Where the crop that predicts the token after t starts: the first that reaches it.
            end = min(16 + max(0, math.ceil((t + 1 - 16) / stride)) * stride, length)
            start = end - 16
            assert t - start < 16 and (start == 0 or t - start + 1 > 16 - stride)
            alone = np.zeros((2, 33), np.int32)
            alone[:, : t + 2 - start] = tiles.score[:, start : t + 2]
            alone = losses({"tokens": alone[:, :-1], "targets": alone[:, 1:]})
            np.testing.assert_allclose(cropped[:, t], alone[:, t - start], atol=2e-5)


def test_a_stride_of_one_sees_exactly_the_training_length():
    """The loss of the last token depends on the last `size` tokens and on no older one."""

    def losses(batch):
        return naive_losses(batch["tokens"], batch["targets"], ROPE)

    tiles = held_out(1, 32)
    last = pp.Cropped(tiles, 16, 1, losses)(32)[0][0, -1]
    for place, same in ((15, True), (16, False)):
        changed = tiles.score.copy()
        changed[0, place] = (changed[0, place] + 100) % 250
        other = pp.Cropped(dataclasses.replace(tiles, score=changed), 16, 1, losses)(32)[0][0, -1]
        assert (abs(other - last) < 1e-6) == same


def test_a_stride_beyond_the_context_is_refused():
    with pytest.raises(UserError, match="must be 1 to 16"):
        pp.Cropped(held_out(), 16, 17, lambda batch: batch["tokens"])


def test_packed_documents_stay_separate_if_they_did_in_training(forward):
    tiles = held_out(2, 32, segments=True, eos_id=256)
    tiles.score[:, 10] = 256
    nope = layers(NoPE(), tiny.MODEL.layers)

    def losses(batch):
        return forward.losses(tiny.parameters(), batch, nope)

    found, weights = pp.window_losses(tiles, 32, losses)
    assert (weights[:, 10] == 0).all() and weights.sum() == 62
    alone = naive_losses(tiles.score[:, 11:-1], tiles.score[:, 12:], nope)
    np.testing.assert_allclose(found[:, 11:], alone, atol=1e-5)


def test_a_population_has_the_losses_of_one_candidate_at_a_time(forward):
    """To 1e-6, in one compilation, also where devices share the candidates; 3 s."""
    scaled = [layers(Rope(scaling=LongRope((1.0,) * 4, (1.0, 1.0, x, 2 * x), 8, 2.0)), 2) for x in (1.0, 1.3, 1.7)]
    scaled += [layers(Rope(scaling=Yarn(2.0, 16)), 2), ROPE]
    batch = pp.as_batch(held_out(3), pp.cut(held_out(3).score, 32))
    batch["weights"] = np.random.default_rng(1).integers(0, 2, batch["tokens"].shape).astype(np.float32)
    one_by_one = [(forward.losses(tiny.parameters(), batch, one) * batch["weights"]).sum(1) for one in scaled]
    for devices in (jax.devices()[:1], jax.devices()[:2]):
        several = Forward(Model(tiny.MODEL).config, devices=devices)
        found = several.population_losses(several.place(tiny.parameters()), batch, scaled)
        np.testing.assert_allclose(found, one_by_one, rtol=1e-6)
        assert several.traces == {("population", 32): 1}
    assert len({round(float(one.sum()), 3) for one in found}) == 5


def test_a_population_of_several_structures_is_refused(forward):
    with pytest.raises(UserError, match="A population needs encodings of one structure"):
        batch = pp.as_batch(held_out(1), pp.cut(held_out(1).score, 16))
        forward.population_losses(tiny.parameters(), batch, [ROPE, layers("rope/window=4", 2)])
