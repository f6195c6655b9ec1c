"""`python -m pe_lab.attention`: the implementations of attention, and which would serve what, here or elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import jax

from pe_lab.attention.capabilities import FEATURES, Request
from pe_lab.attention.dispatch import IMPLEMENTATIONS, choose, reasons_against
from pe_lab.errors import UserError
from pe_lab.parallel import hide_absent_tpu
from pe_lab.terminal import command

HEADINGS = ("", "is", "runs on", *FEATURES, "turns keys", "gradient", "ring, cache", "head_dim", "dtypes")
REQUESTS = {
    "a RoPE layer": Request(),
    "with a window": Request(needs=frozenset({"windows"})),
    "of packed documents": Request(needs=frozenset({"segments"})),
    "an ALiBi layer": Request(needs=frozenset({"slopes"})),
    "heads that rotate apart": Request(split_heads=True),
    "float32": Request(dtype="float32"),
    "1M tokens": Request(length=2**20),
    "texts on several devices": Request(spans=True),
}


def table() -> list[tuple[str, ...]]:
    """What every implementation can do, headings first."""

    def mark(yes: bool) -> str:
        return "yes" if yes else "–"

    rows = [HEADINGS]
    for name, one in IMPLEMENTATIONS.items():
        able = one.capabilities
        honours = [mark(feature in able.honours) for feature in FEATURES]
        dtypes = ", ".join(able.dtypes)
        rows.append(
            (name, one.what, ", ".join(able.platforms), *honours, mark(able.rotates_keys), mark(able.backward),
             mark(one.span is not None), able.head_dims_text, dtypes)
        )  # fmt: skip
    return rows


def choices(platform: str, head_dim: int, length: int) -> list[tuple[str, ...]]:
    """What `auto` takes for some requests on a platform, headings first."""
    rows = [("", "evaluation", "training")]
    for what, request in REQUESTS.items():
        asked = request._replace(platform=platform, head_dim=head_dim)
        if asked.length == Request().length:
            asked = asked._replace(length=length)
        found = []
        for backward in (False, True):
            try:
                found.append(choose("auto", asked._replace(backward=backward)))
            except UserError:
                found.append("none")
        rows.append((what, *found))
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the verb."""
    parser = argparse.ArgumentParser(prog="python -m pe_lab.attention", description=__doc__)
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="other than this machine's")
    parser.add_argument("--head-dim", type=int, default=64, help="K of the requests (default: %(default)s)")
    parser.add_argument("--length", type=int, default=8192, help="their tokens (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="as docs/attention.md has them")
    arguments = parser.parse_args(argv)
    if arguments.head_dim < 2 or arguments.head_dim % 2 or arguments.length < 1:
        raise UserError("--head-dim must be even and positive, --length positive.")
    hide_absent_tpu()
    platform = arguments.platform or jax.default_backend()
    layout = markdown if arguments.markdown else _aligned
    print(layout(table()))
    print(
        "\nEvery one is causal and takes grouped queries. turns keys: rotates them inside, for each query head where "
        "need be.\nring, cache: gives partial results, which texts and caches on several devices are merged from."
    )
    for name, one in IMPLEMENTATIONS.items():
        if one.capabilities.needs:
            print(f"{name} needs {one.capabilities.needs}.")
    print()
    here = f"{jax.devices()[0].device_kind}, " if platform == jax.default_backend() else ""
    print(
        f"What `auto` takes on {platform} ({here}bfloat16, heads of {arguments.head_dim} channels, "
        f"{arguments.length:,} tokens):\n"
    )
    print(layout(choices(platform, arguments.head_dim, arguments.length)))
    request = Request(platform=platform, head_dim=arguments.head_dim, length=arguments.length)
    told = [(name, " and ".join(reasons_against(name, request))) for name in IMPLEMENTATIONS]
    if any(reason for _, reason in told):
        print("\nWhat does not run there:\n")
        print("\n".join(f"{name} {reason}." for name, reason in told if reason))
    return 0


if __name__ == "__main__":
    sys.exit(main())
