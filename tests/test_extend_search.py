"""The search of divisors: candidates, determinism, resumption, and a search that finds a planted optimum."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from pe_lab.config import DataConfig, SourceConfig
from pe_lab.data.mixture import open_mixture
from pe_lab.errors import UserError
from pe_lab.evaluation.scoring.forward import Forward
from pe_lab.evaluation.suites import long_range
from pe_lab.evaluation.variants import Subject
from pe_lab.lab.extend import objective
from pe_lab.lab.extend.search import DivisorSearch, SearchSettings, SearchSpace, read_history
from pe_lab.model import complete
from pe_lab.positional import NTK, PI, LongRopeStart, Yarn, frequencies, layers
from pe_lab.positional.encodings import rope_spectrum

sys.path.append(str(Path(__file__).parent / "evaluation"))
import tiny  # noqa: E402

SPACE = SearchSpace(rope_spectrum(10000.0, 64), 10000.0, 64, 4096, 4.0)
SMALL = SearchSettings(population=8, iterations=5, seed=3)


def planted(space):
    """Distance from divisors that no known method has."""
    target = np.where(np.arange(32) < 17, 1.0, 3.1)
    return target, lambda population: [
        float(((one.divisors - target) ** 2).sum() + 9 * (one.scale - 1.3) ** 2) for one in population
    ]


def run(directory, settings=SMALL, space=SPACE, measure=None, at_once=3, about=None):
    search = DivisorSearch(space, settings)
    search.run(
        measure or planted(space)[1], at_once, directory / "search.jsonl", about or {"data": "x"}, lambda line: None
    )
    return search


def test_the_known_methods_are_candidates_with_their_own_frequencies():
    known = SPACE.known()
    for name, scaling in (("PI", PI(4.0)), ("NTK", NTK(4.0)), ("YaRN", Yarn(4.0, 4096))):
        scaled = scaling.scale(SPACE.inv_freq, 10000.0, 64, None)[0]
        np.testing.assert_allclose(SPACE.inv_freq / known[name].divisors, scaled, rtol=0.006)  # steps of 0.01
    assert known["YaRN"].scale == pytest.approx((0.1 * math.log(4) + 1) ** 2, abs=5e-4) and known["NTK"].scale == 1
    (layer,) = SPACE.layers(known["YaRN"], layers("rope", 1))
    scaled, factor = frequencies(layer.encoding, 64, 16384)
    np.testing.assert_allclose(scaled, SPACE.inv_freq / known["YaRN"].divisors)
    assert layer.scale_at(16384) == pytest.approx(known["YaRN"].scale) and (factor == 1).all()
    unchanged, _ = frequencies(layer.encoding, 64, 4096)
    assert (unchanged == SPACE.inv_freq).all() and layer.scale_at(4096) == 1


def test_the_critical_pair_is_the_first_without_a_whole_rotation():
    """LongRoPE2: d_tcd = 2 ceil(d/2 log_base(L / 2 pi)); pairs from there on are divided by the whole factor."""
    assert SPACE.critical == math.ceil(32 * math.log(4096 / (2 * math.pi), 10000)) == 23
    found = SPACE.known()["critical pair"].divisors
    assert (found[23:] == 4).all() and found[0] == 1 and (np.diff(found) >= 0).all()
    np.testing.assert_allclose(found[:23], 4 ** (np.arange(23) / 23), atol=0.0051)  # NTK that reaches it there


@pytest.mark.parametrize("monotone", [True, False])
def test_all_candidates_are_in_the_space_and_none_is_measured_twice(tmp_path, monotone):
    space = dataclasses.replace(SPACE, monotone=monotone)
    history = run(tmp_path, SearchSettings(16, 10, 0), space).history
    divisors = np.array([one.divisors for one in history])
    assert len(history) == SearchSettings(16, 10, 0).measurements == 16 + 10 * 8
    assert divisors.min() >= 1 and divisors.max() <= 5
    assert len({one.genes.key for one in history}) == len(history)
    assert len({one.scale for one in history}) > 5
    falls = (np.diff(divisors) < 0).any(1)
    assert not falls.any() if monotone else falls.mean() > 0.2


def test_a_search_finds_more_than_the_methods_that_it_starts_from(tmp_path):
    """A planted optimum, 0.5 s."""
    search = run(tmp_path, SearchSettings(32, 40, 0), at_once=16)
    started = min(one.loss for one in search.history if not one.origin.startswith(("mutation", "crossover")))
    assert search.best.loss < started / 3
    by_generation = [min(c.loss for c in search.history if c.generation <= g) for g in range(41)]
    assert by_generation == sorted(by_generation, reverse=True)
    kinds = {one.origin.split()[0] for one in search.history}
    assert kinds == {"PI", "NTK", "YaRN", "critical", "mutation", "crossover"}


def test_equal_seeds_give_equal_searches(tmp_path):
    one, other = run(tmp_path / "a"), run(tmp_path / "b", at_once=100)
    assert one.history == other.history
    another = run(tmp_path / "c", dataclasses.replace(SMALL, seed=4))
    assert another.history[4:] != one.history[4:]


@pytest.mark.parametrize("stop_after", [2, 9, 17])
def test_a_search_that_was_stopped_ends_as_one_that_was_not(tmp_path, stop_after):
    whole, measure, asked = run(tmp_path / "whole"), planted(SPACE)[1], []

    def stopping(population):
        if len(asked) + len(population) > stop_after:
            raise KeyboardInterrupt
        asked.extend(population)
        return measure(population)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", measure=stopping)
    left = []
    resumed = run(tmp_path / "stopped", measure=lambda population: left.extend(population) or measure(population))
    assert resumed.history == whole.history
    assert len(asked) + len(left) == len(whole.history)
    files = [(tmp_path / name / "search.jsonl").read_text() for name in ("whole", "stopped")]
    assert files[0] == files[1]


def test_starts_are_tried_on_the_best_candidate(tmp_path):
    """After the evolution, with its divisors and scale; the same settings without starts give the same history."""
    divisors = planted(SPACE)[1]

    def measure(population):
        better = [3.0 if genes.start == 16 else 0.0 for genes in population]
        return (np.array(divisors(population)) - better).tolist()

    without = run(tmp_path / "without", measure=measure)
    search = run(tmp_path / "starts", dataclasses.replace(SMALL, starts=(4, 16, 64)), measure=measure)
    assert search.history[:-3] == without.history
    tried = search.history[-3:]
    assert [one.start for one in tried] == [4, 16, 64] and {one.divisors for one in tried} == {without.best.divisors}
    assert search.best == tried[1] and search.best.origin == f"start of {without.best.origin}"
    (layer,) = SPACE.layers(search.best.genes, layers("rope", 1))
    assert layer.encoding == LongRopeStart(search.best.divisors, 16)
    assert run(tmp_path / "starts", dataclasses.replace(SMALL, starts=(4, 16, 64))).history == search.history
    with pytest.raises(UserError, match="give different numbers of 1 or more"):
        SearchSettings(starts=(4, 0))


def test_the_history_of_another_search_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(UserError, match="is the history of another search: settings differ"):
        run(tmp_path, dataclasses.replace(SMALL, seed=9))
    with pytest.raises(UserError, match="is the history of another search: data differ"):
        run(tmp_path, about={"data": "y"})
    file = tmp_path / "search.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], json.dumps({"divisors": [1]})]))
    with pytest.raises(UserError, match="is damaged"):
        read_history(file, json.loads(lines[0]))
    with pytest.raises(UserError, match="give at least 8 candidates"):
        SearchSettings(population=4)


# --------------------------------------------------------------------------------------------------------------------
# What a search minimizes


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Documents of 200 bytes that repeat a line of their own, and a checkpoint of a tiny model."""
    directory, rng = tmp_path_factory.mktemp("lines"), np.random.default_rng(0)
    for i in range(40):
        line = "".join(rng.choice(list("abcdefgh"), 19)) + "\n"
        (directory / f"{i}.txt").write_text(line * 10)
    source = SourceConfig(f"text:{directory}/*.txt")
    data = DataConfig((source,), cache_dir=str(directory / "cache"), validation_fraction=0.5)
    subject = Subject(tiny.language_model(tiny.checkpoint(layers("rope", 2), data)), "tiny", "pretrain/checkpoints/3")
    return data, subject, Forward(complete(subject.checkpoint.model), devices=tiny.one_device())


def test_far_tokens_are_found_once_and_no_suite_scores_their_documents(lines, tmp_path, monkeypatch):
    """Stopped after the second of four documents, it goes on with the third; 3 s."""
    data, subject, forward = lines
    for name, value in (("GAIN", 0.0), ("KNOWN", 100.0)):  # random weights know no token
        monkeypatch.setattr(f"pe_lab.evaluation.suites.long_range.{name}", value)
    shown, kept = [], tmp_path / "far_tokens.json"

    def make(show=shown.append, names=("long_range",)):
        params = subject.checkpoint.params
        return objective.make_objective(names, data, subject, forward, params, 64, 4, show, kept)

    def stop(line):
        if "document 3" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(stop)
    found = make()
    assert shown == [f"document {n} of 4: which tokens need a far context" for n in (3, 4)]
    again = make()
    assert len(shown) == 2 and again.fingerprint == found.fingerprint
    (part,) = found.parts
    scored = long_range.choose_documents(_stream(data), 64, 99)
    texts = {tuple(_stream(data).read(start, start + 64).tolist()) for start in scored}
    assert len(texts) == len(scored) > 4 and not texts & {tuple(tokens.tolist()) for tokens in part.tokens}
    # Its loss is the mean over the tokens that count.
    losses = forward.losses(subject.checkpoint.params, part.batch, subject.lm.layers)
    expected = (losses * part.weights).sum() / part.weights.sum()
    assert found.losses(forward, subject.checkpoint.params, [subject.lm.layers])[0, 0] == pytest.approx(expected)


def test_objectives_that_the_data_cannot_give(lines, tmp_path):
    data, subject, forward = lines
    params = subject.checkpoint.params

    def make(names, length=64):
        return objective.make_objective(names, data, subject, forward, params, length, 4)

    with pytest.raises(UserError, match="need more than 4 tokens of context: too few to search with"):
        make(("long_range",))
    assert [part.name for part in make(()).parts] == ["text"]  # by default all tokens count then
    for names, length, says in (
        (("needles",), 64, "the data has no needles"),
        (("passkeys",), 64, "at least 128 tokens"),
        (("text",), 300, "needs two held-out documents of more than that; the longest has 201"),
        (("words",), 64, "there is no 'words'"),
    ):
        with pytest.raises(UserError, match=says):
            make(names, length)


def _stream(data):
    return open_mixture(data).sources[0].prepared.streams["validation"]
