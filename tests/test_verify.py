"""pe_lab.verify: any change of a file is found, and named; and none is restored."""

import itertools
import json
import random
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from object_stores import gcs_bucket, store_servers  # noqa: F401
from tiny_runs import compilations_kept, reseal, tiny, trained  # noqa: F401

from pe_lab import convert, storage
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.config import SourceConfig
from pe_lab.data.preparation import prepare
from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.errors import UserError
from pe_lab.identity import write_run
from pe_lab.storage import AppendedLog, json_object
from pe_lab.storage.manifest import MANIFEST, Digest, digest_file
from pe_lab.verify import DAMAGED, UNCOMMITTED, WHOLE, main, targets, verify

pytestmark = pytest.mark.usefixtures("compilations_kept")


@pytest.fixture
def copy(trained, tmp_path):  # noqa: F811
    return Path(shutil.copytree(trained, tmp_path / "run"))


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def flip(path: Path, rng: random.Random) -> None:
    """Changes one bit."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def flips_of(step: Path, count: int, seed: int):
    """Yields a file of a checkpoint after each change of one bit of it, which is undone afterwards."""
    rng = random.Random(seed)
    several = [path for path in files(step) if path.stat().st_size]
    for _ in range(count):
        path = rng.choices(several, weights=[path.stat().st_size + 200 for path in several])[0]
        content = path.read_bytes()
        flip(path, rng)
        yield path
        path.write_bytes(content)


def test_a_whole_run_is_whole(copy, capsys):
    assert main([str(copy)]) == 0
    out = capsys.readouterr().out
    assert "8 whole\n" in out and out.count("whole        checkpoint") == 6
    assert "recalibrate: phase.json, metrics.jsonl up to step 6; as JSON lines: speed.jsonl" in out


def test_a_bit_of_any_file_is_found(copy):
    step = copy / "recalibrate" / "checkpoints" / "6"
    for path in flips_of(step, 100, seed=1):
        (target,) = targets(step)
        assert verify(target).state == DAMAGED, path


def test_a_file_with_the_size_and_the_crc_of_another_is_found_in_its_place(copy):
    """Files of OCDBT nodes end with their own CRC-32C: all of one size have the same one. 1 s."""
    step = copy / "recalibrate" / "checkpoints" / "6"
    alike: dict[Digest, list[Path]] = {}
    for path in files(copy):
        alike.setdefault(digest_file(path)._replace(hash=""), []).append(path)
    swaps = [
        (path, other)
        for several in alike.values()
        for path, other in itertools.permutations(several, 2)
        if path.is_relative_to(step) and path.read_bytes() != other.read_bytes()
    ]
    assert swaps
    for path, other in swaps:
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        (target,) = targets(step)
        assert verify(target).state == DAMAGED, path
        path.write_bytes(content)
    (target,) = targets(step)
    assert verify(target).state == WHOLE


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_flipped_bit_is_restored(copy):
    """200 flips: each is refused, or changes no weight. 25 s."""
    step = copy / "recalibrate" / "checkpoints" / "6"
    whole = open_checkpoint(step)
    refused = 0
    for path in flips_of(step, 200, seed=2):
        try:
            found = open_checkpoint(step)
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
            continue
        assert found.metadata == whole.metadata, path
        jax.tree.map(np.testing.assert_array_equal, found.params, whole.params)
    assert refused > 100


def test_damage_is_named(copy, capsys):
    step = copy / "pretrain" / "checkpoints" / "8"
    (step / "manifest.json").unlink()
    other = copy / "recalibrate" / "checkpoints" / "6"
    shutil.copytree(other, other.with_name("9"))
    largest = max(files(other / "params"), key=lambda path: path.stat().st_size)
    largest.unlink()
    assert main([str(copy)]) == 1
    out = capsys.readouterr().out
    assert f"DAMAGED      checkpoint {step}: '{step}/manifest.json' cannot be read (No such file or directory)" in out
    assert f"DAMAGED      checkpoint {other}: {largest.relative_to(other)} is missing" in out
    assert f"{other.with_name('9')}' holds step 6: it was copied or renamed" in out
    assert "6 whole, 3 damaged" in out


@pytest.mark.slow
def test_a_run_that_trains_meanwhile_is_not_damaged(copy):
    """A checkpoint comes and goes, as saves and retention have it, 40 times while it is verified: 3 s."""
    step = copy / "recalibrate" / "checkpoints" / "6"
    saving, deleting = step.with_name("6.saving"), step.with_name("6.deleting")
    whole = shutil.copytree(step, copy.parent / "whole")
    (target,) = targets(step)

    def save() -> None:
        shutil.copytree(whole, saving)
        saving.rename(step)

    def delete(seconds: float) -> None:
        time.sleep(seconds)
        step.rename(deleting)
        shutil.rmtree(deleting)

    states = Counter()
    with ThreadPoolExecutor(1) as run:
        for number in range(40):
            deletion = run.submit(delete, number * 0.0002)
            states[verify(target).state] += 1
            deletion.result()
            saved = run.submit(save)
            assert main([str(copy)]) == 0
            saved.result()
    assert states.keys() <= {WHOLE, UNCOMMITTED} and states[UNCOMMITTED], states
    shutil.copytree(whole, saving)  # a save before its directory is renamed
    assert len(list(targets(copy))) == 8


@pytest.mark.slow
def test_a_checkpoint_that_goes_is_uncommitted(copy, gcs_bucket, capsys):  # noqa: F811
    """Two checkpoints on the GCS emulator: 7 s."""
    checkpoints = copy / "recalibrate" / "checkpoints"
    (target,) = targets(checkpoints / "6")
    shutil.rmtree(checkpoints / "6")
    assert verify(target).state == UNCOMMITTED
    remote = storage.path("PATH", f"{gcs_bucket.url}/checkpoints")
    for file in files(checkpoints):
        storage.write_file(remote / file.relative_to(checkpoints).as_posix(), file.read_bytes())
    assert main([str(remote)]) == 0
    storage.remove(remote / "4" / MANIFEST)  # as before the end of a save
    assert main([str(remote)]) == 0
    assert "uncommitted  checkpoint" in capsys.readouterr().out
    assert main([str(remote / "4")]) == 1  # nothing there is whole


def values(content: bytes) -> list[str]:
    """What JSON, or JSON lines, say."""
    lines = [content] if json_object(content) else content.split(b"\n")
    return [json.dumps(json.loads(line), sort_keys=True) for line in lines if line.strip()]


@pytest.mark.slow
def test_a_bit_of_the_files_of_a_run_is_found(copy, tmp_path):
    """A flip is found, or changes no value: 30 flips of each file."""
    write_run(copy, tiny(tmp_path / "recipe"), "command", {})
    assert {target.kind for target in targets(copy)} == {"run", "phase", "checkpoint"}
    for name in ("run.json", "recalibrate/phase.json", "recalibrate/metrics.jsonl"):
        path, rng = copy / name, random.Random(4)
        whole, found = path.read_bytes(), 0
        for _ in range(30):
            flip(path, rng)
            kind = "run" if path.name == "run.json" else "phase"
            (target,) = [one for one in targets(path.parent) if one.kind == kind]
            state = verify(target).state
            if state == WHOLE:  # white space, or the line end of the last record
                assert set(values(whole)) >= set(values(path.read_bytes())), path.read_bytes()
            found += state == DAMAGED
            path.write_bytes(whole)
        assert found > 20, name


def test_what_kinds_of_damage_of_a_run_are_named(copy, tmp_path, capsys):
    write_run(copy, tiny(tmp_path / "recipe"), "command", {})
    log = AppendedLog(copy / "ledger.jsonl")
    log.append({"start": 1, "time": 2.0, "created": 1.0, "seconds": {"step": 1.0}})
    log.close()
    phase = copy / "recalibrate"
    assert main([str(copy)]) == 0
    assert f"whole        run {copy}: run.json; as JSON lines: ledger.jsonl" in capsys.readouterr().out

    def damaged(path, content: bytes | None, says: str) -> None:
        before = path.read_bytes()
        path.unlink() if content is None else path.write_bytes(content)
        assert main([str(copy)]) == 1
        out = capsys.readouterr().out
        assert "9 whole" not in out and says in out, out
        path.write_bytes(before)

    damaged(copy / "run.json", None, "There is no '")
    damaged(copy / "run.json", b"", "it holds no JSON object")
    damaged(copy / "ledger.jsonl", b"{}\n", "has records without their numbers")
    damaged(phase / "phase.json", None, "There is no '")
    damaged(phase / "metrics.jsonl", None, "metrics.jsonl is not what was logged up to step 6")
    lines = (phase / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    damaged(phase / "metrics.jsonl", b"".join(lines[:-2]), "metrics.jsonl is not what was logged up to step 6")
    damaged(phase / "speed.jsonl", b"\0\0\0\n", "speed.jsonl, line 1, is no record: no JSON object")
    with (phase / "metrics.jsonl").open("ab") as file:  # of a step after the checkpoint, and a part of one
        file.write(b'{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    assert main([str(copy)]) == 0


def test_files_without_the_arrays_that_they_should_have_are_damaged(copy, capsys):
    """As Orbax wrote them for a directory with wildcards: the digests are those of a database without an array."""
    step = copy / "recalibrate" / "checkpoints" / "6"
    (step / "params" / "manifest.ocdbt").unlink()
    reseal(step)
    assert main([str(step)]) == 1
    assert "6: params.layers.attention.key is not found in its files" in capsys.readouterr().out


def test_a_step_whose_metadata_have_changed_is_not_exported(copy, tmp_path, capsys):
    step = copy / "recalibrate" / "checkpoints" / "6"
    metadata = step / "metadata" / "metadata"
    changed = metadata.read_bytes().replace(b'"norm_epsilon": 1e-06', b'"norm_epsilon": 5e-06')
    assert changed != metadata.read_bytes()
    metadata.write_bytes(changed)
    for source in (step, copy / "recalibrate" / "checkpoints", copy):  # the others fall back to the step before
        status = convert.main([f"--from={source}", f"--to=hf:{tmp_path / 'out'}", "--parity=off"])
        assert status == (2 if source == step else 0)
        if source == step:
            assert f"'{step}' is damaged (metadata/metadata has changed" in capsys.readouterr().err
        else:
            shutil.rmtree(tmp_path / "out")
    assert main([str(step)]) == 1


def test_prepared_data_and_what_has_no_digests(tmp_path, capsys):
    (tmp_path / "corpus.jsonl").write_text('{"text": "some words"}\n{"text": "other words"}\n')
    source = SourceConfig(f"jsonl:{tmp_path / 'corpus.jsonl'}")
    prepare(source, ByteTokenizer(), "bytes", tmp_path / "data", 0.5)
    assert main([str(tmp_path / "data")]) == 0
    shard = next((tmp_path / "data").glob("train*.safetensors"))
    flip(shard, random.Random(3))
    assert main([str(tmp_path / "data")]) == 1
    assert f"{shard.name} has changed: its CRC-32C is" in capsys.readouterr().out
    external = tmp_path / "hf"
    external.mkdir()
    (external / "config.json").write_text("{}")
    (external / "model.safetensors").write_bytes(b"")
    assert main([str(external)]) == 1
    assert "no digests   export" in capsys.readouterr().out


def test_a_path_without_anything_to_verify(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "has no checkpoint, prepared data or export" in capsys.readouterr().err
