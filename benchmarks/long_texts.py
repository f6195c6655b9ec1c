"""The longest sequence of each recipe's model on some machines, estimated as by `plan --evaluate-length`.

python -m benchmarks.long_texts --write docs/attention.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks.document import Place
from pe_lab.model.cache import cache_bytes
from pe_lab.parallel.topology import GIB, parse_topology
from pe_lab.planning.memory import longest
from pe_lab.planning.plan import make_plan
from pe_lab.recipes import load_config
from pe_lab.terminal import command

RECIPES = (
    "drope_16b",
    "drope_smollm:model=360m",
    "drope_smollm:model=1.7b",
    "drope_llama2",
    "p_rope",
    "table1:method=rnope_swa",
)
MACHINES = ("v5e:4x4", "h200:8")
WAYS = {"at_once": "at once, over all", "in_chunks": "in chunks, on one", "decoding": "decoding, over all"}


def _tokens(count: int) -> str:
    return f"{count / 2**20:.1f}M" if count >= 2**20 else f"{count // 2**10}k" if count else "none"


def rows() -> list[tuple[str, ...]]:
    """Headings, then a row for each recipe."""
    found = [("recipe", "weights", "cache of 128k tokens", "of 1M")]
    found[0] += tuple(f"{machine}: {way}" for machine in MACHINES for way in WAYS.values())
    for recipe in RECIPES:
        name, _, arg = recipe.partition(":")
        cells: list[str] = []
        for machine in MACHINES:
            overrides = {"mesh.data": "1", "mesh.fsdp": "-1", "mesh.tensor": "1", "data.tokenizer": "bytes"}
            config = load_config(f"configs/{name}.py" + (f":{arg}" if arg else ""), overrides)
            plan = make_plan(config, parse_topology(machine))
            phase = plan.phases[0]
            model, structure = phase.model, phase.plan.schedule.structure
            weights = 4 * model.num_parameters  # float32
            if not cells:
                caches = (cache_bytes(model.config, structure, length) for length in (2**17, 2**20))
                cells = [f"{size / GIB:.1f} GiB" for size in (weights, *caches)]
            free = plan.topology.chip.memory - weights
            for way in WAYS:
                cells.append(_tokens(longest(model, structure, plan.topology.count, max(free, 0), way)))
        found.append((recipe, *cells))
    return found


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_texts", description=__doc__, formatter_class=layout
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this document")
    arguments = parser.parse_args(argv)
    place = Place(arguments.write, "planned") if arguments.write else None
    jax.config.update("jax_platforms", "cpu")
    head, *others = rows()
    lines = ["| " + " | ".join(row) + " |" for row in (head, *others)]
    text = "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])
    text += (
        "\n\nThe longest sequence, estimated, with a copy of the float32 weights on every chip; one sequence at a time."
    )
    if place:
        place.write(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
