"""How fast training batches come: pe_lab's pipeline beside plain Grain, levanter's cache and torch, same tokens.

    python benchmarks/feed.py                          # 3 lengths, about 3 minutes, and the demo's data wait
    python benchmarks/feed.py --lengths=1024 --seconds=1 --no-demo

All give shuffled batches of int32 inputs and targets, from files in the page cache:

- pe_lab: `build_pipeline` on one source, whose batches are elements of a `grain.MapDataset`; on 3 sources with weights;
  packed by best fit, with segments and positions; on a split of 604 MB whose files were dropped from the page cache;
  and on a person's own `grain.MapDataset` of windows of a memory map (`data.grain`). Every block of prepared data is
  verified when it is first read.
- Grain: a MapDataset of windows of that memory map, shuffled, repeated, batched, read by its 16 threads; the same with
  ArrayRecord, a record for each window.
- levanter: what its `TokenSeqDataset.get_batch` reads of its cache: a zarr3 array of int32 in shards of 128 Mi tokens,
  with blosc chunks of 256 Ki, of which each window is a slice under `ts.Batch`. levanter itself needs older tokenizers
  than pe_lab, so the array is made here with tensorstore, as its `jagged_array.py` makes it.
- torch: a Dataset of windows of np.memmap, DataLoader with shuffle and 2 workers, in the environment of the slow tests.

Last, the demo's first phase is trained, and its time of waiting for data compared with that of its steps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from pe_lab.config import DataConfig, SourceConfig
from pe_lab.data.pipeline import Pipeline, build_pipeline
from pe_lab.data.shards import TOKENIZER_DIRECTORY, Metadata, write_metadata, write_shard
from pe_lab.data.tokenizers import load_tokenizer, save_tokenizer

VOCABULARY = 32_000
BATCH_TOKENS = 2**17
SHARD = 2**24  # tokens
TORCH = """
import json, sys, time
import numpy as np, torch
path, length, batch, seconds = sys.argv[1], *map(int, sys.argv[2:4]), float(sys.argv[4])
class Windows(torch.utils.data.Dataset):
    def __init__(self):
        self.tokens = np.memmap(path, np.uint16, "r")
    def __len__(self):
        return (len(self.tokens) - 1) // length
    def __getitem__(self, i):
        window = torch.from_numpy(self.tokens[i * length : i * length + length + 1].astype(np.int32))
        return window[:-1], window[1:]
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Windows(), batch, shuffle=True, drop_last=True, num_workers=2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        try:
            next(batches)
        except StopIteration:
            batches = iter(loader)
            next(batches)
        count += 1
    print(json.dumps([count * batch * length / (time.perf_counter() - began), torch.__version__]))
"""


def tokens_of(count: int, seed: int) -> np.ndarray:
    """Random tokens, small ones more often; EOS (256) ends a document of about 600 of them."""
    rng = np.random.default_rng(seed)
    tokens = (VOCABULARY * rng.random(count, np.float32) ** 3).astype(np.uint16)
    tokens[tokens == 256] = 257
    ends = np.cumsum(np.maximum(2, rng.lognormal(6, 0.9, count // 300)).astype(np.int64))
    tokens[ends[ends < count] - 1] = 256
    tokens[-1] = 256
    return tokens


def write_prepared(directory: Path, tokens: np.ndarray) -> str:
    """Prepared data of these tokens, as pe_lab.prepare writes them; its source."""
    directory.mkdir()
    tokenizer = load_tokenizer("bytes")
    documents = np.split(tokens, np.flatnonzero(tokens == 256) + 1)[:-1]
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    first = np.flatnonzero(np.diff(starts // SHARD, prepend=-1))  # documents of the shards
    shards = [
        write_shard(directory / f"train-00000-{n:05d}.safetensors", documents[i:j], np.dtype(np.uint16))
        for n, (i, j) in enumerate(zip(first, [*first[1:], None], strict=True))
    ]
    save_tokenizer(tokenizer, directory / TOKENIZER_DIRECTORY)
    metadata = Metadata(
        source="random",
        column="text",
        identity={},
        tokenizer="bytes",
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=VOCABULARY,
        eos_id=256,
        dtype="uint16",
        validation_fraction=0.0,
        limit_documents=None,
        documents={"train": len(documents), "validation": 0},
        tokens={"train": len(tokens), "validation": 0},
        characters=0,
        content=directory.name,
        shards={"train": tuple(shards), "validation": ()},
        python="",
    )
    write_metadata(directory, metadata)
    return f"prepared:{directory}"


def rate(batches: Iterator[Any], length: int, seconds: float) -> float:
    """Tokens a second of an endless iterator."""
    list(itertools.islice(batches, 3))
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        next(batches)
        count += 1
    return count * (BATCH_TOKENS // length) * length / (time.perf_counter() - began)


OWN = """
import grain
import numpy as np


def dataset(split, seed, length):
    tokens = np.memmap({path!r}, np.uint16, "r")
    windows = grain.MapDataset.range(0, len(tokens) - length, length).shuffle(seed)
    return windows.map(lambda start: {{"tokens": tokens[start : start + length + 1]}})
"""


def pe_lab(
    sources: Sequence[str], length: int, packing: str = "concatenate", weights: Sequence[float] = (1,)
) -> Pipeline:
    """The pipeline that a run has."""
    configs = tuple(SourceConfig(source, weight) for source, weight in zip(sources, weights, strict=True))
    config = DataConfig(sources=configs, packing=packing, segments=packing == "best_fit")
    batch = BATCH_TOKENS // length
    return build_pipeline(config, sequence_length=length, batch_size=batch, seed=0, vocab_size=VOCABULARY)


def inputs_and_targets(windows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    stacked = np.stack(windows).astype(np.int32)
    return stacked[:, :-1], stacked[:, 1:]


def write_records(path: Path, tokens: np.ndarray, starts: range, length: int) -> Path:
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1,zstd:1")
    for start in starts:
        writer.write(tokens[start : start + length].tobytes())
    writer.close()
    return path


def grain_windows(path: Path, length: int) -> Iterator[Any]:
    """A record is a window."""
    import grain

    data = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(str(path))).shuffle(seed=0).repeat()
    windows = data.map(lambda record: np.frombuffer(record, np.uint16))
    return iter(windows.batch(BATCH_TOKENS // length, batch_fn=inputs_and_targets).to_iter_dataset())


def grain_memmap(path: Path, length: int) -> Iterator[Any]:
    """A window is a part of a memory map."""
    import grain

    tokens = np.memmap(path, np.uint16, "r")
    starts = grain.MapDataset.range(0, len(tokens) - length, length).shuffle(seed=0).repeat()
    windows = starts.map(lambda start: tokens[start : start + length + 1])
    return iter(windows.batch(BATCH_TOKENS // length, batch_fn=inputs_and_targets).to_iter_dataset())


def levanter_cache(directory: Path, tokens: np.ndarray | None = None) -> Any:
    """The array of token ids of levanter's cache, opened or (with tokens) written."""
    import tensorstore as ts

    codecs = [{"name": "blosc", "configuration": {"clevel": 5}}]
    sharded = {"name": "sharding_indexed", "configuration": {"chunk_shape": [256 * 1024], "codecs": codecs}}
    grid = {"name": "regular", "configuration": {"chunk_shape": [512 * 256 * 1024]}}
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{directory}/"}}
    spec["metadata"] = {"chunk_grid": grid, "codecs": [sharded]}
    if tokens is not None:
        array = ts.open(spec, dtype="int32", shape=[2**54], create=True).result()
        array[: len(tokens)].write(tokens.astype(np.int32)).result()
    return ts.open(spec, open=True).result()


def levanter_windows(directory: Path, count: int, length: int) -> Iterator[Any]:
    """The reads of `TokenSeqDataset.get_batch`, of a permutation; targets are the inputs, shifted by one."""
    import tensorstore as ts

    array, loop = levanter_cache(directory), asyncio.new_event_loop()

    async def get(indices: np.ndarray) -> np.ndarray:
        with ts.Batch():
            reads = [array[at : at + length].read() for at in (indices * length).tolist()]
        return np.stack(await asyncio.gather(*reads))

    for seed in itertools.count():
        order = np.random.default_rng(seed).permutation((count - 1) // length)
        for at in range(0, len(order) - BATCH_TOKENS // length + 1, BATCH_TOKENS // length):
            inputs = loop.run_until_complete(get(order[at : at + BATCH_TOKENS // length]))
            yield inputs, np.roll(inputs, -1, axis=1)


def drop_from_page_cache(directory: Path) -> None:
    os.sync()
    for path in directory.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def torch_rate(python: str, path: Path, length: int, seconds: float) -> float:
    command = [python, "-c", TORCH, str(path), str(length), str(BATCH_TOKENS // length), str(seconds)]
    # Workers import the script; -c has none to import, but they are forked.
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return float(found.stdout.strip().splitlines()[-1].strip("[]").split(",")[0])


def demo_wait(directory: Path) -> str:
    """The time that the demo's first phase waits for data, and for its steps."""
    recipe = Path(__file__).parents[1] / "configs/drope_laptop.py"
    command = [sys.executable, "-m", "pe_lab.train", f"--config={recipe}:quick", f"--workdir={directory / 'run'}"]
    command += ["--config.phases.0.steps=400", "--config.phases.1.steps=1", "--config.phases.2.steps=1"]
    command += ["--config.phases.1.optimizer.warmup_steps=0", "--config.phases.2.optimizer.warmup_steps=0"]
    subprocess.run(command, cwd=directory, capture_output=True, check=True, timeout=600)
    seconds: Counter[str] = Counter()
    for line in (directory / "run/ledger.jsonl").read_text().splitlines():
        seconds.update(json.loads(line)["seconds"])
    part = seconds["data_wait"] / seconds["step"]
    return f"the demo waits for data {seconds['data_wait']:.2f} s in {seconds['step']:.1f} s of steps: {part:.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="64,1024,8192")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--no-demo", action="store_true", help="do not train the demo's first phase")
    parser.add_argument("--torch", default="", help="a Python that has torch; by default that of the slow tests")
    args = parser.parse_args()
    python = args.torch
    if not python:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.transformers_environments import environment

        python = str(environment("5"))
    lengths = [int(n) for n in args.lengths.split(",")]
    columns: dict[str, list[float]] = {}

    def measure(name: str, batches: Iterator[Any] | Callable[[], float], length: int) -> None:
        found = batches() if callable(batches) else rate(batches, length, args.seconds)
        columns.setdefault(name, []).append(found)
        print(f"  T={length:<6}{name:36}{found / 1e6:8.2f} M tokens/s", flush=True)
        if hasattr(batches, "close"):
            batches.close()

    with tempfile.TemporaryDirectory(prefix="feed_") as temporary:
        root = Path(temporary)
        tokens = tokens_of(2**25, 0)
        parts = [write_prepared(root / f"part{i}", tokens_of(2**23, i + 1)) for i in range(3)]
        source, large = write_prepared(root / "memory", tokens), root / "large"
        larger = write_prepared(large, tokens_of(9 * 2**25, 9))
        tokens.tofile(root / "tokens.bin")
        levanter_cache(root / "levanter", tokens)
        (root / "own.py").write_text(OWN.format(path=str(root / "tokens.bin")))
        for length in lengths:
            windows = range(0, min(len(tokens), 2**18 * length) - length, length)
            by_window = write_records(root / f"windows{length}", tokens, windows, length + 1)
            measure("pe_lab", pe_lab([source], length), length)
            drop_from_page_cache(large)
            measure("pe_lab, 604 MB, not in page cache", pe_lab([larger], length), length)
            measure("pe_lab, best fit", pe_lab([source], length, "best_fit"), length)
            measure("pe_lab, 3 sources", pe_lab(parts, length, weights=(0.5, 0.3, 0.2)), length)
            measure("pe_lab, one's own Grain dataset", pe_lab([f"grain:{root / 'own.py'}:dataset"], length), length)
            measure("Grain, memory map", grain_memmap(root / "tokens.bin", length), length)
            measure("Grain, a record a window", grain_windows(by_window, length), length)
            measure("levanter's cache", levanter_windows(root / "levanter", len(tokens), length), length)
            measure(
                "torch, memmap, 2 workers",
                lambda n=length: torch_rate(python, root / "tokens.bin", n, args.seconds),
                length,
            )
        pipeline = pe_lab([larger], lengths[0])
        pipeline.set_state(pipeline.get_state() | {"iterator": {"next_index": 10**6}})
        began = time.perf_counter()
        next(pipeline)
        first = time.perf_counter() - began
        pipeline.close()
        waits = "" if args.no_demo else demo_wait(root)
    print(f"\nmillion tokens a second (pe_lab over each), batches of {BATCH_TOKENS:,}, {os.cpu_count()} cores\n")
    print(f"{'':36}" + "".join(f"{f'T = {n:,}':>20}" for n in lengths))
    for name, found in columns.items():
        cells = [f"{one / 1e6:.2f} ({columns['pe_lab'][i] / one:.1f}x)" for i, one in enumerate(found)]
        print(f"{name:36}" + "".join(f"{cell:>20}" for cell in cells))
    print(f"\nfirst batch from step 1,000,000 on: {1000 * first:.0f} ms\n{waits}")


if __name__ == "__main__":
    main()
