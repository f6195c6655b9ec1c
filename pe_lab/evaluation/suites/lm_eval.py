"""Tasks of lm-evaluation-harness, which `pe_lab.evaluation.lm_eval` runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from pe_lab.evaluation.suite import Suite, SuiteMetric, option
from pe_lab.evaluation.suites.longbench import CHAT
from pe_lab.terminal import natural, positive


def _side(text: str) -> str:
    if text not in ("left", "middle"):
        raise argparse.ArgumentTypeError("give left or middle.")
    return text


@dataclass(frozen=True)
class HarnessSettings:
    samples: int | None = option(None, "documents a task (default: all)", positive)
    chat: bool = option(False, CHAT)
    lm_eval_tasks: str | None = option(None, "where it finds more tasks (YAML)", metavar="DIR")
    lm_eval_data: str | None = option(None, "its datasets, as the hub has them: DIR/OWNER/NAME", metavar="DIR")
    truncation: str | None = option(
        None,
        "where it cuts contexts that are too long: left, middle (default: middle in LongBench v2 and InfiniteBench)",
        _side,
    )
    num_fewshot: int | None = option(None, "examples in its prompts (default: the task's)", natural)


class HarnessSuite(Suite):
    name = "lm_eval"
    title = "lm-evaluation-harness"
    about = "Scores as EleutherAI's lm-evaluation-harness computes them, ± its own standard errors."
    metrics = (SuiteMetric("score", "score", unit="%"),)
    average_of = 0
    tasks = None
    settings = HarnessSettings


SUITE = HarnessSuite()
