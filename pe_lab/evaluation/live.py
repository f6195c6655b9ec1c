"""Suites on parameters in memory, at several steps of a training run: data is opened, and programs compiled, once."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from pe_lab.checkpoints.checkpoint import Checkpoint
from pe_lab.config import DataConfig, ModelConfig
from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError
from pe_lab.evaluation.generation.prompted import SEED, Prompted
from pe_lab.evaluation.measure import Evaluation, EvaluationPlan, Forwards
from pe_lab.evaluation.suite import PromptSuite, TokenSuite, read_settings
from pe_lab.evaluation.suites import SUITES, open_tasks
from pe_lab.evaluation.variants import Subject, all_variants
from pe_lab.language_model import LanguageModel
from pe_lab.model import Params, complete
from pe_lab.positional import Layer
from pe_lab.results.records import Record


class LiveEvaluation:
    """Measures suites on the parameters of a phase, without a checkpoint. Made once for a phase.

    Schedules are arguments of the compiled programs: all variants share one at each length, and the second call
    compiles nothing. All processes of a run measure together, and all get the records; nothing is written or printed.

    Args:
      model: the shape, as of training.
      layers: the encodings of the phase.
      training_length: of the phase, in tokens.
      data: where text and needles come from.
      suites: suite -> tasks, as `parse_suites` returns them; such that score tokens or ask prompts. None: those that
        are measured by default, as far as the data has a source for them.
      lengths: in tokens.
      variants: names of variants; (): as trained.
      options: of the suites, by name.
      seed: of what suites draw; None: their own.
      tokenizer: for suites that ask prompts.
      mesh: on which the parameters lie; None: on one device.
      run, phase: their names, for the records.

    Raises:
      UserError: from the first `measure`, for a suite, a variant or a length that is impossible.
    """

    def __init__(
        self,
        model: ModelConfig,
        layers: Sequence[Layer],
        training_length: int,
        data: DataConfig,
        suites: Mapping[str, Sequence[str]] | None,
        lengths: Sequence[int],
        variants: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        seed: int | None = None,
        tokenizer: Tokenizer | None = None,
        mesh: Mesh | None = None,
        run: str = "run",
        phase: str = "",
    ):
        for name in suites or ():
            if not isinstance(SUITES[name], TokenSuite | PromptSuite):
                raise ConfigError(f"The suite {name} is not measured in training: evaluate a checkpoint.")
        scored = None if suites is None else tuple(name for name in suites if isinstance(SUITES[name], TokenSuite))
        for name in scored or ():
            if reason := SUITES[name].impossible_in_training(read_settings(SUITES[name], options or {})):
                raise ConfigError(f"The suite {name} is not measured in training: {reason}.")
        names = tuple(variants) or ("as trained",)
        self._plan = EvaluationPlan(tuple(lengths), scored, names, options=options or {}, seed=seed or 0)
        asked = {name: tasks for name, tasks in (suites or {}).items() if name not in scored}
        self._tasks = open_tasks(asked, self._plan.options, self._plan.lengths)
        self._seed = SEED if seed is None else seed
        self._model, self._layers, self._tokenizer = complete(model), tuple(layers), tokenizer
        self._data, self._mesh, self._run, self._phase = data, mesh, run, phase
        self._training_length = training_length
        self._forwards: Forwards = {}
        self._opened: dict[Any, Any] = {}
        self._prompts: dict[Any, Any] = {}

    def cost(self) -> int:
        """Tokens that one `measure` reads, about; each takes a forward pass of the model."""
        options, lengths = self._plan.options, self._plan.lengths
        tokens = 0
        default = [s.name for s in SUITES.values() if s.by_default and isinstance(s, TokenSuite) and s.fits is None]
        for name in default if self._plan.suites is None else self._plan.suites:
            settings = read_settings(SUITES[name], options)
            tokens += sum(SUITES[name].cost(settings, length) for length in lengths)
        for task in self._tasks:
            count = options.get("samples") or SUITES[task.suite].samples.get(task.name, 0)
            tokens += sum(count * length for length in lengths)
        return tokens * len(self._plan.variants)

    def measure(self, params: Params, step: int, tokens: int | None = None) -> list[Record]:
        """The records of the parameters of a step. `tokens` were trained on up to it."""
        subject = self._subject(params, step, tokens)
        records: list[Record] = []
        with tempfile.TemporaryDirectory() as directory:
            if self._plan.suites != ():
                evaluation = Evaluation(
                    [subject],
                    self._data,
                    self._plan,
                    Path(directory),
                    mesh=self._mesh,
                    forwards=self._forwards,
                    opened=self._opened,
                    quiet=True,
                )
                records += evaluation.run()
            if self._tasks:
                variants = all_variants([subject], self._plan.variants, [])
                lengths, options = self._plan.lengths, self._plan.options
                asked = Prompted(
                    variants,
                    self._tasks,
                    lengths,
                    options,
                    self._seed,
                    Path(directory),
                    prompts=self._prompts,
                    quiet=True,
                )
                records += asked.run()
        return records

    def _subject(self, params: Params, step: int, tokens: int | None) -> Subject:
        """The parameters as a checkpoint that lies nowhere."""
        metadata = {
            "id": f"{self._run}-{self._phase}-{step}",
            "phase": self._phase,
            "training_length": self._training_length,
            "tokens": tokens,
            "lineage": [],
        }
        checkpoint = Checkpoint(Path(self._phase), step, params, self._model, self._layers, metadata)
        path = f"{self._phase}/checkpoints/{step}"
        return Subject(LanguageModel(checkpoint, self._layers, self._tokenizer), self._run, path)
