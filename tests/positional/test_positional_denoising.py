"""DoPE: heads chosen by their scores, and what denoising makes of them."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_scores import KEY, QUERY, G, H, K, N, R, edited, schedule_of, scores_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.attention import Hooks
from pe_lab.attention.hooks import encode
from pe_lab.errors import UserError
from pe_lab.positional import (
    NTK,
    PI,
    Alibi,
    Bands,
    Beta,
    Gaussian,
    HeadEdit,
    Layer,
    LayerHooks,
    NoPE,
    Rope,
    Yarn,
    build_schedule,
    denoise,
    dope_by_all,
    dope_by_gaussian,
    dope_by_parts,
    frequencies,
    from_json,
    layers,
    read_scores,
    select_heads,
    to_json,
)
from pe_lab.positional.notebook import NotebookYarn

# Choosing heads by their scores.

SCORES = np.array([[3.0, 1.0, 2.0], [1.0, 5.0, 4.0]])


@pytest.mark.parametrize(
    ("count", "order", "heads"),
    [
        (0, "ascending", ()),
        (0, "descending", ()),
        (1, "ascending", ((0, 1),)),  # of two equal scores the lower layer
        (2, "ascending", ((0, 1), (1, 0))),
        (3, "ascending", ((0, 1), (0, 2), (1, 0))),
        (1, "descending", ((1, 1),)),
        (2, "descending", ((1, 1), (1, 2))),
        (4, "descending", ((0, 0), (0, 2), (1, 1), (1, 2))),
        (5, "descending", ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2))),
        (6, "ascending", tuple((n, h) for n in range(2) for h in range(3))),
        (6, "descending", tuple((n, h) for n in range(2) for h in range(3))),
    ],
)
def test_heads_with_the_lowest_or_highest_scores(count, order, heads):
    assert select_heads(SCORES, count, order) == heads


@settings(max_examples=60)
@given(st.data(), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_selection_is_by_score_then_layer_then_head_over_all_layers_together(data, num_layers, num_heads, ascending):
    values = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1e9])  # many ties
    scores = [[data.draw(values) for _ in range(num_heads)] for _ in range(num_layers)]
    count = data.draw(st.integers(0, num_layers * num_heads))
    sign = 1 if ascending else -1
    ranked = sorted((sign * score, n, h) for n, row in enumerate(scores) for h, score in enumerate(row))
    chosen = select_heads(np.array(scores), count, "ascending" if ascending else "descending")
    assert chosen == tuple(sorted((n, h) for _, n, h in ranked[:count]))
    assert all(type(i) is int for head in chosen for i in head)


def test_scores_are_read_from_a_list_or_an_object(tmp_path):
    path = tmp_path / "scores.json"
    for value in (SCORES.tolist(), {"scores": SCORES.tolist(), "what": "matrix entropy of keys"}):
        path.write_text(json.dumps(value))
        for name in (path, str(path)):
            scores = read_scores(name, 2, 3)
            assert scores.dtype == np.float64
            np.testing.assert_array_equal(scores, SCORES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, ["cannot be read", "No such file"]),
        ("", ["are not JSON"]),
        ("[[1, 2", ["are not JSON"]),
        ("\xff\xfe", ["are not JSON"]),
        ("[[1, 2], [3, 4]]", ["have shape [2, 2]", "2 lists of 3 numbers", 'alone or under "scores"']),
        ("[[1, 2, 3]]", ["have shape [1, 3]", "2 lists of 3 numbers"]),
        ("[1, 2, 3, 4, 5, 6]", ["have shape [6]", "2 lists of 3 numbers"]),
        ("[[1, 2, 3], [4, 5]]", ["2 lists of 3 numbers"]),
        ('[["a", 2, 3], [4, 5, 6]]', ["2 lists of 3 numbers"]),
        ('{"scores": [[1, 2]]}', ["have shape [1, 2]", "2 lists of 3 numbers"]),
        ('{"entropy": [[1, 2, 3], [4, 5, 6]]}', ["2 lists of 3 numbers", 'under "scores"']),
        ("7", ["are not JSON: give a list of lists"]),
        ("null", ["are not JSON: give a list of lists"]),
    ],
)
def test_bad_files_of_scores_are_named_with_what_is_needed(tmp_path, text, says):
    path = tmp_path / "scores.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as error:
        read_scores(path, 2, 3)
    for part in [f"'{path}'", *says]:
        assert part in str(error.value)


def test_a_folder_is_no_file_of_scores(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_scores(tmp_path, 2, 3)


@pytest.mark.parametrize("hole", ["NaN", "Infinity", "null"])
def test_scores_with_a_hole_do_not_rank_heads(tmp_path, hole):
    """Sorted, a head without a score would be the last or the first."""
    path = tmp_path / "scores.json"
    path.write_text(f"[[1, {hole}, 3], [4, 5, 6]]")
    with pytest.raises(UserError, match="finite number|numbers"):
        select_heads(read_scores(path, 2, 3), 2)


# DoPE.

ROPES = layers("rope", N)


@settings(max_examples=60)
@given(
    training=st.integers(1, 1 << 17),
    base=st.floats(10, 1e7),
    scaling=st.sampled_from([None, PI(4.0), NTK(8.0), Yarn(8.0, 128)]),
    fraction=st.sampled_from([0.5, 1.0]),
)
def test_dope_by_parts_removes_the_bands_beyond_two_pi_over_the_training_length(training, base, scaling, fraction):
    encoding = Rope(base, fraction, scaling)
    try:
        inv_freq, gain = frequencies(encoding, K)
    except UserError:  # a base at which YaRN has nothing to interpolate
        return
    # A pair that makes one rotation or more within the training window is fast: here by its wavelength.
    fast = np.array([w > 0 and 2 * math.pi / w < training for w in inv_freq])
    heads = [(1, 0), (1, 5), (3, 2)]
    kept = {}
    for keep in ("fast", "slow"):
        schedule = schedule_of(dope_by_parts([Layer(encoding)] * N, heads, training, keep))
        kept[keep] = schedule.gain[1, 0]
        for n in range(N):
            for h in range(H):
                mask = (fast if keep == "fast" else ~fast) if (n, h) in heads else np.ones(R)
                np.testing.assert_array_equal(schedule.gain[n, h], (gain * mask).astype(np.float32))
                np.testing.assert_array_equal(schedule.inv_freq[n, h], inv_freq.astype(np.float32))
    np.testing.assert_array_equal(kept["fast"] + kept["slow"], gain.astype(np.float32))
    assert ((kept["fast"] == 0) != (kept["slow"] == 0)).all()


def test_dope_by_parts_by_hand():
    """Frequencies 1, .32, .1, .03, ... 3e-4 against 2 pi / 128 = .049, and against .0015 at 4096 tokens."""
    assert dope_by_parts(ROPES, [(0, 0)], 128) == dope_by_parts(ROPES, [(0, 0)], 128, "fast")
    for length, fast in ((128, 3), (4096, 6), (1, 0), (1 << 20, 8)):
        gains = [schedule_of(dope_by_parts(ROPES, [(0, 0)], length, k)).gain[0, 0] for k in ("fast", "slow")]
        assert gains[0].tolist() == [1] * fast + [0] * (R - fast)
        assert gains[1].tolist() == [0] * fast + [1] * (R - fast)


def test_the_threshold_itself_is_slow():
    """Equation 32 keeps what is at most the threshold."""
    assert edited([0], Bands(1.0, "slow")).gain[0, 0].all()
    assert not edited([0], Bands(1.0, "fast")).gain[0, 0].any()


@pytest.mark.parametrize("encoding", [Rope(), Rope(scaling=Yarn(8.0, 128)), Alibi(), NoPE()], ids=repr)
def test_dope_by_all_in_both_its_readings(encoding):
    before = [Layer(encoding)] * N
    uniform, nope = (schedule_of(dope_by_all(before, [(2, 1)], reading)) for reading in ("uniform", "nope"))
    assert (uniform.gain[2, 1] == 0).all() and uniform.structure[2].rotates
    assert (scores_of(uniform, 2)[:, 1] == 0).all()
    # Without its encoding a head has no attention factor either, and no slope.
    assert (nope.inv_freq[2, 1] == 0).all() and (nope.fixed_freq[2, 1] == 0).all() and (nope.gain[2, 1] == 1).all()
    assert nope.alibi_slope[2, 1] == 0
    np.testing.assert_allclose(scores_of(nope, 2)[:, 1], QUERY[1] @ KEY[1], rtol=1e-5)
    untouched = schedule_of(before)
    for schedule in (uniform, nope):
        others = np.arange(H) != 1
        np.testing.assert_array_equal(schedule.gain[2, others], untouched.gain[2, others])
        np.testing.assert_array_equal(schedule.fixed_freq[2, others], untouched.fixed_freq[2, others])
        assert same_layers(schedule, untouched, [0, 1, 3])
    assert dope_by_all(before, [(2, 1)]) == dope_by_all(before, [(2, 1)], "nope")


def same_layers(a, b, chosen):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x[chosen], y[chosen]) for x, y in leaves)


B, T = 2, 300
AT = np.arange(T)[None]


def drawn(seed, scale=1.0, heads=H):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal((B, T, heads, 64)), jnp.float32)


def noisy(encoding, q, k, heads=(1, 4), at=AT):
    """Queries and keys [.., H, K] of which some heads are noise."""
    hooks = Hooks(({},), (LayerHooks(encoding.on(heads), None, heads),))
    found = encode(hooks, q, k, jnp.asarray(at, jnp.int32), [jnp.zeros((*q.shape[:2], 0))])
    return tuple(np.asarray(x, np.float64) for x in found)


@pytest.mark.slow
def test_noise_is_gaussian_independent_and_as_large_as_the_kept_heads():
    """Its variance is that of the kept heads' components, per token, of queries and of keys."""
    size = np.linspace(0.5, 4, T)[None, :, None, None]  # a token's own
    q = drawn(1, size).at[:, :, [1, 4]].multiply(100.0)  # replaced heads do not influence the size
    k = drawn(2, 3 * size, G)
    found = noisy(Gaussian(7), q, k)
    for new, old in zip(found, (q, np.repeat(k, H // G, axis=2)), strict=True):
        np.testing.assert_array_equal(new[:, :, [0, 2, 3, 5]], old[:, :, [0, 2, 3, 5]])
        scaled = new[:, :, [1, 4]] / np.sqrt((np.asarray(old)[:, :, [0, 2, 3, 5]] ** 2).mean((-2, -1)))[..., None, None]
        assert abs(scaled.mean()) < 0.02 and abs(scaled.std() - 1) < 0.02
        assert abs((scaled**4).mean() - 3) < 0.15  # a Gaussian's kurtosis
        assert abs(np.corrcoef(scaled[:, :, 0].ravel(), scaled[:, :, 1].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(found[0][:, :, 1].ravel(), found[1][:, :, 1].ravel())[0, 1]) < 0.03


@pytest.mark.slow
def test_noise_is_a_function_of_seed_head_and_position():
    """So a cached decode equals a full pass, and packed documents are independent."""
    q, k = drawn(1), drawn(2, heads=G)
    whole = noisy(Gaussian(7), q, k)
    part = noisy(Gaussian(7), q[:, 5:9], k[:, 5:9], at=AT[:, 5:9])
    for a, b in zip(whole, part, strict=True):
        np.testing.assert_allclose(a[:, 5:9], b, rtol=1e-6)
    few = noisy(Gaussian(7, 1.0), q, k, heads=(4,))[0][:, :, 4]
    np.testing.assert_array_equal(few, noisy(Gaussian(7, 1.0), q, k)[0][:, :, 4])  # whichever others are chosen
    assert (few != noisy(Gaussian(8, 1.0), q, k)[0][:, :, 4]).mean() > 0.99


def test_noise_of_all_heads_is_as_large_as_all():
    q, k = drawn(1, 5.0), drawn(2, heads=G)
    for found in (noisy(Gaussian(7), q, k, ()), noisy(Gaussian(7), q, k, tuple(range(H)))):
        assert found[0].std() == pytest.approx(5, rel=0.02) and found[1].std() == pytest.approx(1, rel=0.02)


def test_the_appendix_has_one_seed_and_a_fixed_sigma():
    """DoPE, appendix A.2: sigma 1.0 and seed 42 for all heads; the body takes the variance of the other heads."""
    heads = [(0, 1), (0, 4), (3, 2)]
    body, appendix = (dope_by_gaussian(ROPES, heads, *options) for options in ((0,), (42, 1.0, True)))
    assert [edit.heads for layer in body for edit in layer.heads] == [(1, 4), (2,)]
    assert len({edit.to.seed for layer in body for edit in layer.heads}) == 2  # one of each layer
    assert {edit.to for layer in appendix for edit in layer.heads} == {Gaussian(42, 1.0, same=True)}
    found = noisy(appendix[0].heads[0].to, drawn(1, 5.0), drawn(2))
    assert found[0][:, :, 1].std() == pytest.approx(1, rel=0.02)
    np.testing.assert_array_equal(found[0][:, :, 1], found[0][:, :, 4])
    for sigma in (0.0, -1.0, 1e10, float("inf"), float("nan")):
        with pytest.raises(UserError, match="it must be above 0 and at most 2\\^32"):
            Gaussian(7, sigma)


@pytest.mark.slow
def test_hooks_act_on_keys_that_earlier_ones_made_of_every_query_head():
    """Noise on a part of a group, and then a rotation of all keys: the same as in the other order, head by head."""
    q, k = drawn(1), drawn(2, heads=G)
    warp = NotebookYarn()
    noise, warped = LayerHooks(Gaussian(7, 1.0).on((1,)), None, (1,)), LayerHooks(warp)
    at = jnp.asarray(AT, jnp.int32)
    _, found = encode(Hooks(({}, {}), (noise, warped)), q, k, at, [q[..., 0]] * 2)
    _, plain = encode(Hooks(({},), (noise,)), q, k, at, [q[..., 0]])
    for h in range(H):
        _, alone = warp.encode({}, q, plain[:, :, h : h + 1], at, q[..., 0])
        np.testing.assert_array_equal(found[:, :, h], alone[:, :, 0])


def test_denoise_selects_and_edits():
    scores = np.random.default_rng(0).standard_normal((N, H))
    heads = select_heads(scores, 5, "descending")
    asked = {
        "parts": ({"training_length": 128, "keep": "slow"}, dope_by_parts(ROPES, heads, 128, "slow")),
        "all": ({"kind": "uniform"}, dope_by_all(ROPES, heads, "uniform")),
        "gaussian": ({"seed": 3}, dope_by_gaussian(ROPES, heads, 3)),
    }
    for method, (options, expected) in asked.items():
        after = denoise(ROPES, scores, method, 5, "descending", **options)
        assert after == expected
        assert {(n, h) for n, layer in enumerate(after) for edit in layer.heads for h in edit.heads} == set(heads)
    assert denoise(ROPES, scores, "all", 2) == dope_by_all(ROPES, select_heads(scores, 2, "ascending"), "nope")
    for method, options in (("all", {}), ("gaussian", {}), ("parts", {"training_length": 128})):
        assert denoise(ROPES, scores, method, 0, **options) == ROPES


def test_denoising_keeps_windows_scales_and_earlier_edits_and_can_be_repeated():
    before = layers(["rope/window=64/heads=0:nope", "nope/beta=0.1@64"], N)
    once = dope_by_parts(before, [(0, 1), (0, 3), (1, 2)], 128)
    assert once[0] == Layer(Rope(), 64, heads=(HeadEdit((0,), NoPE()), HeadEdit((1, 3), Bands(2 * math.pi / 128))))
    assert once[1].logit_scale == Beta(0.1, 64) and once[1].encoding == NoPE()
    assert once[2:] == before[2:]
    twice = dope_by_gaussian(once, [(0, 1)])
    schedule = schedule_of(twice)
    assert [hook.heads for hook in schedule.structure[0].hooks] == [(1,)]
    assert schedule.gain[0, 3].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert schedule.structure[0].window == 64


@settings(max_examples=40)
@given(
    method=st.sampled_from(["parts", "all", "gaussian"]),
    count=st.integers(0, N * H),
    seed=st.integers(0, 1000),
    order=st.sampled_from(["ascending", "descending"]),
)
def test_denoised_layers_survive_json_and_touch_only_the_chosen_heads(method, count, seed, order):
    scores = np.random.default_rng(seed).standard_normal((N, H))
    options = {"training_length": 128} if method == "parts" else {}
    after = denoise(ROPES, scores, method, count, order, **options)
    back = tuple(from_json(json.loads(json.dumps(to_json(layer)))) for layer in after)
    assert back == after
    changed, plain = schedule_of(back), schedule_of(ROPES)
    differ = np.zeros((N, H), bool)
    for n, structure in enumerate(changed.structure):
        for hook in structure.hooks:
            differ[n, list(hook.heads)] = True
    for name in ("inv_freq", "gain"):
        a, b = (getattr(s, name).reshape(N, H, -1) for s in (changed, plain))
        differ |= (a != b).any(-1)
    assert {(int(n), int(h)) for n, h in np.argwhere(differ)} == set(select_heads(scores, count, order))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: select_heads(np.zeros(6), 1), "have shape (6,); give one finite number per layer and head, [N, H]"),
        (lambda: select_heads(np.array([[1.0, np.nan]]), 1), "give one finite number per layer and head"),
        (lambda: select_heads(np.array([[1.0, np.inf]]), 1), "give one finite number per layer and head"),
        (lambda: select_heads([[1.0, 2.0], [3.0]], 1), "[N, H]"),
        (lambda: select_heads([["a", "b"]], 1), "[N, H]"),
        (lambda: select_heads(SCORES, -1), "count is -1; there are 6 heads to choose from"),
        (lambda: select_heads(SCORES, 7), "count is 7; there are 6 heads to choose from"),
        (lambda: select_heads(SCORES, 1, "ASC"), "order is 'ASC'; it must be ascending (lowest scores) or descending"),
        (lambda: dope_by_parts(ROPES, [(0, 0)], 128, "low"), "Bands.keep is 'low'; it must be slow or fast"),
        (lambda: dope_by_parts(ROPES, [(0, 0)], 0), "training_length is 0; give the tokens of a training window"),
        (lambda: dope_by_parts(ROPES, [(0, 0)], -128), "training_length is -128"),
        (lambda: dope_by_all(ROPES, [(0, 0)], "zero"), "kind is 'zero'; it must be uniform (eq. 35) or"),
        (lambda: dope_by_gaussian(ROPES, [(0, 0)], -1), "seed is -1"),
        (lambda: denoise(ROPES, np.zeros((N, H)), "band", 1), "no method 'band'; it must be parts, all or gaussian"),
        (lambda: denoise(ROPES, np.zeros((N, H)), "all", 25), "count is 25; there are 24 heads to choose from"),
        (lambda: denoise(ROPES, np.zeros((N, H)), "all", 1, "up"), "order is 'up'"),
        (lambda: denoise(ROPES, np.zeros((N, H)), "all", 1, kind="both"), "kind is 'both'"),
        (lambda: dope_by_all(ROPES, [(4, 0)]), "There is no layer 4 to denoise a head of; the layers are 0 to 3"),
        (lambda: dope_by_all(ROPES, [(-1, 0)]), "There is no layer -1 to denoise"),
        (lambda: denoise(ROPES, np.zeros((5, H)), "all", 30), "There are scores for 5 layers, and 4 layers to denoise"),
        (lambda: denoise(ROPES, np.zeros((3, H)), "all", 1), "There are scores for 3 layers, and 4 layers to denoise"),
        (
            lambda: schedule_of(dope_by_all(ROPES, [(1, 2), (1, 6)])),
            "layer 1: there is no query head 6; the heads are 0 to 5",
        ),
        (
            lambda: schedule_of(dope_by_parts(ROPES, [(3, 7)], 128)),
            "layer 3: there is no query head 7; the heads are 0",
        ),
        (lambda: schedule_of(dope_by_gaussian(ROPES, [(0, -1)])), "layer 0: there is no query head -1; the heads are"),
        (lambda: schedule_of(layers("rope/heads=4-6:nope", 2)), "layer 0: there is no query head 6; the heads"),
        (lambda: Bands(0.0), "Bands.threshold is 0.0; give radians per position, such as 2 pi / training length"),
        (lambda: Bands(math.inf), "Bands.threshold is inf"),
        (lambda: Gaussian(0), "Gaussian.seed is 0; give a whole number in [1, 2^32)"),
        (
            lambda: build_schedule([Layer(NoPE(), heads=(HeadEdit((0,), Rope(scaling=NTK(2.0))),))], 2, 1, 2),
            "NTK needs at least 4 rotated channels",
        ),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_arguments_name_what_is_allowed(make, says):
    with pytest.raises(UserError) as error:
        make()
    assert says in str(error.value)
