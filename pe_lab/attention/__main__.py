"""Prints the implementations of attention, and which of them serves which layer, on this machine or another."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax

from pe_lab.attention.capabilities import FEATURES, AttentionRequest
from pe_lab.attention.dispatch import IMPLEMENTATIONS, choose, reasons_against
from pe_lab.attention.preferences import preference
from pe_lab.errors import ConfigError, UnsupportedError
from pe_lab.parallel import compute_capability, hide_absent_tpu
from pe_lab.terminal import argument_parser, bounded, command, positive, table

HEADER = ("", "description", "runs on", *FEATURES, "rotates keys", "gradient", "ring, cache", "head_dim", "dtypes")
REQUESTS = {
    "a RoPE layer": AttentionRequest(),
    "with a window": AttentionRequest(needs=frozenset({"windows"})),
    "of packed documents": AttentionRequest(needs=frozenset({"segments"})),
    "an ALiBi layer": AttentionRequest(needs=frozenset({"slopes"})),
    "with a learned bias by distance": AttentionRequest(needs=frozenset({"distance bias"})),
    "with a key bias and a sink": AttentionRequest(needs=frozenset({"key bias", "sinks"})),
    "with a bias by position": AttentionRequest(needs=frozenset({"position bias"})),
    "with a soft cap": AttentionRequest(needs=frozenset({"soft cap"})),
    "heads that rotate differently": AttentionRequest(split_heads=True),
    "float32": AttentionRequest(dtype="float32"),
    "heads of 256 channels": AttentionRequest(head_dim=256),
    "one sequence of 1,000 tokens": AttentionRequest(length=1000, sequences=1),
    "1M tokens": AttentionRequest(length=2**20),
    "sequences on several devices": AttentionRequest(partial=True),
}


def capabilities() -> list[tuple[str, ...]]:
    """The capabilities of every implementation, after a header."""

    def mark(yes: bool) -> str:
        return "yes" if yes else "–"

    rows = [HEADER]
    for name, one in IMPLEMENTATIONS.items():
        able = one.capabilities
        features = [feature in able.honours for feature in FEATURES]
        features += [able.rotates_keys, able.backward, one.partial is not None]
        platforms, dtypes = ", ".join(able.platforms), ", ".join(able.dtypes)
        rows.append((name, one.description, platforms, *map(mark, features), able.head_dims_text, dtypes))
    return rows


GPUS = {"a100": 8.0, "h100": 9.0, "b200": 10.0}  # and their compute capability
PLATFORMS = ("cpu", "tpu", "gpu", *GPUS)


def on_platform(name: str, head_dim: int, length: int) -> dict[str, AttentionRequest]:
    """Some requests on a platform, by what they are for; "gpu" is an H100."""
    found = {}
    for what, request in REQUESTS.items():
        platform = name if name in ("cpu", "tpu") else "gpu"
        asked = request._replace(platform=platform, capability=GPUS.get(name, 9.0) if platform == "gpu" else 0.0)
        if asked.head_dim == AttentionRequest().head_dim:
            asked = asked._replace(head_dim=head_dim)
        if asked.length == AttentionRequest().length:
            asked = asked._replace(length=length)
        found[what] = asked
    return found


def choices(platform: str, head_dim: int, length: int) -> list[tuple[str, ...]]:
    """The choices of `auto` for some requests on a platform, after a header."""
    rows = [("", "evaluation", "training")]
    for what, asked in on_platform(platform, head_dim, length).items():
        found = []
        for backward in (False, True):
            try:
                found.append(choose("auto", asked._replace(backward=backward)))
            except UnsupportedError:
                found.append("none")
        rows.append((what, *found))
    return rows


def reasons(platform: str, head_dim: int, length: int) -> list[str]:
    """Why `auto` chooses what it does on a platform: the rows of its table, what was measured, and some requests."""
    lines, rows = [], {}
    for what, asked in on_platform(platform, head_dim, length).items():
        rows.setdefault(preference(asked).requests, []).append((what, asked))
    for requests, covered in rows.items():
        row = preference(covered[0][1])
        lines += [f"{requests}: {', '.join(row.order)}"]
        for case, speeds in row.measured.items():
            numbers = ", ".join(f"{name} {speed:,.1f}" for name, speed in speeds.items())
            lines.append(f"  measured, {case}: {numbers} TFLOP/s (benchmarks/results/{row.source})")
        lines += [] if row.measured else ["  not measured"]
        for what, asked in covered:
            against = {name: reasons_against(name, asked) for name in row.order}
            able = next((name for name in row.order if not against[name]), None)
            before = row.order[: row.order.index(able)] if able else row.order
            lines.append(f"  - {what}: {able or 'none'}")
            lines += [f"      {name} {' and '.join(against[name])}" for name in before]
        lines.append("")
    return lines[:-1]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def this_platform() -> str:
    """This machine's, among PLATFORMS."""
    known = {capability: name for name, capability in GPUS.items()}
    return known.get(compute_capability(), jax.default_backend())


@command
def main(argv: Sequence[str]) -> int:
    parser = argument_parser("attention", __doc__)
    parser.add_argument("--platform", choices=PLATFORMS, help="other than this machine's; gpu is an H100")
    parser.add_argument(
        "--head-dim", type=bounded(int, 2, 2**14), default=64, help="channels of a head (default: %(default)s)"
    )
    parser.add_argument("--length", type=positive, default=8192, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--why", action="store_true", help="print the choices with their reasons and measured speeds")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    arguments = parser.parse_args(argv)
    if arguments.head_dim < 2 or arguments.head_dim % 2 or arguments.length < 1:
        raise ConfigError("--head-dim must be even and positive, --length positive.")
    hide_absent_tpu()
    platform = arguments.platform or this_platform()
    if arguments.why:
        print("\n".join(reasons(platform, arguments.head_dim, arguments.length)))
        return 0

    def show(rows: list[tuple[str, ...]]) -> None:
        print(markdown(rows) if arguments.markdown else table(rows[0], rows[1:], words=len(rows[0])))

    show(capabilities())
    print(
        "\nAll are causal and take grouped queries. rotates keys: inside the kernel, per query head where needed."
        "\nring, cache: gives partial results, from which KV caches and sequences on several devices are merged."
    )
    for name, one in IMPLEMENTATIONS.items():
        if one.capabilities.needs:
            print(f"{name} needs {one.capabilities.needs}.")
    print()
    here = f"{jax.devices()[0].device_kind}, " if platform == this_platform() else ""
    print(
        f"The choice of `auto` on {platform} ({here}bfloat16, heads of {arguments.head_dim} channels, "
        f"{arguments.length:,} tokens):\n"
    )
    show(choices(platform, arguments.head_dim, arguments.length))
    request = next(iter(on_platform(platform, arguments.head_dim, arguments.length).values()))
    against = {name: " and ".join(reasons_against(name, request)) for name in IMPLEMENTATIONS}
    if any(against.values()):
        print("\nThese do not run there:\n")
        print("\n".join(f"{name} {reason}." for name, reason in against.items() if reason))
    return 0


if __name__ == "__main__":
    sys.exit(main())
