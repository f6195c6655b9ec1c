"""`python -m pe_lab.evaluate --from=runs/NAME`: scores beyond the training length, by suite and variant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pe_lab import storage
from pe_lab.errors import ConfigError
from pe_lab.evaluation.command_line import parse_arguments, parse_variants
from pe_lab.evaluation.suite import given_options, read_settings
from pe_lab.evaluation.suites import SUITES, parse_suites
from pe_lab.results.records import Record
from pe_lab.terminal import console, works_on


@works_on
def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    from pe_lab.evaluation import tables
    from pe_lab.evaluation.variants import ALL
    from pe_lab.parallel import one_program

    options = given_options(arguments, SUITES.values())
    of_files = [suite.from_files(read_settings(suite, options)) for suite in SUITES.values()]
    if any(found is not None for found in of_files):
        tables.print_records([record for found in of_files for record in found or ()])
        return 0
    if not arguments.source:
        raise ConfigError("--from is missing: which run, checkpoint, hf:DIR or gguf:FILE is to be evaluated?")
    suites = parse_suites(arguments.suite) if arguments.suite is not None else None
    variants = None if arguments.variants in (None, ALL) else parse_variants(arguments.variants)
    with one_program(arguments.together):
        records = evaluate(arguments, suites, variants)
        tables.print_records(records)
        if arguments.by_position:
            tables.print_by_position(records)
    return 0


def evaluate(
    arguments: argparse.Namespace, suites: dict[str, tuple[str, ...]] | None, variants: tuple[str, ...] | None
) -> list[Record]:
    """The records of all targets, measured or read."""
    from pe_lab.evaluation.session import EvaluationSession
    from pe_lab.evaluation.targets import locate_all, parse_steps

    steps = None if arguments.steps is None else parse_steps(arguments.steps)
    targets = locate_all(arguments.source, steps)
    given = storage.path("--out", arguments.out) if arguments.out else None
    for place in [given] if given else [target.root / "evaluation" for target in targets]:
        storage.check_place("--out", place)
    records: list[Record] = []
    for target in targets:
        out = given or target.root / "evaluation"
        if len(targets) > 1:
            console().print(f"{target.display_name}:")
            out = given / target.display_name if given else out
        session = EvaluationSession(target, arguments, suites, variants, out)
        records += [{**record, "run": target.display_name} for record in session.run()]
    return records


if __name__ == "__main__":
    sys.exit(main())
