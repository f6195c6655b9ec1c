"""`python -m pe_lab.surgery --from=A --to=B --drop`: writes an edited child of a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pe_lab.checkpoints import open_checkpoint
from pe_lab.checkpoints.surgery import change, drop, write_child
from pe_lab.config import UserError, command, local_path
from pe_lab.parallel import start_processes
from pe_lab.positional import build_schedule, describe, layers


def parser() -> argparse.ArgumentParser:
    """The command line of this verb."""
    parser = argparse.ArgumentParser(
        prog="python -m pe_lab.surgery",
        description="Writes a child of a checkpoint with the same weights and another positional encoding. "
        "The source is never touched; a phase can start from the child by init_from.",
    )
    parser.add_argument("--from", dest="source", required=True, help="a run, a phase or a checkpoint")
    parser.add_argument("--to", required=True, help="a new directory for the child")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--drop", action="store_true", help="remove the positional encoding (DroPE)")
    what.add_argument("--positional", help="another encoding, such as yarn:factor=2,original_length=1024")
    parser.add_argument("--layers", help="which layers, such as 0,2,8-11; all by default (with --drop)")
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


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    if args.layers and not args.drop:
        raise UserError("--layers goes with --drop; --positional takes one encoding per layer as a pattern.")
    to = local_path("--to", args.to)
    start_processes()
    parent = open_checkpoint(args.source)
    if args.drop:
        after = drop(parent.layers, parse_layers(args.layers) if args.layers else None)
    else:
        after = layers(args.positional.split("+"), len(parent.layers))
    what = change(parent.layers, after)
    if after == parent.layers:
        raise UserError(f"'{parent.path}' already has these encodings; there is nothing to change.")
    where = write_child(parent, after, to, what)
    model = parent.model
    print(describe(build_schedule(after, model.heads, model.kv_heads, model.head_dim), after))
    print(f"{where}: child of {parent.path}: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
