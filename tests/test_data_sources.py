"""Sources yield every document once and in order, whole and in shards, and name the record of an error."""

import codecs
import gzip
import json
import pickle
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from pe_lab.config import Config, SourceConfig, from_dict, to_json
from pe_lab.data.sources import InputShard, files, open_source, tensorflow
from pe_lab.data.tokenizers import ByteTokenizer, load_tokenizer
from pe_lab.errors import UserError
from pe_lab.evaluation.suites import niah as haystacks
from pe_lab.generate import read_text
from pe_lab.identity import config_hash


def documents(source, **settings):
    return [d.text for d in open_source(SourceConfig(source=source, **settings)).documents()]


def in_shards(config):
    """The documents of each shard, read by a source of its own, from JSON, as another machine reads it."""
    shards = open_source(config).shards()
    assert pickle.loads(pickle.dumps(shards)) == shards
    other = open_source(config)
    return [list(other.read(InputShard(s.name, json.loads(json.dumps(s.read))))) for s in shards]


def joined(parts):
    return [document for part in parts for document in part]


def test_the_standard_library_is_code_and_prose_without_its_tests():
    source = open_source(SourceConfig("stdlib"))
    found = [d.text for d in source.documents()]
    assert found == [d.text for d in source.documents()]
    assert any("class OrderedDict(dict)" in d for d in found)  # code: collections
    assert any(d.lstrip().startswith('The "with" statement') for d in found)  # prose: the help topics
    assert not any("import pytest" in d or "_bootstrap_external.MAGIC_NUMBER_FOR_TESTS" in d for d in found)
    assert sum(map(len, found)) > 8_000_000
    assert source.identity()["python"] == sys.version.split()[0]
    parts = in_shards(SourceConfig("stdlib"))
    assert [d.text for d in joined(parts)] == found and len(parts) > 3 and all(parts)


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
    compressed = pyarrow.compress((tmp_path / "a.jsonl").read_bytes() + b"\n", "zstd", asbytes=True)
    (tmp_path / "a.jsonl.zst").write_bytes(compressed + compressed)  # in two frames
    assert documents(f"jsonl:{tmp_path}/a.jsonl.zst") == ["one", "two"] * 2
    assert documents(f"jsonl:{tmp_path}/a.jsonl{{.zst,.gz}}") == ["one", "two"] * 3


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


def test_tensorflow_datasets_without_tensorflow(tfds_directory, monkeypatch):
    options = {"data_dir": tfds_directory}
    assert sorted(documents("tfds:tiny_poems", options=options)) == [f"poem {i}: é" for i in range(7)]
    assert sorted(documents("tfds:tiny_poems/test", options=options)) == [f"test {i}: é" for i in range(3)]
    assert len(documents("tfds:tiny_poems/train[:2]", options=options)) == 2
    assert "tensorflow" not in sys.modules
    config = SourceConfig("tfds:tiny_poems", options=options, template="{text} ({stars})")
    found = [d.text for d in open_source(config).documents()]
    assert sorted(found) == [f"poem {i}: é ({i})" for i in range(7)]
    monkeypatch.setattr(tensorflow, "SHARD_BYTES", 60)
    parts = in_shards(config)
    assert [d.text for d in joined(parts)] == found and len(parts) > 2


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
    (tmp_path / "cut.jsonl.zst").write_bytes(pyarrow.compress(b'{"text": "a"}\n' * 99, "zstd", asbytes=True)[:-5])
    bomb = b'{"text": "' + b"a" * 2**25 + b'"}\n'
    (tmp_path / "bomb.jsonl.zst").write_bytes(pyarrow.compress(bomb, "zstd", asbytes=True))
    (tmp_path / "bomb.txt.gz").write_bytes(gzip.compress(bomb, 1))
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "no.arrow").write_bytes(b"no arrow")
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
        ("jsonl:{}/cut.jsonl.zst", "text", "cut.jsonl.zst"),
        ("jsonl:{}/bomb.jsonl.zst", "text", "bomb.jsonl.zst expands to more than 100 times"),
        ("text:{}/bomb.txt.gz", "text", "bomb.txt.gz expands to more than 100 times"),
        ("jsonl:{}/none.jsonl", "text", "empty"),
        ("arrow:{}/no.arrow", "text", "no.arrow"),
        ("ftp:{}/x", "text", "unknown kind 'ftp'"),
        ("text:ftp://{}/x", "text", "no files at ftp://"),
        ("jsonl:https://example.invalid/*.jsonl", "text", "a web server lists no files"),
        ("jsonl:{}/a{{0..9999999}}.jsonl", "text", "more than 1,000,000 files"),
        ("parqet:{}/x", "text", "Did you mean 'parquet'"),
        ("text:", "text", "incomplete"),
        ("stdlib:x", "text", "incomplete"),
    ],
)
def test_bad_corpora_are_named(tmp_path, source, column, says):
    bad_files(tmp_path)
    with pytest.raises(UserError, match=says):
        documents(source.format(tmp_path), column=column)


def test_a_name_with_wildcards_is_a_file_where_there_is_one(tmp_path, monkeypatch):
    for name in ("lr[1]/a.txt", "lr1/b.txt", "[ab].txt", "a.txt", "~no_one/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    assert documents(f"text:{tmp_path}/lr[1]/*.txt") == ["text of lr[1]/a.txt"]
    assert documents(f"text:{tmp_path}/lr[[]1]/*.txt") == ["text of lr[1]/a.txt"]
    assert documents(f"text:{tmp_path}/[ab].txt") == ["text of [ab].txt"]
    assert documents(f"text:{tmp_path}/[ac].txt") == ["text of a.txt"]
    assert documents(f"text:{tmp_path}/**/[bc].txt") == ["text of lr1/b.txt", "text of ~no_one/c.txt"]
    monkeypatch.chdir(tmp_path)
    assert documents("text:~no_one/*.txt") == ["text of ~no_one/c.txt"]  # there is no such user
    assert documents("text:lr[1]/{a,b}.txt") == ["text of lr[1]/a.txt"]


def test_columns_of_one_name_are_refused(tmp_path):
    """Also within a column; another column may be there twice, and names that differ in case are different."""
    one, two = pyarrow.array(["a"]), pyarrow.array(["b"])
    inner = pyarrow.StructArray.from_arrays([one, two], ["title", "title"])
    listed = pyarrow.array([[{"content": "a", "role": "user"}]])
    for name, columns, names in [
        ("text", [one, two], ["text", "text"]),
        ("nested", [inner], ["meta"]),
        ("other", [one, two, two, listed], ["text", "n", "n", "messages"]),
        ("case", [one, two], ["text", "Text"]),
    ]:
        table = pyarrow.Table.from_arrays(columns, names=names)
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
        with pyarrow.ipc.new_file(tmp_path / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table)
    for kind in ("parquet", "arrow"):
        for name in ("other", "case"):
            assert documents(f"{kind}:{tmp_path}/{name}.{kind}") == ["a"]
        assert documents(f"{kind}:{tmp_path}/case.{kind}", column="Text") == ["b"]
        with pytest.raises(UserError, match=rf"text.{kind} has two columns 'text'"):
            documents(f"{kind}:{tmp_path}/text.{kind}")
        with pytest.raises(UserError, match=rf"nested.{kind} has two columns 'meta.title'"):
            documents(f"{kind}:{tmp_path}/nested.{kind}", template="{meta.title}")


def test_a_byte_order_mark_is_no_text(tmp_path):
    mark = codecs.BOM_UTF8
    (tmp_path / "a.txt").write_bytes(mark + b"hello\n")
    (tmp_path / "b.txt").write_bytes(mark)
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(mark + b"packed"))
    (tmp_path / "d.txt.zst").write_bytes(pyarrow.compress(mark + b"more", "zstd", asbytes=True))
    (tmp_path / "e.txt").write_bytes("in\ufeffside".encode())  # a space of no width
    (tmp_path / "f.jsonl").write_bytes(mark + b'{"text": "line"}\n' + mark + b'{"text": "next"}\n')
    assert documents(f"text:{tmp_path}/*.txt*") == ["hello\n", "packed", "more", "in\ufeffside"]
    assert documents(f"jsonl:{tmp_path}/f.jsonl") == ["line", "next"]
    assert read_text("--prompts", str(tmp_path / "a.txt")) == haystacks._read(tmp_path / "a.txt") == "hello\n"
    plain = ByteTokenizer().exported_files()
    for name, content in plain.items():
        (tmp_path / name).write_bytes(mark + content)
    (tmp_path / "chat_template.jinja").write_bytes(mark + b"hello")
    tokenizer = load_tokenizer(f"hf:{tmp_path}")
    assert tokenizer.eos_id == 256 and tokenizer.chat([{"role": "user", "content": ""}]) == "hello"


@pytest.mark.parametrize("ending", ["txt", "txt.gz", "txt.zst"])
@pytest.mark.parametrize("lines", [True, False])
def test_a_large_text_file_is_several_documents(tmp_path, monkeypatch, ending, lines):
    """They end at line ends, or within 20 bytes at a character, and are the text of the file, in shards of any size."""
    text = "".join(f"{i} é☃😀 words{chr(10) if lines and i % 3 else ''}" for i in range(40))
    content = codecs.BOM_UTF8 + text.encode()
    packed = {"txt.gz": gzip.compress, "txt.zst": lambda b: pyarrow.compress(b, "zstd", asbytes=True)}
    (tmp_path / f"a.{ending}").write_bytes(packed.get(ending, bytes)(content))
    config = SourceConfig(f"text:{tmp_path}/a.*")
    assert [d.text for d in open_source(config).documents()] == [text]
    monkeypatch.setattr(files.TextFiles, "part_bytes", 100)
    monkeypatch.setattr(files, "LINE_BYTES", 60 if lines else 20)
    found = list(open_source(config).documents())
    assert "".join(d.text for d in found) == text
    assert len(found) == (-(-len(content) // 100) if ending == "txt" else len(found)) > 5
    assert all(len(d.text.encode()) <= 200 for d in found)
    if lines:
        assert all(d.text.endswith("\n") for d in found[:-1])
    assert open_source(config).count() in (None, len(found))
    monkeypatch.setattr(files, "SHARD_BYTES", 150)
    monkeypatch.setattr(files.Files, "part_bytes", 150)
    assert joined(in_shards(config)) == found
    (tmp_path / f"a.{ending}").write_bytes(packed.get(ending, bytes)(content[:555] + b"\xff" + content[555:]))
    with pytest.raises(UserError, match=rf"a.{ending} is not UTF-8 \(byte 55\d\)"):
        list(open_source(config).documents())


def test_a_record_that_is_too_long_is_refused_by_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_LINE_BYTES", 1000)
    line = json.dumps({"text": "a"}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 3 + json.dumps({"text": "a" * 2000}) + "\n" + line)
    with pytest.raises(UserError, match=r"a.jsonl, line 4 has more than 1,000 bytes. Split"):
        documents(f"jsonl:{tmp_path}/a.jsonl")


def test_identity_changes_with_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    before = open_source(SourceConfig(f"text:{tmp_path}/*.txt")).identity()
    (tmp_path / "b.txt").write_text("two")
    assert open_source(SourceConfig(f"text:{tmp_path}/*.txt")).identity() != before


# ---------------------------------------------------------------------------------------------------------------------
# Shards


def test_shards_of_lines_end_where_lines_end(tmp_path, monkeypatch):
    lines = [json.dumps({"text": f"{i} " + "ü" * (i * 7 % 50)}, ensure_ascii=False) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:40]), encoding="utf-8")  # no line end at its end
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[40:]).encode()))
    config = SourceConfig(f"jsonl:{tmp_path}/*")
    whole = open_source(config)
    assert len(whole.shards()) == 1
    found = list(whole.documents())
    assert [d.text.split()[0] for d in found] == [str(i) for i in range(60)]
    for size in (len(lines[0]) + 1, 97, 1000):  # a boundary at a line end, and boundaries anywhere
        monkeypatch.setattr(files, "SHARD_BYTES", size)
        monkeypatch.setattr(files.Files, "part_bytes", size)
        parts = in_shards(config)
        assert joined(parts) == found
        assert len(parts) > (tmp_path / "a.jsonl").stat().st_size // size
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:30], "{", *lines[30:40]]), encoding="utf-8")
    with pytest.raises(UserError, match=r"a.jsonl, the line at byte [\d,]+ is not a JSON object"):
        list(open_source(config).documents())


def test_small_files_share_a_shard(tmp_path, monkeypatch):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(str(i) * 10)
    monkeypatch.setattr("pe_lab.data.sources.source.MOST_FILES", 4)
    parts = in_shards(SourceConfig(f"text:{tmp_path}/*.txt"))
    assert [[d.text[0] for d in part] for part in parts] == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]


def test_parquet_and_arrow_are_split_at_their_row_groups(tmp_path, monkeypatch):
    texts = [f"document {i}" for i in range(1000)]
    table = pyarrow.table({"text": pyarrow.array(texts).dictionary_encode(), "n": range(1000)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=30)
    for name, new in (("file", pyarrow.ipc.new_file), ("stream", pyarrow.ipc.new_stream)):
        with new(tmp_path / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    monkeypatch.setattr(files, "SHARD_BYTES", 3000)
    monkeypatch.setattr(files.Files, "part_bytes", 3000)
    for source in ("parquet:{}/a.parquet", "arrow:{}/file.arrow", "arrow:{}/stream.arrow"):
        parts = in_shards(SourceConfig(source.format(tmp_path)))
        assert [d.text for d in joined(parts)] == texts
        assert sum(map(bool, parts)) > 4, source
        filled = documents(source.format(tmp_path), template="{n}: {text}")
        assert filled == [f"{i}: {text}" for i, text in enumerate(texts)]
        with pytest.raises(UserError, match="has no column 'title'"):
            documents(source.format(tmp_path), template="{title}")


# ---------------------------------------------------------------------------------------------------------------------
# Templates


def test_templates_fill_columns_in(tmp_path):
    rows = [
        {"title": "One", "meta": {"n": 1, "by": {"name": "A"}}, "a.b": "dot"},
        {"title": None, "meta": {"n": 2.5, "by": None}, "a.b": ""},
        {"title": "", "meta": None, "a.b": None},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    template = "{{{title}}} {meta.n} {meta.by.name}{a.b}"
    expected = ["{One} 1 Adot", "{} 2.5 "]
    assert documents(f"jsonl:{tmp_path}/a.jsonl", template=template) == expected  # nothing but nulls is no document
    assert documents(f"parquet:{tmp_path}/a.parquet", template=template) == ["{One} 1.0 Adot", "{} 2.5 "]
    assert documents(f"jsonl:{tmp_path}/a.jsonl", column="meta.by.name") == ["A"]
    assert documents(f"parquet:{tmp_path}/a.parquet", column="meta.by.name") == ["A"]
    with pytest.raises(UserError, match=r"a.parquet has no column 'meta.no' \(it has: n, by\)"):
        documents(f"parquet:{tmp_path}/a.parquet", template="{title}{meta.no}")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{title}{text}", r"a.jsonl, line 3 has no column 'text' \(it has: title, meta\). Set the source's template"),
        ("{meta.n}", r"a.jsonl, line 2 has no column 'meta.n' \(it has: m\)"),
        ("{meta}", "a.jsonl, line 1: column 'meta' holds a dict, not text"),
        ("{title", "template '{title'"),
        ("{title!r}{}", "a field is no name"),
        ("text", "names no column"),
    ],
)
def test_a_template_that_fails_names_the_record(tmp_path, template, says):
    rows = [{"title": "a", "text": "b", "meta": {"n": 1}}, {"title": "a", "text": "b", "meta": {"m": 1}}]
    rows.append({"title": "a", "meta": None})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=says):
        documents(f"jsonl:{tmp_path}/a.jsonl", template=template)


def test_settings_that_do_not_fit_the_kind(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    with pytest.raises(UserError, match="has no columns; leave its template out"):
        open_source(SourceConfig("stdlib", template="{a}"))
    with pytest.raises(UserError, match="a template and a chat; give one"):
        open_source(SourceConfig(f"jsonl:{tmp_path}/a.jsonl", template="{a}", chat="messages"))


def test_new_fields_leave_older_runs_as_they_were(tmp_path):
    """A run's hash and the cache's key depend on the JSON, which has what is set."""
    source = to_json(SourceConfig("jsonl:x"))
    assert not {"template", "chat"} & set(source)
    with_template = {"sources": [{**source, "template": "{a}"}]}
    read = from_dict(Config, {"data": with_template})
    assert read.data.sources[0].template == "{a}" and config_hash(read) != config_hash(
        from_dict(Config, {"data": {"sources": [source]}})
    )
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    name = f"jsonl:{tmp_path}/a.jsonl"
    plain = open_source(SourceConfig(name)).identity()
    assert set(plain) == {"files", "bytes", "names_and_sizes"}
    assert open_source(SourceConfig(name, template="{text}")).identity() == {**plain, "template": "{text}"}


# ---------------------------------------------------------------------------------------------------------------------
# Chats


USER, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    ("chat", "record"),
    [
        ("messages", {"messages": [USER, ANSWER]}),
        ("conversations", {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}),
        ("messages", {"messages": {"role": ["user", "assistant"], "content": ["Q", "A"]}}),
        (
            "messages",
            {"messages": [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in (USER, ANSWER)]},
        ),
        ("data.chat", {"data": {"chat": [USER, ANSWER]}}),
        ("prompt/completion", {"prompt": "Q", "completion": "A"}),
        ("prompt/completion", {"prompt": [USER], "completion": [ANSWER]}),
        ("instruction", {"instruction": "Q", "input": "", "output": "A"}),
        ("instruction", {"instruction": "Q", "output": "A"}),
    ],
)
def test_chats_of_every_layout(tmp_path, chat, record):
    empty = {name: None for name in record}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, (record, empty))))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record, empty]), tmp_path / "a.parquet")
    for kind in ("jsonl", "parquet"):
        [found] = open_source(SourceConfig(f"{kind}:{tmp_path}/a.{kind}", chat=chat)).documents()
        assert found == ("", (USER, ANSWER))


def test_an_instruction_has_its_system_prompt_and_input(tmp_path):
    record = {"system": "S", "instruction": "Q", "input": "I", "output": "A"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    [found] = open_source(SourceConfig(f"jsonl:{tmp_path}/a.jsonl", chat="instruction")).documents()
    assert found.messages == ({"role": "system", "content": "S"}, {"role": "user", "content": "Q\n\nI"}, ANSWER)


@pytest.mark.parametrize(
    ("chat", "record", "says"),
    [
        ("messages", {"text": "a"}, "line 1 has no column 'messages' .*source's chat"),
        ("messages", {"messages": "a"}, "column 'messages' holds a str, not a list of messages"),
        ("messages", {"messages": [USER, {"content": "a"}]}, "line 1: message 1 of 'messages' has no 'role'"),
        ("messages", {"messages": [{"role": "user", "content": None}]}, "message 0 of 'messages': its 'content' is"),
        ("messages", {"messages": ["a"]}, "message 0 of 'messages' is a str"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts that are not text"),
        ("prompt/completion", {"prompt": "a"}, "no column 'completion'"),
        ("instruction", {"instruction": "a", "output": 3}, "column 'output' holds a int"),
    ],
)
def test_a_chat_that_is_none_names_the_record(tmp_path, chat, record, says):
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(UserError, match=says):
        list(open_source(SourceConfig(f"jsonl:{tmp_path}/a.jsonl", chat=chat)).documents())
