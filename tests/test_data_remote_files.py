"""Corpora on object stores and web servers, read in parts, with failures in between."""

import gzip
import json
import shlex

import pyarrow
import pyarrow.parquet
import pytest
from hub_server import Dataset, hub_server
from object_stores import bucket, store_servers  # noqa: F401

from pe_lab import prepare, storage
from pe_lab.config import Config, DataConfig, SourceConfig, to_json
from pe_lab.data import mixture
from pe_lab.data.sources import InputShard, files, open_source
from pe_lab.data.sources.records import Records
from pe_lab.data.tokenizers import load_tokenizer
from pe_lab.errors import UserError, redacted
from pe_lab.identity import config_hash, write_run
from pe_lab.storage import InputFile, inputs

TEXTS = [f"document {i} é" for i in range(200)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def corpus(tmp_path):
    """The same documents in each format."""
    table = pyarrow.table({"text": TEXTS, "n": range(len(TEXTS))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=30)
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    with pyarrow.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    contents = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    half = LINES.find(b"\n", len(LINES) // 2) + 1
    return contents | {
        "00.jsonl": LINES[:half],
        "01.jsonl": LINES[half:],
        "a.jsonl.gz": gzip.compress(LINES),
        "a.jsonl.zst": pyarrow.compress(LINES, "zstd", asbytes=True),
        "empty.jsonl": b"",
    }


SOURCES = [
    "jsonl:{}/{{00..01}}.jsonl", "jsonl:{}/a.jsonl.gz", "jsonl:{}/a.jsonl.zst", "parquet:{}/a.parquet",
    "arrow:{}/a.arrow", "arrow:{}/stream.arrow",
]  # fmt: skip


def check(base, monkeypatch):
    """Reads every source in shards of about 2,000 bytes."""
    monkeypatch.setattr(files, "SHARD_BYTES", 2000)
    monkeypatch.setattr(files.Files, "part_bytes", 2000)
    for name in SOURCES:
        source = open_source(SourceConfig(name.format(base)))
        shards = [InputShard(s.name, json.loads(json.dumps(s.read))) for s in source.shards()]
        assert [d.text for shard in shards for d in source.read(shard)] == TEXTS, name
        splits = ("jsonl:{}/{", "parquet")
        assert (len(shards) > 2) == name.startswith(splits), name


@pytest.mark.slow
def test_an_object_store(bucket, tmp_path, monkeypatch):  # noqa: F811
    """Costs 15 s for both stores, with the start of the servers."""
    base = storage.path("", f"{bucket.url}/corpus")
    storage.write_files({base / name: content for name, content in corpus(tmp_path).items()})
    check(base, monkeypatch)
    name = f"jsonl:{base}/*.jsonl"
    source = open_source(SourceConfig(name))
    assert [d.text for d in source.documents()] == TEXTS  # a glob, in sorted order, with a file of no bytes
    storage.write_files({base / "01.jsonl": LINES[-17:].rjust(len(source.identity()["names_and_sizes"]))})
    assert open_source(SourceConfig(name)).identity() != source.identity()
    with pytest.raises(UserError, match=r"were asked for|no longer there|changed"):
        list(source.documents())
    with pytest.raises(UserError, match="No file matches"):
        open_source(SourceConfig(f"jsonl:{base}/no*.jsonl"))
    with pytest.raises(UserError, match="is empty"):
        open_source(SourceConfig(f"jsonl:{base}/empty.jsonl"))


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "FIRST_PAUSE", 0.001)
    contents = corpus(tmp_path)
    datasets = {
        "web/open": Dataset(contents),
        "web/login": Dataset(contents, 401),
        "web/whole": Dataset(contents, parts=False),
    }
    with hub_server(datasets) as started:
        yield started


def test_a_web_server(server, monkeypatch):
    check(server.file_url("web/open", "")[:-1], monkeypatch)
    monkeypatch.setattr(inputs, "READ_BYTES", 500)
    source = open_source(SourceConfig(f"jsonl:{server.file_url('web/open', '{00,empty,01}.jsonl')}"))
    server.requests.clear()
    server.failures = 3
    assert [d.text for d in source.documents()] == TEXTS  # 503 three times, and tried again
    assert all("bytes=" in request for request in server.requests)


def test_a_web_server_that_serves_no_parts(server):
    for name in ("{00..01}.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        assert [
            d.text for d in open_source(SourceConfig(f"jsonl:{server.file_url('web/whole', name)}")).documents()
        ] == TEXTS
    with pytest.raises(UserError, match="a Parquet file is read in parts"):
        open_source(SourceConfig(f"parquet:{server.file_url('web/whole', 'a.parquet')}"))


def test_files_that_change_while_they_are_read(server):
    source = open_source(SourceConfig(f"jsonl:{server.file_url('web/open', '00.jsonl')}"))
    server.datasets["web/open"].files["00.jsonl"] = LINES[:99]
    with pytest.raises(UserError, match="00.jsonl': bytes 0 to .* 99 bytes came"):
        list(source.documents())


def test_credentials_of_an_address_are_used_and_stored_nowhere(server, tmp_path, capsys):
    def address(secret):
        at = server.file_url("web/open", "{00..01}.jsonl").replace("://", f"://me:{secret}@")
        return f"jsonl:{at}?X-Amz-Signature={secret}&part=1"

    def prepared(secret, to):
        arguments = [f"--source={address(secret)}", "--tokenizer=bytes", f"--out={tmp_path / to}"]
        assert prepare.main([*arguments, "--validation-fraction=0.1", "--workers=1"]) == 0

    prepared("hunter2", "one")
    prepared("swordfish", "one")  # nothing to do: another signature is no other source
    assert "nothing to do" in capsys.readouterr().out
    prepared("hunter2", "two")
    text = (tmp_path / "one" / "metadata.json").read_text()
    assert "://***@" in text and "X-Amz-Signature=***&part=1" in text
    wrong = address("hunter2").replace("00..01", "08..09")
    assert prepare.main([f"--source={wrong}", "--tokenizer=bytes", f"--out={tmp_path / 'three'}"]) == 2
    told = capsys.readouterr()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"hunter2" in content or b"swordfish" in content for content in written)
    assert "hunter2" not in told.out + told.err and "08.jsonl?X-Amz-Signature=***&part=1" in told.err
    configs = [Config(data=DataConfig(sources=(SourceConfig(address(secret)),))) for secret in ("hunter2", "x")]
    assert "hunter2" not in json.dumps(to_json(configs[0]))
    assert config_hash(configs[0]) == config_hash(configs[1]) != config_hash(Config())
    first, second = (open_source(config.data.sources[0]) for config in configs)
    assert first.identity() == second.identity()
    assert [d.text for d in first.documents()] == TEXTS
    assert "hunter2" not in mixture._unique_names(configs[0].data.sources)[0]
    write_run(tmp_path / "run", configs[0], shlex.join(["train", f"--config.x={address('hunter2')}"]), {})
    assert "hunter2" not in (tmp_path / "run" / "run.json").read_text()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:secret@bucket/a", "s3://***@bucket/a"),
        ("https://hf_abc@h/x/@y", "https://***@h/x/@y"),
        ("https://u:p@ss@h/x", "https://***@h/x"),
        ("https://h/f?sv=1&sig=a%2Fb%3D&se=2", "https://h/f?sv=1&sig=***&se=2"),
        ("https://h/f?X-Goog-Credential=a&X-Goog-Date=b", "https://h/f?X-Goog-Credential=***&X-Goog-Date=b"),
        (
            "https://h/f?AWSAccessKeyId=A&Signature=b&Expires=1",
            "https://h/f?AWSAccessKeyId=***&Signature=***&Expires=1",
        ),
        ("--x='https://h/f?access_token=abc' --y", "--x='https://h/f?access_token=***' --y"),
        ("https://h/f?api_key=abc&monkey=1&size=2", "https://h/f?api_key=***&monkey=1&size=2"),
        ("https://h/f?key=AIzaSy-x_1&alt=media", "https://h/f?key=***&alt=media"),
        ("https://h/f?key=ab/cd%2Bef==", "https://h/f?key=***"),
        ("https://h/f?key=part/a.jsonl&v=1", "https://h/f?key=part/a.jsonl&v=1"),
        ("'https://h/f?key={00..01}.jsonl.gz' is", "'https://h/f?key={00..01}.jsonl.gz' is"),
        ("https://h/f?policy=open", "https://h/f?policy=open"),
        ("https://h/f?Signature=a&Policy=b&Key-Pair-Id=c", "https://h/f?Signature=***&Policy=***&Key-Pair-Id=***"),
        *(
            (f"https://h/f?{name}=a.b/c&page=1", f"https://h/f?{name}=***&page=1")
            for name in (
                "secret_key",
                "SecretKey",
                "subscription-key",
                "AuthKey",
                "private_key",
                "app_key",
                "jwt",
                "bearer",
                "hmac",
                "session_id",
                "sessionid",
                "x-functions-key",
            )
        ),
        (
            "hf://datasets/o/n@main/x gs://b/a@b rope/beta=0.4@1024",
            "hf://datasets/o/n@main/x gs://b/a@b rope/beta=0.4@1024",
        ),
    ],
)
def test_what_is_a_credential(text, shown):
    assert redacted(text) == shown


def files_at(*addresses):
    """The source of files of one size, which only their addresses tell apart."""
    config = SourceConfig(f"jsonl:{addresses[0]}")
    return files.JsonLines(config.source, [InputFile(address, 10) for address in addresses], Records(config))


def test_the_digest_of_an_address_is_of_what_it_names():
    def identity(address):
        return str(files_at(address).identity())

    assert len({identity(f"https://h/f?key={key}") for key in ("a.jsonl", "b.jsonl", "a", "b")}) == 4
    assert identity("https://h/f?key=a&token=1&secret_key=2") == identity("https://h/f?key=a&token=3&secret_key=4")
    assert identity("https://u:p@h/f?Policy=a&Signature=b") == identity("https://v:q@h/f?Policy=c&Signature=d")
    assert identity("https://h/f?policy=a") != identity("https://h/f?policy=b")


def test_files_that_a_key_tells_apart_are_prepared_each(tmp_path, monkeypatch):
    tokenizer, places = load_tokenizer("bytes"), []
    monkeypatch.setattr(mixture, "open_source", lambda config: files_at(config.source.removeprefix("jsonl:")))
    monkeypatch.setattr(mixture, "_cached", lambda directory, *_: places.append(directory) or directory)
    monkeypatch.setattr(mixture, "load_saved_tokenizer", lambda directory: tokenizer)
    for query in ("key=a.jsonl", "key=b.jsonl", "key=a", "key=b", "key=b&sig=1", "key=b&sig=2"):
        config = SourceConfig(f"jsonl:https://h/f?{query}")
        mixture.ensure_prepared(config, tokenizer, "bytes", tmp_path, 0.1)
        mixture.ensure_tokenizer("sentencepiece:train:300", [config], tmp_path)
    for kind in (places[::2], places[1::2]):
        assert len(set(kind)) == 5 and kind[4] == kind[5]  # another signature is no other file


def test_the_name_of_a_part_has_nothing_of_a_signature_with_a_slash():
    assert str(files.Part("https://h/f.jsonl?sig=ab/cd", 10, 0, 10)) == "f.jsonl?sig=***"


@pytest.mark.parametrize(
    ("dataset", "name", "says"),
    [
        ("web/login", "00.jsonl", "needs a login, or refuses this one .401"),
        ("web/open", "nope.jsonl", "There is no .*nope.jsonl"),
        ("web/open", "empty.jsonl", "is empty"),
        ("web/open", "*.jsonl", "lists no files. Write their numbers in braces"),
    ],
)
def test_files_that_a_web_server_does_not_have(server, dataset, name, says):
    with pytest.raises(UserError, match=says):
        open_source(SourceConfig(f"jsonl:{server.file_url(dataset, name)}"))


def test_a_web_server_that_is_down(server):
    server.failures = 99
    with pytest.raises(UserError, match="does not answer as it should .503"):
        open_source(SourceConfig(f"jsonl:{server.file_url('web/open', '00.jsonl')}"))
    with pytest.raises(UserError, match="does not answer as it should .ConnectionError"):
        open_source(SourceConfig("jsonl:http://127.0.0.1:9/a.jsonl"))
