"""Prepared shards and their windows: every token once, no held-out document in training, no partial directory."""

import itertools
import json
import platform
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest

from pe_lab.config import SourceConfig
from pe_lab.data import filters, mixture, preparation, shard_preparation, shards
from pe_lab.data.executors import in_this_process
from pe_lab.data.filters import Filters
from pe_lab.data.mixture import ensure_prepared, ensure_tokenizer
from pe_lab.data.preparation import prepare
from pe_lab.data.shards import METADATA_FILE, ShardStream, open_prepared, read_metadata, write_shard
from pe_lab.data.tokenizers import ByteTokenizer, load_tokenizer
from pe_lab.data.windows import TokenWindows, WindowArrays, documents_of, make_batch
from pe_lab.errors import UserError
from pe_lab.storage.manifest import sealed

DOCUMENTS = [f"document {i}: " + "lorem ipsum " * (i % 7) for i in range(300)]


def jsonl(path, documents):
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents), encoding="utf-8")
    return SourceConfig(f"jsonl:{path}")


def prepared(tmp_path, documents=DOCUMENTS, fraction=0.1, **settings):
    out = tmp_path / "out"
    prepare(jsonl(tmp_path / "corpus.jsonl", documents), ByteTokenizer(), "bytes", out, fraction, **settings)
    return out


def decoded(opened, split):
    stream = opened.streams[split]
    tokens = opened.tokens(split, 0, stream.tokens)
    ends = np.flatnonzero(tokens == opened.tokenizer.eos_id)
    return [opened.tokenizer.decode(d) for d in np.split(tokens, ends + 1)[:-1]]


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of at least 1,000 tokens, in blocks of 64."""
    monkeypatch.setattr(shard_preparation, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(shards, "BLOCK_TOKENS", 64)


def test_every_document_is_in_one_split(tmp_path, small_shards):
    opened = open_prepared(prepared(tmp_path))
    train, validation = decoded(opened, "train"), decoded(opened, "validation")
    assert sorted(train + validation) == sorted(DOCUMENTS)
    assert not set(train) & set(validation)
    assert 10 <= len(validation) <= 60
    m = opened.metadata
    assert m.python == platform.python_version()
    assert m.documents == {"train": len(train), "validation": len(validation)}
    assert sum(m.tokens.values()) == sum(len(d) + 1 for d in DOCUMENTS)
    assert {split: stream.tokens for split, stream in opened.streams.items()} == m.tokens
    assert len(m.shards["train"]) > 3 and all(1000 <= s.tokens < 1200 for s in m.shards["train"][:-1])
    assert {split: sum(s.documents for s in m.shards[split]) for split in m.shards} == m.documents
    assert m.dtype == "uint16" and m.eos_id == 256 and m.characters == sum(map(len, DOCUMENTS))


def test_windows_across_shards_and_blocks(tmp_path, small_shards):
    opened = open_prepared(prepared(tmp_path))
    stream = opened.streams["train"]
    tokens = np.concatenate([opened.tokenizer.encode(d).tolist() + [256] for d in decoded(opened, "train")])
    starts = np.random.default_rng(0).integers(0, stream.tokens - 2500, 50)
    for length in (1, 64, 300, 2500):
        found = stream.gather(starts, length)
        np.testing.assert_array_equal(found, np.stack([tokens[s : s + length] for s in starts]))
        np.testing.assert_array_equal(stream.read(int(starts[0]), int(starts[0]) + length), found[0])
    np.testing.assert_array_equal(stream.read(0, stream.tokens), tokens)
    np.testing.assert_array_equal(stream.ends, np.flatnonzero(tokens == 256) + 1)
    assert len(stream.read(stream.tokens, stream.tokens + 5)) == 0
    assert stream.gather(starts[:0], 7).shape == (0, 7)
    assert not stream.has_loss and stream.loss(starts).all()


def test_tokens_that_are_no_targets(tmp_path, small_shards):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 300, n) for n in (5, 70, 1, 64, 13, 200)]
    loss = [rng.random(len(document)) < 0.5 for document in documents]
    places = [slice(0, 2), slice(2, 3), slice(3, 6)]
    written = [
        write_shard(tmp_path / f"train-{i}.safetensors", documents[p], np.dtype("uint16"), None if i == 1 else loss[p])
        for i, p in enumerate(places)
    ]
    loss[2] = np.ones(1, bool)  # of the shard without the tensor

    described = read_metadata(prepared(tmp_path))
    described = replace(described, chat="messages", shards={"train": tuple(written), "validation": ()})
    stream, whole = ShardStream(tmp_path, described, "train"), np.concatenate(loss)
    starts = rng.integers(0, stream.tokens - 150, 40)
    assert stream.has_loss
    np.testing.assert_array_equal(
        stream.loss(starts[:, None] + np.arange(150)), np.stack([whole[s : s + 150] for s in starts])
    )


def test_windows_cover_the_stream_and_targets_are_the_next_tokens(tmp_path):
    stream = open_prepared(prepared(tmp_path)).streams["train"]
    tokens = stream.read(0, stream.tokens).astype(np.int32)
    windows = TokenWindows(stream, 17)
    assert len(windows) == (len(tokens) - 1) // 17
    arrays = windows.read(np.arange(len(windows)))
    batch = make_batch(arrays, segments=False, eos_id=256)
    used = len(windows) * 17
    np.testing.assert_array_equal(batch["tokens"].ravel(), tokens[:used])
    np.testing.assert_array_equal(batch["targets"].ravel(), tokens[1 : used + 1])
    assert len(tokens) - 1 - used < 17
    np.testing.assert_array_equal(arrays.tokens[3], tokens[51:69])
    assert {k: v.dtype.name for k, v in batch.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "weights": "float32",
    }


def test_segments_end_with_their_document():
    eos = 9
    window = np.array([[1, 2, eos, 3, eos, eos, 4, 5, 6], [eos, 1, 2, 3, 4, 5, 6, 7, eos]], np.int32)
    batch = make_batch(WindowArrays(window, np.ones((2, 8), np.float32)), segments=True, eos_id=eos)
    np.testing.assert_array_equal(batch["segments"], [[1, 1, 1, 2, 2, 3, 4, 4], [1, 2, 2, 2, 2, 2, 2, 2]])
    np.testing.assert_array_equal(batch["positions"], [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]])
    np.testing.assert_array_equal(batch["weights"], [[1, 1, 0, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1]])
    counted = batch["weights"] > 0
    following = documents_of(window, eos)[:, 1:]
    np.testing.assert_array_equal(counted, batch["segments"] == following)  # exactly the targets inside


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("documents", [["one", "two"], ["one", "two", "one"], list("abcdefgh")])
def test_neither_split_is_empty_where_two_documents_differ(tmp_path, documents, fraction):
    opened = open_prepared(prepared(tmp_path, documents, fraction))
    train, validation = decoded(opened, "train"), decoded(opened, "validation")
    assert sorted(train + validation) == sorted(documents)
    assert train and validation and not set(train) & set(validation)  # equal documents share a split


def test_splitting_one_document(tmp_path):
    text = "0123456789" * 10
    for documents, fraction, train, validation in (
        ([text], 0.1, [text[:90]], [text[90:]]),
        ([text, text], 0.1, [text[:90]] * 2, [text[90:]]),
        (["x"], 0.1, ["x"], []),
        ([text, "x"], 0.0, [text, "x"], []),
    ):
        opened = open_prepared(prepared(tmp_path, documents, fraction))
        assert decoded(opened, "train") == train and decoded(opened, "validation") == validation
        shutil.rmtree(tmp_path / "out")


def test_the_split_depends_on_the_document_alone(tmp_path):
    held_out = set(decoded(open_prepared(prepared(tmp_path, fraction=0.2)), "validation"))
    shutil.rmtree(tmp_path / "out")
    others = decoded(open_prepared(prepared(tmp_path, ["another", *DOCUMENTS[::-1]], 0.2)), "validation")
    assert set(others) - {"another"} == held_out


def test_a_long_document_is_encoded_in_pieces_without_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_preparation, "PIECE_CHARACTERS", 50)
    document = ("a line\n" * 30) + "x" * 120 + "\nthe end"
    opened = open_prepared(prepared(tmp_path, [document, "b"], fraction=0.0))
    assert decoded(opened, "train") == [document, "b"]


@pytest.mark.parametrize("duplicates", [False, True])
def test_a_document_beyond_the_bound_is_refused_by_its_place(tmp_path, monkeypatch, duplicates):
    """Unless a filter drops it."""
    monkeypatch.setattr(filters, "MOST_CHARACTERS", 100)
    texts = ["good", "x" * 101, "y" * 100]
    with pytest.raises(UserError, match="document 1 has 101 characters; one has at most 100. Split it, or drop"):
        prepared(tmp_path, texts, fraction=0.0, filters=Filters(exact_duplicates=duplicates))
    assert not (tmp_path / "out").exists()
    dropping = Filters(max_characters=100, exact_duplicates=duplicates)
    assert decoded(open_prepared(prepared(tmp_path, texts, fraction=0.0, filters=dropping)), "train") == texts[::2]


def test_lone_surrogates_do_not_stop_a_corpus(tmp_path):
    opened = open_prepared(prepared(tmp_path, ["good", "bad \ud800 text"], fraction=0.0))
    assert decoded(opened, "train") == ["good", "bad ? text"]


def test_limit_documents(tmp_path):
    opened = open_prepared(prepared(tmp_path, fraction=0.0, limit_documents=5))
    assert decoded(opened, "train") == DOCUMENTS[:5]


def test_a_vocabulary_beyond_16_bits(tmp_path):
    import tokenizers

    model = tokenizers.models.WordLevel({"[UNK]": 0, "document": 70_000, "</s>": 99_999}, unk_token="[UNK]")
    wide = tokenizers.Tokenizer(model)
    wide.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wide.add_special_tokens(["</s>"])
    wide.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(f"hf:{tmp_path}/tokenizer.json")
    metadata = prepare(jsonl(tmp_path / "c.jsonl", DOCUMENTS), tokenizer, "hf", tmp_path / "wide", 0.1)
    assert metadata.dtype == "uint32"
    stream = ShardStream(tmp_path / "wide", metadata, "train")
    tokens = stream.read(0, stream.tokens)
    assert (tokens == 99_999).sum() == (tokens == 70_000).sum() == metadata.documents["train"]


def first_shard(out):
    return out / read_metadata(out).shards["train"][0].file


def test_damage_is_found_and_named(tmp_path):
    out = prepared(tmp_path)
    path = first_shard(out)
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(UserError, match=f"{path.name} is truncated"):
        open_prepared(out)
    for place, says in ((len(content) // 2, "block . is not the one"), (3, "header"), (400, "not the file that")):
        path.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        with pytest.raises(UserError, match=f"{path.name} is damaged: .*{says}"):
            open_prepared(out).streams["train"].read(0, 10**6)
    path.unlink()
    with pytest.raises(UserError, match=f"{path.name} is missing"):
        open_prepared(out)


def test_a_shard_of_other_data_is_never_read(tmp_path):
    """Whole in itself, of the same size, in the place of another."""
    out, other = prepared(tmp_path), tmp_path / "other"
    other.mkdir()
    swapped = prepared(other, [document.replace("lorem", "dolor") for document in DOCUMENTS])
    path = first_shard(out)
    shutil.copyfile(swapped / path.name, path)
    shard = read_metadata(out).shards["train"][0]
    path.write_bytes(path.read_bytes().ljust(shard.bytes, b"\0")[: shard.bytes])
    with pytest.raises(UserError, match=f"{path.name} is damaged"):
        open_prepared(out).streams["train"].read(0, 100)


def test_a_changed_digit_of_the_metadata_is_found(tmp_path):
    path = prepared(tmp_path) / METADATA_FILE
    path.write_text(path.read_text().replace('"eos_id": 256', '"eos_id": 255'))
    with pytest.raises(UserError, match="metadata.json is damaged: it does not have the content"):
        open_prepared(path.parent)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: {**m, "format": 2}, "format 2, this version reads 3"),
        (lambda m: {k: v for k, v in m.items() if k != "shards"}, "shards"),
        (lambda m: {**m, "surprise": 1}, "surprise"),
        (lambda m: [m], "holds no JSON object"),
        (lambda m: {**m, "tokenizer_fingerprint": "hf-other"}, "hf-other"),
    ],
)
def test_damaged_metadata(tmp_path, change, says):
    out = prepared(tmp_path, DOCUMENTS[:3])
    path = out / METADATA_FILE
    changed = change(json.loads(path.read_text()))
    path.write_text(json.dumps(sealed(changed) if isinstance(changed, dict) else changed))
    with pytest.raises(UserError, match=says):
        open_prepared(out)
    path.write_text("{")
    with pytest.raises(UserError, match=METADATA_FILE):
        open_prepared(out)
    path.unlink()
    for missing in (out, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=f"There is no '{missing}/{METADATA_FILE}'. Prepare the data"):
            open_prepared(missing)


@pytest.mark.parametrize(
    ("documents", "fraction", "says"),
    [([], 0.1, "corpus.jsonl.* is empty"), (["", ""], 0.1, "empty"), (["a"], 1.5, "validation_fraction=1.5")],
)
def test_a_failed_preparation_leaves_nothing(tmp_path, documents, fraction, says):
    with pytest.raises(UserError, match=says):
        prepared(tmp_path, [*documents], fraction)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_a_failure_half_way_leaves_nothing(tmp_path, small_shards, monkeypatch):
    monkeypatch.setattr(shard_preparation, "BATCH_CHARACTERS", 1000)
    config = jsonl(tmp_path / "corpus.jsonl", DOCUMENTS)
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(UserError, match="line 301"):
        ensure_prepared(config, ByteTokenizer(), "bytes", tmp_path / "new" / "cache", 0.01)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_two_may_prepare_the_same_directory(tmp_path, monkeypatch, capsys):
    """The second waits for the first, and uses its directory."""
    import threading

    monkeypatch.setattr(preparation, "LEASE_SECONDS", 0.05)
    config, made, second = jsonl(tmp_path / "corpus.jsonl", DOCUMENTS), [], []

    def again():
        made.append(prepare(config, ByteTokenizer(), "bytes", tmp_path / "out", 0.1))

    def executor(place, step, shards, report):
        second.append(threading.Thread(target=again))
        second[0].start()
        time.sleep(0.3)
        assert not made
        yield from in_this_process(place, step, shards, report)

    first = prepare(config, ByteTokenizer(), "bytes", tmp_path / "out", 0.1, executor=executor)
    second[0].join(timeout=300)
    assert made == [first] and "is being prepared by process" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.jsonl", "out"]
    open_prepared(tmp_path / "out")


def test_the_cache_is_used_until_its_inputs_change(tmp_path):
    config = jsonl(tmp_path / "corpus.jsonl", DOCUMENTS)
    cache = tmp_path / "cache"
    first = ensure_prepared(config, ByteTokenizer(), "bytes", cache, 0.1)
    made = (first / METADATA_FILE).stat().st_mtime_ns
    assert ensure_prepared(config, ByteTokenizer(), "bytes", cache, 0.1) == first
    assert (first / METADATA_FILE).stat().st_mtime_ns == made
    tokenizer = ensure_tokenizer("sentencepiece:train:320", [config], cache)
    others = {
        ensure_prepared(config, ByteTokenizer(), "bytes", cache, 0.2),
        ensure_prepared(config, tokenizer, "sentencepiece:train:320", cache, 0.1),
        ensure_prepared(jsonl(tmp_path / "corpus.jsonl", DOCUMENTS[1:]), ByteTokenizer(), "bytes", cache, 0.1),
    }
    assert len(others) == 3 and first not in others


def test_other_processes_wait_for_process_0(tmp_path, monkeypatch):
    import threading

    config = jsonl(tmp_path / "corpus.jsonl", DOCUMENTS)
    cache = tmp_path / "cache"
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(ensure_prepared(config, ByteTokenizer(), "bytes", cache, 0.1, process_index=1))
    )
    waiting.start()
    time.sleep(0.3)
    assert not cache.exists()  # it wrote nothing itself
    made = ensure_prepared(config, ByteTokenizer(), "bytes", cache, 0.1)
    waiting.join(timeout=300)
    assert found == [made]
    monkeypatch.setattr(mixture, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(UserError, match="process 0"):
        ensure_prepared(config, ByteTokenizer(), "bytes", tmp_path / "elsewhere", 0.1, process_index=1)
    with pytest.raises(UserError, match="process 0"):
        ensure_tokenizer("sentencepiece:train:320", [config], tmp_path / "elsewhere", process_index=1)


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        ensure_prepared(jsonl(tmp_path / "c.jsonl", DOCUMENTS), ByteTokenizer(), "bytes", tmp_path / "file", 0.1)


@pytest.mark.parametrize("least", [1, 60, 80])
def test_long_documents_are_a_stream_of_their_own(tmp_path, small_shards, least):
    """Equal to the documents of that size one after another, for every read: within, across and at the ends of them."""
    opened = open_prepared(prepared(tmp_path))
    stream = opened.streams["train"]
    documents = [stream.read(a, b) for a, b in itertools.pairwise([0, *stream.ends.tolist()])]
    kept = [document for document in documents if len(document) >= least]
    assert len(kept) == len(documents) if least == 1 else 2 < len(kept) < len(documents)
    long = opened.of_long_documents(least)
    mine, whole = long.streams["train"], np.concatenate(kept)
    assert mine.tokens == len(whole) == long.metadata.tokens["train"]
    assert mine.ends.tolist() == np.cumsum([len(one) for one in kept]).tolist()
    np.testing.assert_array_equal(mine.read(0, mine.tokens + 9), whole)
    rng = np.random.default_rng(0)
    starts = np.append(rng.integers(0, mine.tokens - 150, 200), [0, mine.ends[0], mine.ends[0] - 1, mine.tokens - 150])
    for length in (1, 7, 150):
        np.testing.assert_array_equal(mine.gather(starts, length), whole[starts[:, None] + np.arange(length)])
    lengths = rng.integers(0, 150, len(starts))
    pieces = [whole[a : a + n] for a, n in zip(starts, lengths, strict=True)]
    np.testing.assert_array_equal(mine.gather_pieces(starts, lengths), np.concatenate(pieces))
    assert long.metadata.fingerprint != opened.metadata.fingerprint


def test_a_corpus_without_long_documents_is_refused(tmp_path):
    with pytest.raises(UserError, match="no document has 9,999 tokens; the longest of .* has"):
        open_prepared(prepared(tmp_path)).of_long_documents(9999)
