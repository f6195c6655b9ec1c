"""The extension of a context from a checkpoint to an answer: screening, search, training at equal FLOPs, evaluation.

Everything is kept in one directory, and a command that was stopped goes on where it was:

  extend.json       what was asked for
  screening/        records of the methods without training, the cost of each layer, and the search
  arms/             a sweep: a run for each method and seed, with its evaluation
  before/           records of the checkpoint as it was, beyond the target
  answer.json, table.md, report.html
  best/             a child of the checkpoint, or the trained weights, with the encoding of the answer
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab import storage
from pe_lab.analysis.sequences import data_of as own_data
from pe_lab.checkpoints.checkpoint import Checkpoint, open_source
from pe_lab.config import DataConfig, SourceConfig, to_json
from pe_lab.data.mixture import open_mixture
from pe_lab.data.sources import KINDS
from pe_lab.errors import CheckpointError, ConfigError, DataError, UnsupportedError
from pe_lab.evaluation.command_line import as_flag
from pe_lab.evaluation.scoring.forward import Forward, tensor_shards
from pe_lab.evaluation.suites import parse_suites
from pe_lab.evaluation.suites.long_range import choose_documents, document_sizes
from pe_lab.evaluation.targets import load_subjects, locate
from pe_lab.evaluation.variants import Subject
from pe_lab.lab.extend.answer import Answer, Trained, answer_json, answer_rows, make_answer
from pe_lab.lab.extend.arms import (
    ExtensionArm,
    TrainingSettings,
    check_documents,
    flops_per_token,
    make_sweep_of,
    not_exportable,
    plan_arms,
)
from pe_lab.lab.extend.methods import (
    METHODS,
    SEARCHED,
    UNCHANGED,
    YARN,
    Chosen,
    Extension,
    choose,
    distinct,
    layer_costs,
    rotating_layers,
)
from pe_lab.lab.extend.numbers import Numbers, numbers_from_json, numbers_json, over_seeds, suite_numbers
from pe_lab.lab.extend.page import html_page, markdown
from pe_lab.lab.extend.screening import Screening, screen
from pe_lab.lab.extend.search import HISTORY, SearchSettings, search_checkpoint, search_space
from pe_lab.lab.sweeps import CellState, Runner, run_sweep
from pe_lab.lab.sweeps.state import COMPLETE
from pe_lab.language_model import LanguageModel
from pe_lab.model import complete
from pe_lab.positional import Beta, Layer, from_json, text_of
from pe_lab.results.records import RecordFile, digest, finite
from pe_lab.results.variants import VARIANTS
from pe_lab.storage import AnyPath, exists, read_json, write_json
from pe_lab.terminal import table

PLAN, SCREENED = "extend.json", "screening.json"
ANSWER, PAGE, TABLE = "answer.json", "report.html", "table.md"
FEWEST_DOCUMENTS = 4  # of twice the target, for that to be measured
Show = Callable[[str], None]  # prints a line
Look = Callable[[Sequence[CellState]], None]
ALWAYS = (UNCHANGED, YARN)  # are trained in any case
SAME_FREQUENCIES = ("ntk_by_parts", "dynamic_ntk")  # at the target as YaRN and NTK
FORMS = ("drope", "slow_half")  # DroPE, and the drop of half of the pairs: trained unless others are named


@dataclass(frozen=True)
class ExtensionPlan:
    """What is asked for.

    Attributes:
      source: the checkpoint, as `--from` gives it.
      target: in tokens.
      methods: to compare without training.
      arms: to train; (): `ALWAYS`, the best `train_best` of the screening, and `FORMS`.
      training: what all arms have in common; None: nothing is trained.
      seeds: of the arms.
      search: None: nothing is searched.
      options: of suites.
      directory: of everything.
      left_out: methods that are not trained, since they cannot be exported.
      suites: options of `pe_lab.evaluate` for the suites that measure the arms beside the score; (): none do.
      export: forms of `best/` beside its own, hf or gguf.
    """

    source: str
    target: int
    methods: tuple[str, ...]
    arms: tuple[str, ...]
    train_best: int
    training: TrainingSettings | None
    seeds: tuple[int, ...]
    search: SearchSettings | None
    search_sequences: int
    options: Mapping[str, Any]
    data: DataConfig
    directory: AnyPath
    left_out: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    export: tuple[str, ...] = ()


@dataclass(frozen=True)
class Screened:
    """What the screening has left in its directory.

    Attributes:
      layers: {key: the layers of a possible method}.
      impossible: {key: why a method is none here}.
      searched_flops: that the search took.
    """

    screening: Screening
    layers: Mapping[str, tuple[Layer, ...]]
    impossible: Mapping[str, str]
    searched_flops: float = 0.0

    def chosen(self, keys: Sequence[str]) -> list[Chosen]:
        """The possible ones of these methods, each once: of those that are the same, the one that was screened."""
        screened = {self.layers[key]: key for key in reversed(self.screening.numbers)}
        found = [Chosen(screened.get(self.layers[key], key), self.layers[key]) for key in keys if key in self.layers]
        return distinct(found)[0]


def lengths_of(plan: ExtensionPlan, subject: Subject) -> tuple[int, ...]:
    """From the training length to the target, in factors of 2."""
    return factors_of_two(subject.training_length, plan.target)


def check(plan: ExtensionPlan, subject: Subject) -> None:
    """Checks what can be checked before anything is measured.

    Raises:
      ConfigError: the target is not beyond the training length.
      DataError: no held-out document, or none to train on, has the length of the target.
    """
    trained = subject.training_length
    if plan.target <= trained:
        raise ConfigError(
            f"--length={plan.target}: the checkpoint was trained on {trained:,} tokens. Give more, such as 4x."
        )
    if any(layer.scale_at(trained) != 1 for layer in subject.lm.layers):
        raise ConfigError(
            f"{subject.path} has a logit scale of its own within its training length, beside which none can be fitted."
        )
    texts = [one for one in open_mixture(plan.data).sources if one.prepared is not None]
    if plan.training is not None and plan.training.long:
        check_documents(plan.data, plan.target)
    streams = [one.prepared.streams["validation"] for one in texts]
    if any(choose_documents(stream, plan.target, 1) for stream in streams):
        return
    sizes = [document_sizes(stream) for stream in streams]
    count, longest = sum(map(len, sizes)), max((int(one.max(initial=0)) for one in sizes), default=0)
    raise DataError(
        f"None of {count:,} held-out documents has more than {plan.target:,} tokens; the longest has {longest:,}. Give "
        "--data with longer documents, or a shorter --length."
    )


def expected(plan: ExtensionPlan, subject: Subject, keys: Sequence[str]) -> tuple[list[Chosen], dict[str, str]]:
    """The possible methods of `keys` before anything is measured, and why others are not: {key: reason}.

    Those that need a measurement have layers of the same cost and the same kinds of encodings.
    """
    given = Extension(subject, plan.target, layer_costs=dict.fromkeys(rotating_layers(subject), 0.0))
    if plan.search is not None:
        space = search_space(subject, plan.target)
        given = dataclasses.replace(given, searched=space.layers(space.known()["YaRN"], subject.lm.layers))
    return choose(keys, given)


def check_training(plan: ExtensionPlan, subject: Subject) -> None:
    """Plans the arms that may be trained and makes the configs of their runs, without writing any.

    Raises:
      ConfigError: the budget is too small for one step, or the directory has runs of the same names that are others.
      UserError: the config of an arm is wrong; names it.
    """
    assert plan.training is not None
    keys = plan.arms or tuple(key for key in (*ALWAYS, *FORMS) if key not in plan.left_out)
    arms, _ = plan_arms(distinct(expected(plan, subject, keys)[0])[0], subject, plan.training, {})
    known = [arm for arm in arms if not arm.chosen.method.needs]
    make_sweep_of(known, plan.training, plan.seeds, plan.directory / "arms")


# --------------------------------------------------------------------------------------------------------------------
# Without training


def screen_methods(plan: ExtensionPlan, show: Show) -> Screened:
    """Measures all methods without training, after the costs of layers and the search that some need."""
    subject = load(plan.source)
    check(plan, subject)
    where = plan.directory / "screening"
    keys = tuple(dict.fromkeys((*plan.methods, *plan.arms, *ALWAYS, *FORMS)))
    needs = {METHODS[key].needs for key in keys}
    given, flops = Extension(subject, plan.target), 0.0
    if "layer_costs" in needs:
        given = dataclasses.replace(given, layer_costs=_layer_costs(plan, subject, where, show))
    if "searched" in needs and plan.search is not None:
        search, objective = search_checkpoint(
            subject, plan.data, plan.target, where, plan.search, sequences=plan.search_sequences, show=show
        )
        read = {**objective.read_before, plan.target: len(search.history) * objective.tokens}
        flops = sum(tokens * flops_per_token(subject, subject.lm.layers, n) / 3 for n, tokens in read.items())
        given = dataclasses.replace(given, searched=search.space.layers(search.best.genes, subject.lm.layers))
        show(f"{where / HISTORY}: {len(search.history):,} candidates, {flops:.2e} FLOPs")
    chosen, impossible = choose(keys, given)
    screened, same = distinct([one for one in chosen if one.key in plan.methods])
    for key in (key for key in plan.methods if key in impossible | same):
        show(f"{METHODS[key].name} left out: {(impossible | same)[key]}.")
    found = screen(subject, plan.data, screened, lengths_of(plan, subject), where, plan.options)
    made = Screened(found, {one.key: one.layers for one in chosen}, impossible, flops)
    write_json(where / SCREENED, _screened_json(made))
    return made


def _layer_costs(plan: ExtensionPlan, subject: Subject, where: AnyPath, show: Show) -> dict[int, float]:
    file = where / "layer_costs.json"
    about = {"checkpoint": subject.id, "data": _data_digest(plan.data)}
    if storage.is_file(file) and {key: (found := read_json(file)).get(key) for key in about} == about:
        return {int(n): float(cost) for n, cost in found["costs"].items()}
    show("the cost of dropping each layer's encoding, one at a time")
    forward = Forward(complete(subject.checkpoint.model), tensor=tensor_shards(subject.lm.mesh))
    costs = layer_costs(subject, plan.data, forward, forward.place(subject.checkpoint.params))
    write_json(file, {**about, "costs": {str(n): cost for n, cost in costs.items()}})
    return costs


def _screened_json(made: Screened) -> dict[str, Any]:
    found = made.screening
    return {
        "target": found.target,
        "training_length": found.trained,
        "numbers": {key: numbers_json(numbers) for key, numbers in found.numbers.items()},
        "scales": {key: {str(n): scale for n, scale in scales.items()} for key, scales in found.scales.items()},
        "layers": {key: [to_json(layer) for layer in layers] for key, layers in made.layers.items()},
        "impossible": dict(made.impossible),
        "searched_flops": made.searched_flops,
    }


def read_screened(plan: ExtensionPlan) -> Screened:
    """What `screen_methods` has written; `DataError` if it has not."""
    file = plan.directory / "screening" / SCREENED
    if not storage.is_file(file):
        raise DataError(f"'{plan.directory}' has no screening yet. Run the command without --only first.")
    found = read_json(file)
    return Screened(
        Screening(
            {key: numbers_from_json(numbers) for key, numbers in found["numbers"].items()},
            {key: {int(n): scale for n, scale in scales.items()} for key, scales in found["scales"].items()},
            found["target"],
            found["training_length"],
        ),
        {key: tuple(map(from_json, layers)) for key, layers in found["layers"].items()},
        found["impossible"],
        found["searched_flops"],
    )


# --------------------------------------------------------------------------------------------------------------------
# Training


def default_arms(plan: ExtensionPlan, screening: Screening) -> tuple[str, ...]:
    """Always no change and YaRN, the best of the screening beside them, DroPE and the drop of the slow half."""
    others = [key for key in screening.ranked() if key not in (*ALWAYS, *FORMS, *SAME_FREQUENCIES)]
    best = others[: plan.train_best]
    return tuple(key for key in dict.fromkeys((*ALWAYS, *best, *FORMS)) if key not in plan.left_out)


def make_arms(plan: ExtensionPlan, subject: Subject, screened: Screened, show: Show) -> list[ExtensionArm]:
    """The arms to train, at equal FLOPs."""
    if plan.training is None:
        raise ConfigError("--no-training trains nothing, so that there is nothing to train, to evaluate or to answer.")
    keys = plan.arms or default_arms(plan, screened.screening)
    chosen = screened.chosen(keys)
    reasons = {key: reason for key, reason in screened.impossible.items() if key in keys}
    # Of layers that the screening has chosen it is known only now.
    reasons |= (unsaid := not_exportable(plan.source, plan.target, chosen, plan.export))
    for key in unsaid.keys() & set(plan.arms):
        raise UnsupportedError(f"--export: {METHODS[key].name}: {unsaid[key]}.")
    possible = [one for one in chosen if one.key not in unsaid]
    arms, left_out = plan_arms(possible, subject, plan.training, {SEARCHED: screened.searched_flops})
    for key, reason in {**reasons, **left_out}.items():
        show(f"{METHODS[key].name} is not trained: {reason}.")
    return arms


def train_arms(
    plan: ExtensionPlan, arms: Sequence[ExtensionArm], runner: Runner, retry: bool, command: str, look: Look
) -> tuple[list[CellState], bool]:
    """Trains the arms; the states of their runs, and whether they were stopped."""
    assert plan.training is not None
    sweep = make_sweep_of(arms, plan.training, plan.seeds, plan.directory / "arms")
    _, states, stopped = run_sweep(sweep, runner, retry, command, look)
    return [state for state in states if state.cell.name in sweep.names], stopped


# --------------------------------------------------------------------------------------------------------------------
# Evaluation


def evaluate_arms(plan: ExtensionPlan, show: Show) -> Answer:
    """Measures the checkpoint as it was and all runs, from the training length to twice the target.

    The answer is written as answer.json, for what comes after.
    """
    screened, subject = read_screened(plan), load(plan.source)
    arms = make_arms(plan, subject, screened, lambda line: None)
    lengths = _final_lengths(plan, subject, show)
    best = [key for key in screened.screening.ranked() if key in {arm.key for arm in arms}][:1]
    untrained = screened.chosen(tuple(dict.fromkeys((UNCHANGED, YARN, *best))))
    before = screen(subject, plan.data, untrained, lengths, plan.directory / "before", plan.options)
    trained_length = subject.training_length
    del subject
    files = sorted((plan.directory / "before" / "long_range.key_tokens").glob("*.json"))
    options = {"reference": str(files[-1]) if len(files) == 1 else plan.source, **plan.options}
    trained = []
    for arm in arms:
        of_seeds, scales = [], []
        for seed in plan.seeds:
            run = plan.directory / "arms" / f"{arm.key}__seed={seed}"
            show(f"evaluation of {run.name}")
            model = load(str(run))
            own = Chosen(arm.key, model.lm.layers)
            found = screen(model, plan.data, [own], lengths, run / "evaluation", options)
            of_seeds.append(found.numbers[arm.key])
            scales.append(found.scales[arm.key].get(plan.target, 1.0))
        trained.append(Trained(arm, over_seeds(of_seeds), tuple(scales)))
    found = make_answer(
        trained, before.numbers[UNCHANGED], screened.screening, plan.target, trained_length, len(plan.seeds)
    )
    write_json(plan.directory / ANSWER, finite(answer_json(found)))
    return found


def read_answer(plan: ExtensionPlan, subject: Subject) -> Answer:
    """The answer of what was measured, with the scores of the other suites; `DataError` if nothing was."""
    file = plan.directory / ANSWER
    if not storage.is_file(file):
        raise DataError(f"'{plan.directory}' has no answer yet. Run the command without --only first.")
    found, screened = read_json(file), read_screened(plan)
    if found["seeds"] != len(plan.seeds):
        raise DataError(f"'{file}' is of {found['seeds']} seeds, not of {len(plan.seeds)}. Run --only=evaluate first.")
    of_arms = {one["variant"]: one for one in found["arms"]}
    arms = [arm for arm in make_arms(plan, subject, screened, lambda line: None) if arm.key in of_arms]
    trained = []
    for arm in arms:
        one = of_arms[arm.key]
        trained.append(Trained(arm, numbers_from_json(one["numbers"]), tuple(one["scales"])))
    trained = [
        dataclasses.replace(one, numbers=dict(one.numbers) | over_seeds(_of_suites(plan, scaled(plan, one))))
        for one in trained
    ]
    (of_suites,) = _of_suites(plan, [(plan.directory / "before", "", VARIANTS[0])])
    before = numbers_from_json(found["before"]) | of_suites
    return make_answer(trained, before, screened.screening, plan.target, subject.training_length, len(plan.seeds))


def scaled(plan: ExtensionPlan, trained: Trained) -> list[tuple[AnyPath, str, str]]:
    """Of the run of each seed: its directory, its checkpoint, and the text of its layers with the scale that fits."""
    found = []
    for seed, scale in zip(plan.seeds, trained.scales, strict=True):
        run, arm = plan.directory / "arms" / f"{trained.arm.key}__seed={seed}", trained.arm
        layers = with_scale(arm.chosen.layers, scale, arm.length, plan.target)
        found.append((run / "evaluation", locate(str(run)).paths[-1], text_of(layers)))
    return found


def _of_suites(plan: ExtensionPlan, runs: Sequence[tuple[AnyPath, str, str]]) -> list[Numbers]:
    """The scores of the suites that `plan.suites` names, from the records of each run's variant."""
    option = next((one for one in plan.suites if one.startswith("--suite=")), "")
    names = parse_suites(option.removeprefix("--suite=")) if option else ()
    found = []
    for directory, _, variant in runs:
        records = [record for name in names for record in RecordFile(directory / f"{name}.jsonl").records]
        found.append(suite_numbers([record for record in records if record["variant"] == variant]))
    return found


def suite_commands(plan: ExtensionPlan, subject: Subject) -> list[list[str]]:
    """The commands that measure the suites: of the checkpoint as it was, and of every run under the scale that fits."""
    if not plan.suites:
        return []
    answer = read_answer(plan, subject)
    lengths = ",".join(map(str, (*lengths_of(plan, subject), 2 * plan.target)))
    base = ["-m", "pe_lab.evaluate", f"--lengths={lengths}", *plan.suites]
    source = locate(plan.source).paths[-1]
    found = [[*base, f"--from={source}", f"--out={plan.directory / 'before'}", f"--variants={as_flag(VARIANTS[0])}"]]
    for one in answer.trained:
        for directory, checkpoint, text in scaled(plan, one):
            positional = f"--positional={one.arm.chosen.name}:{text}"
            found.append([*base, f"--from={checkpoint}", f"--out={directory}", positional])
    return found


def with_scale(layers: Sequence[Layer], scale: float, training_length: int, target: int) -> tuple[Layer, ...]:
    """The layers with a logit scale that is 1 up to the training length, and at the target `scale` times theirs."""
    if scale == 1 or target <= training_length:
        return tuple(layers)

    def law(layer: Layer) -> Beta:
        return Beta((scale * layer.scale_at(target) - 1) / math.log(target / training_length), training_length)

    return tuple(dataclasses.replace(layer, logit_scale=law(layer)) for layer in layers)


def _final_lengths(plan: ExtensionPlan, subject: Subject, show: Show) -> tuple[int, ...]:
    """From the training length to twice the target, where there are held-out documents of that length."""
    twice, sources = 2 * plan.target, open_mixture(plan.data).sources
    streams = [one.prepared.streams["validation"] for one in sources if one.prepared is not None]
    if any(len(choose_documents(stream, twice, FEWEST_DOCUMENTS)) == FEWEST_DOCUMENTS for stream in streams):
        return (*lengths_of(plan, subject), twice)
    show(
        f"Fewer than {FEWEST_DOCUMENTS} held-out documents have more than {twice:,} tokens: nothing is measured there."
    )
    return lengths_of(plan, subject)


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints


def load(source: str) -> Subject:
    """The last checkpoint that a path means, with its weights."""
    target = locate(source)
    (subject,) = load_subjects(target, target.paths[-1:])
    return subject


def data_of(given: str | None, subject: Subject) -> DataConfig:
    """The data of `--data`, or of the checkpoint's run.

    Raises:
      ConfigError: neither tells any.
    """
    tokenizer = subject.checkpoint.tokenizer
    if given is None:
        if (own := own_data(subject)) is None:
            raise ConfigError(f"'{subject.path}' does not tell its data. Give --data=SOURCE, such as 'books/*.jsonl'.")
        # A tokenizer that the run trained would be another one, of other sources.
        return dataclasses.replace(own, tokenizer=tokenizer) if tokenizer and not own.prepared else own
    if storage.path("--data", given).is_dir():
        return DataConfig(prepared=given)
    if not tokenizer:
        raise ConfigError(f"'{subject.path}' has no tokenizer, so that --data has to be a directory of pe_lab.prepare.")
    source = given
    if given.partition(":")[0] not in KINDS:
        kinds = {".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
        kind = next((kind for end, kind in kinds.items() if re.search(rf"\{end}(\.\w+)?$", given)), "text")
        source = f"{kind}:{given}"
    return DataConfig((SourceConfig(source=source),), tokenizer=tokenizer, validation_fraction=0.05)


def described(source: str) -> Subject:
    """The last checkpoint that a path means, without its weights: for plans."""
    target = locate(source)
    opened = open_source(target.paths[-1])
    metadata = {**opened.metadata, "training_length": opened.training_length}
    if not opened.length_given:
        raise CheckpointError(
            f"'{source}' does not tell its training length. Write it into config.json, as max_position_embeddings."
        )
    path = storage.path("--from", target.paths[-1])
    checkpoint = Checkpoint(path, 0, {}, opened.model, opened.layers, metadata, opened.tokenizer)
    return Subject(LanguageModel(checkpoint, opened.layers, None), target.run, target.paths[-1])


def factors_of_two(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first, ... and last."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return (*found, last)


def _data_digest(data: DataConfig) -> str:
    return digest([[source.name, source.fingerprint] for source in open_mixture(data).sources])


def failed(states: Sequence[CellState]) -> list[CellState]:
    """The runs that are not complete."""
    return [state for state in states if state.state != COMPLETE]


def check_plan(directory: AnyPath, asked: Mapping[str, Any]) -> None:
    """Compares what is asked for with what the directory has.

    Methods, arms, seeds and a budget may come later: measurements and runs have their own records of what they are of.

    Args:
      asked: what all measurements depend on.

    Raises:
      ConfigError: the directory has another extension, or other files.
    """
    if not exists(directory / PLAN):
        files = storage.children(directory) if exists(directory) else []
        if any(not child.name.startswith(".") for child in files):
            raise ConfigError(f"--workdir '{directory}' is not empty and no extension. Choose a new directory.")
        return
    before = read_json(directory / PLAN)
    if differing := [key for key in asked if before.get(key) != asked[key]]:
        told = "; ".join(f"{key}: {before.get(key)} there, {asked[key]} here" for key in differing[:4])
        raise ConfigError(f"--workdir '{directory}' is another extension ({told}). Choose another directory.")


def write_plan(directory: AnyPath, asked: Mapping[str, Any], budget: Mapping[str, Any]) -> None:
    """Writes what is asked for.

    Args:
      budget: what a budget in hours is for the first command; see `known_budget`.
    """
    before = read_json(directory / PLAN) if exists(directory / PLAN) else {}
    content = {**asked, "budget": dict(budget) or before.get("budget", {})}
    if content != before:
        write_json(directory / PLAN, content)


def known_budget(directory: AnyPath, budget: str, runs: int) -> int | None:
    """The tokens of an arm that the first command found for a budget: the speed of a machine varies."""
    file = directory / PLAN
    found = read_json(file).get("budget", {}) if exists(file) else {}
    return found["tokens"] if (found.get("text"), found.get("runs")) == (budget, runs) else None


def write_answer(plan: ExtensionPlan, answer: Answer, screening: Screening, command: str) -> AnyPath:
    """Writes report.html and table.md, and prints the answer; the path of the page.

    Args:
      command: the line that made the answer.
    """
    assert plan.training is not None
    sweep = make_sweep_of([one.arm for one in answer.trained], plan.training, plan.seeds, plan.directory / "arms")
    commands = [command] + [shlex.join(["python", *cell.command(sweep.directory)[1:]]) for cell in sweep.asked]
    files = {
        plan.directory / TABLE: markdown(answer, screening),
        plan.directory / PAGE: html_page(answer, screening, plan.source, commands),
    }
    storage.write_files({path: text.encode() for path, text in files.items()})
    print(answer.sentence(), flush=True)
    print(table(*answer_rows(answer)), flush=True)
    if not math.isnan(answer.correlation):
        print(f"rank correlation of the screening with the trained arms: {answer.correlation:.2f}")
    print(f"{plan.directory / PAGE}; open it in a browser.", flush=True)
    return plan.directory / PAGE
