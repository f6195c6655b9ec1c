"""Methods of a longer context, the score that ranks them, and a screening on a tiny model."""

import dataclasses
import functools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from pe_lab.errors import UserError
from pe_lab.evaluation.scoring.forward import Forward
from pe_lab.evaluation.variants import Subject
from pe_lab.lab.extend.extension import Screened
from pe_lab.lab.extend.methods import METHODS, Extension, choose, distinct, layer_costs, parse_methods
from pe_lab.lab.extend.numbers import At, Number, columns, numbers_of, over_seeds, score, score_difference, score_terms
from pe_lab.lab.extend.screening import Screening, screen, text_rows
from pe_lab.model import complete
from pe_lab.positional import NTK, PI, Layer, NoPE, PartialRope, Rope, Yarn, layers, text_of
from pe_lab.results.statistics import paired_sum, paired_t

sys.path.append(str(Path(__file__).parent / "evaluation"))
import tiny  # noqa: E402


def extension(described="rope", data=None, factor=4, **measured):
    found = tiny.checkpoint(layers(described, 2), data)
    subject = Subject(tiny.language_model(found), "tiny", "pretrain/checkpoints/3")
    return Extension(subject, factor * tiny.LENGTH, **measured)


def names(found):
    return [one.key for one in found]


def test_methods_are_those_of_their_scalings():
    found, impossible = choose(("unchanged", "pi", "ntk", "yarn", "drope", "searched"), extension())
    assert names(found) == ["unchanged", "pi", "ntk", "yarn", "drope"] and not impossible
    expected = [Rope(), Rope(scaling=PI(4.0)), Rope(scaling=NTK(4.0)), Rope(scaling=Yarn(4.0, 16)), NoPE()]
    assert [one.layers for one in found] == [(Layer(encoding),) * 2 for encoding in expected]
    for one in found:
        assert layers(one.text, 2) == one.layers == layers(text_of(one.layers), 2)


def test_layers_with_a_window_within_the_training_length_stay_as_they_are():
    found, _ = choose(("yarn", "drope"), extension("rope/window=8+rope"))
    assert found[0].layers == (Layer(Rope(), window=8), Layer(Rope(scaling=Yarn(4.0, 16))))


def test_the_slow_pairs_are_those_without_a_whole_rotation():
    (one,), _ = choose(("slow_pairs",), extension("rope:base=100"))
    kept = one.layers[0].encoding.fraction * 4
    periods = 2 * math.pi * 100 ** (np.arange(4) / 4)  # head_dim 8
    assert kept == (periods <= 16).sum() == 1


def test_windows_and_dropped_layers():
    (windows,), _ = choose(("windows",), extension())
    assert windows.layers == (Layer(Rope(), window=16), Layer(Rope(scaling=Yarn(4.0, 16))))
    (dropped,), _ = choose(("cheapest_dropped",), extension(layer_costs={0: 0.5, 1: 0.1}))
    assert dropped.layers == (Layer(Rope(), window=16), Layer(NoPE()))


def test_what_is_impossible_is_explained():
    _, impossible = choose(("pi", "slow_pairs", "clipped", "drope"), extension("nope"))
    assert set(impossible) == {"pi", "slow_pairs", "clipped", "drope"}
    assert impossible["drope"] == "no layer has an encoding to drop"
    _, impossible = choose(("clipped", "slow_half"), extension(PartialRope(fraction=0.5)))
    assert set(impossible.values()) == {"no layer has RoPE over all channels, unscaled"}
    _, impossible = choose(("slow_pairs",), extension("rope:base=2"))
    assert impossible == {"slow_pairs": "all pairs complete a rotation within the training length"}
    with pytest.raises(UserError, match="--methods: there is no method 'yran'. Did you mean 'yarn'"):
        parse_methods("pi,yran")
    assert parse_methods("PI,Dynamic-NTK") == ("pi", "dynamic_ntk") and parse_methods(None) == tuple(METHODS)


def test_of_equal_methods_the_one_that_was_screened_is_trained():
    chosen, _ = choose(("yarn", "slow_pairs", "slow_half"), extension("rope:base=6.5"))  # periods 6.3, 10, 16.02, 25.6
    found, left_out = distinct(chosen)
    assert [one.key for one in found] == ["yarn", "slow_pairs"]
    assert left_out == {"slow_half": "it is the same as slow pairs dropped here"}
    layers = {one.key: one.layers for one in chosen}
    screened = Screened(Screening(dict.fromkeys(("yarn", "slow_pairs"), {}), {}, 64, 16), layers, {})
    assert [one.key for one in screened.chosen(("yarn", "slow_half", "slow_pairs", "drope"))] == ["yarn", "slow_pairs"]
    screened = Screened(Screening({"yarn": {}}, {}, 64, 16), layers, {})
    assert [one.key for one in screened.chosen(("slow_half",))] == ["slow_half"]


# --------------------------------------------------------------------------------------------------------------------
# Numbers


def test_a_sum_of_paired_means_has_the_interval_of_welch():
    rng = np.random.default_rng(0)
    one, other = rng.normal(0.3, 1.0, 9).tolist(), rng.normal(0.2, 0.1, 40).tolist()
    found = paired_sum([one, other])
    # Welch's test of two samples is of the difference of their means: that of one and of the others with their signs.
    welch = stats.ttest_ind(one, [-x for x in other], equal_var=False)
    interval = welch.confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(one) + np.mean(other))
    assert (found.low, found.high, found.p) == pytest.approx((interval.low, interval.high, welch.pvalue))
    alone = paired_sum([one])
    assert alone == paired_t(one, [0.0] * 9)
    assert math.isnan(paired_sum([one, [1.0]]).low)


def test_the_score_is_of_far_tokens_or_where_there_are_few_of_all():
    def documents(tokens):
        nll = {"nll": 3.0, "nll_by_document": [2.0, None, 4.0], "all_nll": 2.0, "all_nll_by_document": [1.0, 2.0, 3.0]}
        return {"suite": "long_range", "length": 64, "tokens": tokens, **nll}

    needles = {"suite": "needles", "length": 64, "accuracy": 0.5, "accuracy_by_window": [0.0, 1.0]}
    needles |= {"answer_nll": 0.7, "answer_nll_by_window": [0.6, 0.8]}
    many, few = numbers_of([documents(100), needles]), numbers_of([documents(15), needles])
    assert set(many) - set(few) == {At("far", 64)}
    terms = score_terms([many, many], 64)
    assert terms == (At("far", 64), At("answers", 64)) and score(many, terms) == 3.7
    assert score_terms([many, few], 64) == (At("text", 64), At("answers", 64))
    lower = {at: Number(one.mean - 1, tuple(u if u is None else u - 1 for u in one.units)) for at, one in many.items()}
    found = score_difference(lower, many, terms)
    assert found.mean == pytest.approx(-2) and found.p == 0  # a document without far tokens makes no pair


def test_the_loss_by_position_is_that_of_the_longest_sequences():
    common = {"suite": "long_range", "nll": 3.0, "all_nll": 2.0, "tokens": 99}
    short = {**common, "length": 64, "position_edges": [0, 16, 64], "nll_by_position": [9.0, 3.0]}
    long = {**common, "length": 128, "position_edges": [0, 16, 64, 128], "nll_by_position": [9.0, 3.1, 2.5]}
    found = numbers_of([short, long])
    positions = {at.length: one.mean for at, one in found.items() if at.measure == "position"}
    assert positions == {64: 3.1, 128: 2.5}  # earlier tokens have no context
    assert {at.measure for at in columns([found], (64, 128))} == {"far", "text"}


def test_seeds_are_the_units_of_several_runs():
    runs = [{At("far", 64): Number(mean, (mean,) * 5)} for mean in (1.0, 2.0, 4.5)]
    assert over_seeds(runs)[At("far", 64)] == Number(2.5, (1.0, 2.0, 4.5), by_seed=True)
    assert over_seeds(runs[:1]) == runs[0]


def test_the_terms_of_a_seed_are_one_sample():
    """They are of one model: a difference of scores is one for each seed. Documents and windows are other samples."""
    differences = {At("far", 64): (0.02, 0.10, 0.18), At("answers", 64): (0.01, 0.11, 0.20)}
    for by_seed in (True, False):
        one = {at: Number(float(np.mean(d)), d, by_seed) for at, d in differences.items()}
        other = {at: Number(0.0, (0.0,) * 3, by_seed) for at in differences}
        found = score_difference(one, other, tuple(differences))
        sums = np.sum(list(differences.values()), axis=0)
        expected = stats.ttest_1samp(sums, 0.0).pvalue if by_seed else paired_sum([*differences.values()]).p
        assert found.p == pytest.approx(expected) and found.mean == pytest.approx(sums.mean())
        assert (found.p > 0.05) == by_seed


def test_methods_are_ranked_by_what_is_compared():
    """The mean of a record is over tokens, that of a comparison over documents."""
    at = At("far", 64)
    one = {at: Number(2.9, (3.0, 1.0))}  # most far tokens are in the first document
    other = {at: Number(2.5, (2.5, 2.5))}
    assert score(one, (at,)) == 2.0 and score_difference(one, other, (at,)).mean == -0.5


# --------------------------------------------------------------------------------------------------------------------
# A screening


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.corpus(tmp_path_factory.mktemp("corpus"))


def test_the_cost_of_a_layer_is_what_its_drop_adds_to_the_loss(data):
    """3 s."""
    given = extension(data=data)
    checkpoint = given.subject.checkpoint
    forward = Forward(complete(checkpoint.model), devices=tiny.one_device())
    costs = layer_costs(given.subject, data, forward, checkpoint.params)
    assert set(costs) == {0, 1} and all(abs(cost) > 1e-3 for cost in costs.values())
    from pe_lab.lab.extend.objective import make_objective

    text = make_objective(("text",), data, given.subject, forward, checkpoint.params, tiny.LENGTH, 4)
    (part,) = text.parts
    for n, cost in costs.items():
        dropped = tuple(Layer(NoPE()) if n == m else Layer(Rope()) for m in range(2))
        loss = [forward.losses(checkpoint.params, part.batch, one).mean() for one in (dropped, given.layers)]
        assert cost == pytest.approx(float(loss[0] - loss[1]), abs=1e-5)


@pytest.mark.slow  # 3 s
def test_a_screening_has_every_method_and_is_not_measured_twice(data, tmp_path):
    """15 s of compiling."""
    given = extension(data=data, factor=2)
    chosen, _ = choose(("unchanged", "pi", "yarn", "drope"), given)
    options = {"documents": 4, "windows": 16, "tokens": 512, "fit_tokens": 256}
    measure = functools.partial(screen, given.subject, data, chosen, (16, 32), tmp_path, options)
    found = measure()
    assert set(found.numbers) == {"unchanged", "pi", "yarn", "drope"}
    of_position = {At("position", 32)}  # one bin: tokens 16 to 31
    assert {at for numbers in found.numbers.values() for at in numbers if at.measure != "far"} == of_position | {
        At(name, length) for name in ("text", "found", "answers") for length in (16, 32)
    }
    assert found.ranked() == sorted(found.numbers, key=found.score)
    assert {key: set(scales) for key, scales in found.scales.items()} == dict.fromkeys(found.numbers, {16, 32})
    assert all(scales[16] == 1 for scales in found.scales.values())
    terms = found.terms
    assert found.score("pi") == pytest.approx(sum(found.numbers["pi"][at].mean for at in terms))
    header, rows = text_rows(found)
    assert len(rows) == 4 and {len(row) for row in rows} == {len(header)}
    before = {file: file.read_bytes() for file in tmp_path.glob("*.jsonl")}
    again = measure()
    assert again == dataclasses.replace(found) and {file: file.read_bytes() for file in before} == before
