"""Prompted suites from end to end on a tiny model: what is kept, what is asked again, and what the rows say."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny

from pe_lab.errors import UserError
from pe_lab.evaluation.generation.backend import ModelBackend
from pe_lab.evaluation.generation.prompted import Prompted, batches, by_length, schedule_length
from pe_lab.evaluation.generation.tasks import Sample
from pe_lab.evaluation.progress import TokenProgress
from pe_lab.evaluation.suites.niah import Haystack, niah_task
from pe_lab.evaluation.variants import Subject, all_variants
from pe_lab.language_model import LanguageModel
from pe_lab.positional import DynamicNTK, NoPE, Rope
from pe_lab.results.records import SampleFile, sample_key
from pe_lab.results.statistics import mean_of, wilson

HAYSTACK = Haystack("text", " ".join(f"Day {n} went by. Nobody came." for n in range(100)))
LENGTHS = (600, 700)


def model(encoding=None, **metadata) -> LanguageModel:
    return tiny.language_model(tiny.checkpoint(encoding, **metadata))


def variants(lm, methods=None, descriptions=()):
    return all_variants([Subject(lm, "tiny", "pretrain/checkpoints/3")], methods, list(descriptions))


def task(name="standard", depths=(0.0, 50.0), **changes):
    made = niah_task(name, HAYSTACK, depths)
    return type(made)(**{**vars(made), "max_new_tokens": 12, **changes})


class Copies:
    """Answers with what it should, and counts how often it is asked."""

    def __init__(self, most: int = 4, dies_after: int | None = None, wrong: float | None = None):
        self.asked, self._rows, self._dies, self._wrong = [], most, dies_after, wrong

    def batch_size(self, length: int) -> int:
        return self._rows

    def __call__(self, samples, statistics):
        if self._dies is not None and len(self.asked) >= self._dies:
            raise KeyboardInterrupt
        self.asked.append([sample.index for sample in samples])
        return ["nothing" if s.depth[0] == self._wrong else " ".join(s.references) for s in samples]


def run(directory, answers, count=10, lm=None, tasks=None, **options):
    made = Prompted(variants(lm or model()), tasks or [task()], LENGTHS, {"samples": count}, 42, directory,
                    backend=lambda *_: answers, **options)  # fmt: skip
    return made, made.run()


@pytest.fixture
def counts(monkeypatch):
    """The numbers of tokens that are reported."""
    found = []
    monkeypatch.setattr(TokenProgress, "add", lambda progress, tokens, name=None: found.append(tokens))
    return found


def without_times(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_a_copying_model_has_all_and_rows_tell_by_depth(tmp_path, counts):
    made = Prompted(
        variants(model()), [task()], LENGTHS, {"samples": 10}, 42, tmp_path, backend=lambda *_: Copies(wrong=50.0)
    )
    rows = made.run()
    assert sum(counts) == made.work == 10 * sum(LENGTHS)
    assert [(row["length"], row["score"], row["samples"]) for row in rows] == [(600, 0.5, 10), (700, 0.5, 10)]
    assert rows[0]["by_depth"] == {"depth": [0.0, 50.0], "score": [1.0, 0.0], "count": [5, 5]}
    assert rows[0]["low"] == pytest.approx(wilson(0.5, 10)[0]) and rows[0]["scores"]["all_found"] == 0.5
    assert rows[0]["factor"] == 600 / tiny.LENGTH and rows[0]["label"] == rows[0]["model"] == "RoPE"
    line = without_times(tmp_path / "samples" / "niah.jsonl")[0]
    needed = {"prompt", "tokens", "depth", "references", "output", "score", "lineage", "protocol", "length"}
    assert needed <= set(line) and line["lineage"] == ["initialized at random"] and line["protocol"] == "niah-1"
    assert 580 - 12 <= line["tokens"] <= 600 - 12
    kept = [json.loads(text) for text in (tmp_path / "niah.jsonl").read_text().splitlines()]
    assert [row["score"] for row in kept] == [0.5, 0.5]


def test_what_was_interrupted_goes_on_and_ends_the_same(tmp_path):
    """Ten samples at each of two lengths, by four: batches of 4, 4, and 2 that are filled up."""
    run(tmp_path / "whole", Copies())
    file = tmp_path / "cut" / "samples" / "niah.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", Copies(dies_after=2))
    # A process that is killed as it writes leaves a part of a batch, and a part of a line.
    kept = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(kept[:5]) + kept[5][:40])
    second = Copies(dies_after=3)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", second)
    assert second.asked == [[4, 5, 6, 7], [8, 9, 9, 9], [0, 1, 2, 3]]  # the begun batch whole, though one was there
    last = Copies()
    made, _ = run(tmp_path / "cut", last)
    assert made.finished == 14 and last.asked == [[4, 5, 6, 7], [8, 9, 9, 9]]
    assert without_times(file) == without_times(tmp_path / "whole" / "samples" / "niah.jsonl")


def test_what_is_finished_is_not_asked_again_unless_it_is_to_be(tmp_path):
    _, rows = run(tmp_path, Copies())
    again = Copies()
    made, same = run(tmp_path, again)
    assert not again.asked and made.finished == made.total == 20 and same[0]["score"] == rows[0]["score"]
    run(tmp_path, again, count=12)  # two more of each length
    assert sorted({i for asked in again.asked for i in asked}) == [8, 9, 10, 11]
    before = (tmp_path / "samples" / "niah.jsonl").read_text().count("\n")
    assert before == 24
    anew = Copies(wrong=0.0)
    _, worse = run(tmp_path, anew, again=True)
    assert worse[0]["score"] == 0.5 and (tmp_path / "samples" / "niah.jsonl").read_text().count("\n") == before


def test_another_variant_another_haystack_and_another_seed_are_other_samples(tmp_path):
    run(tmp_path, Copies(), count=2)
    for change in (
        {"lm": model(Rope(base=500.0))},
        {"tasks": [task(haystack=Haystack("text", HAYSTACK.text + " And so on."))]},
    ):
        asked = Copies()
        run(tmp_path, asked, count=2, **change)
        assert len(asked.asked) == 2
    other = Copies()
    Prompted(variants(model()), [task()], LENGTHS, {"samples": 2}, 43, tmp_path, backend=lambda *_: other).run()
    assert len(other.asked) == 2


@pytest.mark.slow
def test_the_model_itself_answers_as_generate_does(tmp_path, counts, capsys):
    lm = model()
    made = Prompted(variants(lm), [task()], (600,), {"samples": 3}, 42, tmp_path)
    made.run()
    assert sum(counts) == made.work == 1800 and len([tokens for tokens in counts if tokens]) > 10  # as it goes on
    lines = without_times(tmp_path / "samples" / "niah.jsonl")
    samples = made.groups[0].prompts.samples
    for line, sample in zip(lines, samples, strict=True):
        assert line["output"] == lm.generate(sample.tokens, max_new_tokens=12, text=True)
    assert made.statistics.prompt_tokens == sum(len(s.tokens) for s in samples) and made.statistics.new_tokens >= 3
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.slow
def test_encodings_that_follow_the_length_are_fixed_at_the_one_that_is_asked_for(tmp_path):
    lm = model(Rope(scaling=DynamicNTK(original_length=tiny.LENGTH)))
    (variant,) = variants(lm)
    sample = Sample(0, "", np.arange(40, dtype=np.int32), ("x",), 6)
    named = model(Rope()).with_positional(f"ntk:factor={64 / tiny.LENGTH}")
    assert ModelBackend(variant.at(64))([sample]) == [named.generate(sample.tokens, max_new_tokens=6, text=True)]
    assert ModelBackend(variant.at(40))([sample]) != ModelBackend(variant.at(64))([sample])
    assert variant.fingerprint(64) != variant.fingerprint(128)
    assert variants(model(Rope()))[0].fingerprint(64) == variants(model(Rope()))[0].fingerprint(128)


def test_the_cropped_baseline_reads_the_end_of_a_prompt():
    (variant,) = variants(model(), ["cropped"])
    sample = Sample(0, "", np.arange(40, dtype=np.int32), ("x",), 6)
    cropped = ModelBackend(variant.at(40), crop=variant.crop)([sample])
    end = sample.tokens[-(tiny.LENGTH - 6) :]
    assert cropped == [variant.lm.generate(end, max_new_tokens=6, text=True)]


def test_samples_of_a_batch_have_the_space_that_the_longest_answer_needs():
    (variant,) = variants(model(), ["as trained"])
    tokens = np.arange(20, dtype=np.int32)
    short, long = (Sample(i, "", tokens, ("x",), new) for i, new in enumerate((2, 9)))
    expected = variant.lm.generate(tokens, max_new_tokens=9, text=True)
    assert ModelBackend(variant.at(40))([short, long])[1] == ModelBackend(variant.at(40))([long, short])[0] == expected


def test_methods_and_encodings_of_variants():
    lm = model()
    labels = [variant.label for variant in variants(lm, ["as trained", "YaRN"], ["yarn:factor=2", "nope"])]
    assert labels == ["RoPE", "RoPE + YaRN", "RoPE with yarn:factor=2", "RoPE with nope"]
    assert [variant.label for variant in variants(lm, None, ["nope"])] == ["RoPE with nope"]
    dropped = model(NoPE(), lineage=("random", tiny.DROPPED))
    with pytest.raises(UserError, match="nowhere has no fitted logit scale.*Or name paper-beta"):
        variants(dropped, ["beta"])
    with pytest.raises(UserError, match="makes no sense for what is here .DroPE."):
        variants(dropped, ["YaRN"])
    (scaled,) = variants(dropped, ["paper beta"])
    assert scaled.layers_at(4 * tiny.LENGTH)[0].logit_scale == pytest.approx(1 + 0.412 * np.log(4))


def test_a_model_without_a_tokenizer_is_an_error(tmp_path):
    lm = model()
    bare = type(lm)(lm.checkpoint, lm.layers)
    with pytest.raises(UserError, match="came without a tokenizer"):
        Prompted(variants(bare), [task()], LENGTHS, {"samples": 2}, 42, tmp_path)


def test_a_prompt_that_does_not_fit_is_an_error_and_never_cut(tmp_path):
    class Careless(type(task())):
        def samples(self, tokenizer, length, count, seed):
            return super().samples(tokenizer, length + 50, count, seed)

    made = Careless(**vars(task()))
    with pytest.raises(UserError, match="do not fit 600; prompts are never cut"):
        Prompted(variants(model()), [made], (600,), {"samples": 2}, 42, tmp_path)


def test_batches_are_of_one_size_and_few():
    cut = batches(list(range(11)), 8)
    assert cut == [([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]), ([6, 7, 8, 9, 10], [6, 7, 8, 9, 10, 10])]
    assert batches([3], 8) == [([3], [3])]


def test_sequences_of_their_own_lengths_share_few_schedules():
    assert [schedule_length(n, 16) for n in (1, 16, 17, 32, 33, 100)] == [16, 16, 32, 32, 64, 128]
    cut = {"tokens_before_truncation": 20000}
    lines = [{"tokens": n, "metadata": about, "score": s} for n, about, s in
             [(100, {}, 1.0), (4095, {}, 0.0), (4096, {}, 1.0), (900, cut, 1.0)]]  # fmt: skip
    found = by_length(lines)
    assert found["edges"] == [0, 4096, 8192, 16384, 32768] and found["of"] == "tokens"
    assert found["count"] == [2, 1, 0, 1] and found["score"] == [0.5, 1.0, None, 1.0]
    longest = by_length([{"tokens": 200_000, "metadata": {}, "score": 1.0}])
    assert longest["edges"][-2:] == [131072, 200_001] and longest["count"][-1] == 1


def test_scores_by_the_length_that_records_tell():
    """LongBench-E's buckets: below 4,000, below 8,000, and above."""
    lines = [{"tokens": 1, "metadata": {"record_length": n}, "score": 1.0} for n in (10, 3999, 4000, 7999, 8000, 90000)]
    found = by_length(lines, (0, 4000, 8000))
    assert found["edges"] == [0, 4000, 8000, 90001] and found["count"] == [2, 2, 2] and found["of"] == "words"


def test_intervals():
    """Wilson's of 8 in 10 is in his tables (0.4902, 0.9433)."""
    found = mean_of([1.0] * 8 + [0.0] * 2)
    assert (found.low, found.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert mean_of([x / 10 for x in (1, 2, 3, 4, 5)]).stderr == pytest.approx(0.0707, abs=1e-4)
    certain = mean_of([1.0] * 5)
    assert certain.high == pytest.approx(1.0) and certain.low < 0.7 and mean_of([]) is None
    # A little better is no more certain, as it would be by Student's t: 0 to 16% and 0 to 4%.
    none, little = mean_of([0.0] * 20), mean_of([0.0] * 19 + [0.25])
    assert none.high == pytest.approx(little.high, rel=0.02) and little.low > 0
    fractions = mean_of([0.5] * 500)
    assert 0.48 < fractions.low < 0.5 < fractions.high < 0.52


@pytest.mark.parametrize("n", [11, 50, pytest.param(500, marks=pytest.mark.slow)])
def test_intervals_have_the_mean_in_them_95_times_in_a_hundred(n):
    rng, drawn = np.random.default_rng(n), 2000
    for mean, draw in {
        0.05: lambda: rng.binomial(4, 0.05, n) / 4,
        0.3: lambda: rng.binomial(4, 0.3, n) / 4,
        0.98: lambda: rng.binomial(4, 0.98, n) / 4,
        0.65: lambda: np.where(rng.random(n) < 0.5, 1.0, rng.binomial(4, 0.3, n) / 4),
        2 / 7: lambda: rng.beta(2, 5, n),
    }.items():
        found = [mean_of(draw().tolist()) for _ in range(drawn)]
        assert np.mean([one.low <= mean <= one.high for one in found]) > 0.935


def test_four_answers_about_one_problem_count_as_one():
    rng = np.random.default_rng(0)
    alike = [float(solved) for solved in rng.random(100) < 0.4 for _ in range(4)]
    clusters = [i // 4 for i in range(400)]
    found, each = mean_of(alike, clusters), mean_of(alike[::4])
    assert (found.low, found.high, found.stderr) == pytest.approx((each.low, each.high, each.stderr))
    assert found.count == 400 and found.high - found.low > 1.9 * (mean_of(alike).high - mean_of(alike).low)


def test_a_damaged_file_of_lines_is_named(tmp_path):
    path = tmp_path / "niah.jsonl"
    path.write_text('{"index": 0}\n[1]\n')
    with pytest.raises(UserError, match="line 2, is no sample record"):
        SampleFile(path)
    path.write_text('{"index": 0}\n{"ind')
    file = SampleFile(path)
    assert [sample_key(line)[-1] for line in file.records.values()] == [0]
    file.add([{"index": 1}])
    assert path.read_text() == '{"index": 0}\n{"index": 1}\n'


def test_a_crop_that_leaves_no_prompt_is_an_error_before_anything_is_asked(tmp_path):
    """Of 16 tokens, 12 for the answer would leave four."""
    made = [r for r in variants(model(), ["cropped"])]
    with pytest.raises(UserError, match="--variants=cropped: of 16 tokens.* keeps 12 for its answer"):
        Prompted(made, [task()], LENGTHS, {"samples": 2}, 42, tmp_path, backend=lambda *_: Copies())
