"""Compares attention with cuDNN, tokamax, torch and the limits of the device on a GPU, and with torch on a CPU, in time
and in memory.

    python -m benchmarks.attention --peer-python=/path/to/venv/bin/python     # what this machine is for
    python -m benchmarks.attention --tiny --ours-only                         # a GPU's parts, interpreted: do they run?

Parts on a GPU: `features`, every feature on all that honour it, forward and with gradients; `forward`, TFLOP/s of whole
texts; `backward`, of training; `decode`, bytes/s of the cache that one query reads; `gradient`, forward and backward
pass of pe_lab's kernel, with and without a bias by distance. On a
CPU: `speed`, `memory`, `learned`: both with a learned bias by distance, and, asked for alone, `kernels`: are ours,
interpreted, right? All sides get the same arrays; before anything is timed, outputs of some queries are compared with a
reference in float64, and what is off is not timed (exit status 1). Sides take turns. The peer is torch in a process of
its own (another Python, perhaps: `--peer-python`, or the environment's PE_LAB_PEER).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peer needs memory of the same GPU
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # as `python benchmarks/attention.py` from a checkout that is not installed
sys.path.insert(0, str(HERE))

import jax

platforms = os.environ.get("JAX_PLATFORMS")
from attention_cases import Case
from attention_tools import Plan, Table, TorchPeer, tell
from train_step import find_peer_python

if platforms is None:
    os.environ.pop("JAX_PLATFORMS", None)  # `train_step.py` says cpu; JAX has read it before, the peer has not

import attention_cpu
import attention_features
import attention_gradient
import attention_kernels as kernels
import attention_learned
from attention_tables import decode_table, flops_table, gradient_table, wrong

from benchmarks.document import Place
from pe_lab.errors import UserError, did_you_mean
from pe_lab.identity import machine, versions
from pe_lab.parallel import keep_freed_memory, start_processes
from pe_lab.terminal import command

PARTS = {
    "gpu": ("features", "forward", "backward", "gradient", "decode"),
    "cpu": ("speed", "memory", "learned", "kernels"),
}
LENGTHS = {"gpu": (2048, 4096, 8192, 16384, 32768, 65536, 131072), "cpu": (512, 1024, 2048, 4096, 8192)}
SMALL = 1000  # tokens of a text whose queries are all compared; no multiple of any block
CACHES = [(B, S) for S in (8192, 32768, 131072) for B in (1, 8)]
TRAINED = (1024, 4096)
GRADIENTS = (2048, 8192, 32768)
FEATURES_AT = (8192, 32768)
BACKWARD_UP_TO = 4096  # tokens, on a CPU


@dataclasses.dataclass
class Report:
    """The results and their tables, printed and written one by one, because a machine may be lent for minutes only.

    Attributes:
      markdown: how tables are printed.
      path: of the file; empty: none.
      found: all that the file will hold.
      place: of all tables in a document.
      tables: so far.
      wrong: something gave another result than it should.
    """

    markdown: bool
    path: str
    found: dict[str, Any]
    place: Place | None = None
    tables: list[Table] = dataclasses.field(default_factory=list)
    wrong: bool = False

    def add(self, part: str, result: Any, table: Table) -> None:
        if isinstance(result, list):
            self.found.setdefault(part, []).extend(result)
            self.wrong |= wrong([one for one in result if "rows" in one])
        else:
            self.found[part] = result
        print("\n" + (table.markdown() if self.markdown else table.text()), flush=True)
        if self.path:
            Path(self.path).write_text(json.dumps(self.found, indent=1) + "\n")
        self.tables.append(table)
        if self.path:
            text = "\n\n".join(table.markdown() for table in self.tables)
            Path(self.path).with_suffix(".md").write_text(f"`{self.found['command']}`\n\n{text}\n")
        if self.place:
            about, release = self.found["machine"], self.found["versions"]
            used = ", ".join(f"{name} {release[name]}" for name in ("python", "jax", "torch") if name in release)
            said = f"`{self.found['command']}` on {about['device']}, {about['cpus']} processors, {used}:"
            self.place.write("\n\n".join([said, *(table.markdown() for table in self.tables)]))


def accelerator(args: argparse.Namespace, plan: Plan, report: Report) -> None:
    """A GPU's parts, or with `plan.tiny` the same in small anywhere."""
    limits = kernels.ceilings(plan)
    said = f"A product of {limits['side']} x {limits['side']} matrices in bfloat16. Bytes read and written are counted."
    numbers = [f"{limits['matmul'] / 1e12:,.1f}", f"{limits['copy'] / 1e9:,.0f}"]
    table = Table("What the device does at best", [["matrix product, TFLOP/s", "copy, GB/s"], numbers], [said])
    report.add("ceilings", limits, table)
    H, G, tiny = args.heads, args.kv_heads, plan.tiny
    tokens = 96 if tiny else args.tokens
    for K in args.head_dims:
        shape = f"{H} heads, {G} key heads, {K} channels, bfloat16"

        def texts(lengths: Sequence[int], K: int = K) -> list[Case]:
            return [Case(max(1, tokens // T), T, T, H, G, K, "bfloat16") for T in lengths]

        if "features" in args.parts:
            small = Case(1, 96 if tiny else SMALL, 96 if tiny else SMALL, H, G, K, "bfloat16")
            for case in texts((96,)) if tiny else [small, *texts(FEATURES_AT)]:
                # Short and long sequences with what most layers have; one length for the rest.
                names = list(attention_features.FEATURES)
                chosen = names if tiny or FEATURES_AT[0] == case.T else names[:2]
                results = attention_features.features(case, small, plan, chosen)
                report.add("features", results, attention_features.table_of(results))
        if "forward" in args.parts:
            small = Case(1, SMALL, SMALL, H, G, K, "bfloat16")
            results = []
            for case in texts((40, 96)) if tiny else [small, *texts(args.lengths)]:
                rows = kernels.forward(case, plan, kernels.forward_entries(case, tiny))
                results.append({"case": case._asdict(), "auto": kernels.taken(case), "rows": rows})
            title = f"TFLOP/s, forward (4 B H T T K / 2 counted, what causality leaves), B T = {tokens:,} or B = 1; "
            report.add("forward", results, flops_table(title + shape, results, 1, limits["matmul"], tiny))
        if "backward" in args.parts:
            results = []
            for case in texts((48,) if tiny else TRAINED):
                rows = kernels.backward(case, plan, kernels.backward_runs(tiny))
                results.append({"case": case._asdict(), "auto": kernels.taken(case, backward=True), "rows": rows})
            title = f"TFLOP/s, forward and backward (3.5 times as many counted), B T = {tokens:,}; "
            report.add("backward", results, flops_table(title + shape, results, 3.5, limits["matmul"], tiny))
        if "gradient" in args.parts:
            small = Case(1, SMALL, SMALL, H, G, K, "bfloat16")
            cases = texts((48,)) if tiny else [small, *texts(GRADIENTS)]
            results = [{"case": case._asdict(), "rows": attention_gradient.training(case, plan)} for case in cases]
            title = f"TFLOP/s, forward and backward (3.5 times as many counted), B T = {tokens:,} or B = 1; {shape}"
            report.add("gradient", results, gradient_table(title, results))
        if "decode" in args.parts:
            cases = [Case(B, 1, S, H, G, K, "bfloat16") for B, S in ([(1, 96), (2, 96)] if tiny else CACHES)]
            results = [{"case": case._asdict(), "rows": kernels.decode(case, plan)} for case in cases]
            auto = kernels.taken(cases[0], partial=True)
            title = f"Decoding: GB/s of a cache that one query a text reads; {shape}"
            report.add("decode", results, decode_table(title, results, limits["copy"], auto, tiny))


def cpu(args: argparse.Namespace, plan: Plan, report: Report) -> None:
    """A CPU's parts."""
    if "speed" in args.parts:
        lengths = (*args.lengths, 16384) if args.long and 16384 not in args.lengths else args.lengths
        report.add("speed", *attention_cpu.speed(plan, lengths, args.heads, args.kv_heads, BACKWARD_UP_TO))
    if "memory" in args.parts:
        report.add("memory", *attention_cpu.memory(args.heads, args.kv_heads))
        report.add("reading", *attention_cpu.reading())
    if "learned" in args.parts:
        report.add("learned", *attention_learned.speed(plan, args.lengths))
        report.add("learned_memory", *attention_learned.memory())
    if "kernels" in args.parts:
        look = dataclasses.replace(plan, tiny=True, timed=False, peer=None)
        report.add("kernels", *attention_cpu.interpreted(look))


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help="some of this machine's, with commas")
    parser.add_argument("--tiny", action="store_true", help="a GPU's parts, interpreted, where there is none")
    parser.add_argument("--peer-python", default="", help="a Python with torch and transformers")
    parser.add_argument("--ours-only", action="store_true", help="no peer")
    parser.add_argument("--only", default="", help="rows whose names have one of these in them, with commas")
    parser.add_argument("--lengths", default="", help="tokens of texts, with commas")
    parser.add_argument("--long", action="store_true", help="16k tokens on a CPU, too")
    parser.add_argument("--head-dims", default="64,128", help="channels of a head on a GPU, with commas")
    parser.add_argument("--heads", type=int, default=0, help="query heads (16 on a GPU, 8 on a CPU)")
    parser.add_argument("--kv-heads", type=int, default=0, help="key heads (4 on a GPU, 2 on a CPU)")
    parser.add_argument("--tokens", type=int, default=32768, help="of all texts of a batch on a GPU; longer: one text")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: as many as there are processors")
    parser.add_argument("--json", default="", help="a file for all that is found")
    parser.add_argument("--markdown", action="store_true", help="print tables as docs/attention.md has them")
    parser.add_argument("--write", default="", help="a document for the tables (docs/attention.md)")
    return parser.parse_args(argv)


def numbers(option: str, text: str, at_least: int) -> tuple[int, ...]:
    try:
        found = tuple(int(x) for x in text.split(","))
        if min(found) < at_least:
            raise ValueError
    except ValueError:
        raise UserError(f"{option}={text}: whole numbers of {at_least} or more with commas are needed.") from None
    return found


def complete(args: argparse.Namespace, platform: str) -> None:
    """Completes the arguments for this machine, and refuses impossible ones.

    Raises:
      UserError: says what, and what would do.
    """
    if platform not in PARTS:
        raise UserError(f"This measures GPUs and CPUs; JAX has a {platform} here. JAX_PLATFORMS=cpu chooses the CPU.")
    if args.tiny and platform != "cpu":
        raise UserError("--tiny interprets kernels on a CPU: run it with JAX_PLATFORMS=cpu.")
    kind = "gpu" if args.tiny else platform
    args.parts = args.parts.split(",") if args.parts else [part for part in PARTS[kind] if part != "kernels"]
    for part in args.parts:
        if part not in PARTS[kind]:
            raise UserError(f"--parts={part} is not for a {kind}. {did_you_mean(part, PARTS[kind])}")
    args.lengths = numbers("--lengths", args.lengths, 16) if args.lengths else LENGTHS[platform]
    args.head_dims = (32,) if args.tiny else numbers("--head-dims", args.head_dims, 16)
    args.only = [part for part in args.only.split(",") if part]
    args.heads = args.heads or {"gpu": 16, "cpu": 4 if args.tiny else 8}[platform]
    args.kv_heads = args.kv_heads or {"gpu": 4, "cpu": 2}[platform]
    if args.kv_heads < 1 or args.heads % args.kv_heads:
        raise UserError(f"--heads={args.heads} does not divide by --kv-heads={args.kv_heads}.")
    for name in ("rounds", "tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1.")


@contextlib.contextmanager
def peer(python: str | None, threads: int) -> Any:
    """torch's process, or None without a Python to run it."""
    if python is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        device = "cpu" if jax.default_backend() == "cpu" else "cuda"
        process = TorchPeer(python, {"threads": threads, "device": device}, Path(folder))
        try:
            yield process
        finally:
            process.stop()


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = options(argv)
    available = sorted(os.sched_getaffinity(0))
    args.threads = args.threads or len(available)
    if not 1 <= args.threads <= len(available):
        raise UserError(f"--threads is {args.threads}; this machine offers {len(available)}.")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise UserError(f"--json={args.json}: there is no folder {Path(args.json).absolute().parent}.")
    if args.peer_python and shutil.which(args.peer_python) is None:
        raise UserError(f"--peer-python={args.peer_python} is not a program.")
    # XLA takes a thread for each processor it may run on; the peer inherits the same set.
    os.sched_setaffinity(0, available[: args.threads])
    if args.tiny or args.parts == "kernels":
        os.environ.setdefault("NPROC", "8")  # threads of XLA: interpreted, each warpgroup that waits keeps one
    keep_freed_memory()
    start_processes()
    platform = jax.default_backend()
    complete(args, platform)
    alone = args.parts[0] if len(args.parts) == 1 else ""
    name = "tiny" if args.tiny else alone if alone in ("learned", "kernels") else platform
    place = Place(args.write, name) if args.write else None
    python = None if args.ours_only else find_peer_python(args.peer_python)
    plan = Plan(args.rounds, turn=0.05 if platform == "gpu" else 0.3, only=args.only)
    plan.backends = ("flash", "cudnn") if platform == "gpu" or args.tiny else ("grouped", "repeated")
    if args.tiny:
        plan = dataclasses.replace(plan, tiny=True, turn=0, rounds=1)
    with peer(python, args.threads) as plan.peer:
        about = {
            "command": shlex.join(["python", "-m", "benchmarks.attention", *(sys.argv[1:] if argv is None else argv)]),
            "arguments": {name: value for name, value in vars(args).items() if name not in ("json", "write")},
            "versions": versions() | (plan.peer.versions if plan.peer else {}),
            "machine": machine(),
            "load_average": os.getloadavg(),
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        report = Report(args.markdown, args.json, about, place)
        tell(f"{about['machine']['device']}, JAX {jax.__version__}: {', '.join(args.parts)}")
        if platform == "gpu" or args.tiny:
            accelerator(args, plan, report)
        else:
            cpu(args, plan, report)
    for path in filter(None, (args.json, args.write)):
        tell(f"written to {path}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
