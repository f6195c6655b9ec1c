"""Preparation at scale: the same bytes whoever runs the shards, after any interruption."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest
from corpora import corpus, documents_of, run, sentences

from pe_lab.data import preparation, shard_preparation
from pe_lab.data.executors import in_processes, in_this_process
from pe_lab.data.filters import Filters
from pe_lab.data.preparation import building_directory
from pe_lab.data.shards import open_prepared
from pe_lab.data.sources import source as sources
from pe_lab.errors import UserError
from pe_lab.prepare import main

# An input shard for each file, as those of a large corpus are.
COMMAND = "import sys, pe_lab.data.sources.source as s; s.MOST_FILES = 1; from pe_lab.prepare import main; "
COMMAND += "sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def shards(monkeypatch):
    monkeypatch.setattr(sources, "MOST_FILES", 1)


def contents(out):
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


FILES = [sentences(30, 1), sentences(3, 2), [], sentences(17, 3) + sentences(4, 1), sentences(8, 4)]
ALL = Filters(min_characters=5, exact_duplicates=True, near_duplicates=0.7)


def test_processes_and_tasks_write_the_same_bytes(tmp_path, shards, monkeypatch, capsys):
    """About 3 s: two processes are spawned."""
    monkeypatch.setattr(shard_preparation, "SHARD_TOKENS", 4000)
    config = corpus(tmp_path, *FILES)
    whole = run(config, tmp_path / "one", filters=ALL)
    expected = contents(tmp_path / "one")
    assert len(whole.shards["train"]) > 4 and whole.dropped == {"exact_duplicate": 4}
    assert "no documents in c2.jsonl" in capsys.readouterr().err
    for task in (2, 0, 1, 2, 1, 0):  # fingerprints first: no task can go on before all of them are there
        result = run(config, tmp_path / "tasks", filters=ALL, task=(task, 3))
    assert result == whole
    assert contents(tmp_path / "tasks") == expected
    monkeypatch.setattr(shard_preparation, "SHARD_TOKENS", 2**24)  # as in spawned processes
    for out, executor in (("alone", in_this_process), ("two", in_processes(2))):
        run(config, tmp_path / out, executor=executor)
    assert contents(tmp_path / "two") == contents(tmp_path / "alone")


def test_a_task_that_others_overtake_returns_what_they_wrote(tmp_path, shards, monkeypatch):
    """While a task that has done its share opens the plan, the last one finishes the directory."""
    config = corpus(tmp_path, *FILES)
    whole = run(config, tmp_path / "one")
    assert run(config, tmp_path / "tasks", task=(1, 2)) is None
    real, others = preparation.open_plan, [(0, 2)]

    def overtaken(*arguments):
        if others:
            assert run(config, tmp_path / "tasks", task=others.pop()) == whole
        return real(*arguments)

    monkeypatch.setattr(preparation, "open_plan", overtaken)
    assert run(config, tmp_path / "tasks", task=(1, 2)) == whole
    assert contents(tmp_path / "tasks") == contents(tmp_path / "one") and not list(tmp_path.glob(".tasks*"))


def test_a_directory_that_another_process_puts_into_its_place_is_waited_for(tmp_path, shards, monkeypatch, capsys):
    """2 s."""
    config = corpus(tmp_path, *FILES)
    real, second = preparation.remove_tree, []

    def slow(directory):
        if not second:
            words = [f"--source={config.source}", "--tokenizer=bytes", f"--out={tmp_path / 'out'}"]
            second.append(threading.Thread(target=lambda: second.append(main(words))))
            second[0].start()
            time.sleep(0.5)
            assert second[1:] == [] and directory.exists()
        real(directory)

    monkeypatch.setattr(preparation, "remove_tree", slow)
    assert main([f"--source={config.source}", "--tokenizer=bytes", f"--out={tmp_path / 'out'}"]) == 0
    second[0].join()
    assert second[1] == 0 and "nothing to do" in capsys.readouterr().out


def interrupted(after, steps):
    """An executor whose process is as if killed after some shards."""

    def executor(place, step, shards, report):
        for shard in shards:
            if len(steps) == after:
                raise KeyboardInterrupt
            steps.append((step, shard))
            yield from in_this_process(place, step, {shard: shards[shard]}, report)

    return executor


@pytest.mark.parametrize("after", [0, 3, 7, 9])
def test_what_was_interrupted_goes_on_where_it_stopped(tmp_path, shards, after):
    config = corpus(tmp_path, *FILES)
    run(config, tmp_path / "whole", filters=ALL)
    steps = []
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", filters=ALL, executor=interrupted(after, steps))
    assert not (tmp_path / "out").exists() and len(steps) == after
    building = building_directory(tmp_path / "out")
    plan = building / shard_preparation.WORK / shard_preparation.PLAN_FILE  # may have credentials of an address
    assert plan.stat().st_mode & 0o777 == 0o600
    (building / ".train-00001-00000.safetensors.123").write_bytes(b"of a killed process")
    run(config, tmp_path / "out", filters=ALL, executor=interrupted(99, steps))
    assert sorted(steps) == [(step, shard) for step in ("fingerprints", "shard") for shard in range(5)]  # each once
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not building.exists()


def test_a_damaged_shard_is_prepared_again(tmp_path, shards):
    config, steps = corpus(tmp_path, *FILES), []
    run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", executor=interrupted(4, steps))
    (building_directory(tmp_path / "out") / "train-00001-00000.safetensors").write_bytes(b"")
    run(config, tmp_path / "out", executor=interrupted(99, steps))
    assert Counter(shard for _, shard in steps) == {0: 1, 1: 2, 2: 1, 3: 1, 4: 1}
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("files", [[["one"], ["two"]], [["one"], ["two", "one"], []], [list("abcd"), list("efgh")]])
def test_neither_split_is_empty_over_shards(tmp_path, shards, files, fraction):
    run(corpus(tmp_path, *files), tmp_path / "out", fraction)
    train, validation = (documents_of(tmp_path / "out", split) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(sum(files, []))
    assert train and validation and not set(train) & set(validation)


def test_one_document_in_several_shards(tmp_path, shards):
    text = "0123456789" * 10
    run(corpus(tmp_path, [text], [text, text]), tmp_path / "out")
    assert documents_of(tmp_path / "out", "train") == [text[:90]] * 3
    assert documents_of(tmp_path / "out", "validation") == [text[90:]]


def test_the_order_is_that_of_the_corpus(tmp_path, shards):
    run(corpus(tmp_path, *FILES), tmp_path / "out")
    found = {split: documents_of(tmp_path / "out", split) for split in ("train", "validation")}
    for split in found:
        assert found[split] == [document for document in sum(FILES, []) if document in set(found[split])]


def test_counts_are_those_of_the_files(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(shard_preparation, "SHARD_TOKENS", 2000)
    metadata = run(corpus(tmp_path, *FILES), tmp_path / "out", 0.3, limit_documents=40)
    every = sum(FILES, [])[:40]
    found = {split: documents_of(tmp_path / "out", split) for split in ("train", "validation")}
    assert sorted(found["train"] + found["validation"]) == sorted(every)
    assert metadata.documents == {split: len(documents) for split, documents in found.items()}
    assert metadata.tokens == {split: sum(len(d) + 1 for d in documents) for split, documents in found.items()}
    assert metadata.characters == sum(map(len, every))


def test_chats_have_targets_and_are_cut_where_they_are_alone(tmp_path, shards, capsys):
    refuses = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    template = refuses + "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    import tokenizers

    letters = {chr(c): i for i, c in enumerate(range(32, 127))} | {"\n": 95, "</s>": 96}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token=" "))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    plain.add_special_tokens(["</s>"])
    plain.save(str(tmp_path / "tokenizer.json"))
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    arguments = [f"--source=jsonl:{tmp_path}/a.jsonl", f"--tokenizer=hf:{tmp_path}/tokenizer.json", "--chat=messages"]
    assert main([*arguments, f"--out={tmp_path / 'all'}", "--validation-fraction=0"]) == 0
    opened = open_prepared(tmp_path / "all")
    stream = opened.streams["train"]
    start = np.zeros(1, int)
    ids, loss = stream.gather(start, stream.tokens)[0], stream.loss(np.arange(stream.tokens))
    assert ids[-1] == opened.tokenizer.eos_id and opened.metadata.chat == "messages"
    assert "".join(opened.tokenizer.decode([i]) for i in ids[loss]).strip().endswith("Because.")
    assert "Why" not in "".join(opened.tokenizer.decode([i]) for i in ids[loss])
    assert main([*arguments, f"--out={tmp_path / 'cut'}", "--validation-fraction=0.4"]) == 0
    parts = [open_prepared(tmp_path / "cut").tokens(split, 0, 999) for split in ("train", "validation")]
    np.testing.assert_array_equal(np.concatenate([parts[0][:-1], parts[1]]), ids)
    records = [chat, chat, chat[1:]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": record}) + "\n" for record in records))
    assert main([*arguments, f"--out={tmp_path / 'refused'}"]) == 2
    assert "a.jsonl, document 2: The chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--min-characters=9999"], "Every document of 'jsonl:.*' was dropped by the filters \\(min_characters 62\\)"),
        (["--min-tokens=9", "--max-tokens=8"], "--min-tokens=9 is more than --max-tokens=8"),
        (["--language=xx"], "--language=xx is not known"),
        (["--language=en:2"], "--language=en:2: '2' is not a number from 0.0 to 1.0"),
        (["--array=3/3"], "--array=3/3 is not I/N"),
        (["--array=slurm"], "needs SLURM_ARRAY_TASK_ID"),
        (["--engine=beam"], "argument --engine: invalid choice: 'beam'"),
        (["--near-duplicates=7"], "argument --near-duplicates: '7' is not"),
        (["--template={nothing}"], "has no column 'nothing'"),
        (["--workers=0"], "argument --workers: '0' is not"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_written(tmp_path, shards, capsys, flags, says):
    arguments = [f"--source={corpus(tmp_path, *FILES).source}", "--tokenizer=bytes", f"--out={tmp_path}/x/out"]
    before = sorted(tmp_path.iterdir())
    assert main([*arguments, "--workers=1", *flags]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and re.search(says, error[0])
    assert sorted(tmp_path.iterdir()) == before


def test_another_corpus_or_other_flags_do_not_go_on(tmp_path, shards, monkeypatch):
    config = corpus(tmp_path, *FILES)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", filters=ALL, executor=interrupted(2, []))
    with pytest.raises(UserError, match="had begun with filters={.*}, not {}. Choose another directory"):
        run(config, tmp_path / "out")
    with pytest.raises(UserError, match="had begun with validation_fraction=0.1, not 0.2. Choose another directory"):
        run(config, tmp_path / "out", 0.2, filters=ALL)
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: "99")
        with pytest.raises(UserError, match='had begun with libraries={"rensa": .*}, not {"rensa": "99"}'):
            run(config, tmp_path / "out", filters=ALL)
    with (tmp_path / "c3.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(UserError, match="files of the source have changed since"):
        run(config, tmp_path / "out", filters=ALL)
    assert len(list(building_directory(tmp_path / "out").glob(".work/fingerprints-*"))) == 2  # nothing is lost


def test_bad_documents_keep_what_is_done(tmp_path, shards):
    config = corpus(tmp_path, *FILES)
    good = (tmp_path / "c3.jsonl").read_text()
    (tmp_path / "c3.jsonl").write_text(good[:-2] + "!\n")
    with pytest.raises(UserError, match="c3.jsonl, line 21 is not a JSON object"):
        run(config, tmp_path / "out")
    (tmp_path / "c3.jsonl").write_text(good)  # of the same size, as the files of the plan
    steps = []
    run(config, tmp_path / "out", executor=interrupted(99, steps))
    assert [shard for _, shard in steps] == [3, 4]


def test_the_commands_need_no_jax():
    """Each worker imports them."""
    loaded = "import sys, pe_lab.prepare, pe_lab.data.executors; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded]).returncode == 0


def command(out, source, *flags, environment=None):
    run = [sys.executable, "-c", COMMAND, f"--source={source}", "--tokenizer=bytes", f"--out={out}", *flags]
    return subprocess.Popen(run, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})})


def ended(process):
    error = process.communicate()[1]
    assert process.returncode == 0, error


SLOW_FLAGS = ("--min-characters=3", "--exact-duplicates", "--near-duplicates=0.7", "--validation-fraction=0.05")


@pytest.fixture
def larger(tmp_path, shards):
    """Twelve shards with duplicates, and how one process prepares them."""
    files = [sentences(400, i // 2, words=60) + sentences(400, 100 + i, words=60) for i in range(12)]
    config = corpus(tmp_path, *files)
    ended(command(tmp_path / "one", config.source, *SLOW_FLAGS, "--workers=1"))
    return config.source, contents(tmp_path / "one")


@pytest.mark.slow
def test_four_processes_an_array_and_ray_write_the_same_bytes(tmp_path, larger):
    """About 50 s on two cores: real processes, and a Ray cluster on this machine."""
    source, expected = larger
    ended(command(tmp_path / "four", source, *SLOW_FLAGS, "--workers=4"))
    assert contents(tmp_path / "four") == expected
    for _ in range(2):
        tasks = []
        for task in range(3):
            slurm = {"SLURM_ARRAY_TASK_ID": str(7 + task), "SLURM_ARRAY_TASK_MIN": "7", "SLURM_ARRAY_TASK_COUNT": "3"}
            flags = (*SLOW_FLAGS, "--workers=1", "--array=slurm")
            tasks.append(command(tmp_path / "array", source, *flags, environment=slurm))
        for task in tasks:
            ended(task)
    assert contents(tmp_path / "array") == expected
    ended(command(tmp_path / "ray", source, *SLOW_FLAGS, "--engine=ray"))
    assert contents(tmp_path / "ray") == expected
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.slow
def test_a_killed_preparation_goes_on(tmp_path, larger):
    """About 30 s on two cores: killed in the middle of each step; its workers end with it."""
    source, expected = larger
    building = building_directory(tmp_path / "killed")
    for pattern in ("fingerprints-*", "shard-*"):
        process = command(tmp_path / "killed", source, *SLOW_FLAGS, "--workers=2")
        deadline = time.monotonic() + 60
        while len(list(building.glob(f".work/{pattern}"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = {p.name: p.stat().st_mtime_ns for p in building.glob(f".work/{pattern}")}
        assert 4 <= len(done) < 12 and len(children) >= 2
        deadline = time.monotonic() + 10
        while any(os.path.exists(f"/proc/{child}") for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(os.path.exists(f"/proc/{child}") for child in children)
        assert {p.name: p.stat().st_mtime_ns for p in building.glob(f".work/{pattern}")}.items() >= done.items()
    ended(command(tmp_path / "killed", source, *SLOW_FLAGS, "--workers=2"))
    assert contents(tmp_path / "killed") == expected
    assert not building.exists()
