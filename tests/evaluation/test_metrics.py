"""The metrics against the originals' own code (tests/data/make_scorer_golden.py says which and how)."""

import json
import sys
import time
from pathlib import Path

import pytest

from pe_lab.errors import UserError
from pe_lab.evaluation.scoring import metrics
from pe_lab.evaluation.scoring.metrics import common_length, common_words, rouge_l

GOLDEN = json.loads((Path(__file__).parents[1] / "data/scorer_golden.json").read_text(encoding="utf-8"))


def different(score, cases, golden, tolerance=1e-12):
    """All cases whose score differs from the original's."""
    assert len(cases) == len(golden) >= 60
    scored = [(case, score(*case), right) for case, right in zip(cases, golden, strict=True)]
    return [(case, got, right) for case, got, right in scored if not abs(got - right) <= tolerance or not 0 <= got <= 1]


@pytest.mark.parametrize(
    "name", ["qa_f1", "qa_f1_zh", "rouge_l", "rouge_l_zh", "code_similarity", "code_similarity_levenshtein"]
)
def test_texts_score_as_longbench_scores_them(name):
    golden = GOLDEN[name]
    assert len({round(value, 6) for value in golden}) >= 20
    assert different(metrics.METRICS[name], GOLDEN["pairs"], golden) == []


@pytest.mark.parametrize(
    ("name", "reference"), [("count", "{}"), ("retrieval", "Paragraph {}"), ("retrieval_zh", "段落{}")]
)
def test_numbers_score_as_longbench_scores_them(name, reference):
    cases = [(output, reference.format(k)) for output, k in GOLDEN["numbered"]]
    assert different(metrics.METRICS[name], cases, GOLDEN[name]) == []


def test_classes_score_as_longbench_scores_them():
    assert different(metrics.classification, GOLDEN["classified"], GOLDEN["classification"]) == []


def test_strings_are_matched_as_ruler_matches_them():
    for name in ("string_match_all", "string_match_part"):
        golden = [value / 100 for value in GOLDEN[name]]
        assert different(getattr(metrics, name), GOLDEN["matched"], golden, tolerance=0.5e-4) == []
    assert {0, 50, 100} < {*GOLDEN["string_match_all"]} and {*GOLDEN["string_match_part"]} == {0, 100}


@pytest.mark.parametrize("name", ["string_match_all", "string_match_part"])
def test_no_reference_is_an_error(name):
    with pytest.raises(ValueError, match="no references"):
        getattr(metrics, name)("anything", [])


@pytest.mark.parametrize("name", ["retrieval", "retrieval_zh"])
def test_a_reference_without_a_paragraph_is_refused(name):
    with pytest.raises(ValueError, match="names no"):
        metrics.METRICS[name]("3", "3")


def longest_common(one, other):
    """The length by the textbook's table."""
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, x in enumerate(one):
        for j, y in enumerate(other):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def test_the_common_subsequence_is_a_longest_one():
    texts = [
        "",
        "a",
        "ab",
        "ba",
        "abcabba",
        "cbabac",
        "aaaa",
        "the quick brown fox",
        "a quick fix, thou",
        "x" * 70 + "ab",
    ]
    for one in texts:
        for other in texts:
            assert common_length(one, other) == longest_common(one, other), (one, other)
    assert common_words("dabce", "bacd") in ({"b", "c"}, {"a", "c"})


def test_a_long_summary_without_full_stops_is_scored_quickly():
    # The package's recursion is too deep for it, and LongBench then gives 0.
    reference = [f"w{i * i % 701}" for i in range(2000)]
    output = reference[:600:3] + [f"w{i % 701}" for i in range(312)]
    start = time.process_time()
    score = rouge_l(" ".join(output), " ".join(reference))
    assert time.process_time() - start < 1  # 0.01 s; the package takes 1
    shared = len(common_words(reference, output))
    precision, recall = shared / len({*output}), shared / len({*reference})
    assert 200 / 701 < score == pytest.approx(2 * precision * recall / (precision + recall), abs=1e-7)


def test_the_error_without_jieba_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    for name in ("qa_f1_zh", "rouge_l_zh"):
        with pytest.raises(UserError, match="pip install jieba"):
            metrics.METRICS[name]("北京", "北京")
