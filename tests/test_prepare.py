"""`python -m pe_lab.prepare`: writes prepared data once, and refuses other directories."""

import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from pe_lab.data.shards import METADATA_FILE, open_prepared
from pe_lab.prepare import main

TEXTS = [f"row {i} " + "some words to learn from " * (i % 9) for i in range(120)]


@pytest.fixture
def corpus(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "body": TEXTS[::-1]}), tmp_path / "a.parquet")
    return f"--source=parquet:{tmp_path}/*.parquet"


def test_it_writes_shards_metadata_and_tokenizer(corpus, tmp_path, capsys):
    out = tmp_path / "deep" / "er" / "out"
    assert main([corpus, "--tokenizer=sentencepiece:train:300", f"--out={out}", "--validation-fraction=0.2"]) == 0
    prepared = open_prepared(out)
    assert sum(prepared.metadata.documents.values()) == 120
    assert 10 < prepared.metadata.documents["validation"] < 40
    assert prepared.tokenizer.vocab_size == 300
    printed = capsys.readouterr().out
    assert f"data.prepared={out}" in printed
    assert prepared.metadata.source == corpus.removeprefix("--source=")
    (train,) = [line.split() for line in printed.splitlines() if line.startswith("train")]
    assert train == ["train", *(f"{getattr(prepared.metadata, n)['train']:,}" for n in ("documents", "tokens")), "1"]
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]


def test_a_second_call_changes_nothing(corpus, tmp_path, capsys):
    arguments = [corpus, "--tokenizer=bytes", f"--out={tmp_path / 'out'}"]
    assert main(arguments) == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    assert main(arguments) == 0
    assert "already prepared" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == before


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ("--column=body", "--column=text, not body"),
        ("--validation-fraction=0.5", "--validation-fraction=0.01, not 0.5"),
        ("--limit-documents=3", "--limit-documents=None, not 3"),
        ("--tokenizer=sentencepiece:train:300", "--tokenizer=bytes, not sentencepiece:train:300"),
    ],
)
def test_other_prepared_data_is_refused(corpus, tmp_path, capsys, changed, says):
    arguments = [corpus, "--tokenizer=bytes", f"--out={tmp_path / 'out'}"]
    assert main(arguments) == 0
    assert main([*arguments, changed]) == 2
    assert says in capsys.readouterr().err


def test_a_changed_corpus_and_a_changed_tokenizer_are_refused(corpus, tmp_path, capsys):
    import tokenizers

    def write_tokenizer(words):
        vocabulary = {word: i for i, word in enumerate(["</s>", "[UNK]", *words])}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["</s>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))

    write_tokenizer(["row", "some"])
    arguments = [corpus, f"--tokenizer=hf:{tmp_path}/tokenizer.json", f"--out={tmp_path / 'out'}"]
    assert main(arguments) == 0
    assert main(arguments) == 0
    write_tokenizer(["row", "words"])
    assert main(arguments) == 2
    assert "was prepared with tokenizer hf-" in capsys.readouterr().err
    write_tokenizer(["row", "some"])
    pyarrow.parquet.write_table(pyarrow.table({"text": ["more"]}), tmp_path / "b.parquet")
    assert main(arguments) == 2
    assert "other files" in capsys.readouterr().err


def test_limit_and_column(corpus, tmp_path):
    out = tmp_path / "out"
    arguments = [corpus, "--tokenizer=bytes", f"--out={out}", "--column=body", "--limit-documents=4"]
    assert main([*arguments, "--validation-fraction=0"]) == 0
    prepared = open_prepared(out)
    text = prepared.tokenizer.decode(prepared.tokens("train", 0, 10**6))
    assert text == "".join(TEXTS[::-1][:4])
    assert prepared.metadata.tokens["validation"] == 0


def test_a_template_has_line_ends(corpus, tmp_path, monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity")  # as on macOS
    arguments = [corpus, "--tokenizer=bytes", f"--out={tmp_path / 'out'}", "--limit-documents=1", "--workers=1"]
    assert main([*arguments, "--validation-fraction=0", r"--template={text}\n\t{body}"]) == 0
    prepared = open_prepared(tmp_path / "out")
    assert prepared.tokenizer.decode(prepared.tokens("train", 0, 10**6)) == f"{TEXTS[0]}\n\t{TEXTS[-1]}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--source=text:{}/none/*.txt", "--tokenizer=bytes"], "none/*.txt"),
        (["--source=text:{}/empty.txt", "--tokenizer=bytes"], "empty.txt"),
        (
            ["--source=parquet:{}/a.parquet", "--tokenizer=bytes", "--column=txet"],
            "a.parquet has no column 'txet'",
        ),
        (["--source=stdlib", "--tokenizer=hf:{}/none.json"], "none.json"),
        (["--source=stdlib", "--tokenizer=sentencepiece:train:no"], "SIZE"),
        (
            ["--source=stdlib", "--tokenizer=bytes", "--validation-fraction=1.5"],
            "argument --validation-fraction: '1.5' is not",
        ),
        (["--source=stdlib", "--tokenizer=bytes", "--limit-documents=0"], "argument --limit-documents: '0' is not"),
        (["--source=needles", "--tokenizer=bytes"], "needles"),
        (["--source=text:{}/empty*", "--tokenizer=sentencepiece:train:300"], "empty"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_written(corpus, tmp_path, capsys, arguments, says):
    (tmp_path / "empty.txt").write_text("")
    before = sorted(tmp_path.iterdir())
    assert main([a.format(tmp_path) for a in arguments] + [f"--out={tmp_path}/x/out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error
    assert sorted(tmp_path.iterdir()) == before


def test_an_external_directory_is_left_alone(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    assert main([corpus, "--tokenizer=bytes", f"--out={out}"]) == 2
    assert "is not prepared data" in capsys.readouterr().err
    assert [p.name for p in out.iterdir()] == ["thesis.tex"]
    (out / "thesis.tex").unlink()
    assert main([corpus, "--tokenizer=bytes", f"--out={out}"]) == 0  # empty, it is accepted


def test_truncated_shards_are_refused(corpus, tmp_path, capsys):
    arguments = [corpus, "--tokenizer=bytes", f"--out={tmp_path / 'out'}"]
    assert main(arguments) == 0
    shard = next((tmp_path / "out").glob("train-*"))
    shard.write_bytes(shard.read_bytes()[:100])
    assert main(arguments) == 2
    assert f"{shard.name} is truncated" in capsys.readouterr().err


def test_help_and_missing_arguments(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0 and "parquet:GLOB" in capsys.readouterr().out
    assert main([]) == 2
    assert "--out" in capsys.readouterr().err


def test_as_a_command(corpus, tmp_path):
    run = [sys.executable, "-m", "pe_lab.prepare"]
    out = tmp_path / "out"
    done = subprocess.run([*run, corpus, "--tokenizer=bytes", f"--out={out}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "documents" in done.stdout
    assert json.loads((out / METADATA_FILE).read_text())["documents"]["train"] > 100
