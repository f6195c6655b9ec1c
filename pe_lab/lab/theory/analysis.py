"""Constructions and bounds of the papers as numbers; see `pe_lab.lab.theory`."""

from __future__ import annotations

import argparse
import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pe_lab.analysis.analysis import Analysis
from pe_lab.lab.theory import dope, drope, notebook, p_rope
from pe_lab.lab.theory.statement import Statement
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts
from pe_lab.results.findings import Findings
from pe_lab.results.table import TextTable
from pe_lab.terminal import Progress, any_seed, console

PAPERS = ("p-RoPE", "DroPE", "DoPE", "pe_notebook")
ABOUT = 50  # statements, for the progress bar


def statements(seed: int = 0) -> Iterator[Statement]:
    """Every statement as it is measured, in the order of the papers; `seed`, not negative, is of all random inputs."""
    for paper in (p_rope, drope, dope, notebook):
        yield from paper.statements(seed)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=any_seed, default=0, help="of all random inputs (default: %(default)s)")


def _run(arguments: argparse.Namespace) -> Findings:
    found: list[Statement] = []
    with Progress(console(), "theory", ABOUT) as progress:
        for one in statements(arguments.seed):
            found.append(one)
            progress.update(len(found), f"{one.source}: {one.verdict}")
    tables = [_table(paper, [one for one in found if one.source.startswith(f"{paper},")]) for paper in PAPERS]
    sentences = [_sentence(one) for one in found]
    sentences.append(_counts(found))
    numbers = {
        f"{index}/{name}": np.asarray(value) for index, one in enumerate(found) for name, value in one.numbers.items()
    }
    metadata = {"statements": [{**dataclasses.asdict(one), "numbers": None} for one in found]}
    shapes = {str(index): one.source for index, one in enumerate(found)}
    return Findings(tuple(sentences), tuple(tables), _figures(found), numbers, shapes, metadata)


def _counts(found: Sequence[Statement]) -> str:
    """How many of the papers' statements hold, and of the corrected forms beside them."""
    own, forms = (
        collections.Counter(one.verdict for one in found if one.corrected == corrected) for corrected in (False, True)
    )
    return (
        f"{own.total()} statements of the papers: {own['holds']} hold, {own['fails']} fail. "
        f"{forms.total()} corrected forms beside them: {forms['holds']} hold, {forms['fails']} fail."
    )


def _sentence(one: Statement) -> str:
    quote = f"The paper has: {one.quote} " if one.quote and not one.corrected else ""
    return f"{one.source}: {one.verdict}. {quote}{one.measured} {one.note}".strip()


def _table(paper: str, found: Sequence[Statement]) -> TextTable:
    rows = tuple((one.source.removeprefix(f"{paper}, "), one.verdict, one.sentence) for one in found)
    return TextTable(paper, ("statement", "verdict", "sentence"), rows, words=3)


def _figures(found: Sequence[Statement]) -> tuple[Figure, ...]:
    """p-RoPE's Figures 2 and 8, and DoPE's Figures 3 to 6, from the numbers of their statements."""
    numbers = {one.source: one.numbers for one in found}

    def line(label: str, of: Mapping[str, Any], x: str, y: str) -> Line:
        return Line(label, np.asarray(of[x]), np.asarray(of[y]))

    ones, normal = numbers["p-RoPE, Figure 2 (a)"], numbers["p-RoPE, Figure 2 (b)"]
    error = 1.96 * np.asarray(normal["standard_error"])
    mean = np.asarray(normal["logit"])
    around = Line("mean logit", np.asarray(normal["distance"]), mean, mean - error, mean + error)
    ranges = numbers["p-RoPE, Figure 8 (a)"]
    wider = [line(f"range {n}x", ranges, "distance", f"logit_range_{n}") for n in (1, 4, 16, 64)]
    heads = numbers["DoPE, Figures 3 to 6 and Section 5.5, low rank"]
    kinds = ("coherent", "isotropic", "one_pair")
    energy = [
        Line(
            kind.replace("_", " "),
            np.arange(1.0, 1 + len(heads[f"energy_{kind}"])),
            np.asarray(heads[f"energy_{kind}"]),
        )
        for kind in kinds
    ]
    similarity = np.stack([np.asarray(heads[f"token_similarity_{kind}"]) for kind in kinds])
    return (
        LineCharts(
            "decay",
            "Logits by distance",
            "Queries and keys of ones decay with distance, Gaussian ones do not (p-RoPE, Figure 2).",
            (("all ones", (line("logit", ones, "distance", "logit"),)), ("Gaussian", (around,))),
            "distance, tokens",
            "mean logit, normalized",
            log_x=True,
        ),
        LineCharts(
            "random_positions",
            "Logits of all-ones vectors under randomized positions",
            "A larger range of positions makes them decay faster (p-RoPE, Figure 8a).",
            (("all ones", tuple(wider)),),
            "distance, tokens",
            "mean logit, normalized",
            log_x=True,
        ),
        LineCharts(
            "low_rank",
            "Energy of a head's queries in its first principal components",
            "A head whose queries stay in a cone needs few components, an isotropic one all (DoPE, Figures 3 to 6).",
            (("cumulative energy", tuple(energy)),),
            "components",
            "share of the energy",
        ),
        HeatMaps(
            "similarity",
            "Similarity of each token's query to the first principal component",
            "A slow pair makes it periodic over the sequence (DoPE, Figure 6).",
            similarity[None],
            ("cosine",),
            tuple(kind.replace("_", " ") for kind in kinds),
            tuple(map(str, range(similarity.shape[1]))),
            "",
            "head",
            "token",
            "cosine",
            "diverging",
            (-1.0, 1.0),
        ),
    )


ANALYSIS = Analysis(
    "p-RoPE, sections 3 to 6; DroPE, section 3 and appendix B; DoPE, section 4; pe_notebook",
    _options,
    _run,
    models=False,
)
