"""The studies of `pe_lab.analyze`, a module each. A new study is a module with a `STUDY`, and its entry here."""

from __future__ import annotations

from pe_lab.analysis.studies import (
    check,
    dope,
    frequency_use,
    head_entropy,
    heads,
    knock_out,
    layers,
    logit_bounds,
    phase,
    positional_bias,
    theory,
)
from pe_lab.analysis.study import Study

MODULES = (
    check,
    frequency_use,
    heads,
    logit_bounds,
    head_entropy,
    dope,
    positional_bias,
    phase,
    theory,
    layers,
    knock_out,
)
STUDIES: dict[str, Study] = {module.STUDY.name: module.STUDY for module in MODULES}
