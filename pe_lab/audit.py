"""`python -m pe_lab.audit`: compares a checkpoint with what a runtime computes from it, and names the fault."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pe_lab import storage
from pe_lab.errors import ConfigError, UnsupportedError
from pe_lab.storage import check_place, write_json
from pe_lab.terminal import Progress, argument_parser, bounded, console, positive, works_on

if TYPE_CHECKING:
    from pe_lab.checkpoints.audit.observed import Observed
    from pe_lab.checkpoints.checkpoint import Checkpoint

EXAMPLES = """\
  python -m pe_lab.audit hf:SmolLM-360M                                   what transformers computes
  python -m pe_lab.audit hf:SmolLM-360M --runtime=gguf:smol.Q8_0.gguf     what llama.cpp computes from this file
  python -m pe_lab.audit hf:SmolLM-360M --write-tokens=tokens.npz         for a runtime elsewhere: its tokens
  python -m pe_lab.audit hf:SmolLM-360M --runtime=logits:vllm.npz         and what it computed
  python -m pe_lab.audit --self-test                                      every fault in six small models

Exit status 0: the runtime computes what the config says; 1: it does not, and the fault is named if a hypothesis
explains the logits. docs/audit.md has the faults, and the format of files of logits.
"""


def parser() -> argparse.ArgumentParser:
    description = "Compares a checkpoint as its config says with what a runtime computes, and names the fault."
    p = argument_parser("audit", description, EXAMPLES)
    p.add_argument("checkpoint", nargs="?", help="hf:DIR, hf:ORG/NAME, gguf:FILE, or a checkpoint of pe_lab")
    p.add_argument(
        "--runtime", default="transformers", help="transformers, gguf:FILE or logits:FILE.npz (default: %(default)s)"
    )
    p.add_argument(
        "--python", metavar="PYTHON", help="an interpreter with transformers and torch, or with llama_cpp for gguf:"
    )
    p.add_argument(
        "--length",
        type=bounded(int, 2, 2**20),
        metavar="TOKENS",
        help="of a sequence (default: 320, or more for windows)",
    )
    p.add_argument("--tokens", type=positive, help="of all sequences (default: two sequences)")
    p.add_argument(
        "--tolerance",
        type=bounded(float, 1e-9, 1.0),
        help="what rounding may be, relative to the largest logit (default: 2e-5, or what the first tokens show)",
    )
    p.add_argument("--write-tokens", metavar="FILE", help="write the tokens for logits: to this npz file, and end")
    p.add_argument("--json", metavar="FILE", help="also write the answer with its numbers to this file")
    p.add_argument("--self-test", action="store_true", help="inject every fault into six small models: 80 s")
    return p


@works_on
def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    if args.self_test == (args.checkpoint is not None):
        raise ConfigError("Give a checkpoint to audit, or --self-test alone.")
    for option in ("json", "write_tokens"):
        if (file := getattr(args, option)) is not None:
            flag = f"--{option.replace('_', '-')}"
            check_place(flag, storage.path(flag, file), file=True)

    from pe_lab.parallel import hide_absent_tpu  # these load JAX

    hide_absent_tpu()
    return _self_test() if args.self_test else _audit(args)


def _audit(args: argparse.Namespace) -> int:
    import numpy as np

    from pe_lab.checkpoints.audit.observed import default_length, near_batch
    from pe_lab.checkpoints.audit.report import record, report, unseen
    from pe_lab.checkpoints.audit.search import HypothesisRunner, Search
    from pe_lab.checkpoints.checkpoint import open_checkpoint
    from pe_lab.model import model_schedule
    from pe_lab.positional import describe

    runtime = _runtime(args)
    checkpoint = open_checkpoint(args.checkpoint)
    config = checkpoint.model
    length = args.length or default_length(checkpoint.layers)
    sequences = max(1, (args.tokens or 2 * length) // length)
    if args.write_tokens:
        near = near_batch(checkpoint, length, sequences)
        content = io.BytesIO()
        np.savez(content, tokens=near.tokens, positions=near.positions)
        storage.write_file(storage.path("--write-tokens", args.write_tokens), content.getvalue())
        print(f"{args.write_tokens}: tokens {list(near.tokens.shape)} at positions 0 to {near.length - 1:,}")
        return 0
    checkpoint, observed = _observed(runtime, checkpoint, length, sequences)
    schedule = model_schedule(config, checkpoint.layers)
    print(f"{args.checkpoint}, as its config says:\n{describe(schedule, checkpoint.layers)}\n")
    shapes = "; ".join(f"{list(one.tokens.shape)} up to position {one.positions[-1]:,}" for one in observed.batches)
    print(f"Runtime: {observed.name}. Tokens: {shapes}.")
    for line in [*observed.notes, *(f"Not seen: {what}." for what in unseen(checkpoint.layers, observed.batches))]:
        print(line)
    with Progress(console(stderr=True), "auditing", None) as progress:

        def tell(done: int, total: int, name: str) -> None:
            progress.update(done, f"{done} of {total}, {name}")

        runner = HypothesisRunner(checkpoint, observed.batches)
        found = Search(runner, observed.logits, args.tolerance, observed.exact, tell).run()
    print(f"\n{report(found, observed)}\n\n{found.passes:.0f} forward passes.")
    if args.json:
        write_json(storage.path("--json", args.json), record(found, observed, args.checkpoint))
    return 0 if found.sound else 1


class Runtime(NamedTuple):
    """What `--runtime` names: transformers, gguf or logits; its file; the interpreter that runs it."""

    kind: str
    file: Path | None
    python: str = ""


def _runtime(args: argparse.Namespace) -> Runtime:
    """The runtime; `UserError` for all that can be told before the weights are read."""
    from pe_lab.checkpoints.checkpoint import is_external
    from pe_lab.checkpoints.parity import find_python

    kind, colon, name = args.runtime.partition(":")
    if kind not in ("transformers", "gguf", "logits") or bool(name) == (kind == "transformers") or (colon and not name):
        raise ConfigError(f"--runtime '{args.runtime}': give transformers, gguf:FILE or logits:FILE.npz.")
    if args.write_tokens:
        return Runtime(kind, None)
    if kind == "transformers" and not is_external(args.checkpoint):
        raise ConfigError(
            f"'{args.checkpoint}' is a checkpoint of pe_lab, which transformers cannot read. Export it (python -m "
            f"pe_lab.convert --from={args.checkpoint} --to=hf:DIR) and audit the export, or give --runtime=gguf:FILE "
            "or logits:FILE.npz."
        )
    file = storage.local_copy(storage.path("--runtime", name)) if name else None
    if file is not None and not file.is_file():
        raise ConfigError(f"--runtime: there is no file '{name}'.")
    if kind == "logits":
        return Runtime(kind, file)
    needs = ("llama_cpp",) if kind == "gguf" else ("transformers", "torch")
    if kind == "transformers" and (args.checkpoint.startswith("gguf:") or args.checkpoint.endswith(".gguf")):
        needs = (*needs, "gguf")
    python = find_python(args.python, needs, "--python")
    if python is None:
        listed = " and ".join({"llama_cpp": "llama-cpp-python"}.get(package, package) for package in needs)
        raise UnsupportedError(
            f"--runtime={args.runtime} needs {listed}, which this Python does not have. Install that, name an "
            "interpreter that has it (--python=PYTHON), or give --runtime=logits:FILE.npz."
        )
    return Runtime(kind, file, python)


def _observed(runtime: Runtime, checkpoint: Checkpoint, length: int, sequences: int) -> tuple[Checkpoint, Observed]:
    """What the runtime computes, and the checkpoint with the weights that it has."""
    from pe_lab.checkpoints.audit import observed

    if runtime.kind == "logits":
        return checkpoint, observed.saved(runtime.file, checkpoint.model.vocab_size)
    if runtime.kind == "gguf":
        checkpoint, notes = observed.with_weights_of(checkpoint, runtime.file)
        near = observed.near_batch(checkpoint, length, sequences)
        found = observed.by_llama_cpp(runtime.file, runtime.python, near, checkpoint.model.vocab_size)
        return checkpoint, found._replace(notes=(*notes, *found.notes))
    gguf_file = checkpoint.path.name if checkpoint.path.is_file() else None
    directory = checkpoint.path.parent if gguf_file else checkpoint.path
    batches = observed.audited_batches(checkpoint, length, sequences)
    return checkpoint, observed.by_transformers(directory, runtime.python, batches, gguf_file)


def _self_test() -> int:
    from pe_lab.checkpoints.audit.self_test import FAULTY, INJECTIONS, MODELS, outcomes, self_test_table

    found = []
    total = len(INJECTIONS) * len(FAULTY) + len(MODELS)
    with Progress(console(stderr=True), "self-test", total) as progress:
        for outcome in outcomes(MODELS, INJECTIONS):
            found.append(outcome)
            progress.update(len(found), f"{outcome.model}, {outcome.fault or 'no fault'}")
    print(self_test_table(found))
    tried = [one for one in found if one.audit is not None and one.fault is not None]
    sound = [one for one in found if one.fault is None]
    print(
        f"\n{sum(one.passed for one in tried)} of {len(tried)} faults found; "
        f"{sum(not one.passed for one in sound)} false alarms on {len(sound)} sound checkpoints."
    )
    return 0 if all(one.passed for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
