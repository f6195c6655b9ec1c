"""Statements of papers: their verdicts, and the numbers that their sentences name."""

import dataclasses
import json
import re

import pytest

from pe_lab import analyze
from pe_lab.lab.theory import analysis as theory
from pe_lab.lab.theory.analysis import statements
from pe_lab.lab.theory.statement import QUOTES, Statement
from pe_lab.results.findings import read_findings

# By hand, from the papers' proofs.
HOLDS = [
    "p-RoPE, Proposition 3.1",
    "p-RoPE, Proposition 3.2",
    "p-RoPE, Figure 2 (a)",
    "p-RoPE, Figure 2 (b)",
    "p-RoPE, Proposition 5.2",
    "p-RoPE, Theorem 5.3",
    "p-RoPE, Theorem 6.1",
    "p-RoPE, Figure 8 (a)",
    "p-RoPE, Figure 8 (b)",
    "DroPE, Definition 3.1",
    "DroPE, Proposition 3.2",
    "DroPE, Remark B.1",
    "DroPE, Proposition 3.3",
    "DroPE, Lemma B.2",
    "DroPE, Theorem 3.4",
    "DroPE, Theorem 3.4, RoPE",
    "DroPE, Lemma B.4",
    "DroPE, Proposition B.3, eq. 12 and 13",
    "DroPE, Section 4.1, corrected",
    "DroPE, eq. 3 and 10, corrected",
    "DroPE, eq. 11, corrected",
    "DroPE, Section D.1",
    "DoPE, eq. 13 to 19",
    "DoPE, Section 4.2",
    "DoPE, eq. 21 and 22",
    "DoPE, after eq. 21, corrected",
    "DoPE, eq. 21 by mean directions, corrected",
    "DoPE, Lemma A.1",
    "DoPE, eq. 24 to 26",
    "DoPE, eq. 29",
    "DoPE, eq. 30",
    "DoPE, Section 5.2, patterns",
    "DoPE, eq. 32 to 34, corrected",
    "DoPE, Figures 3 to 6 and Section 5.5, low rank",
    "DoPE, Figure 6 and Section 5.5, periodicity",
    "pe_notebook, table of accuracies",
    "pe_notebook, NTK-aware RoPE, corrected",
]
FAILS = [
    "DroPE, Remark B.1, part (2)",  # equal values: no loss depends on the weights
    "DroPE, Section 3.1",  # a norm comes before the first attention
    "DroPE, Section 4.1",  # two pairs, not five
    "DroPE, eq. 3 and 10",  # m from 1 shifts the exponent by one pair
    "DroPE, eq. 11",  # every frequency is at most 1
    "DoPE, after eq. 21",  # beyond 45 degrees the principal direction may leave the cone
    "DoPE, eq. 30 with r = 1",  # exp of the entropy of one number is 1
    "DoPE, eq. 32 to 34",  # slow bands are the coherent ones
    "pe_notebook, its test",  # Cauchy-Schwarz
    "pe_notebook, its test without encoding",
    "pe_notebook, NTK-aware RoPE",
    "pe_notebook, YaRN, relative distances",
    "pe_notebook, YaRN, transition",
    "pe_notebook, NoPE",
]


@pytest.fixture(scope="module")
def found():
    return {one.source: one for one in statements(0)}


@pytest.mark.slow  # 15 s: all statements
def test_every_statement_is_as_reasoned_by_hand(found):
    assert {source: one.holds for source, one in found.items()} == dict.fromkeys(HOLDS, True) | dict.fromkeys(
        FAILS, False
    )
    for one in found.values():
        assert one.sentence.endswith((".", ").")) and one.measured.endswith((".", ").")), one.source
        assert one.holds or one.note or f"{one.source}, corrected" in found, one.source
        assert one.holds or one.quote, f"{one.source} fails without the paper's own words"
        assert one.holds or not one.corrected
    assert set(QUOTES) <= {source.removesuffix(", corrected") for source in found}


def flat(value):
    return [value] if isinstance(value, float) else value


@pytest.mark.slow
def test_numbers_are_plain_and_name_every_number_of_the_sentence(found):
    """Numbers of the sentence are rounded: each agrees with one of `numbers` (or is in the statement) to its digits."""
    missing = []
    for one in found.values():
        json.dumps(dict(one.numbers), allow_nan=False)
        values = [x for value in one.numbers.values() for x in flat(value)]
        assert values and all(isinstance(x, float) for x in values)
        values += [-x for x in values] + [100 * x for x in values]
        known = set(re.findall(r"\d[\d,.]*\d|\d", one.sentence)) | {"0", "1", "2"}
        for text in re.findall(r"(?<![\w.^])\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?", one.measured):
            number, (mantissa, _, exponent) = float(text.replace(",", "")), text.rstrip(",").partition("e")
            digit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
            if text.rstrip(",") not in known and not any(abs(number - x) <= 0.5001 * digit for x in values):
                missing.append(f"{one.source}: {text}")
    assert not missing, "\n".join(missing)


def test_a_corrected_form_that_fails_is_counted():
    one = Statement("DoPE, eq. 1", "", "", True, {})
    form = dataclasses.replace(one, source="DoPE, eq. 2, corrected")
    found = [one, dataclasses.replace(one, holds=False), form, dataclasses.replace(form, holds=False)]
    counts = "2 statements of the papers: 1 hold, 1 fail. 2 corrected forms beside them: 1 hold, 1 fail."
    assert theory._counts(found) == counts


@pytest.mark.slow  # 2 s besides the statements
def test_the_command_shows_each_statement_with_its_verdict_and_its_numbers(found, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(theory, "statements", lambda seed: found.values())
    assert analyze.main(["theory", f"--out={tmp_path}", "--format=svg"]) == 0
    corrected = [one for one in found.values() if one.corrected]
    assert (
        f"{len(found) - len(corrected)} statements of the papers: "
        f"{len(HOLDS) - len(corrected)} hold, {len(FAILS)} fail. "
        f"{len(corrected)} corrected forms beside them: {len(corrected)} hold, 0 fail."
    ) in " ".join(capsys.readouterr().out.split())
    analysis = read_findings(tmp_path).findings
    rows = {(table.title, *row) for table in analysis.tables for row in table.rows}
    assert rows == {(*source.split(", ", 1), c.verdict, c.sentence) for source, c in found.items()}
    for sentence, one in zip(analysis.sentences[:-1], found.values(), strict=True):
        assert sentence.startswith(f"{one.source}: {one.verdict}. ")
        assert sentence.endswith(f"{one.measured} {one.note}".strip())
        assert one.corrected or one.quote in sentence
    assert {path.stem for path in tmp_path.glob("*.svg")} == {figure.name for figure in analysis.figures}


def test_a_negative_seed_is_refused(capsys):
    assert analyze.main(["theory", "--seed=-1"]) == 2
    assert "--seed: '-1' is not a whole number from 0" in capsys.readouterr().err
