"""`python -m pe_lab.convert`: Hugging Face and GGUF checkpoints in, Hugging Face checkpoints out."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pe_lab.checkpoints import Checkpoint, is_external, open_checkpoint, open_source
from pe_lab.checkpoints.families import FAMILIES, leaf_paths
from pe_lab.checkpoints.hf_write import DTYPES, Export, plan_export, token_ids, write_huggingface
from pe_lab.checkpoints.logit_gate import Verdict, compare, gate_python, held
from pe_lab.checkpoints.native import write_checkpoint
from pe_lab.checkpoints.source import Source, nested
from pe_lab.data.tokenizers import Tokenizer, check_vocabulary, export_tokenizer, load_tokenizer, save_tokenizer
from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.parallel import hide_absent_tpu
from pe_lab.positional import build_schedule, describe
from pe_lab.storage import local_path, new_directory
from pe_lab.terminal import command

EXAMPLES = """\
in:
  python -m pe_lab.convert --from=hf:SmolLM-360M --to=runs/smollm_360m           a directory of Hugging Face's
  python -m pe_lab.convert --from=hf:Qwen/Qwen3-0.6B --to=runs/qwen3             from the hub, where it is reachable
  python -m pe_lab.convert --from=gguf:SmolLM2.Q8_0.gguf --to=runs/smollm2       a GGUF file of the llama family
out:
  python -m pe_lab.convert --from=runs/drope/recalibrate --to=hf:exports/drope
  python -m pe_lab.convert --from=runs/drope --to=hf:exports/drope --length=16384 --dtype=bfloat16

Weights keep their number format; training and evaluation read them as float32. Where transformers and torch are
installed (or --gate-python names an interpreter that has them), a fixed batch is read on both sides, and a result that
differs is not kept. docs/checkpoints.md has the families and what of an edited model each can say.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m pe_lab.convert",
        description="Brings a checkpoint in from Hugging Face or GGUF, or takes one out to Hugging Face.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--from", dest="source", required=True, help="hf:DIR, hf:ORG/NAME, gguf:FILE, or a checkpoint of pe_lab"
    )
    p.add_argument("--to", required=True, help="a new directory; hf:DIR to take it out")
    p.add_argument(
        "--family", choices=FAMILIES, help="the architecture to take it out as (default: the first that can)"
    )
    p.add_argument("--dtype", choices=DTYPES, help="of the weights taken out (default: as they are)")
    p.add_argument(
        "--length", type=int, metavar="TOKENS", help="fix what follows the length (beta, dynamic YaRN) at this one"
    )
    p.add_argument(
        "--gate",
        default="auto",
        choices=("auto", "require", "off"),
        help="compare logits with transformers: where it can be (auto), always, or not",
    )
    p.add_argument("--gate-python", metavar="PYTHON", help="an interpreter with transformers and torch, for the gate")
    return p


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    if args.length is not None and args.length < 1:
        raise UserError(f"--length is {args.length}; give a positive number of tokens.")
    hide_absent_tpu()
    source = open_source(args.source)
    needs = ("transformers", "torch", *(("gguf",) if source.path.suffix == ".gguf" else ()))
    python = None if args.gate == "off" else gate_python(args.gate_python, needs)
    if args.gate == "require" and python is None:
        raise UserError(f"--gate=require: {' and '.join(needs)} are not installed here; give --gate-python=PYTHON.")
    tokenizer = load_tokenizer(source.tokenizer) if source.tokenizer else None
    if tokenizer is not None:
        check_vocabulary(tokenizer, source.model.vocab_size, source.said)
    if args.to.startswith("hf:"):
        take_out(source, tokenizer, local_path("--to", args.to.removeprefix("hf:")), args, python)
    else:
        bring_in(source, tokenizer, local_path("--to", args.to), args, python)
    return 0


def bring_in(
    source: Source, tokenizer: Tokenizer | None, to: Path, args: argparse.Namespace, python: str | None
) -> None:
    """Somebody else's checkpoint as one of ours."""
    if not is_external(args.source):
        raise UserError(
            f"--from '{args.source}' is a checkpoint of pe_lab already. Edit it with pe_lab.surgery, or take it out "
            "with --to=hf:DIR."
        )
    for option in ("family", "dtype", "length"):
        if getattr(args, option) is not None:
            raise UserError(f"--{option} goes with --to=hf:DIR; what comes in is kept as it is.")
    model = Model(source.model)
    size = model.num_parameters * source.dtype.itemsize
    trained = f"trained on {source.training_length:,} tokens"
    print(f"{source.said}: {model.num_parameters:,} parameters, {source.dtype}, {trained}")
    print(describe(_schedule(source), source.layers))
    with new_directory(to, "--to") as beside:
        facts = {} if tokenizer is None else {"tokenizer": tokenizer.fingerprint}
        with progress("converting", size) as done:
            where = write_checkpoint(source, beside, to, facts, done)
        if tokenizer is not None:
            save_tokenizer(tokenizer, beside / "tokenizer")
        gguf_file = source.path.name if source.path.is_file() else None
        theirs = source.path.parent if gguf_file else source.path
        family = getattr(source, "family", None)
        if family is not None and not family.stock and args.gate != "require":
            print(f"Logits not compared: transformers has no {family.architecture} without code of its own.")
        else:
            _gate(args, python, model, lambda p: compare(open_checkpoint(where), theirs, p, gguf_file))
    note = "" if tokenizer else " It came without a tokenizer."
    print(f"{to}: converted from {source.said}.{note}")


def take_out(
    source: Source, tokenizer: Tokenizer | None, to: Path, args: argparse.Namespace, python: str | None
) -> None:
    """Any checkpoint as a Hugging Face directory."""
    export = plan_export(source, args.family, args.dtype, args.length)
    if tokenizer is not None:
        config = token_ids(export.config, getattr(tokenizer, "bos_id", None), tokenizer.eos_id)
        export = dataclasses.replace(export, config=config)
    print(f"{source.said}: as {export.family.architecture}, {export.dtype}, {export.size / 1e9:.2f} GB")
    for note in export.notes:
        print(note)
    if export.family.model_type == "qwen2" and tokenizer is not None and tokenizer.kind != "hf":
        print(
            "transformers 5 takes every tokenizer beside a qwen2 model for Qwen's own, with other ids: load this one "
            "with PreTrainedTokenizerFast."
        )
    if not export.family.stock:
        print(f"transformers has no {export.family.architecture}: DroPE's own code reads this.")
    with new_directory(to, "--to") as beside:
        with progress("converting", export.size) as done:
            write_huggingface(source, export, beside, done)
        if tokenizer is not None:
            export_tokenizer(tokenizer, beside)
        if export.family.stock:
            _gate(args, python, Model(source.model), lambda p: compare(_as_exported(args, export), beside, p))
    note = "" if tokenizer else " The checkpoint came without a tokenizer."
    print(f"{to}: written from {source.said}.{note}")


def _as_exported(args: argparse.Namespace, export: Export) -> Checkpoint:
    """What the export should compute: the source, its logit scale beside its weights, or rounded with them."""
    checkpoint = open_checkpoint(args.source)
    if export.dtype == "float32":
        pairs = zip(export.layers, export.scales, strict=True)
        return dataclasses.replace(
            checkpoint, layers=tuple(dataclasses.replace(layer, logit_scale=scale) for layer, scale in pairs)
        )
    leaves = leaf_paths(checkpoint.params)
    for path, leaf in leaves.items():
        if path.removeprefix("layers.") in export.folded:
            leaf = leaf * np.array(export.scales, np.float32).reshape(-1, *[1] * (leaf.ndim - 1))
        leaves[path] = leaf.astype(export.dtype).astype(np.float32)
    return dataclasses.replace(checkpoint, params=nested(leaves), layers=export.layers)


def _gate(args: argparse.Namespace, python: str | None, model: Model, judge: Callable[[str], Verdict]) -> None:
    """Prints the verdict, or why there is none; `UserError` where the two sides differ."""
    if args.gate == "off":
        print("Logits not compared: --gate=off.")
        return
    if python is None:
        print(
            "Logits not compared: transformers and torch are not installed here (--gate-python=PYTHON names another)."
        )
        return
    if args.gate == "auto" and not held(4 * model.num_parameters):
        print("Logits not compared: memory does not hold the model twice (--gate=require tries all the same).")
        return
    started = time.monotonic()
    verdict = judge(python)
    if not verdict.passed:
        raise UserError(
            f"The logits differ from transformers': {verdict}. The result was not kept. This is a fault of the "
            "conversion or of the checkpoint, not of rounding; please report it (--gate=off keeps the result)."
        )
    print(f"Logits compared with transformers': {verdict}; {time.monotonic() - started:.0f} s.")


def _schedule(source: Source) -> Any:
    model = source.model
    return build_schedule(source.layers, model.heads, model.kv_heads, model.head_dim)


@contextmanager
def progress(what: str, size: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on a terminal, a line now and then in a log."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    written, next_line = 0, time.monotonic() + 10
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=size)

        def done(more: int) -> None:
            nonlocal written, next_line
            written += more
            bar.update(task, completed=written)
            if not console.is_terminal and time.monotonic() >= next_line:
                next_line = time.monotonic() + 10
                console.print(f"{what}: {written / 1e9:.1f} of {size / 1e9:.1f} GB", highlight=False)

        yield done


if __name__ == "__main__":
    sys.exit(main())
