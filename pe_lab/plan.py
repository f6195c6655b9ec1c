"""`python -m pe_lab.plan --config=configs/x.py --topology=v5e:16x16`: the time and the memory that a recipe needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pe_lab.config import TOPOLOGIES
from pe_lab.errors import ConfigError
from pe_lab.output import work_on
from pe_lab.recipes import load_config, split_overrides
from pe_lab.storage import check_place, write_json
from pe_lab.terminal import argument_parser, bounded, command

DESCRIPTION = """\
Prints the parameters, tokens, FLOPs and hours of a recipe and the memory of one chip, without running it. Memory is
estimated from shapes, and measured by the compiler. Compiling for a TPU slice needs no TPU, only libtpu:
pip install 'pe-lab[aot]'. Compiling for GPUs needs no GPU, only JAX's CUDA plugin: pip install 'pe-lab[gpu]'. It takes
up to minutes, so by default only the phase with the largest estimate is compiled; --phase=all compiles every phase."""

EPILOG = f"""\
topologies: {TOPOLOGIES}
local compiles for the devices of this machine. More than 8 GPUs are nodes of 8. For GPUs that are not here, XLA does
not choose kernels by measuring them, and the workspace of cuDNN is not counted.
Any key of the recipe can be set: --config.model.remat=full --config.phases.0.accumulate=4

exit status: 0, or 1 if the program does not fit the chip, or a figure is over 1% worse than --against, or 2 for bad
input"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argument_parser("plan", DESCRIPTION, EPILOG)
    p.add_argument("--config", required=True, help="recipe, argument after a colon: configs/x.py:quick")
    p.add_argument("--topology", default="local", help="chips to plan for; local by default")
    p.add_argument(
        "--slices",
        type=bounded(int, 1, 2**20),
        default=1,
        metavar="N",
        help="that many such TPU slices, joined by the network",
    )
    p.add_argument("--phase", metavar="NAME", help="phase to compile, or all; the largest by default")
    p.add_argument(
        "--evaluate-length",
        metavar="TOKENS",
        help="plan evaluating a sequence of this length (such as 128k) instead: its KV cache, and one pass over all "
        "chips",
    )
    p.add_argument(
        "--explain",
        action="store_true",
        help="also print the largest buffers, collectives, kernels and the resource that bounds the compiled step",
    )
    p.add_argument(
        "--against", type=Path, metavar="FILE", help="compare the step with one that --explain --json wrote before"
    )
    p.add_argument("--no-compile", action="store_true", help="estimates only: seconds instead of minutes")
    p.add_argument(
        "--mfu", type=bounded(float, 1e-6, 1.0), default=0.4, help="assumed share of the peak (default: %(default)s)"
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    return p


@command
def main(argv: Sequence[str]) -> int:
    rest, overrides = split_overrides(argv)
    args = parser().parse_args(rest)
    if args.json and not args.json.parent.is_dir():
        raise ConfigError(f"--json={args.json}: there is no directory '{args.json.parent}'.")
    if (args.explain or args.against) and (args.no_compile or args.evaluate_length):
        raise ConfigError("--explain and --against compile a step: leave out --no-compile and --evaluate-length.")

    import jax

    from pe_lab.parallel import start_processes
    from pe_lab.parallel.compiler import topology_devices
    from pe_lab.parallel.topology import parse_topology
    from pe_lab.planning.plan import choose_phases, make_plan
    from pe_lab.planning.report import read_report
    from pe_lab.planning.tables import print_evaluation, print_training

    if args.json:
        check_place("--json", args.json, file=True)
        work_on()
    if args.topology == "local":
        start_processes()
    else:
        # Compiling for other devices uses none of this machine, so a run may go on beside it.
        jax.config.update("jax_platforms", "cpu")
    if args.against:
        read_report(args.against)  # before minutes of compilation
    topology = parse_topology(args.topology, args.slices)
    if topology.kind == "cpu":
        topology_devices(topology)  # before JAX starts with another number of them
    plan = make_plan(load_config(args.config, overrides, inherits=True), topology)
    planned = print_evaluation if args.evaluate_length else print_training
    numbers, fits = planned(args, plan, choose_phases(plan, args.phase))
    if args.json:
        write_json(args.json, numbers)
    return 1 if fits is False else 0


if __name__ == "__main__":
    sys.exit(main())
