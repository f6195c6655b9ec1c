"""Filters: length, language and duplicates; what they drop is counted and sampled."""

import json
import random
import sys

import numpy as np
import pytest
from corpora import corpus, documents_of, run, sentences

from pe_lab.data.filters import Filters, _languages, bands, shingles, signatures
from pe_lab.data.preparation import building_directory
from pe_lab.data.shards import open_prepared
from pe_lab.data.sources import source as sources
from pe_lab.prepare import main


@pytest.fixture(autouse=True)
def an_input_shard_for_each_file(monkeypatch):
    monkeypatch.setattr(sources, "MOST_FILES", 1)


def test_filters_of_single_documents(tmp_path, capsys):
    english = "The weather was cold this morning, and the children walked to school through the fresh snow. "
    german = "Das Wetter war heute Morgen kalt, und die Kinder gingen durch den frischen Schnee zur Schule. "
    files = [[english * 2, "short", german * 2], [english * 30, german, english]]
    arguments = [f"--source={corpus(tmp_path, *files).source}", "--tokenizer=bytes", "--validation-fraction=0"]
    flags = ["--min-characters=10", "--max-characters=2000", "--language=en:0.9", "--min-tokens=150"]
    assert main([*arguments, *flags, f"--out={tmp_path / 'out'}", "--workers=1"]) == 0
    assert documents_of(tmp_path / "out", "train") == [english * 2]
    metadata = open_prepared(tmp_path / "out").metadata
    assert metadata.dropped == {"min_characters": 1, "max_characters": 1, "language": 2, "min_tokens": 1}
    assert "dropped documents: min_characters 1, max_characters 1, language 2" in capsys.readouterr().out
    read = (tmp_path / "out" / "dropped" / "language.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in read]
    assert [(s["input"], s["document"], s["language"], s["text"]) for s in samples] == [
        ("c0.jsonl", 2, "de", german * 2),
        ("c1.jsonl", 1, "de", german),
    ]
    assert main([*arguments, f"--out={tmp_path / 'out'}"]) == 2
    assert "already prepared with --min-characters=10, not 0" in capsys.readouterr().err


def jaccard(one, two, words=5):
    one, two = set(shingles(one, words)), set(shingles(two, words))
    return len(one & two) / len(one | two)


def test_planted_duplicates(tmp_path):
    """Copies with a few changed words, on both sides of a threshold of 0.8, far beyond the error of the estimate."""
    rng = random.Random(0)
    originals = sentences(40, 5, words=400)

    def changed(text, count):
        words = text.split()
        for i in rng.sample(range(len(words)), count):
            words[i] = f"changed{i}"
        return " ".join(words)

    near, far = [changed(d, 3) for d in originals], [changed(d, 40) for d in originals]
    assert min(map(jaccard, originals, near)) > 0.9 and max(map(jaccard, originals, far)) < 0.6
    files = [originals[:20], originals[20:] + near[:20] + originals[:3], far + near[20:], ["...", "...", "!"]]
    filters = Filters(exact_duplicates=True, near_duplicates=0.8)
    metadata = run(corpus(tmp_path, *files), tmp_path / "out", 0.0, filters=filters)
    assert documents_of(tmp_path / "out", "train") == originals + far + ["...", "!"]  # the first of each group
    assert metadata.dropped == {"exact_duplicate": 4, "near_duplicate": 40}
    path = tmp_path / "out" / "dropped" / "near_duplicate.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == 32
    for sample in samples:
        kept = files[sample["kept"]["shard"]][sample["kept"]["document"]]
        assert kept in originals and jaccard(kept, files[sample["shard"]][sample["document"]]) > 0.9
    without = run(corpus(tmp_path, *files), tmp_path / "exact", 0.0, filters=Filters(exact_duplicates=True))
    assert without.dropped == {"exact_duplicate": 4} and without.fingerprint != metadata.fingerprint


def test_signatures_estimate_the_similarity():
    """The mean error of 40 pairs is within four of its standard errors."""
    one = sentences(40, 7, words=200)
    two = [" ".join([*text.split()[:170], *sentences(1, 8 + i, words=30)[0].split()]) for i, text in enumerate(one)]
    exact = np.array([jaccard(a, b) for a, b in zip(one, two, strict=True)])
    assert 0.65 < exact.mean() < 0.8
    filters = Filters(near_duplicates=0.8)
    estimate = (signatures(one, filters) == signatures(two, filters)).mean(1)
    assert abs((estimate - exact).mean()) < 4 * np.sqrt((exact * (1 - exact)).mean() / 128 / 40) < 0.03


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.95])
def test_few_pairs_at_the_threshold_are_no_candidates(threshold):
    count, width = bands(threshold, 128)
    assert count * width <= 128
    assert (1 - threshold**width) ** count <= 0.02 < (1 - threshold ** (width + 1)) ** (128 // (width + 1))


@pytest.mark.parametrize(
    ("library", "flag", "says"),
    [
        ("ray", "--engine=ray", "pip install 'pe-lab[ray]'"),
        ("rensa", "--near-duplicates", "pip install 'pe-lab[filters]'"),
        ("py3langid.langid", "--language=en", "pip install 'pe-lab[filters]'"),
    ],
)
def test_a_missing_library_is_named(tmp_path, monkeypatch, capsys, library, flag, says):
    _languages.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)
    arguments = [
        f"--source={corpus(tmp_path, ['one', 'two']).source}",
        "--tokenizer=bytes",
        f"--out={tmp_path / 'out'}",
    ]
    assert main([*arguments, flag]) == 2
    assert says in capsys.readouterr().err and not building_directory(tmp_path / "out").exists()
