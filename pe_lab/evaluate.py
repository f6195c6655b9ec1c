"""`python -m pe_lab.evaluate --from=runs/NAME`: scores beyond the training length, by suite and variant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pe_lab import storage
from pe_lab.evaluation.command_line import parse_arguments
from pe_lab.evaluation.tasks.suites import parse_suites
from pe_lab.results.records import Record
from pe_lab.terminal import console, works_on


@works_on
def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    from pe_lab.evaluation import tables
    from pe_lab.evaluation.tasks.ruler.files import score_predictions
    from pe_lab.evaluation.variants import ALL, parse_methods
    from pe_lab.parallel import one_program

    if arguments.predictions:
        predictions = storage.local_copy(storage.path("--predictions", arguments.predictions))
        tables.print_records(score_predictions(predictions))
        return 0
    suites = parse_suites(arguments.suite) if arguments.suite is not None else None
    methods = None if arguments.methods in (None, ALL) else parse_methods(arguments.methods)
    with one_program(arguments.together):
        records = evaluate(arguments, suites, methods)
        tables.print_records(records)
        if arguments.by_position:
            tables.print_by_position(records)
    return 0


def evaluate(
    arguments: argparse.Namespace, suites: dict[str, tuple[str, ...]] | None, methods: tuple[str, ...] | None
) -> list[Record]:
    """The records of all targets, measured or read."""
    from pe_lab.evaluation.session import Session
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
        session = Session(target, arguments, suites, methods, out)
        records += [{**record, "run": target.display_name} for record in session.run()]
    return records


if __name__ == "__main__":
    sys.exit(main())
