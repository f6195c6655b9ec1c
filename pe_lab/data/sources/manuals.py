"""The corpus `manuals`: English from documentation packages of Debian 12, downloaded at its first use.

The packages are in `manuals.tsv`: the file in the pool, its SHA-256, the files in it that are documents, and its
licence, as its copyright file has it.
"""

from __future__ import annotations

import csv
from pathlib import Path

from pe_lab.data.sources.debian import Corpus, Package
from pe_lab.data.sources.paragraphs import is_english_prose


def _packages() -> tuple[Package, ...]:
    with Path(__file__).with_name("manuals.tsv").open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return tuple(Package(**row) for row in rows)


MANUALS = Corpus("manuals", _packages(), is_english_prose, repeats=False, cuts=True)
