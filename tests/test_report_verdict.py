"""The headline: who wins where, said as the rows have it, with ties and losses."""

from __future__ import annotations

import pytest
from run_directories import WINNING, make_run

from pe_lab.analysis.run_files import read_run, read_runs
from pe_lab.page.document import build_page
from pe_lab.page.run_section import work_out

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
    for part in ("at 8× it finds 51%", "RoPE as trained 0%", "RoPE + YaRN) 30%"):
        assert part in found.headline
    assert "does not" not in found.headline


def test_headline_where_it_loses_says_where_and_by_how_much(tmp_path):
    worse = change(WINNING, DROPPED, (0.53, 0.30, 0.20, 0.05), (8.0, 12.0, 30.0, 96.0))
    found = verdict(make_run(tmp_path, methods=worse))
    assert found.tone == "loss" and found.headline.startswith("The dropped model does not win:")
    assert "at 8× (25 points lower than RoPE + YaRN)" in found.headline
    assert (
        "in perplexity it loses at 2×, 4× and 8× (at worst 12.0 times that of RoPE, cropped context)" in found.headline
    )


def test_headline_where_it_wins_here_and_loses_there(tmp_path):
    mixed = change(WINNING, DROPPED, (0.53, 0.30, 0.54, 0.51))
    found = verdict(make_run(tmp_path, methods=mixed))
    assert found.tone == "mixed" and "does not win everywhere" in found.headline
    assert "wins at 4× and 8×" in found.headline and "at 2× (15 points lower than RoPE + NTK)" in found.headline


def test_a_win_in_needles_does_not_hide_a_loss_in_perplexity(tmp_path):
    found = verdict(make_run(tmp_path, methods=change(WINNING, DROPPED, None, (8.0, 8.8, 7.45, 7.4))))
    assert found.tone == "mixed"
    assert "in perplexity it wins at 4× and 8× and loses at 2× (10.0% higher than RoPE + YaRN)" in found.headline


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


@pytest.mark.parametrize(
    ("models", "words"),
    [(("RoPE",), "No dropped model has been evaluated"), (("DroPE",), "but RoPE was not")],
)
def test_headline_where_a_side_is_missing(tmp_path, models, words):
    one = {key: value for key, value in WINNING.items() if key[0] in models}
    run = make_run(tmp_path, methods=one)
    assert words in verdict(run).headline and verdict(run).tone == "missing"
    assert words in build_page(read_runs([run]))
