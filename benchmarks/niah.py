"""Needles in a haystack, answered by pe_lab and by transformers: the same prompts, in alternation.

    python benchmarks/niah.py --from=runs/smollm2 --peer-model=exports/smollm2 --peer-python=/path/to/venv/bin/python

Both answer the same samples of `--suite=niah:standard` greedily, up to 128 new tokens or the end of the text, in
float32 on equally many threads. pe_lab answers in the batches that `evaluate` chooses, transformers one prompt at a
time and in batches of the same size (padded on the left), of which the faster counts. Compilation and a first round are
not counted. Prints samples a second, seconds, and the share of equal answers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import jax
from decode import DecodePeer, in_float32
from train_step import find_peer_python

import pe_lab
from pe_lab.errors import ConfigError
from pe_lab.evaluation.command_line import parse_lengths
from pe_lab.evaluation.generation.backend import ModelBackend
from pe_lab.evaluation.generation.prompted import batches
from pe_lab.evaluation.generation.tasks import Sample
from pe_lab.evaluation.suites.niah import niah_task, open_haystack
from pe_lab.identity import machine, versions
from pe_lab.model import GenerationStatistics
from pe_lab.parallel import start_processes
from pe_lab.parallel.host_memory import keep_freed_memory
from pe_lab.storage import write_json
from pe_lab.terminal import command, table


class Ours:
    """pe_lab, as `pe_lab.evaluate` runs it."""

    def __init__(self, lm: pe_lab.LanguageModel, length: int):
        self.name, self._answer, self._lm = "pe_lab", ModelBackend(lm), lm
        self.rows = self._answer.batch_size(length)

    def run(self, samples: Sequence[Sample]) -> tuple[float, list[str]]:
        """Seconds without compiling, and the answers."""
        statistics, start = GenerationStatistics(), time.perf_counter()
        answers: list[str] = []
        for batch, filled in batches(range(len(samples)), self.rows):
            answers += self._answer([samples[i] for i in filled], statistics)[: len(batch)]
        return time.perf_counter() - start - statistics.compile_seconds, answers


class Theirs:
    """transformers' `generate`, in batches of `rows`."""

    def __init__(self, peer: DecodePeer, lm: pe_lab.LanguageModel, rows: int):
        self.name, self.rows, self._peer, self._lm = f"transformers, {rows} at once", rows, peer, lm

    def run(self, samples: Sequence[Sample]) -> tuple[float, list[str]]:
        tokenizer = self._lm.tokenizer
        assert tokenizer is not None
        eos = sorted({tokenizer.eos_id, *tokenizer.stop_ids})
        seconds, answers = 0.0, []
        for start in range(0, len(samples), self.rows):
            part = samples[start : start + self.rows]
            prompts = [sample.tokens.tolist() for sample in part]
            asked = {"do": "answer", "prompts": prompts, "new": part[0].max_new_tokens, "eos": eos}
            found = self._peer._ask(asked)
            seconds += found["seconds"]
            for ids in found["ids"]:
                end = next((i for i, token in enumerate(ids) if token in eos), len(ids))
                answers.append(tokenizer.decode(ids[:end]))
        return seconds, answers


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", required=True, help="what pe_lab.load reads, with its tokenizer")
    parser.add_argument("--peer-model", default="", help="the same model as a Hugging Face directory")
    parser.add_argument("--peer-python", default="", help="a Python with torch and transformers")
    parser.add_argument("--haystack", default="essays")
    parser.add_argument("--lengths", default="1024,2048", help="tokens of prompt and answer, with commas")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of both, after one that is not counted")
    parser.add_argument("--out", default=str(HERE / "results" / "cpu"), help="folder of results; empty: none")
    args = parser.parse_args(argv)
    parse_lengths(args.lengths, 0)  # raises before anything runs
    if args.samples < 1 or args.rounds < 1:
        raise ConfigError("--samples and --rounds must be at least 1.")
    if not args.peer_model:
        raise ConfigError(
            "--peer-model is missing: the same model as a Hugging Face directory, as pe_lab.convert writes."
        )
    return args


def measure(sides: Sequence[Any], samples: Sequence[Sample], rounds: int) -> dict[str, Any]:
    """The median seconds and the last answers of each side; the first round, which compiles, is not counted."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    answers: dict[str, list[str]] = {}
    for round_number in range(rounds + 1):
        for i in range(len(sides)):
            side = sides[(round_number + i) % len(sides)]
            took, answers[side.name] = side.run(samples if round_number else samples[: side.rows])
            if round_number:
                seconds[side.name].append(took)
    return {"seconds": {name: statistics.median(taken) for name, taken in seconds.items()}, "answers": answers}


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    python = find_peer_python(args.peer_python)
    keep_freed_memory()
    start_processes()
    lm = in_float32(pe_lab.load(args.source))
    task, cases = niah_task("standard", open_haystack(args.haystack)), []
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        job = {"model": str(Path(args.peer_model).resolve()), "threads": threads}
        peer = DecodePeer(python, job, Path(folder))
        try:
            for length in parse_lengths(args.lengths, 0):
                samples = list(task.samples(lm.tokenizer, length, args.samples, 42))
                ours = Ours(lm, length)
                sides = [ours, *(Theirs(peer, lm, rows) for rows in sorted({1, ours.rows}))]
                found = measure(sides, samples, args.rounds)
                best = min(value for name, value in found["seconds"].items() if name != ours.name)
                same = {
                    name: sum(a == b for a, b in zip(answers, found["answers"][ours.name], strict=True)) / len(samples)
                    for name, answers in found["answers"].items()
                }
                score = sum(
                    task.score(s, a)[task.metric] for s, a in zip(samples, found["answers"][ours.name], strict=True)
                ) / len(samples)
                print(f"\n{args.samples} samples of {length:,} tokens, {threads} threads; ours scores {score:.0%}")
                rows = []
                for side in sides:
                    took = found["seconds"][side.name]
                    ratio = took / found["seconds"][ours.name]
                    numbers = f"{args.samples / took:.3f}", f"{took:.1f}", f"{ratio:.2f}", f"{same[side.name]:.0%}"
                    rows.append((side.name, *numbers))
                print(table(("", "samples/s", "seconds", "ours/this", "equal answers"), rows))
                print(f"ours over the faster peer: {best / found['seconds'][ours.name]:.2f}", flush=True)
                cases.append({"length": length, "rows": ours.rows, "seconds": found["seconds"], "same": same,
                              "score": score, "ratio": best / found["seconds"][ours.name]})  # fmt: skip
        finally:
            peer.stop()
    if args.out:
        path = Path(args.out) / f"niah-threads{threads}-jax{jax.__version__}.json"
        result = {"source": args.source, "samples": args.samples, "cases": cases, "versions": versions(),
                  "peer": peer.versions, "machine": machine()}  # fmt: skip
        write_json(path, result)
        print(f"\nWrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
