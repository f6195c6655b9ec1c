"""pe_lab's models in EleutherAI's lm-evaluation-harness: the model class, and the harness's command line.

    python -m pe_lab.evaluation.lm_eval --model_args pretrained=runs/x,max_length=4096 --tasks arc_easy,hellaswag

`python -m pe_lab.evaluate --suite=lm_eval:TASKS` writes result records instead.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from typing import Any

from pe_lab.errors import ConfigError, DataError, UserError
from pe_lab.evaluation.lm_eval.adapter import adapter
from pe_lab.evaluation.lm_eval.task_lists import by_hand
from pe_lab.terminal import works_on

__all__ = ["PeLabLM", "adapter", "main"]  # noqa: F822


def __getattr__(name: str) -> Any:
    # The class is made on request: its base is the harness's, which other users of this package need not install.
    if name == "PeLabLM":
        return adapter()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@works_on
def main(argv: Sequence[str]) -> int:
    """The harness's own command line, with `--model pe_lab --batch_size auto` by default."""
    adapter()
    from lm_eval.__main__ import cli_evaluate

    # Its bootstraps fork otherwise; see harness._in_one_process.
    multiprocessing.set_start_method("spawn", force=True)
    before, sys.argv = sys.argv, ["lm-eval", *with_defaults(argv)]
    try:
        cli_evaluate()
    except ConnectionError as error:
        raise DataError(f"A task's dataset cannot be opened: {error}. {by_hand('--include_path')}") from error
    except ValueError as error:
        if isinstance(error, UserError) or "Tasks not found" not in str(error):
            raise
        raise ConfigError(f"{error}. `python -m pe_lab.evaluation.lm_eval ls tasks` lists them all.") from error
    finally:
        sys.argv = before
    return 0


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """The arguments of a run with pe_lab's defaults; those of other commands, or with a config, unchanged."""
    given = {argument.partition("=")[0] for argument in arguments}
    if not given or arguments[0] in ("ls", "validate") or given & {"--config", "-C", "--help", "-h"}:
        return list(arguments)
    added = [] if given & {"--model", "-M"} else ["--model", "pe_lab"]
    added += [] if given & {"--batch_size", "-b"} else ["--batch_size", "auto"]
    return [*arguments, *added]
