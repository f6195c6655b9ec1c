"""pe_lab.prepare, from JSON lines to token shards, against the batch encoding of `tokenizers` on the same documents.

    python benchmarks/prepare.py                  # 60 MB of Python and its documentation, three rounds
    python benchmarks/prepare.py --megabytes=20 --rounds=1

A byte-level BPE of 32,000 pieces is trained on the corpus. The peer has the documents in memory, encodes them with
`encode_batch_fast` in batches of a million characters on the same number of threads, and drops the result.
pe_lab.prepare reads them from files, splits, encodes and writes them, in a process for each core; the start of the
command and its workers is measured with small files, printed, and subtracted. Both run alternately; the table has the
medians of the rounds: seconds, and seconds of all cores, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

PIECE = 4_000  # characters of a document, about those of a web page
PEER = """
import json, sys, time, tokenizers
documents = [json.loads(line)["text"] for path in sys.argv[2:] for line in open(path, encoding="utf-8")]
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
tokenizer.encode_batch_fast(documents[:50])  # starts the threads
batches, batch, characters = [], [], 0
for document in documents:
    batch.append(document)
    characters += len(document)
    if characters > 1_000_000:
        batches.append(batch)
        batch, characters = [], 0
batches.append(batch)
begun = time.perf_counter(), time.process_time()
for batch in batches:
    tokenizer.encode_batch_fast(batch, add_special_tokens=False)
print(time.perf_counter() - begun[0], time.process_time() - begun[1])
"""


def write_corpus(directory: Path, characters: int, files: int) -> list[Path]:
    """Files of JSON lines with pieces of the standard library and of the installed packages."""
    found, total = [], 0
    roots = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    for path in (path for root in roots for path in sorted(root.rglob("*.py"))):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        found += [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
        total += len(text)
        if total > characters:
            break
    paths = [directory / f"corpus-{number:02d}.jsonl" for number in range(files)]
    for number, path in enumerate(paths):
        path.write_text("".join(json.dumps({"text": document}) + "\n" for document in found[number::files]))
    return paths


def train_tokenizer(paths: list[Path], path: Path) -> None:
    """A byte-level BPE of 32,000 pieces."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=32_000, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((json.loads(line)["text"] for line in paths[0].open()), trainer)
    tokenizer.save(str(path))


def prepare(source: Path | str, tokenizer: Path, out: Path, workers: int) -> tuple[float, float]:
    """The seconds of one pe_lab.prepare, whose input shards are the files, and those of all cores."""
    code = "import sys, pe_lab.data.sources.source as s; s.MOST_FILES = 1; from pe_lab.prepare import main; main()"
    arguments = [f"--source=jsonl:{source}", f"--tokenizer=hf:{tokenizer}", f"--out={out}", f"--workers={workers}"]
    begun, used = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
    now = os.times()
    cores = now.children_user + now.children_system - used.children_user - used.children_system
    return time.perf_counter() - begun, cores


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--megabytes", type=int, default=60)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        paths = write_corpus(directory, args.megabytes * 10**6, 8 * args.workers)
        tokenizer = directory / "tokenizer.json"
        train_tokenizer(paths, tokenizer)
        (directory / "small").mkdir()
        for number in range(args.workers):
            (directory / "small" / f"{number}.jsonl").write_text('{"text": "small"}\n{"text": "smaller"}\n')
        characters = sum(len(json.loads(line)["text"]) for path in paths for line in path.open())
        times: dict[str, list[tuple[float, float]]] = {"tokenizers": [], "pe_lab": [], "start": []}
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(args.workers)}
        small, large = directory / "small" / "*.jsonl", directory / "corpus-*.jsonl"
        for n in range(args.rounds):
            run = [sys.executable, "-c", PEER, str(tokenizer), *map(str, paths)]
            done = subprocess.run(run, check=True, capture_output=True, text=True, env=environment)
            elapsed, cores = map(float, done.stdout.split())
            times["tokenizers"].append((elapsed, cores))
            times["start"].append(prepare(small, tokenizer, directory / f"s{n}", args.workers))
            times["pe_lab"].append(prepare(large, tokenizer, directory / f"o{n}", args.workers))
        found = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in times.items()}  # noqa: B905
        ours = [all_ - start for all_, start in zip(found["pe_lab"], found["start"], strict=True)]
        print(f"{characters / 1e6:.1f} million characters in {len(paths)} files, {args.workers} cores")
        print(f"{'':38} seconds  of all cores  million characters/s")
        rows = (("tokenizers, encode_batch_fast", found["tokenizers"]), ("pe_lab.prepare", ours))
        for name, (elapsed, cores) in rows:
            print(f"{name:38} {elapsed:7.2f} {cores:13.2f} {characters / elapsed / 1e6:21.2f}")
        print(f"{'start of the command and its workers':38} {found['start'][0]:7.2f} {found['start'][1]:13.2f}")
        ratios = [peer / own for peer, own in zip(found["tokenizers"], ours, strict=True)]
        print(f"tokenizers' seconds / pe_lab.prepare's: {ratios[0]:.2f}; of all cores: {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
