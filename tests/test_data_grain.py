"""A person's own Grain dataset: mixed by weight, sharded, resumed, counted, and refused in one message."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import numbered

from pe_lab.config import Config, DataConfig, SourceConfig, from_dict
from pe_lab.data.held_out import validation_batches
from pe_lab.data.pipeline import build_pipeline
from pe_lab.data.tokenizers import load_tokenizer
from pe_lab.errors import UserError
from pe_lab.training.plan import vocabulary

LENGTH, BATCH, ELEMENTS = 16, 12, 100
FILE = """
import grain
import numpy as np

ELEMENTS = 100


def element(split, length, i):
    tokens = (np.arange(length + 1) + 7 * i) % 90 + (100 if split == "validation" else 0)
    tokens[0] = i
    return {"tokens": tokens}


def mapped(split, seed, length):
    count = 10 if split == "validation" else ELEMENTS
    return grain.MapDataset.range(count).shuffle(seed).map(lambda i: element(split, length, i))


def iterated(split, seed, length):
    return mapped(split, seed, length).repeat().to_iter_dataset().filter(lambda e: e["tokens"][0] % 5 != 0)


def trained_only(split, seed, length):
    return mapped(split, seed, length) if split == "train" else None


def short(split, seed, length):
    return mapped(split, seed, length).to_iter_dataset()


def packed(split, seed, length):
    def documents(i):
        segments = np.repeat([1, 2, 0], [6, 8, length - 13])
        positions = np.concatenate([np.arange(6) + 50, np.arange(8), np.zeros(length - 13, int)])
        weights = np.linspace(0, 1, length + 1)
        return {"tokens": np.full(length + 1, i), "segments": segments, "positions": positions, "weights": weights}

    return grain.MapDataset.range(ELEMENTS).map(documents)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_data.py"
    path.write_text(FILE)
    return path


def alone(file, function, **settings):
    return DataConfig(grain=f"{file}:{function}", **settings)


def build(config, batch_size=BATCH, **settings):
    return build_pipeline(config, **{"sequence_length": LENGTH, "batch_size": batch_size, "seed": 3, **settings})


def take(pipeline, count):
    return list(itertools.islice(pipeline, count))


def numbers(batches):
    """The number of each element."""
    return [int(row[0]) for batch in batches for row in batch["tokens"]]


def test_a_map_dataset_comes_in_its_own_order(file):
    pipeline = build(alone(file, "mapped"))
    read = numbers(take(pipeline, 17))
    assert sorted(read[:ELEMENTS]) == sorted(read[ELEMENTS : 2 * ELEMENTS]) == list(range(ELEMENTS))
    assert read[:ELEMENTS] != read[ELEMENTS : 2 * ELEMENTS]  # Grain shuffles each epoch
    assert read[:ELEMENTS] != numbers(take(build(alone(file, "mapped"), seed=4), 9))[:ELEMENTS]
    name = pipeline.describe(1)[0]["name"]
    assert pipeline.tokens_read() == {f"{kind}_tokens/{name}": 17 * BATCH * LENGTH for kind in ("read", "expected")}
    assert pipeline.new_repeats() == [(name, 2), (name, 3)]
    assert pipeline.steps_of(1) == ELEMENTS // BATCH
    first = next(build(alone(file, "mapped")))
    np.testing.assert_array_equal(first["targets"][:, :-1], first["tokens"][:, 1:])
    assert {k: v.dtype.name for k, v in first.items()} == {"tokens": "int32", "targets": "int32", "weights": "float32"}
    assert (first["weights"] == 1).all()


@pytest.mark.parametrize("function", ["mapped", "iterated"])
def test_over_kills_other_processes_and_batch_sizes_every_element_is_read_once(file, function):
    config = alone(file, function)
    whole = build(config)
    expected = numbers(take(whole, 20))
    read, state = [], None
    for count, batches, size in ((1, 4, 12), (3, 5, 12), (2, 10, 6), (1, 3, 24)):
        processes = [build(config, size, process_index=i, process_count=count) for i in range(count)]
        for process in processes:
            if state is not None:
                process.set_state(json.loads(json.dumps(state)))
        parts = [take(process, batches) for process in processes]
        read += [number for each in zip(*parts, strict=True) for number in numbers(each)]
        states = [process.get_state() for process in processes]
        assert all(one == states[0] for one in states)
        state = states[0]
        for process in processes:
            take(process, 2)  # after the checkpoint, before the kill
            process.close()
    assert read == expected[: len(read)] and len(read) == 240
    assert state["sequences"] == state["sources"][0]["sequences"] == 240
    assert state["sources"][0]["read_tokens"] == 240 * LENGTH
    if function == "mapped":
        assert state["iterator"] == {"next_index": 22} and sorted(read[:ELEMENTS]) == list(range(ELEMENTS))
    whole.close()


@pytest.mark.parametrize("function", ["mapped", "iterated"])
def test_batches_are_left_out_and_told(file, function):
    config = alone(file, function)
    whole = take(build(config), 9)
    pipeline = build(config)
    take(pipeline, 3)
    told = list(pipeline.sequences(2))
    assert [record["tokens"][0] for record in told] == numbers(whole[2:3])
    assert told[0]["sequence"] == 0 and len(told[0]["tokens"]) == LENGTH + 1 and "text" in told[0]
    pipeline.leave_out([3, 4, 6])
    assert [record["tokens"][0] for record in pipeline.sequences(4)] == numbers(whole[4:5])
    assert numbers(take(pipeline, 1)) == numbers(whole[5:6])
    resumed = build(config)
    resumed.set_state(json.loads(json.dumps(pipeline.get_state())))
    assert numbers(take(resumed, 2)) == numbers(take(pipeline, 2)) == numbers(whole[7:9])
    assert function == "mapped" or list(build(config).sequences(0)) != [] and list(resumed.sequences(0)) == []


@pytest.mark.parametrize("function", ["holed", "holed_iterated"])
def test_a_bad_element_is_met_again(file, function):
    """Nobody who catches the error trains on what follows."""
    bad = "\ndef holed(split, seed, length):\n"
    bad += "    tokens = lambda i: np.full(length + 1, 300 if i == 30 else i)\n"
    bad += "    return grain.MapDataset.range(ELEMENTS).map(lambda i: {'tokens': tokens(i)})\n"
    bad += "\ndef holed_iterated(*given):\n    return holed(*given).to_iter_dataset()\n"
    file.write_text(FILE + bad)
    pipeline = build(alone(file, function))
    assert numbers(take(pipeline, 2)) == list(range(24))
    for _ in range(2):
        with pytest.raises(UserError, match="element 30 of .* has the token id 300"):
            next(pipeline)
    pipeline.leave_out([2])
    assert numbers(take(pipeline, 1)) == list(range(36, 48))


def test_it_is_mixed_by_weight_with_other_sources(file, tmp_path):
    text = SourceConfig(numbered(tmp_path / "a.jsonl", 200), weight=0.5, name="text")
    mine = SourceConfig(f"grain:{file}:mapped", weight=0.25, name="mine", epochs=1)
    needles = SourceConfig("needles", weight=0.25, options={"pairs": 1, "queries": 1}, name="needles")
    config = DataConfig(sources=(text, mine, needles), cache_dir=str(tmp_path / "cache"), validation_fraction=0.1)
    pipeline = build(config)
    batches = take(pipeline, 8)
    found = [
        row
        for batch in batches
        for row in batch["tokens"]
        if (row[1:] == (np.arange(1, LENGTH) + 7 * row[0]) % 90).all()
    ]
    assert len(found) == 8 * BATCH // 4 and len({int(row[0]) for row in found}) == len(found)
    assert [row["windows"] for row in pipeline.describe(1)][1:] == [ELEMENTS, None]
    assert pipeline.tokens_read()["read_tokens/mine"] == len(found) * LENGTH
    with pytest.raises(UserError, match=r"'mine' runs dry at step 34 of 50: epochs=1 of its 100 windows"):
        pipeline.check_supply(50)
    weighted = build(config, weights={"mine": [[0, 0], [4, 1]], "text": 0, "needles": [[0, 1], [4, 0]]})
    assert len({*numbers(take(weighted, 8)[4:])}) == 4 * BATCH


def test_validation_is_the_split_of_that_name(file):
    for function in ("mapped", "iterated"):
        ((_, batches),) = validation_batches(
            alone(file, function), sequence_length=LENGTH, batch_size=4, count=2, vocab_size=300
        ).items()
        assert len(batches) == 2 and all((batch["tokens"][:, 1:] >= 100).all() for batch in batches)
        assert sum(batch["weights"].sum() for batch in batches) == 8 * LENGTH
    assert validation_batches(alone(file, "trained_only"), sequence_length=LENGTH, batch_size=4, count=2) == {}


def test_weights_segments_and_positions_are_those_of_the_dataset(file):
    batch = next(build(alone(file, "packed", segments=True)))
    np.testing.assert_array_equal(batch["segments"][0], [1] * 6 + [2] * 8 + [0] * 2)
    np.testing.assert_array_equal(batch["positions"][0], [*range(50, 56), *range(8), 0, 0])
    expected = np.linspace(0, 1, LENGTH + 1)[1:]
    expected[[5, 13, 14, 15]] = 0  # the first of a segment is no target, nor is padding
    np.testing.assert_allclose(batch["weights"][0], expected, rtol=1e-6)


def test_ids_without_a_tokenizer(file):
    config = alone(file, "mapped", tokenizer="none")
    assert numbers(take(build(config, vocab_size=190), 2))
    with pytest.raises(UserError, match="does not tell how many ids there are: set model.vocab_size"):
        build(config)
    with pytest.raises(UserError, match="data.tokenizer is 'none': set config.model.vocab_size"):
        vocabulary(Config(data=config), 0)
    with pytest.raises(UserError, match="data.tokenizer='none' is for Grain datasets alone"):
        build(replace(config, sources=(SourceConfig("needles"),)), vocab_size=190)
    with pytest.raises(UserError, match="has no segments. Give them, or set data.segments=False"):
        next(build(replace(config, segments=True), vocab_size=190))
    assert load_tokenizer("none").decode([3, 5]) == "3 5"
    with pytest.raises(UserError, match="encodes no strings: pass token ids"):
        load_tokenizer("none").encode("text")


WRONG = """
import grain
import numpy as np


def of(make, split, length):
    return grain.MapDataset.range(50).map(lambda i: make(length))

def lists(split, seed, length):
    return [1, 2]

def raises(split, seed, length):
    raise RuntimeError("no such disk")

def empty(split, seed, length):
    return grain.MapDataset.range(0)

def key(split, seed, length):
    return of(lambda t: {"tokens": np.zeros(t + 1, int), "mask": 1}, split, length)

def array(split, seed, length):
    return of(lambda t: np.zeros(t + 1, int), split, length)

def shape(split, seed, length):
    return of(lambda t: {"tokens": np.zeros(t, int)}, split, length)

def floats(split, seed, length):
    return of(lambda t: {"tokens": np.zeros(t + 1)}, split, length)

def beyond(split, seed, length):
    return of(lambda t: {"tokens": np.full(t + 1, 257)}, split, length)

def segments(split, seed, length):
    return of(lambda t: {"tokens": np.zeros(t + 1, int), "segments": np.ones(t + 1, int)}, split, length)

def nan(split, seed, length):
    return of(lambda t: {"tokens": np.zeros(t + 1, int), "weights": np.full(t + 1, np.nan)}, split, length)

def late(split, seed, length):
    return grain.MapDataset.range(50).map(lambda i: {}["column"])

def late_iterated(split, seed, length):
    return late(split, seed, length).to_iter_dataset()

def holes(split, seed, length):
    return grain.MapDataset.range(50).map(lambda i: {"tokens": np.zeros(length + 1, int)}).filter(lambda e: False)
"""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("maped", "my_data.py has no function 'maped'. Did you mean 'mapped'"),
        ("lists", r"lists\('train', ...\) returns a list; it must return a grain.MapDataset or a grain.IterDataset"),
        ("raises", r"raises\('train', 3, 16\) raises RuntimeError: no such disk"),
        ("empty", "has no elements"),
        ("key", r"element 0 of .*has \['mask', 'tokens'\]. It must be a dict of tokens, weights, segments, positions"),
        ("array", "has ndarray. It must be a dict of tokens"),
        ("shape", r"has tokens of shape \(16,\). It must be \(17,\): sequence_length \+ 1"),
        ("floats", "has tokens of type float64. They must be integers"),
        ("beyond", "has the token id 257, and ids are below 257. Set model.vocab_size"),
        ("segments", r"has \['segments'\]. Set data.segments=True, or leave them out"),
        ("nan", "has weights that are not finite"),
        ("late", "element 0 of .* raises KeyError: 'column'. Mend the function"),
        ("late_iterated", "element 0 of .* raises KeyError: 'column'. Mend the function"),
        ("holes", "is None, as MapDataset.filter leaves it. Filter an IterDataset"),
    ],
)
def test_what_is_wrong_is_one_message(file, function, says):
    file.write_text(FILE + WRONG)
    with pytest.raises(UserError, match=f"data source 'grain:{file}:{function}'.*{says}"):
        next(build(alone(file, function)))


def test_more_bad_input(file, tmp_path):
    for address, says in (
        (f"{tmp_path}/none.py:mapped", "there is no file"),
        (f"{file}", "is not FILE.py:FUNCTION"),
        ("json:loads", "is not FILE.py:FUNCTION"),
    ):
        with pytest.raises(UserError, match=says):
            build(DataConfig(grain=address))
    both = (SourceConfig(f"grain:{file}:iterated"), SourceConfig(f"grain:{file}:mapped"))
    with pytest.raises(UserError, match="is a grain.IterDataset, which has no random access and so must be the only"):
        build(DataConfig(sources=both))
    with pytest.raises(UserError, match="data.prepared and data.grain both replace"):
        build(DataConfig(grain="a.py:b", prepared="c"))
    with pytest.raises(UserError, match="has no template, chat or options"):
        build(DataConfig(sources=(SourceConfig(f"grain:{file}:mapped", chat="messages"),)))
    pipeline = build(alone(file, "short"))
    with pytest.raises(UserError, match="short ends after fewer than 108 elements. Train for fewer steps, or"):
        take(pipeline, 9)
    state = build(alone(file, "mapped")).get_state()
    with pytest.raises(UserError, match="data position does not fit this config"):
        build(alone(file, "iterated")).set_state(state)
    file.write_text("import nothing_of_this_name\n")
    with pytest.raises(UserError, match="raises ModuleNotFoundError"):
        build(alone(file, "mapped"))
    assert from_dict(Config, {"data": {"grain": "a.py:b"}}).data.grain == "a.py:b"


def test_the_example_of_the_docs_reads_every_window_of_a_file_once(tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs/data.md").read_text()
    code = re.search(r"```python\n(import grain\n.*?)```", page, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    Path("my_data.py").write_text(code)
    text = "".join(chr(32 + i % 91) for i in range(5_000))
    Path("essays.txt").write_text(text)
    pipeline = build(DataConfig(grain="my_data.py:dataset"))
    windows = pipeline.describe(1)[0]["windows"]
    assert windows == (4_500 - 1) // LENGTH
    read = [bytes(row.astype(np.uint8)).decode() for batch in take(pipeline, 23) for row in batch["tokens"]]
    starts = [start for start in range(0, windows * LENGTH, LENGTH)]
    assert len(read) == 276 and set(read) <= {text[start : start + LENGTH] for start in starts}
    assert pipeline.steps_of(1) == windows // BATCH == 23
    assert validation_batches(DataConfig(grain="my_data.py:dataset"), sequence_length=LENGTH, batch_size=4, count=2)
