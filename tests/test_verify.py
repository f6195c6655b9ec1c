"""pe_lab.verify: any change of a file is found, and named; and none is restored."""

import itertools
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
from tiny_runs import compilations_kept, trained  # noqa: F401

from pe_lab import storage
from pe_lab.checkpoints import open_checkpoint
from pe_lab.config import SourceConfig
from pe_lab.data.preparation import prepare
from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.errors import UserError
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
    assert "6 whole\n" in out and out.count("whole        checkpoint") == 6


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
    assert "4 whole, 3 damaged" in out


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
    assert len(list(targets(copy))) == 6


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
