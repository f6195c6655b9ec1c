"""Commands that read and write paths of object stores, as they do paths of this machine."""

from __future__ import annotations

import json

import numpy as np
import pytest
from object_stores import bucket, gcs_bucket, store_servers  # noqa: F401

from pe_lab import analyze, prepare, storage
from pe_lab.config import SourceConfig
from pe_lab.data import preparation
from pe_lab.data.executors import in_this_process
from pe_lab.data.filters import Filters
from pe_lab.data.shards import open_prepared
from pe_lab.data.sources import source as sources
from pe_lab.data.tokenizers import load_tokenizer
from pe_lab.results.records import RecordFile, SampleFile


@pytest.fixture(autouse=True)
def copies(tmp_path, monkeypatch):
    monkeypatch.setenv("PE_LAB_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_results_and_samples_are_kept_and_replaced(bucket):  # noqa: F811
    out = storage.path("--out", f"{bucket.url}/run/evaluation")
    key = {"run": "r", "checkpoint": "c", "variant": "m", "length": 16, "seed": 0, "source": "s"}
    RecordFile(out / "niah.jsonl").put([{**key, "accuracy": 0.25}, {**key, "length": 32, "accuracy": 0.5}])
    records = RecordFile(out / "niah.jsonl")
    records.put([{**key, "accuracy": 0.75}])
    assert [record["accuracy"] for record in RecordFile(out / "niah.jsonl").records] == [0.75, 0.5]
    samples = SampleFile(out / "samples" / "niah.jsonl")
    samples.add([{"index": 0, "answer": "a"}, {"index": 1, "answer": "b"}])
    samples.add([{"index": 1, "answer": "not again"}, {"index": 2, "answer": "c"}])
    again = SampleFile(out / "samples" / "niah.jsonl")
    assert [record["answer"] for record in again.records.values()] == ["a", "b", "c"]
    again.forget([next(iter(again.records))])
    again.add([{"index": 3, "answer": "d"}])
    found = SampleFile(out / "samples" / "niah.jsonl").records.values()
    assert [record["answer"] for record in found] == ["b", "c", "d"]


@pytest.mark.slow
def test_an_analysis_writes_its_files(bucket, capsys):  # noqa: F811
    """The figures take 5 s."""
    out = f"{bucket.url}/frequencies"
    assert analyze.main(["frequencies", f"--out={out}", "--format=svg"]) == 0
    assert f"{out}/frequencies.json" in capsys.readouterr().out
    assert json.loads(storage.read_bytes(storage.path("--out", f"{out}/frequencies.json")))
    assert any(name.endswith(".svg") for name in bucket.names())


@pytest.mark.slow
def test_a_prepared_corpus_is_read_from_a_store(bucket, tmp_path, capsys):  # noqa: F811
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * (number + 1))
    sizes = ["--source=text:" + str(tmp_path / "*.txt"), "--tokenizer=bytes", "--validation-fraction=0.2"]
    out = f"{bucket.url}/data"
    assert prepare.main([*sizes, f"--out={out}"]) == 0
    assert prepare.main([*sizes, f"--out={out}"]) == 0
    assert "already prepared" in capsys.readouterr().out
    assert prepare.main([*sizes, f"--out={tmp_path / 'data'}"]) == 0
    remote, local = (open_prepared(storage.path("data.prepared", text)) for text in (out, str(tmp_path / "data")))
    for split, count in local.metadata.tokens.items():
        np.testing.assert_array_equal(remote.tokens(split, 0, count), local.tokens(split, 0, count))
    assert prepare.main([*sizes[:2], "--validation-fraction=0.3", f"--out={out}"]) == 2
    assert "already prepared with --validation-fraction=0.2" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_preparation_goes_on_in_a_store(bucket, tmp_path, monkeypatch):  # noqa: F811
    """About 4 s."""
    monkeypatch.setattr(sources, "MOST_FILES", 1)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"document {number} of four " * 9)
    config, out = SourceConfig(f"text:{tmp_path}/*.txt"), storage.path("--out", f"{bucket.url}/data")
    filters, done = Filters(exact_duplicates=True, near_duplicates=0.99), []

    def killed(place, step, shards, report):
        for shard in shards:
            if len(done) == 6:
                raise KeyboardInterrupt
            done.append(shard)
            yield from in_this_process(place, step, {shard: "keep"}, report)

    with pytest.raises(KeyboardInterrupt):
        preparation.prepare(config, load_tokenizer("bytes"), "bytes", out, 0.5, filters=filters, executor=killed)
    assert not storage.is_file(out / "metadata.json") and "-00001-00000.safetensors" in str(storage.listing(out))
    for where in (out, tmp_path / "local"):
        preparation.prepare(config, load_tokenizer("bytes"), "bytes", where, 0.5, filters=filters)
    remote, local = (
        {n: (where / n).read_bytes() for n in storage.listing(where)} for where in (out, tmp_path / "local")
    )
    assert remote == local


def test_a_tokenizer_is_read_from_a_store_with_the_files_beside_it(bucket):  # noqa: F811
    from pe_lab.data.tokenizers import save_tokenizer

    directory = storage.path("the tokenizer", f"{bucket.url}/tokenizer")
    save_tokenizer(load_tokenizer("bytes"), directory)
    assert load_tokenizer(f"saved:{directory}").fingerprint == load_tokenizer("bytes").fingerprint
    text = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "<e>": 1}, "unk_token": "a"}}
    added = [{"id": 1, "content": "<e>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}]
    text |= {"added_tokens": [{**added[0], "normalized": False}], "normalizer": None, "pre_tokenizer": None}
    text |= {"post_processor": None, "decoder": None, "truncation": None, "padding": None}
    storage.write_json(directory.parent / "hf" / "tokenizer.json", text)
    storage.write_json(directory.parent / "hf" / "tokenizer_config.json", {"eos_token": "<e>"})
    for name in ("hf", "hf/tokenizer.json"):
        assert load_tokenizer(f"hf:{bucket.url}/{name}").eos_id == 1
