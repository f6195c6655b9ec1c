"""`python -m pe_lab.surgery --from=A --to=B --drop`: writes an edited child of a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pe_lab.checkpoints import open_checkpoint
from pe_lab.checkpoints.logit_scale import how_to_fit, read_logit_scale
from pe_lab.checkpoints.qk_norm import change_qk_norm
from pe_lab.checkpoints.store import Checkpoint
from pe_lab.checkpoints.surgery import NOTHING, change, write_child
from pe_lab.config import DataConfig, from_dict
from pe_lab.data.pipeline import validation_batches
from pe_lab.data.tokenizers import load_tokenizer, save_tokenizer
from pe_lab.errors import UserError
from pe_lab.parallel import start_processes
from pe_lab.positional import Beta, Layer, build_schedule, denoise, describe, drop, read_scores, read_with
from pe_lab.storage import local_path
from pe_lab.terminal import command

# --dope: how chosen heads are denoised. Both readings of the paper where its equations and its text disagree.
DOPE: dict[str, tuple[str, dict[str, Any]]] = {
    "all-nope": ("all", {"reading": "nope"}),
    "all-uniform": ("all", {"reading": "uniform"}),
    "parts-fast": ("parts", {"keep": "fast"}),
    "parts-slow": ("parts", {"keep": "slow"}),
    "gaussian": ("gaussian", {}),
}
FIT_ROWS, FIT_LENGTH = 8, 1024  # windows of text that a QK-norm's constants are fitted on, and their tokens at most


def parser() -> argparse.ArgumentParser:
    """The command line of this verb."""
    parser = argparse.ArgumentParser(
        prog="python -m pe_lab.surgery",
        description="Writes a child of a checkpoint with another positional encoding, another QK-norm, or both. "
        "The source is never touched; a phase can start from the child by init_from.",
    )
    parser.add_argument(
        "--from", dest="source", required=True, help="a run, a phase, a checkpoint, hf:DIR or gguf:FILE"
    )
    parser.add_argument("--to", required=True, help="a new directory for the child")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--drop", action="store_true", help="remove the positional encoding (DroPE)")
    what.add_argument(
        "--positional", help="another one: rope:base=10000; yarn:factor=4 stretches what is there; A+B is a pattern"
    )
    what.add_argument("--mask-heads", metavar="SCORES.json", help="denoise heads by their scores (DoPE)")
    parser.add_argument(
        "--logit-scale",
        metavar="C",
        help="DroPE's beta, 1 + C ln(n / training length), on every layer; `fitted`: what --suite=beta of "
        "pe_lab.evaluate kept with the checkpoint",
    )
    parser.add_argument("--layers", help="which layers, such as 0,2,8-11; all by default (with --drop)")
    parser.add_argument("--count", type=int, default=1, help="how many heads of all (with --mask-heads)")
    parser.add_argument(
        "--order", default="ascending", choices=("ascending", "descending"), help="the lowest scores, or the highest"
    )
    parser.add_argument("--dope", default="all-nope", choices=DOPE, help="what becomes of them (all-nope by default)")
    norm = parser.add_mutually_exclusive_group()
    norm.add_argument(
        "--add-qk-norm",
        nargs="?",
        const="head",
        metavar="KIND",
        help="head (default), flat, query_head or query_flat; its constants are fitted on held-out text",
    )
    norm.add_argument("--remove-qk-norm", action="store_true", help="fold it into the projections, as well as can be")
    parser.add_argument("--text", help="a text file to fit a QK-norm on, instead of what the run holds out")
    return parser


def parse_layers(text: str) -> list[int]:
    """`0,2,8-11` as a list of layer numbers."""
    chosen: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.isdigit() or not last.isdigit() or int(last) < int(first):
            raise UserError(f"--layers: '{part}' is not a layer or a range such as 8-11.")
        chosen.extend(range(int(first), int(last) + 1))
    return chosen


def edited_layers(parent: Checkpoint, args: argparse.Namespace) -> tuple[Layer, ...]:
    """The parent's layers under the edit that the command line asks for."""
    if args.layers and not args.drop:
        raise UserError("--layers goes with --drop; --positional takes one encoding per layer as a pattern.")
    length = int(parent.metadata["training_length"])
    if args.drop:
        return drop(parse_layers(args.layers) if args.layers else None).apply(parent.layers)
    if args.positional:
        items = args.positional.split("+")
        return read_with(items if len(items) > 1 else items[0], parent.layers, length)
    if args.mask_heads:
        scores = read_scores(args.mask_heads, len(parent.layers), parent.model.heads)
        method, options = DOPE[args.dope]
        if method == "parts":
            options = {**options, "training_length": length}
        return denoise(parent.layers, scores, method, args.count, args.order, **options)
    return parent.layers


def logit_scale(parent: Checkpoint, text: str) -> Beta:
    """What `--logit-scale` means for this checkpoint."""
    if text != "fitted":
        try:
            return Beta(float(text), int(parent.metadata["training_length"]))
        except ValueError:
            raise UserError(f"--logit-scale='{text}' is no number. Write C, such as 0.103, or fitted.") from None
    scale = read_logit_scale(parent)
    if scale is None:
        raise UserError(f"--logit-scale=fitted: {how_to_fit(parent)}")
    return scale


def fitting_text(parent: Checkpoint, text: str | None) -> Mapping[str, np.ndarray]:
    """A batch of windows, of at most `FIT_LENGTH` tokens: from a file, or from what the checkpoint's data holds out."""
    length = min(int(parent.metadata["training_length"]), FIT_LENGTH)
    if text:
        if not parent.tokenizer:
            raise UserError(f"'{parent.path}' came without a tokenizer; --text cannot be read.")
        try:
            ids = load_tokenizer(parent.tokenizer).encode(Path(text).read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text: '{text}' cannot be read as text ({error}).") from None
        rows = min(FIT_ROWS, (len(ids) - 1) // length)
        if rows < 1:
            raise UserError(f"--text: '{text}' has {len(ids)} tokens; one window needs {length + 1}.")
        windows = np.asarray(ids[: rows * length + 1], np.int32)
        tokens, targets = windows[:-1].reshape(rows, length), windows[1:].reshape(rows, length)
        return {"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}
    if parent.converted:
        raise UserError(f"A QK-norm is fitted on text, and '{parent.path}' says nothing of its own; give --text=FILE.")
    data = from_dict(DataConfig, parent.metadata["config"]["data"], f"{parent.path}: config.data")
    try:
        found = validation_batches(data, sequence_length=length, batch_size=FIT_ROWS, count=1)
    except UserError as error:
        raise UserError(f"A QK-norm is fitted on text, and the data of '{parent.path}' is not here: {error} Or give "
                        "--text=FILE.") from None  # fmt: skip
    batch = next((batches[0] for batches in found.values() if batches), None)
    if batch is None:
        raise UserError(f"The data of '{parent.path}' holds no text out to fit a QK-norm on; give --text=FILE.")
    return batch


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    kind = "none" if args.remove_qk_norm else args.add_qk_norm
    if not (args.drop or args.positional or args.mask_heads or args.logit_scale or kind):
        raise UserError(
            "Nothing to do: give --drop, --positional, --mask-heads, --logit-scale, --add-qk-norm or --remove-qk-norm "
            "(see --help)."
        )
    to = local_path("--to", args.to)
    start_processes()
    parent = open_checkpoint(args.source)
    after, model = edited_layers(parent, args), parent.model
    if args.logit_scale:
        scale = logit_scale(parent, args.logit_scale)
        after = tuple(dataclasses.replace(layer, logit_scale=scale) for layer in after)
    what, edited = change(parent.layers, after), None
    if what == NOTHING and not kind:
        raise UserError(f"'{parent.path}' already has these encodings; there is nothing to change.")
    schedule = build_schedule(after, model.heads, model.kv_heads, model.head_dim)
    if kind:
        model, params, told = change_qk_norm(model, parent.params, kind, schedule, fitting_text(parent, args.text))
        what, edited = str(told) if what == NOTHING else f"{what}; {told}", (model, params)
    tokenizer = load_tokenizer(parent.tokenizer) if parent.tokenizer else None
    save = None if tokenizer is None else functools.partial(save_tokenizer, tokenizer)
    where = write_child(parent, after, to, what, edited, save)
    print(describe(schedule, after))
    print(f"{where}: child of {parent.path}: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
