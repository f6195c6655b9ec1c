"""The verdict of tables made here: label -> length in training lengths -> accuracy or perplexity."""

from __future__ import annotations

import math

import pytest

from pe_lab.results.scores import arrange
from pe_lab.results.table import Length, Table
from pe_lab.results.verdict import imported_headline, judge

MODELS = {"RoPE": ("RoPE", "as trained"), "NTK": ("RoPE", "NTK"), "PI": ("RoPE", "PI"), "NoPE": ("NoPE", "as trained")}
MODELS |= {"DroPE": ("DroPE", "as trained"), "β": ("DroPE", "beta"), "paper": ("DroPE", "paper beta")}
MODELS |= {"odd": ("DroPE", "whirled"), "p-RoPE 0.5": ("p-RoPE 0.5", "as trained")}


def scores(suite, values, known=True):
    rows = []
    for label, by_factor in values.items():
        model, method = MODELS[label]
        for factor, value in by_factor.items():
            record = {"label": label, "model": model, "variant": method, "stderr": 0.001}
            record |= {"nll": math.log(value)} if suite == "perplexity" else {"accuracy": value}
            rows.append((suite, label, Length(factor if known else None, 64 * factor), record))
    (table,) = arrange(rows)
    return table


def gap(suite, ours, theirs):
    ((_, (duel,)),) = judge(scores(suite, {"RoPE": {2: theirs}, "DroPE": {2: ours}}), None).duels
    return duel.gap


@pytest.mark.parametrize(
    ("suite", "ours", "theirs", "words"),
    [
        ("needles", 0.5, 0.42, "8.0 points higher"),
        ("needles", 0.25, 0.5, "25 points lower"),
        ("needles", 0.5, 0.5, "0.0 points higher"),
        ("perplexity", 6.0, 8.0, "25.0% lower"),
        ("perplexity", 12.0, 8.0, "50.0% higher"),
        ("perplexity", 8.0, 8.0, "0.0% lower"),
        ("perplexity", 2.0, 8.0, "75.0% lower"),
        ("perplexity", 24.0, 8.0, "3.00 times as high"),
    ],
)
def test_a_difference_in_words(suite, ours, theirs, words):
    assert gap(suite, ours, theirs) == words


def test_a_difference_of_perplexities_without_losses_and_of_other_scores():
    def said(name, ours, theirs):
        rows = [
            ("s", model, Length(2, 128), {"model": model, "variant": "as trained", name: value})
            for model, value in (("RoPE", theirs), ("DroPE", ours))
        ]
        ((_, (duel,)),) = judge(None, arrange(rows)[0]).duels
        return duel.gap

    assert said("perplexity", 6.0, 8.0) == "25.0% lower"
    assert said("score", 0.5, 0.25) == "0.25 higher" and said("score", 0.25, 0.5) == "0.25 lower"
    # Of a model that diverged: e^700, which is 10^(700 / 2.302585) = 10^304.0061, stands for all larger ratios.
    assert said("nll", 1000.0, 10.0) == "1.0·10³⁰⁴ times as high"


LOST = {"RoPE": {1: 0.5, 2: 0.6}, "DroPE": {1: 0.5, 2: 0.2}}
WON = {"RoPE": {1: 0.5, 2: 0.2}, "DroPE": {1: 0.5, 2: 0.6}}


def test_one_length_past_the_training_length_makes_a_verdict():
    found = judge(scores("needles", WON), None)
    assert (found.tone, found.opening) == ("win", "")  # the headline has the numbers
    assert found.headline == (
        "Without its positional encoding the model works past its training length: at 2× DroPE finds 60% of the "
        "needles, and the best RoPE variant (RoPE) 20%."
    )
    lost = judge(scores("needles", LOST), None)
    assert lost.headline == (
        "The dropped model (DroPE) does not win: in needle accuracy it loses to the best RoPE variant at 2× (40 points "
        "lower than RoPE)."
    )
    assert lost.opening == (
        "At 2× its training length DroPE finds 20% of the needles, the best RoPE variant (RoPE) 60%."
    )
    assert lost.details == [
        "RoPE as trained finds 50% of the needles at 1×, 60% at 2×.",
        "At the training length itself, DroPE: needles 50% against 50% of RoPE (no difference beyond the noise).",
    ]


def test_perplexity_alone_has_the_same_sentences():
    found = judge(None, scores("perplexity", {"RoPE": {1: 8.0, 4: 9.0}, "DroPE": {1: 9.0, 4: 9.9}, "NoPE": {4: 20.0}}))
    assert found.headline == (
        "The dropped model (DroPE) does not win: in perplexity it loses to the best RoPE variant at 4× (10.0% higher "
        "than RoPE)."
    )
    assert found.details == [
        "RoPE as trained has perplexity 8.00 at 1×, 9.00 at 4×.",
        "At the training length itself, DroPE: perplexity 9.00 against 8.00 of RoPE (worse).",
        "At 4×, DroPE (perplexity 9.90) is ahead of NoPE (20.0), the best of the models with another encoding.",
    ]
    assert judge(scores("needles", LOST), found.duels[0][0]).headline.endswith(
        "; in perplexity it loses at 4× (10.0% higher than RoPE)."
    )
    only_trained = scores("perplexity", {"RoPE": {1: 8.0}, "DroPE": {1: 7.0}})
    both = judge(scores("needles", LOST), only_trained)
    assert both.headline.endswith("(40 points lower than RoPE).") and len(both.duels) == 2
    assert both.details[-1].endswith(
        "(no difference beyond the noise) and perplexity 7.00 against 8.00 of RoPE (better)."
    )


def test_wins_ties_and_losses_each_have_their_lengths():
    rope = dict.fromkeys((2, 4, 8, 16), 0.5)
    some = {2: 0.6, 4: 0.5, 8: 0.4, 16: 0.6}
    found = judge(scores("needles", {"RoPE": rope, "DroPE": some}), scores("perplexity", {"RoPE": rope, "DroPE": rope}))
    assert found.tone == "mixed" and found.headline == (
        "The dropped model (DroPE) does not win everywhere: in needle accuracy it wins at 2× and 16×, ties at 4× and "
        "loses to the best RoPE variant at 8× (10 points lower than RoPE); in perplexity it ties at 2×, 4×, 8× and 16×."
    )
    wins_and_ties = judge(scores("needles", {"RoPE": {2: 0.5, 4: 0.5}, "DroPE": {2: 0.6, 4: 0.5}}), None)
    assert wins_and_ties.headline.endswith("does not win everywhere: in needle accuracy it wins at 2× and ties at 4×.")
    assert judge(scores("needles", {"RoPE": {2: 0.5}, "DroPE": {2: 0.5}}), None).headline.endswith(
        "(DroPE) does not win: in needle accuracy it cannot be told from the best RoPE variant at 2× its training "
        "length."
    )
    ties_and_losses = judge(None, scores("perplexity", {"RoPE": {2: 8.0, 4: 8.0}, "DroPE": {2: 8.0, 4: 8.8}}))
    assert ties_and_losses.tone == "loss" and ties_and_losses.headline.endswith(
        "does not win: in perplexity it ties at 2× and loses to the best RoPE variant at 4× (10.0% higher than RoPE)."
    )


def test_of_two_losses_in_perplexity_the_worse_is_told():
    worse = scores("perplexity", {"RoPE": {2: 8.0, 4: 8.0, 8: 8.0}, "DroPE": {2: 8.8, 4: 10.0, 8: 7.0}})
    assert judge(scores("needles", WON), worse).headline.endswith(
        "RoPE) 20%; in perplexity it wins at 8× and loses at 2× and 4× (at worst 25.0% higher than RoPE)."
    )
    better = scores("perplexity", {"RoPE": {2: 8.0}, "DroPE": {2: 7.0}})
    assert judge(scores("needles", WON), better).headline.endswith("(RoPE) 20%.")


def test_only_rope_as_trained_is_named_beside_the_best():
    values = {"RoPE": {2: 0.1}, "NTK": {2: 0.3}, "DroPE": {2: 0.6}}
    assert (
        ", RoPE as trained 10%, and the best RoPE variant (NTK) 30%." in judge(scores("needles", values), None).headline
    )
    del values["RoPE"]
    assert judge(scores("needles", values), None).headline.endswith(
        "of the needles, and the best RoPE variant (NTK) 30%."
    )


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        (("odd", "DroPE", "β", "paper"), "β"),
        (("odd", "DroPE", "paper"), "DroPE"),
        (("odd", "paper"), "paper"),
        (("odd",), "odd"),
    ],
)
def test_one_variant_stands_for_the_dropped_model_whatever_its_score(measured, chosen):
    values = {label: {2: 0.9 - 0.1 * place} for place, label in enumerate(measured)}
    ((_, (duel,)),) = judge(scores("needles", {"RoPE": {2: 0.2}} | values), None).duels
    assert duel.label == chosen and duel.rival == "RoPE"


@pytest.mark.parametrize(
    ("fitted", "plain", "chosen"),
    [
        ({2: 0.5}, {2: 0.4, 4: 0.4}, {2: "DroPE", 4: "DroPE"}),  # so that 4× has a duel, and of the same variant
        ({2: 0.1, 4: 0.1}, {2: 0.9, 4: 0.9}, {2: "β", 4: "β"}),
        ({2: 0.1, 4: 0.1}, {1: 0.9, 2: 0.9, 4: 0.9, 8: 0.9}, {2: "β", 4: "β"}),  # 1× is no test, and 8× has no RoPE
    ],
)
def test_one_variant_stands_for_the_dropped_model_at_all_lengths(fitted, plain, chosen):
    rope = {1: 0.2, 2: 0.2, 4: 0.2}
    ((_, found),) = judge(scores("needles", {"RoPE": rope, "β": fitted, "DroPE": plain}), None).duels
    assert {duel.column.key: duel.label for duel in found} == chosen


def test_a_length_of_one_side_alone_is_no_duel():
    values = {"RoPE": {1: 0.5, 2: 0.5}, "DroPE": {1: 0.5, 4: 0.5}}
    found = judge(scores("needles", values), None)
    assert [duel.column.key for duel in found.duels[0][1]] == [1] and (found.tone, found.opening) == ("missing", "")
    assert found.headline == "The dropped model and RoPE have not both been evaluated past the training length yet."
    assert found.details == ["RoPE as trained finds 50% of the needles at 1×, 50% at 2×."]
    assert judge(scores("needles", values), None, "hf:a").headline == found.headline  # imported, and dropped
    assert (
        judge(None, None).headline
        == "Nothing has been evaluated here yet."
        == judge(None, Table((), {}, {}, "perplexity")).headline
    )


def test_rope_at_one_length_is_no_row_of_lengths():
    assert judge(scores("needles", {"RoPE": {2: 0.5}, "DroPE": {2: 0.6}}), None).details == []
    (said,) = judge(scores("needles", {"RoPE": {2: 0.5, 4: 0.4, 8: 0.3}}), None).details
    assert said == "RoPE as trained finds 50% of the needles at 2×, 40% at 4× and 30% at 8×."


def test_every_model_that_rotates_has_its_row_of_lengths():
    values = {"RoPE": {1: 0.9, 2: 0.4}, "NTK": {1: 0.9, 2: 0.5}, "p-RoPE 0.5": {1: 0.8, 2: 0.6}}
    assert judge(scores("needles", values), None).details == [
        "RoPE as trained finds 90% of the needles at 1×, 40% at 2×.",
        "p-RoPE 0.5 as trained finds 80% of the needles at 1×, 60% at 2×.",
    ]


def test_other_schemes_are_compared_at_the_longest_length_that_both_have():
    values = {"RoPE": {2: 0.1}, "DroPE": {2: 0.5, 4: 0.5, 8: 0.5}, "NoPE": {2: 0.1, 4: 0.5, 16: 0.9}}
    assert judge(scores("needles", values), None).details == [
        "At 4×, DroPE (needles 50%) is within the noise of NoPE (50%), the best of the models with another encoding."
    ]


def test_an_imported_checkpoint_beside_the_model_as_it_is():
    def said(values, suite="needles", known=True):
        return imported_headline(scores(suite, values, known), "hf:a")

    start = "Imported from hf:a. At 4× its training length "
    assert said({"RoPE": {2: 0.9, 4: 0.5}}) == f"{start}RoPE finds 50% of the needles."
    assert said({"NTK": {4: 0.5}, "PI": {4: 0.3}}) == f"{start}NTK finds 50% of the needles."
    assert said({"RoPE": {4: 0.5}, "NTK": {4: 0.4}, "PI": {4: 0.3}}) == (
        f"{start}RoPE finds 50% of the needles: none of the 2 other variants is better."
    )
    assert said({"RoPE": {4: 8.0}, "NTK": {4: 7.0}}, "perplexity", known=False) == (
        "Imported from hf:a. At 256 tokens NTK has perplexity 7.00, the best of 2 variants; as it is, the model has "
        "perplexity 8.00."
    )
    assert said({"RoPE": {4: 0.5}}, "ruler") == f"{start}RoPE scores 50%."


def test_the_rival_at_the_training_length_is_named():
    """The best that rotates is p-RoPE 0.5: the sentence compares with the one that it names."""
    values = {"RoPE": {1: 50.0, 2: 60.0}, "p-RoPE 0.5": {1: 46.7, 2: 55.0}, "DroPE": {1: 41.5, 2: 70.0}}
    found = judge(None, scores("perplexity", values))
    assert "At the training length itself, DroPE: perplexity 41.5 against 46.7 of p-RoPE 0.5 (better)." in found.details


def test_without_a_drop_the_headline_is_the_best_and_its_distance():
    """0.05 ± 1.96 sqrt(2) 0.001 nats are 4.88% [4.61, 5.14]."""
    best, other = math.exp(2.0), math.exp(2.05)
    found = judge(None, scores("perplexity", {"RoPE": {8: other}, "NoPE": {8: best}, "p-RoPE 0.5": {8: 20.0}}))
    assert (found.tone, found.headline) == (
        "missing",
        "At 8× the training length NoPE has perplexity 7.39, the best of 3 variants: 4.9% lower [4.6, 5.1] than RoPE "
        "(7.77).",
    )
    close = judge(None, scores("perplexity", {"RoPE": {8: math.exp(2.001)}, "NoPE": {8: best}}))
    assert "but cannot be told from RoPE (7.40): 0.1% lower [-0.2, 0.4]." in close.headline
    needles = judge(scores("needles", {"RoPE": {2: 0.5}, "NoPE": {2: 0.75}}), None)
    assert needles.headline.endswith("the best of 2 variants: 25.0 points more [24.7, 25.3] than RoPE (50%).")
    assert judge(None, scores("perplexity", {"NoPE": {8: best}})).headline.endswith("7.39; nothing else was measured.")
