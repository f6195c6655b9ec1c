"""Needles in haystacks: the prompts are RULER's, DroPE's and DoPE's, fit their length, and are reproducible."""

import json
import random
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.errors import UserError
from pe_lab.evaluation.suites import niah, open_tasks
from pe_lab.evaluation.suites.niah import Haystack, distinct, draw, word_list

TOKENIZER = ByteTokenizer()
DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "niah_golden.json").read_text(encoding="utf-8"))
PROSE = " ".join(f"SampleRecord {n} of the log says that nothing happened today. Or so it seems!" for n in range(300))
ESSAYS = Haystack("essays", PROSE)
ALL = [niah.niah_task(name, ESSAYS) for name in niah.NIAH] + [niah.ruler_needle_task(n, ESSAYS) for n in niah.RULER]


def by_reading(prompt: str, asked: list[str]) -> list[str]:
    """The values of the keys that are asked for, found in the prompt."""
    facts = re.findall(r"One of the special magic \w+ for ([^.]+?) is: ([\w-]+)\.", prompt)
    return [value for key in asked for k, value in facts if k == key]


def asked_keys(prompt: str) -> list[str]:
    (listed,) = re.findall(r"What (?:is|are all) the special magic \w+ for (.+?) mentioned", prompt)
    return re.split(r",? and |, ", listed)


@pytest.mark.parametrize("task", ALL, ids=lambda task: f"{task.suite}:{task.name}")
def test_a_copying_model_finds_all_values_and_random_text_none(task):
    for index, sample in enumerate(task.samples(TOKENIZER, 3000, 3, 42)):
        assert len(sample.tokens) + sample.max_new_tokens <= 3000
        found = by_reading(sample.text, asked_keys(sample.text))
        assert sorted(found) == sorted(sample.references) and len(found) == task.values * task.queries
        assert task.score(sample, " and ".join(found)) == {"fraction_found": 1.0, "all_found": 1.0}
        assert task.found(sample, found[0]) == [float(r == found[0]) for r in sample.references]
        rng = np.random.default_rng(index)
        noise = TOKENIZER.decode(rng.integers(0, 256, sample.max_new_tokens))
        assert task.score(sample, noise) == {"fraction_found": 0.0, "all_found": 0.0}


@pytest.mark.parametrize("task", ALL, ids=lambda task: f"{task.suite}:{task.name}")
def test_a_prompt_is_as_long_as_fits_and_depends_on_its_index_alone(task):
    long = task.samples(TOKENIZER, 4000, 20, 42)
    sample = long[7]
    unit = max(len(word) for word in PROSE.split()) + 1 if task.haystack.text else 150
    assert 4000 - unit < len(sample.tokens) + sample.max_new_tokens <= 4000
    again = task.samples(TOKENIZER, 4000, 8, 42)[7]  # with others asked for before it, or none
    assert again.fingerprint == sample.fingerprint and again.text == sample.text
    others = [long[6], task.samples(TOKENIZER, 4000, 20, 43)[7]]
    assert sample.references not in [other.references for other in others]
    shorter = task.samples(TOKENIZER, 3000, 20, 42)[7]  # the same needles, so that lengths compare in pairs
    assert shorter.references == sample.references and len(shorter.tokens) < len(sample.tokens)


@pytest.mark.parametrize("name", list(GOLDEN))
def test_prompts_are_those_of_rulers_own_template(name):
    """The golden texts are made by lm-evaluation-harness' port of RULER; see tests/data/make_niah_golden.py."""
    task = niah.ruler_needle_task(name, ESSAYS)
    sample = task.samples(TOKENIZER, 3000, 1, 0)[0]
    assert masked(sample.text, task) == masked(GOLDEN[name], task)


def masked(prompt: str, task: niah.NeedleTask) -> str:
    """A prompt without its keys, values and filler."""
    text = prompt
    for key in asked_keys(prompt):
        text = text.replace(key, "KEY")
    head, _, rest = text.partition("\n")
    context, _, tail = rest.rpartition("\nWhat")
    needles = re.findall(r"One of the special magic (\w+) for [^.]+? is: [\w-]+\.", context)
    kinds = sorted(set(needles))
    filler = re.sub(r"One of the special magic \w+ for [^.]+? is: [\w-]+\.", "", context).split()
    # Of a haystack of needles, how many there are is a matter of length.
    count = len(needles) if task.haystack.kind != "needles" else "many"
    return f"{head}|{kinds}|{count}|{bool(filler)}|{tail}"


def test_samples_cycle_through_the_grid_and_needles_lie_at_their_depths():
    task = niah.niah_task("standard", ESSAYS, (0.0, 50.0, 100.0))
    for index, sample in enumerate(task.samples(TOKENIZER, 4000, 6, 1)):
        (depth,) = sample.depth
        assert depth == (0.0, 50.0, 100.0)[index % 3]
        start = sample.text.index("\n") + 1
        end = sample.text.rindex("\nWhat is")
        place = (sample.text.index("One of the special") - start) / (end - start)
        assert abs(place - depth / 100) < 0.05
    sample = niah.niah_task("multi_value", ESSAYS).samples(TOKENIZER, 4000, 1, 1)[0]
    places = [sample.text.index(f"is: {value}.") / len(sample.text) for value in sample.references]
    assert np.argsort(places).tolist() == np.argsort(sample.depth, kind="stable").tolist()


class Words(ByteTokenizer):
    """A word with the space before it is a token, and so is any other character."""

    def encode_with_offsets(self, text):
        found = list(re.finditer(r" ?\w+|[^\w]", text))
        ids = [1000 + zlib.crc32(one[0].encode()) % 2**30 if len(one[0]) > 1 else ord(one[0]) for one in found]
        return np.array(ids, np.int32), np.array([one.span() for one in found], np.int32).reshape(-1, 2)


@pytest.mark.parametrize("name, tokenizer", [("bytes", TOKENIZER), ("words", Words())])
def test_a_needle_of_the_grid_lies_where_kamradts_test_puts_it(name, tokenizer):
    """The places are needlehaystack's own; see tests/data/make_needle_places_golden.py."""
    golden = json.loads((DATA / "needle_places_golden.json").read_text(encoding="utf-8"))
    places = [niah.before_needle(tokenizer, golden["text"], depth) for depth in golden["depths"]]
    assert places == golden["characters_before"][name]


def test_a_place_in_tokens_where_the_tokenizer_has_no_period():
    """A tokenizer that joins the period with the word before it has no token to go back to."""
    joined = Words()
    joined.encode_with_offsets = lambda text: (
        np.arange(len(text.split()), dtype=np.int32) + 1000,
        np.array([one.span() for one in re.finditer(r"\S+ ?", text)], np.int32),
    )
    assert niah.before_needle(joined, "one two. three four. five six", 50) == len("one two. three ")
    assert niah.before_needle(joined, "one two. three four.", 0) == 0


@pytest.mark.parametrize("haystack", [ESSAYS, Haystack("noise")], ids=["essays", "noise"])
@pytest.mark.parametrize("name", ["standard", "clean", "noisy"])
def test_needles_of_the_grid_follow_the_depth_in_tokens(name, haystack):
    """At most a sentence before the depth, whatever the length of the sentences around it."""
    task = niah.niah_task(name, haystack)
    for sample in task.samples(TOKENIZER, 4000, 11, 1):
        context = sample.text[sample.text.index("\n") + 1 : sample.text.rindex("\nWhat is")]
        fact = re.search(r"One of the special magic numbers for \S+ is: \d+\.", context)
        share = 100 * fact.start() / (len(context) - len(fact[0]))
        assert sample.depth[0] - 4 < share < sample.depth[0] + 0.2
        filler = context.replace(fact[0], "").split()
        start = " ".join(haystack.text.split() * 2 if haystack.text else niah.NOISE.split() * 200)
        assert " ".join(filler) in start  # nothing of the text is lost


def test_a_drope_prompt_ends_with_a_colon_and_its_excerpt_begins_anywhere():
    standard = niah.niah_task("standard", ESSAYS).samples(TOKENIZER, 2000, 4, 0)
    assert all(
        re.search(r"The special magic number for \S+ mentioned in the provided text is:$", s.text) for s in standard
    )
    beginnings = {sample.text.split("\n")[1][:20] for sample in standard[1:]}  # the first has its needle there
    assert len(beginnings) == 3
    several = niah.niah_task("multi_query", ESSAYS).samples(TOKENIZER, 2000, 1, 0)[0]
    tail = r"The special magic numbers for \S+, \S+, \S+, and \S+ mentioned in the provided text are:$"
    assert re.search(tail, several.text)
    ruler = niah.ruler_needle_task("niah_single_2", ESSAYS).samples(TOKENIZER, 2000, 4, 0)
    assert len({sample.text.split("\n")[1][:20] for sample in ruler[:2]}) >= 1
    assert all(sample.text.endswith("mentioned in the provided text is") for sample in ruler)


def test_sinks_are_start_of_sequence_tokens_after_the_needle():
    task = niah.niah_task("noisy", ESSAYS)
    sample = task.samples(TOKENIZER, 3000, 4, 0)[2]
    sinks = np.flatnonzero(sample.tokens == TOKENIZER.eos_id)  # bytes have no start of sequence
    assert len(sinks) == niah.SINKS and (np.diff(sinks) == 1).all()
    before = TOKENIZER.decode(sample.tokens[: sinks[0]])
    assert before.endswith(f"is: {sample.references[0]}.")
    assert sample.max_new_tokens == 50 and sample.stop == () and sample.stop_ids == (ord("\n"),)


def test_a_length_that_is_too_short_is_refused_with_the_shortest_possible():
    task = niah.niah_task("standard", ESSAYS)
    with pytest.raises(UserError, match="the shortest take") as error:
        task.samples(TOKENIZER, 300, 1, 0)[0]
    least = int(re.search(r"take ([\d,]+)", str(error.value))[1].replace(",", ""))
    assert len(task.samples(TOKENIZER, least, 1, 0)[0].tokens) + task.max_new_tokens == least
    with pytest.raises(UserError):
        task.samples(TOKENIZER, least - 1, 1, 0)[0]


def test_sentences_are_split_at_their_ends():
    text = 'It rained. "Did it?" she asked. Dr. Wu, i.e. the U.S. doctor, paid $3.50 (really!). Yes. 7 left.'
    found = niah.sentences(text)
    assert found == ["It rained.", '"Did it?" she asked.', "Dr. Wu, i.e. the U.S. doctor, paid $3.50 (really!).",
                     "Yes.", "7 left."]  # fmt: skip
    assert " ".join(niah.sentences(PROSE)) == PROSE and len(niah.sentences(PROSE)) == 600
    assert niah.sentences("no end") == ["no end"]


def test_a_haystack_of_texts_begins_again_after_its_last_word(tmp_path):
    (tmp_path / "b.txt").write_text("four five. Six seven eight nine ten.")
    (tmp_path / "a.txt").write_text("One two\n\n three.\tAnd")
    found = niah.open_haystack(f"{tmp_path}/*.txt")
    assert " ".join(found.pieces(14, 9, "words", "numbers", random.Random(0))) == (
        "nine ten. One two three. And four five. Six seven eight nine ten. One"
    )
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="a.txt is no UTF-8 text"):
        niah.open_haystack(f"{tmp_path}/*.txt")


def test_words_numbers_and_uuids():
    rng = random.Random(0)
    assert re.fullmatch(r"\d{7}", draw("numbers", rng))
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", draw("uuids", rng))
    assert any(draw("words", rng) for _ in range(3)) and len(word_list("noun")) > 6000
    assert len(set(distinct(lambda: draw("numbers", rng), 50))) == 50


def test_rulers_essays_are_joined_piece_by_piece():
    """As in RULER's niah.py, empty filler before a needle or after the last one leaves a space."""
    task = niah.NeedleTask("ruler", "niah_single_2", ESSAYS, depths=(0.0,))
    assert "afterwards.\n One of the special" in task.samples(TOKENIZER, 2000, 1, 0)[0].text
    task = niah.NeedleTask("ruler", "niah_single_2", ESSAYS, depths=(100.0,))
    assert re.search(r"is: \d{7}\. \nWhat is", task.samples(TOKENIZER, 2000, 1, 0)[0].text)
    at_one_place = niah.NeedleTask("ruler", "niah_multivalue", ESSAYS, values=2, depths=(50.0, 50.0))
    assert re.search(r"is: \d{7}\.  One of", at_one_place.samples(TOKENIZER, 2000, 1, 0)[0].text)


def test_few_samples_get_depths_from_0_to_100():
    standard, *_ = open_tasks({"niah": ()}, {"haystack": "noise", "samples": 3})
    assert [sample.depth for sample in standard.samples(TOKENIZER, 2000, 3, 0)] == [(0.0,), (50.0,), (100.0,)]
    (one,) = open_tasks({"niah": ("standard",)}, {"haystack": "noise", "samples": 1})
    assert one.samples(TOKENIZER, 2000, 1, 0)[0].depth == (50.0,)
    with pytest.raises(UserError, match="would leave out some of the 4 depths"):
        open_tasks({"niah": ("standard",)}, {"haystack": "noise", "samples": 3, "depths": "0,1,2,3"})


def test_clean_is_noisy_without_its_sinks():
    clean, noisy = (niah.niah_task(name, ESSAYS) for name in ("clean", "noisy"))
    ours, theirs = (task.samples(TOKENIZER, 3000, 1, 0)[0] for task in (clean, noisy))
    assert (ours.max_new_tokens, ours.stop_ids) == (theirs.max_new_tokens, theirs.stop_ids) == (50, (ord("\n"),))
    assert "sinks" not in ours.metadata and theirs.metadata["sinks"] == 10
    assert "clean" not in niah.DEFAULT and set(niah.DEFAULT) < set(niah.NIAH)


def test_null_characters_of_a_haystack_are_not_places_of_sinks(tmp_path):
    (tmp_path / "a.txt").write_text("alpha beta\0gamma delta. " * 50)
    task = niah.niah_task("noisy", niah.open_haystack(str(tmp_path / "*.txt")))
    (sample,) = task.samples(TOKENIZER, 2000, 1, 0)
    assert int(np.sum(sample.tokens == TOKENIZER.eos_id)) == 10


def test_a_word_that_does_not_fit_is_refused_before_any_sample_is_made():
    text = "alpha beta gamma. " * 50 + "x" * 5000 + " " + "alpha beta gamma. " * 50
    task = niah.niah_task("standard", Haystack("text", text.strip()))
    with pytest.raises(UserError, match="do not hold all 500 samples of niah:standard .*; the shortest take 5,"):
        task.samples(TOKENIZER, 2000, 500, 42)


def test_a_haystack_in_rulers_own_file(tmp_path):
    path = tmp_path / "PaulGrahamEssays.json"
    path.write_text(json.dumps({"text": PROSE}))
    assert niah.open_haystack(str(path)).text == PROSE
    path.write_text("[1]")
    with pytest.raises(UserError, match="is damaged: it holds no JSON object.*with a `text`"):
        niah.open_haystack(str(path))
