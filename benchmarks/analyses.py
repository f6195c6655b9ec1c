"""The time of `heads`, `frequency_use` and `logit_bounds` on a sequence, over that of a forward pass of the same model.

    python benchmarks/analyses.py --from=gguf:SmolLM2-135M-Instruct.Q4_1.gguf --length=8192

All sides read the same tokens in the same process, one after another, `--rounds` times; the medians are compared. The
forward pass ends with the final norm; `with logits` adds the unembedding, 1,024 tokens at a time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # from a checkout that is not installed

import jax
import numpy as np

import pe_lab
from pe_lab.analysis import frequency_use, heads, logit_bounds
from pe_lab.identity import machine, versions
from pe_lab.model import Model
from pe_lab.storage import write_json
from pe_lab.terminal import command, table

ALLOWED = 3.0
TOKENS = 1024  # of a chunk of logits


def sides(lm: pe_lab.LanguageModel, ids: np.ndarray) -> dict[str, Callable[[], Any]]:
    """What is timed, by name; each call ends when its result is there."""
    model, schedule = Model(lm.whole_pass_config(), backward=False), lm.schedule_for(ids.shape[1])
    params = lm.checkpoint.params

    @jax.jit
    def hidden(params: Any, tokens: jax.Array) -> jax.Array:
        return model.hidden(params, tokens, None, None, schedule)

    @jax.jit
    def largest(params: Any, x: jax.Array) -> jax.Array:
        return model.logits(params, x).max(-1)

    def with_logits() -> None:
        x = hidden(params, ids)
        for start in range(0, ids.shape[1], TOKENS):
            largest(params, x[:, start : start + TOKENS]).block_until_ready()

    return {
        "forward pass": lambda: hidden(params, ids).block_until_ready(),
        "with logits": with_logits,
        "heads": lambda: heads.measure(lm, ids),
        "frequency_use": lambda: frequency_use.measure(lm, ids),
        "logit_bounds": lambda: logit_bounds.measure(lm, ids),
    }


@command
def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", required=True)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    arguments = parser.parse_args(argv)
    lm = pe_lab.load(arguments.source)
    ids = np.random.default_rng(0).integers(0, lm.config.vocab_size, (1, arguments.length)).astype(np.int32)
    timed = sides(lm, ids)
    for run in timed.values():
        run()  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(arguments.rounds):
        for name, run in timed.items():
            begun = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = {name: medians[name] / medians["forward pass"] for name in medians}
    rows = [(name, f"{medians[name]:.2f}", f"{ratio[name]:.2f}") for name in medians]
    print(table(("side", "seconds, median", "over a forward pass"), rows))
    worst = max(ratio["heads"], ratio["frequency_use"])
    print(
        f"{arguments.length:,} tokens of {lm}. Allowed: {ALLOWED:g}; the worse of heads and frequency_use: {worst:.2f}."
    )
    if arguments.out:
        about = {"length": arguments.length, "model": repr(lm), "machine": machine(), "versions": versions()}
        write_json(arguments.out, {**about, "seconds": seconds, "ratio": ratio, "allowed": ALLOWED})
    return 0 if worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
