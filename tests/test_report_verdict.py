"""The headline: wins, ties and losses as the records have them."""

from __future__ import annotations

import json

import pytest
from prompted_rows import row, write_rows
from run_directories import WINNING, make_run

from pe_lab.page.document import build_page, headline
from pe_lab.page.run_section import work_out
from pe_lab.results.runs import read_run, read_runs

DROPPED = ("DroPE", "beta", "DroPE, β")
YARN = ("RoPE", "YaRN", "RoPE + YaRN")


def verdict(directory):
    return work_out(read_run(directory)).verdict


def change(methods, method, accuracies=None, perplexities=None):
    old = methods[method]
    return {**methods, method: (accuracies or old[0], perplexities or old[1])}


def test_headline_where_the_dropped_model_wins(tmp_path):
    found = verdict(make_run(tmp_path))
    assert found.tone == "win"
    for part in ("at 8× DroPE, β finds 51%", "RoPE as trained 0%", "RoPE + YaRN) 30%"):
        assert part in found.headline
    assert "does not" not in found.headline


def test_headline_where_it_loses_says_where_and_by_how_much(tmp_path):
    worse = change(WINNING, DROPPED, (0.53, 0.30, 0.20, 0.05), (8.0, 12.0, 30.0, 96.0))
    found = verdict(make_run(tmp_path, methods=worse))
    assert found.tone == "loss" and found.headline.startswith("The dropped model (DroPE, β) does not win:")
    assert "at 8× (25 points lower than RoPE + YaRN)" in found.headline
    assert (
        "in perplexity it loses at 2×, 4× and 8× (at worst 12.0 times that of RoPE, cropped context)" in found.headline
    )


def test_headline_where_it_wins_here_and_loses_there(tmp_path):
    mixed = change(WINNING, DROPPED, (0.53, 0.30, 0.54, 0.51))
    found = verdict(make_run(tmp_path, methods=mixed))
    assert found.tone == "mixed" and "does not win everywhere" in found.headline
    assert "wins at 4× and 8×" in found.headline and "at 2× (15 points lower than RoPE + NTK)" in found.headline
    assert found.headline.endswith("; in perplexity it wins at 2×, 4× and 8×.")


def test_a_win_in_needles_does_not_hide_a_loss_in_perplexity(tmp_path):
    found = verdict(make_run(tmp_path, methods=change(WINNING, DROPPED, None, (8.0, 8.8, 7.45, 7.4))))
    assert found.tone == "mixed"
    assert "in perplexity it wins at 4× and 8× and loses at 2× (10.0% higher than RoPE + YaRN)" in found.headline


def test_the_worst_loss_is_the_largest_difference_not_the_highest_perplexity(tmp_path):
    methods = {key: (found, (8.0, 8.0, 8.0, 90.0)) for key, (found, _) in WINNING.items() if key[0] == "RoPE"}
    methods[DROPPED] = (WINNING[DROPPED][0], (8.0, 9.0, 24.0, 120.0))
    found = verdict(make_run(tmp_path, methods=methods))
    assert "in perplexity it loses at 2×, 4× and 8× (at worst 3.00 times that of RoPE" in found.headline


def test_a_difference_within_the_noise_is_a_tie(tmp_path):
    tied = change(WINNING, YARN, (0.54, 0.55, 0.54, 0.52), (8.0, 7.6, 7.45, 7.4))
    found = verdict(make_run(tmp_path, methods=tied))
    assert found.tone == "loss" and "cannot be told from the best RoPE variant at 2×, 4× and 8×" in found.headline


def test_cropping_is_a_rival_too(tmp_path):
    cropped = ("RoPE", "cropped", "RoPE, cropped context")
    found = verdict(make_run(tmp_path, methods=change(WINNING, cropped, None, (8.1, 7.0, 7.0, 7.0))))
    assert "loses at 2×, 4× and 8×" in found.headline and "RoPE, cropped context" in found.headline


def test_nope_from_scratch_is_reported_but_is_no_rival(tmp_path):
    nope = {("NoPE", "as trained", "NoPE"): ((0.51, 0.53, 0.5, 0.6), (8.2, 8.1, 8.3, 9.0))}
    found = verdict(make_run(tmp_path, methods=WINNING | nope))
    assert found.tone == "win"
    assert any("behind NoPE (60%)" in sentence for sentence in found.details)


RANKED = (
    "At 8× the training length RoPE + YaRN finds 30% of the needles, the best of 5 variants: 24.0 points more "
    "[20.8, 27.2] than RoPE, cropped context (6.0%). At 8× the training length RoPE, cropped context has perplexity "
    "8.03, the best of 5 variants: 16.4% lower [15.4, 17.3] than RoPE + YaRN (9.60)."
)


@pytest.mark.parametrize(("models", "words"), [(("RoPE",), RANKED), (("DroPE",), "but RoPE was not")])
def test_headline_where_a_side_is_missing(tmp_path, models, words):
    """Intervals by hand: 0.24 ± 1.96 sqrt((.3 .7 + .06 .94) / 1024); 1 - 8.03 / 9.6 e^(± 1.96 .004 sqrt 2)."""
    one = {key: value for key, value in WINNING.items() if key[0] in models}
    run = make_run(tmp_path, methods=one)
    assert words in verdict(run).headline and verdict(run).tone == "missing"
    assert words in build_page(read_runs([run]))


def test_headline_of_a_run_evaluated_at_its_training_length_alone(tmp_path):
    short = {key: (accuracies[:1], perplexities[:1]) for key, (accuracies, perplexities) in WINNING.items()}
    nope = {("NoPE", "as trained", "NoPE"): ((0.51,), (8.2,))}
    found = verdict(make_run(tmp_path, methods=short | nope))
    assert found.tone == "missing"
    assert found.headline == "The dropped model and RoPE have not both been evaluated past the training length yet."


def test_the_opening_compares_with_the_best_variant_and_names_both(tmp_path):
    found = verdict(make_run(tmp_path))
    assert found.opening == (
        "At 2× its training length DroPE, β finds 56% of the needles, the best RoPE variant (RoPE + NTK) 45%; at 8×, "
        "51% and 30% (RoPE + YaRN)."
    )
    paper = {("DroPE", "paper beta", "DroPE, paper's β"): WINNING[DROPPED]}
    found = verdict(make_run(tmp_path / "paper", methods=WINNING | paper))
    assert "DroPE, β finds" in found.opening and "paper" not in found.opening + found.headline


@pytest.mark.slow
def test_several_runs_without_a_dropped_model_have_a_whole_headline(tmp_path):
    rope = {key: value for key, value in WINNING.items() if key[0] == "RoPE"}
    runs = read_runs([make_run(tmp_path, name, methods=rope) for name in ("one", "two")])
    assert ">At 8× the training length " in build_page(runs)


@pytest.mark.parametrize("written", ["lineage", "source.json"])
def test_an_imported_checkpoint_has_a_headline_of_its_own(tmp_path, written):
    rope = {key: value for key, value in WINNING.items() if key[0] == "RoPE"}
    run = make_run(tmp_path, methods=rope, phases=(("convert", "rope(base=10000)", 10),))
    if written == "lineage":
        info = json.loads((run / "convert" / "phase.json").read_text())
        info["lineage"] = [{"id": "a", "what": "converted from hf:models/small", "path": "", "step": 0}]
        (run / "convert" / "phase.json").write_text(json.dumps(info))
    else:
        (run / "source.json").write_text('{"source": "hf:models/small"}')
    assert headline(read_runs([run])) == (
        "Imported from hf:models/small. At 8× its training length RoPE + YaRN finds 30% of the needles, the best of 5 "
        "variants; as it is, the model finds 0% of the needles."
    )


def test_an_imported_checkpoint_with_prompted_tasks_alone(tmp_path):
    write_rows(
        tmp_path, "niah", [row("niah", "standard", "RoPE", 0.25, 128), row("niah", "standard", "RoPE + YaRN", 0.5, 128)]
    )
    (tmp_path / "source.json").write_text('{"source": "gguf:small.gguf"}')
    assert headline(read_runs([tmp_path])).startswith(
        "Imported from gguf:small.gguf. At 2× its training length RoPE + YaRN scores 50%"
    )
    assert not read_run(tmp_path).problems  # nothing is missing
