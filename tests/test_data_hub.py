"""Datasets of the hub: local mirrors of its layout, and a server of its protocol on loopback."""

import gzip
import io
import json

import pyarrow
import pyarrow.parquet
import pytest
from hub_server import COMMIT, Dataset, hub_server

from pe_lab.config import SourceConfig
from pe_lab.data.sources import InputShard, files, open_source
from pe_lab.errors import UserError

README = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
- config_name: lines
  data_files: lines/*
---
# A dataset
"""


def parquet(texts):
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": range(len(texts))}), content, row_group_size=3)
    return content.getvalue()


FILES = {
    "README.md": README.encode(),
    "data/train-00000-of-00002.parquet": parquet([f"a{i}" for i in range(10)]),
    "data/train-00001-of-00002.parquet": parquet(["b0", "b1"]),
    "data/test-00000-of-00001.parquet": parquet(["t"]),
    "lines/1.jsonl": b'{"text": "c0"}\n',
    "lines/2.jsonl.gz": gzip.compress(b'{"text": "c1"}\n'),
}
TRAIN = [*(f"a{i}" for i in range(10)), "b0", "b1"]


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    return write(tmp_path / "mirror", FILES)


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def write(directory, contents):
    for name, content in contents.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def texts(config):
    return [document.text for document in open_source(config).documents()]


def test_a_mirror_has_the_readmes_configs_and_splits(mirror, monkeypatch):
    source = open_source(SourceConfig(f"hf:{mirror}"))
    assert [d.text for d in source.documents()] == TRAIN and source.count() == len(TRAIN)
    assert texts(SourceConfig(f"hf:{mirror}/test")) == texts(SourceConfig(f"hf:{mirror}:default/test")) == ["t"]
    assert texts(SourceConfig(f"hf:{mirror}:lines")) == ["c0", "c1"]
    assert texts(SourceConfig(f"hf:{mirror}", template="{n}{text}"))[:2] == ["0a0", "1a1"]
    monkeypatch.setattr(files, "SHARD_BYTES", 300)
    monkeypatch.setattr(files.Files, "part_bytes", 300)
    shards = [InputShard(s.name, json.loads(json.dumps(s.read))) for s in source.shards()]
    parts = [[d.text for d in source.read(shard)] for shard in shards]
    assert sum(parts, []) == TRAIN and sum(map(bool, parts)) > 3
    before = source.identity()
    write(mirror, {"data/train-00002-of-00002.parquet": parquet(["more"])})
    assert open_source(SourceConfig(f"hf:{mirror}")).identity() != before


def test_formats_that_datasets_reads(tmp_path):
    """CSV files, and a README with a setting of their format; a shard for each file."""
    readme = "---\nconfigs:\n- config_name: default\n  sep: ';'\n  data_files: '*.csv'\n---\n"
    directory = write(
        tmp_path / "csv", {"README.md": readme.encode(), "1.csv": b"text;n\n1, 2;3\n;4\n", "2.csv": b"text;n\nlast;5\n"}
    )
    source = open_source(SourceConfig(f"hf:{directory}"))
    assert [[d.text for d in source.read(shard)] for shard in source.shards()] == [["1, 2"], ["last"]]
    assert texts(SourceConfig(f"hf:{directory}", template="{n}:{text}")) == ["3:1, 2", "4:", "5:last"]
    with pytest.raises(UserError, match="has no column 'body'"):
        open_source(SourceConfig(f"hf:{directory}", column="body"))
    with pytest.raises(UserError, match="changed since its shards"):
        list(source.read(InputShard("", {"shard": 0, "of": 2, "version": "other"})))


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("{}:nope", "'nope' not found. Available"),
        ("{}/nope", r"no split 'nope' \(it has: train, test\)"),
        ("{}/empty", r"cannot be read|no data files"),
        ("{}/zero", "is empty"),
        ("{}/missing/x", "no directory"),
        ("name", "no directory 'name', and it is no repository"),
    ],
)
def test_bad_mirrors(mirror, where, says):
    (mirror / "empty").mkdir()
    write(mirror / "zero", {"train.jsonl": b""})
    with pytest.raises(UserError, match=says):
        open_source(SourceConfig(f"hf:{where.format(mirror)}"))


def test_a_directory_whose_name_datasets_takes_for_a_pattern_is_refused(tmp_path):
    (tmp_path / "d[1]").mkdir()
    with pytest.raises(UserError, match="reads wildcards in the name of a directory, '.*d.1.'. Give the directory"):
        open_source(SourceConfig(f"hf:{tmp_path}/d[1]"))


def test_options_of_the_hub(mirror):
    with pytest.raises(UserError, match="Did you mean 'revision'"):
        open_source(SourceConfig(f"hf:{mirror}", options={"revison": "x"}))
    with pytest.raises(UserError, match="option revision is 3"):
        open_source(SourceConfig(f"hf:{mirror}", options={"revision": 3}))


def test_without_datasets_the_message_names_the_extra(mirror, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'pe-lab\[hf\]'"):
        open_source(SourceConfig(f"hf:{mirror}"))


@pytest.fixture
def hub(monkeypatch):
    import datasets
    import huggingface_hub

    repositories = {
        "org/open": Dataset(FILES),
        "org/gated": Dataset(FILES, 401, "secret"),
        "org/refused": Dataset(FILES, 403),
    }
    with hub_server(repositories) as server:
        # They read HF_ENDPOINT when they are imported, which another test may have done.
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


def test_a_dataset_of_the_hub_is_read_in_parts(hub, monkeypatch):
    source = open_source(SourceConfig("hf:org/open"))
    monkeypatch.setattr(files, "SHARD_BYTES", 300)
    monkeypatch.setattr(files.Files, "part_bytes", 300)
    shards = source.shards()
    hub.requests.clear()
    assert [d.text for shard in shards for d in source.read(shard)] == TRAIN
    # The shards name the files of one commit, and nothing is read without a range.
    assert hub.requests and all(f"resolve/{COMMIT}/data/train" in r and "bytes=" in r for r in hub.requests)
    assert source.identity()["revision"] == COMMIT
    assert texts(SourceConfig("hf:org/open:lines/train")) == ["c0", "c1"]


def test_a_login_opens_a_gated_dataset(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert texts(SourceConfig("hf:org/gated/test")) == ["t"]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("org/gated", "needs a login .*HF_TOKEN"),
        ("org/refused", "needs a login .*HF_TOKEN"),
        ("org/missing", "the hub has no such dataset"),
        ("org/open/nope", "no split 'nope'"),
    ],
)
def test_datasets_that_the_hub_refuses(hub, where, says):
    with pytest.raises(UserError, match=says):
        open_source(SourceConfig(f"hf:{where}"))


def test_no_network(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="the hub cannot be reached .*hf:DIRECTORY"):
        open_source(SourceConfig("hf:org/open"))
