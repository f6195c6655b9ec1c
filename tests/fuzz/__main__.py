"""`python -m tests.fuzz --inputs=100000 --seed=0`: damaged inputs for every reader, and a table of what became of them.

Each kind is read in child processes, many inputs in each, under a limit of memory and of time. Every input is a
function of (seed, kind, number), so that `--kind=GGUF --first=1234 --inputs=1` reads one again. Exit status 1 unless
every input was accepted or refused by a `UserError`.
"""

from __future__ import annotations

import argparse
import collections
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from .kinds import KINDS, inputs

BOUND = 512 * 2**20  # bytes that one input may take
SECONDS = 20  # that one input may take
OUTCOMES = {"a": "accepted", "r": "refused", "e": "other exceptions", "c": "crashes", "h": "hangs", "m": "over memory"}
GOOD = "ar"


class Hang(BaseException):
    """An input took longer than `SECONDS`."""


def outcome(kind: object) -> tuple[str, str]:
    """What became of an input that was written: a letter of `OUTCOMES`, and the traceback of a failure."""
    from pe_lab.errors import UserError

    try:
        kind.read()
    except UserError as error:
        if not str(error).strip() or "\n" in str(error).strip():
            return "e", f"a refusal that is not one line: {error!r}"
        return "r", ""
    except MemoryError:
        return "m", traceback.format_exc()
    except Hang:
        return "h", traceback.format_exc()
    except BaseException:  # Rust's panics are no Exception
        return "e", traceback.format_exc()
    return "a", ""


def _alarm(*_: object) -> None:
    raise Hang


def child(name: str, seed: int, first: int, last: int) -> None:
    """Reads inputs, and writes a letter for each to stdout, tracebacks to stderr."""
    letters = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever libraries print
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _alarm)
    with tempfile.TemporaryDirectory() as scratch:
        for number, kind in enumerate(inputs(name, Path(scratch), seed, first, last), first):
            if number == first:
                size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (size + BOUND, size + BOUND))
            signal.alarm(SECONDS)
            letter, why = outcome(kind)
            signal.alarm(0)
            if letter not in GOOD:
                print(f"--- {name} {number}: {OUTCOMES[letter]}\n{why}", file=sys.stderr, flush=True)
            letters.write(letter.encode())


def run(name: str, seed: int, first: int, last: int, log: Path) -> collections.Counter[str]:
    """How many inputs had each outcome; a child that crashes or hangs is replaced by another, after that input."""
    found: collections.Counter[str] = collections.Counter()
    while first < last:
        command = [sys.executable, "-m", "tests.fuzz", f"--child={name}", f"--seed={seed}"]
        command += [f"--first={first}", f"--inputs={last - first}"]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        with log.open("ab") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env)
        done, hung = 0, False
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                # The first letter waits for imports.
                if not selector.select(timeout=2 * SECONDS if done else 240):
                    hung = True
                    process.kill()
                    break
                letters = os.read(process.stdout.fileno(), 65_536).decode()
                if not letters:
                    break
                done += len(letters)
                found.update(letters)
        status = process.wait()
        process.stdout.close()
        first += done
        if first < last:
            letter = "h" if hung else "c"
            with log.open("a") as errors:
                print(f"--- {name} {first}: {OUTCOMES[letter]} (status {status})", file=errors)
            found[letter] += 1
            first += 1
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="of all kinds together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="these kinds alone; repeatable")
    parser.add_argument("--first", type=int, default=0, help="number of the first input of each kind")
    parser.add_argument("--log", type=Path, default=Path("build/fuzz.log"), help="tracebacks (default: %(default)s)")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(args.child, args.seed, args.first, args.first + args.inputs)
        return 0
    kinds, bad = args.kind or list(KINDS), 0
    args.log.parent.mkdir(parents=True, exist_ok=True)
    args.log.write_text("")
    print(f"{'kind':16}" + "".join(f"{title:>18}" for title in ("inputs", *OUTCOMES.values(), "seconds")), flush=True)
    total: collections.Counter[str] = collections.Counter()
    for name in kinds:
        begun, count = time.monotonic(), -(-args.inputs // len(kinds))
        found = run(name, args.seed, args.first, args.first + count, args.log)
        cells = [count, *(found[letter] for letter in OUTCOMES), round(time.monotonic() - begun)]
        print(f"{name:16}" + "".join(f"{cell:>18,}" for cell in cells), flush=True)
        total.update(found)
    bad = sum(count for letter, count in total.items() if letter not in GOOD)
    print(
        f"{sum(total.values()):,} inputs, seed {args.seed}: {bad} neither accepted nor refused"
        + f", see {args.log}" * bool(bad)
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
