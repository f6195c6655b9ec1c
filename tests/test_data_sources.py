"""Sources yield every document in order, and name the file of an error."""

import gzip
import json
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from pe_lab.config import SourceConfig
from pe_lab.data.sources import open_source
from pe_lab.errors import UserError


def documents(source, **settings):
    return [d.text for d in open_source(SourceConfig(source=source, **settings)).documents()]


def test_the_standard_library_is_code_and_prose_without_its_tests():
    source = open_source(SourceConfig("stdlib"))
    found = [d.text for d in source.documents()]
    assert found == [d.text for d in source.documents()]
    assert any("class OrderedDict(dict)" in d for d in found)  # code: collections
    assert any(d.lstrip().startswith('The "with" statement') for d in found)  # prose: the help topics
    assert not any("import pytest" in d or "_bootstrap_external.MAGIC_NUMBER_FOR_TESTS" in d for d in found)
    assert sum(map(len, found)) > 8_000_000
    assert source.identity()["python"] == sys.version.split()[0]


def test_text_files_are_one_document_each_in_sorted_order(tmp_path, monkeypatch):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    (tmp_path / "a.txt").write_text("first\né", encoding="utf-8")
    (tmp_path / "sub" / "deep" / "c.txt").write_text("third", encoding="utf-8")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"zipped"))
    assert documents(f"text:{tmp_path}/*.txt") == ["first\né", "second"]
    assert documents(f"text:{tmp_path}/**/*.txt") == ["first\né", "second", "third"]
    assert documents(f"text:{tmp_path}/*.gz") == ["zipped"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert documents("text:~/a.txt") == ["first\né"]


def test_json_lines(tmp_path):
    rows = [{"text": "one", "body": "eins"}, {"text": "two", "body": None}, {"text": "", "body": "drei"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert documents(f"jsonl:{tmp_path}/a.jsonl") == ["one", "two"]
    assert documents(f"jsonl:{tmp_path}/a.jsonl", column="body") == ["eins", "drei"]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert documents(f"jsonl:{tmp_path}/*.gz") == ["one", "two"]


def test_parquet_streams_every_row_group_of_every_file(tmp_path):
    texts = [f"document {i}" for i in range(5000)]
    table = pyarrow.table({"text": texts, "score": np.arange(5000)})
    pyarrow.parquet.write_table(table.slice(0, 3000), tmp_path / "part-0.parquet", row_group_size=700)
    pyarrow.parquet.write_table(table.slice(3000), tmp_path / "part-1.parquet", row_group_size=999)
    source = open_source(SourceConfig(f"parquet:{tmp_path}/*.parquet"))
    assert [d.text for d in source.documents()] == texts
    assert source.count() == 5000


@pytest.fixture(scope="module")
def tfds_directory(tmp_path_factory):
    import tensorflow_datasets as tfds

    # Not registered, so that it is read from its files, like a dataset prepared elsewhere.
    class TinyPoems(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict(
                {"text": tfds.features.Text(), "stars": tfds.features.Scalar(dtype=np.int64)}
            )
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, download_manager):
            return {
                "train": self._generate_examples("poem", 7),
                "test": self._generate_examples("test", 3),
            }

        def _generate_examples(self, word, count):
            for i in range(count):
                yield i, {"text": f"{word} {i}: é", "stars": i}

    directory = tmp_path_factory.mktemp("tfds")
    TinyPoems(data_dir=str(directory), file_format="array_record").download_and_prepare()
    return str(directory)


def test_tensorflow_datasets_without_tensorflow(tfds_directory):
    options = {"data_dir": tfds_directory}
    assert sorted(documents("tfds:tiny_poems", options=options)) == [f"poem {i}: é" for i in range(7)]
    assert sorted(documents("tfds:tiny_poems/test", options=options)) == [f"test {i}: é" for i in range(3)]
    assert len(documents("tfds:tiny_poems/train[:2]", options=options)) == 2
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize(
    ("source", "settings", "says"),
    [
        ("tfds:tiny_poems/nope", {}, "no split 'nope'"),
        ("tfds:tiny_pomes", {}, "tfds:tiny_pomes"),
        ("tfds:tiny_poems", {"column": "body"}, "no column 'body'"),
        ("tfds:tiny_poems", {"options": {"data_dri": "x"}}, "data_dri"),
    ],
)
def test_tensorflow_datasets_bad_input(tfds_directory, source, settings, says):
    settings = {"options": {"data_dir": tfds_directory}, **settings}
    with pytest.raises(UserError, match=says):
        documents(source, **settings)


def test_a_column_of_numbers_is_refused(tfds_directory):
    with pytest.raises(UserError, match="'stars'"):
        documents("tfds:tiny_poems", column="stars", options={"data_dir": tfds_directory})


def bad_files(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "column.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    (tmp_path / "number.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:-12])
    (tmp_path / "no.parquet").write_bytes(b"PAR1 this is no parquet PAR1")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), tmp_path / "column.parquet")


@pytest.mark.parametrize(
    ("source", "column", "says"),
    [
        ("text:{}/missing*.txt", "text", "missing"),
        ("text:{}", "text", "is a directory"),
        ("text:{}/empty.txt", "text", "empty"),
        ("text:{}/latin.txt", "text", r"latin.txt is not UTF-8 \(byte 3\)"),
        ("jsonl:{}/broken.jsonl", "text", "broken.jsonl, line 2 is not a JSON object"),
        ("jsonl:{}/column.jsonl", "text", "column.jsonl, line 2 has no column 'text' .*body"),
        ("jsonl:{}/number.jsonl", "text", "number.jsonl, line 1: column 'text' holds a int"),
        ("jsonl:{}/list.jsonl", "text", "list.jsonl, line 1 is not a JSON object"),
        ("jsonl:{}/cut.jsonl.gz", "text", "cut.jsonl.gz"),
        ("parquet:{}/no.parquet", "text", "no.parquet"),
        ("parquet:{}/column.parquet", "text", "column.parquet has no column 'text' .*body"),
        ("parquet:{}/column.parquet", "n", "column 'n' is of type int64"),
        ("parqet:{}/x", "text", "Did you mean 'parquet'"),
        ("text:", "text", "incomplete"),
        ("stdlib:x", "text", "incomplete"),
    ],
)
def test_bad_corpora_are_named(tmp_path, source, column, says):
    bad_files(tmp_path)
    with pytest.raises(UserError, match=says):
        documents(source.format(tmp_path), column=column)


def test_identity_changes_with_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    before = open_source(SourceConfig(f"text:{tmp_path}/*.txt")).identity()
    (tmp_path / "b.txt").write_text("two")
    assert open_source(SourceConfig(f"text:{tmp_path}/*.txt")).identity() != before
