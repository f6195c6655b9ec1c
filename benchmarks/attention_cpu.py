"""Part of `attention.py`: attention on a CPU, its time against that of torch, and its memory.

As a program, `python attention_cpu.py TOKENS WHOLE`, it reads a text with the demo's model and prints, as JSON, the
memory that its own process took: in one pass if the text has at most WHOLE tokens, else in chunks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))

import jax
import jax.numpy as jnp
import numpy as np

from pe_lab.recipes import load_config

FIT = (4096, 8192, 16384, 32768, 65536)  # tokens whose memory is looked at
READ = 32768  # tokens that the demo's model reads
VOCABULARY = 640  # the demo's tokenizer and its needles' symbols, rounded up


def speed(plan: Any, lengths: Sequence[int], heads: int, kv_heads: int, longest_backward: int) -> tuple[list[Any], Any]:
    """Chunked attention (dense for short sequences) against torch's, forward and forward with backward; and a table."""
    from attention_cases import Case
    from attention_kernels import Entry, backward, forward, taken
    from attention_tables import failures
    from attention_tools import Table, number, ratios

    from pe_lab.attention import LayerEncoding, attention

    def ours(name: str, gradient: bool) -> Any:
        return lambda q, k, v: attention(q, k, v, LayerEncoding(), implementation=name, backward=gradient)

    columns = ("chunked", "dense", "torch grouped", "torch repeated")
    found: list[dict[str, Any]] = []
    table = [["tokens", "pass", *columns, "auto", "torch / auto", "spread", "CPU time"]]
    for T in lengths:
        case = Case(1, T, T, heads, kv_heads, 64, "float32")
        names = ("chunked", "dense") if T <= 512 else ("chunked",)
        for what in ("forward", "backward"):
            gradient = what == "backward"
            if gradient and longest_backward < T:
                continue
            tried = {name: ours(name, gradient) for name in names}
            rows = backward(case, plan, tried) if gradient else forward(case, plan, [Entry(*x) for x in tried.items()])
            auto = taken(case, gradient)
            result = {"case": case._asdict(), "what": what, "auto": auto, "rows": rows}
            peers = [row for name, row in rows.items() if name.startswith("torch") and "seconds" in row]
            if peers and "seconds" in rows.get(auto, {}):
                peer = min(peers, key=lambda row: row["seconds"])
                result["torch_over_ours"] = ratios(peer["turns"], rows[auto]["turns"])
                result["torch_over_ours_cpu"] = ratios(peer["cpu_turns"], rows[auto]["cpu_turns"])
            found.append(result)
            shown = [number(rows.get(name, {}).get("seconds")) for name in columns]
            ratio = result.get("torch_over_ours")
            spread = f"{ratio['low']:.2f} to {ratio['high']:.2f}" if ratio else "–"
            title = "forward, backward" if gradient else "forward"
            cpu = f"{result['torch_over_ours_cpu']['median']:.2f}" if ratio else "–"
            table.append([f"{T:,}", title, *shown, auto, number(ratio and ratio["median"]), spread, cpu])
    told = failures(found)
    title = f"Seconds of attention, 1 x tokens, {heads} heads, {kv_heads} key heads, 64 channels, float32"
    notes = [
        "Medians. torch / auto: the faster of torch's two over the choice of `auto`, in each round; above 1, pe_lab is "
        "faster. CPU time is the same ratio of processor seconds. torch repeated has a key head for every query head, "
        "made beforehand."
    ]
    return found, Table(title, table, notes + told)


def interpreted(plan: Any) -> tuple[list[Any], Any]:
    """Errors of an accelerator's kernels, interpreted on short sequences and small caches; and a table."""
    from attention_cases import TOLERANCE, Case
    from attention_kernels import backward, backward_runs, decode, forward, forward_entries
    from attention_tables import failures
    from attention_tools import Table

    results = []
    for H, G, K, B, S in ((4, 2, 64, 1, 40), (14, 2, 32, 2, 150)):
        text, cache = Case(B, S, S, H, G, K, "bfloat16"), Case(B, 1, S, H, G, K, "bfloat16")
        for what, case, rows in (
            ("forward", text, forward(text, plan, forward_entries(text, tiny=True))),
            ("gradients", text, backward(text, plan, backward_runs(tiny=True))),
            ("decoding", cache, decode(cache, plan)),
        ):
            results.append({"what": what, "case": case._asdict(), "rows": rows})
    shape = "{B} x {S}, {H}/{G} heads of {K}"
    table = [["", *(f"{r['what']} {shape.format(**r['case'])}" for r in results)]]
    for name in dict.fromkeys(name for result in results for name in result["rows"]):
        errors = [result["rows"].get(name, {}).get("error") for result in results]
        if any(x is not None for x in errors):
            table.append([name, *("–" if x is None else f"{x:.1e}" for x in errors)])
    title = "Relative errors of kernels, interpreted, in bfloat16, against a reference in float64"
    notes = [f"Allowed: {TOLERANCE['bfloat16']}. XLA computes the calls of cuDNN and tokamax here."]
    return results, Table(title, table, [*notes, *failures(results)])


def memory(heads: int, kv_heads: int, lengths: Sequence[int] = FIT) -> tuple[dict[str, Any], Any]:
    """Bytes of a compiled chunked attention without its arguments and results, and a line fitted to them."""
    from attention_kernels import gradients
    from attention_tools import Table, tell

    from pe_lab.attention import LayerEncoding, attention

    found: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "tokens": list(lengths)}
    table = [["pass", *(f"{T:,}" for T in lengths), "bytes a token", "plus MiB", "R²"]]
    for what in ("forward", "forward, backward"):
        taken = []
        for T in lengths:
            tell(f"  memory: {what}, {T:,} tokens")
            given = [jax.ShapeDtypeStruct((1, T, n, 64), jnp.float32) for n in (heads, kv_heads, kv_heads)]
            backward = what != "forward"

            def run(q: Any, k: Any, v: Any, backward: bool = backward) -> Any:
                return attention(q, k, v, LayerEncoding(), implementation="chunked", backward=backward)

            compiled = jax.jit(gradients(run) if backward else run).lower(*given).compile()
            taken.append(compiled.memory_analysis().temp_size_in_bytes)
        fit = line(lengths, taken)
        found[what] = {"bytes": taken, **fit}
        table.append(
            [what, *(f"{n / 2**20:,.1f}" for n in taken), f"{fit['slope']:,.0f}", f"{fit['intercept'] / 2**20:.2f}",
             f"{fit['r2']:.6f}"]
        )  # fmt: skip
    each = 4 * 64 * (2 * heads + 2 * kv_heads)
    notes = [f"Queries, keys, values and outputs themselves take {each:,} bytes a token."]
    return found, Table(
        f"MiB of the compiled chunked attention without arguments and results, by tokens; {heads} heads, "
        f"{kv_heads} key heads, 64 channels, float32", table, notes
    )  # fmt: skip


def line(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Least squares: y = intercept + slope x, and the share of y's variance that it explains."""
    slope, intercept = np.polyfit(x, y, 1)
    left = np.square(np.asarray(y) - (intercept + slope * np.asarray(x))).sum()
    return {
        "slope": float(slope),
        "intercept": float(intercept),
        "r2": float(1 - left / np.square(y - np.mean(y)).sum()),
    }


def reading(tokens: int = READ) -> tuple[list[dict[str, Any]], Any]:
    """Memory of processes that run the demo's model on sequences."""
    from attention_tools import Table, tell

    found = []
    for length, whole, way in (
        (1024, 1024, "in one pass"),
        (tokens, 0, "in chunks, as pe_lab.evaluate"),
        (tokens, tokens, "in one pass"),
    ):
        tell(f"  reading {length:,} tokens {way}")
        command = [sys.executable, str(HERE / "attention_cpu.py"), str(length), str(whole)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-800:]}")
        found.append({"tokens": length, "way": way, **json.loads(done.stdout.splitlines()[-1])})
    table = [["tokens", "method", "before MiB", "peak MiB", "more MiB", "seconds", "again"]]
    for row in found:
        mib = [f"{row[name] / 2**20:,.0f}" for name in ("before", "peak")]
        more = f"{(row['peak'] - row['before']) / 2**20:,.0f}"
        table.append([f"{row['tokens']:,}", row["way"], *mib, more, f"{row['seconds']:.2f}", f"{row['again']:.2f}"])
    notes = [
        "Resident memory of the whole process, after the parameters are loaded and at its peak. The first pass also "
        "compiles; its cost is that of 1,024 tokens."
    ]
    return found, Table("A forward pass over one sequence with the model of configs/drope_laptop.py", table, notes)


def resident(what: str) -> int:
    """Bytes that this process has (VmRSS) or has had at most (VmHWM). A child's ru_maxrss begins with its parent's."""
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith(what):
            return int(row.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {what}.")


def read(tokens: int, whole: int) -> dict[str, Any]:
    """Losses of one text of random tokens, as `pe_lab.evaluation` gets them."""
    from pe_lab.evaluation.scoring.forward import WHOLE, Forward
    from pe_lab.model import Model
    from pe_lab.positional import layers

    config = load_config(f"{HERE.parent}/configs/drope_laptop.py", {"model.vocab_size": str(VOCABULARY)})
    model = Model(config.model)
    params = jax.block_until_ready(model.init(jax.random.key(0)))
    text = np.random.default_rng(0).integers(0, VOCABULARY, (1, tokens + 1)).astype(np.int32)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    described = layers(config.phases[0].positional, config.model.layers)
    reader = Forward(model.config, whole=whole or WHOLE)
    before, seconds = resident("VmRSS"), []
    for _ in range(2):
        start = time.perf_counter()
        losses = reader.losses(params, batch, described)
        seconds.append(time.perf_counter() - start)
    return {
        "before": before,
        "peak": resident("VmHWM"),
        "seconds": seconds[0],
        "again": seconds[1],
        "loss": float(losses.mean()),
    }


if __name__ == "__main__":
    print(json.dumps(read(int(sys.argv[1]), int(sys.argv[2]))))
