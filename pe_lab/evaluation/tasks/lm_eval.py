"""The suite of lm-evaluation-harness' tasks, which `pe_lab.evaluation.lm_eval` runs."""

from __future__ import annotations

from pe_lab.evaluation.tasks.task import Suite
from pe_lab.terminal import natural

SUITE = Suite(
    name="lm_eval",
    title="lm-evaluation-harness",
    about="Scores as EleutherAI's lm-evaluation-harness computes them, ± its own standard errors.",
    average_of=0,
    flags={
        "--lm-eval-tasks": {"metavar": "DIR", "help": "where lm_eval finds more tasks (YAML)"},
        "--num-fewshot": {
            "type": natural,
            "help": "examples in lm_eval's prompts (default: the task's)",
        },
    },
)
