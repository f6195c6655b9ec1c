"""Many-shot in-context learning of mathematics (DoPE, section 5.3 and appendix A.2): solved problems, and one to solve.

DoPE publishes neither its prompt nor its choice of problems. The lengths, buffer, depths, stop strings and numbers of
samples are the paper's; the wording of the prompt and the comparison of answers are pe_lab's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError, DataError
from pe_lab.evaluation.generation.tasks import Draft, Lazy, Sample, Scores, SizedTask, half_pair, random_for
from pe_lab.evaluation.scoring.math_answers import final_answer, last_boxed, same_answer
from pe_lab.evaluation.suite import PromptSuite, SuiteMetric, option
from pe_lab.storage import at_home, read_records
from pe_lab.terminal import positive

STOP = ("</s>", "<|im_end|>", "<|endoftext|>", "Problem:")
DEPTHS = (Fraction(0), Fraction(1, 3), Fraction(2, 3), Fraction(1))
BUFFER, NEW_TOKENS = 2300, 2048
SAMPLES = {"needle": 400, "plain": 100}  # the paper's: 100 problems, at each depth and without
ZERO_SHOT = {"zero_shot": 100}  # only when it is named
FIELDS = ("problem", "solution", "answer")
ADVICE = (
    "Give a file of JSON lines with --problems=FILE: one problem a line, with the fields problem, solution and answer, "
    "as the hub's dataset nlile/hendrycks-MATH-benchmark has them (load it where there is a network, and export its "
    "split `test` with to_json)."
)


@dataclass(frozen=True)
class Problem:
    text: str
    solution: str
    answer: str


@dataclass(frozen=True)
class ManyShotTask(SizedTask):
    """A problem to solve after as many solved ones as fit, in random order, repeated where they do not suffice.

    Sample i of `plain` asks for problem i of a random order of the problems. Sample i of `needle` asks for problem
    i // 4, which is also among the solved ones, at depth 0, 1/3, 2/3 or 1 (i % 4). The five samples that ask for one
    problem have the same other solved problems, at all lengths, and the problem as `cluster` in their metadata. A
    problem that does not fit with one other is skipped.
    """

    problems: tuple[Problem, ...]
    fingerprint: str  # of their file
    needle: bool  # whether the solved problems include the problem that is asked for, once; else they exclude it
    buffer: int = BUFFER  # the tokens of the length that are left to the question and its answer
    max_new_tokens: int = NEW_TOKENS  # are left to an answer even if the buffer is smaller

    suite = "many_shot"
    metric = "accuracy"
    stop = STOP

    @property
    def name(self) -> str:
        return "needle" if self.needle else "plain"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"problems": self.fingerprint, "buffer": self.buffer, "max_new_tokens": self.max_new_tokens}

    def choose(self, tokenizer: Tokenizer, length: int, count: int, seed: int) -> Sequence[int]:
        """The drafts of the first problems that fit. Draft 4 p + d is of problem p, with depth d if it has a needle."""
        each, order = len(DEPTHS) if self.needle else 1, _order(self.problems, seed)

        def least(asked: int) -> int:
            """Tokens of the problem with its solution, one other, and what is reserved."""
            others, ends = self._others(asked, seed), (DEPTHS[0], DEPTHS[-1])
            tokens = max(len(tokenizer.encode_prompt(self._text(others, asked, 1, depth))) for depth in ends)
            return tokens + self.reserved(tokenizer, len(DEPTHS) * asked)

        problems = self.first_fitting(length, -(-count // each), order, least, "A smaller --buffer needs fewer.")
        return [len(DEPTHS) * asked + place for asked in problems for place in range(each)][:count]

    def draft(self, tokenizer: Tokenizer, length: int, index: int, seed: int) -> Draft:
        asked, place = divmod(index, len(DEPTHS))
        depth = DEPTHS[place] if self.needle else None
        others = self._others(asked, seed)
        return Draft(
            lambda size: self._text(others, asked, size, depth),
            (self.problems[asked].answer,),
            "exemplars",
            1,
            depth=lambda size: () if depth is None else (round(100 * float(depth), 1),),
            metadata={"problem": asked, "cluster": asked},
        )

    def reserved(self, tokenizer: Tokenizer, index: int) -> int:
        """The tokens that are left to the answer: the buffer without the question, at least `max_new_tokens`."""
        question = len(tokenizer.encode(_unsolved(self.problems[index // len(DEPTHS)])))
        return max(self.max_new_tokens, self.buffer - question)

    def score(self, sample: Sample, output: str) -> Scores:
        """1 if the final answer of the output is the reference, else 0."""
        return _accuracy(sample, output)

    def found(self, sample: Sample, output: str) -> list[float]:
        """The score once for each of `Sample.depth`."""
        return [self.score(sample, output)["accuracy"]] * len(sample.depth)

    def _others(self, asked: int, seed: int) -> list[int]:
        """The other problems, without those of the same words, in random order."""
        text = self.problems[asked].text.split()
        pool = [i for i, problem in enumerate(self.problems) if problem.text.split() != text]
        return random_for(self.suite, "exemplars", seed, asked).sample(pool, len(pool))

    def _text(self, others: Sequence[int], asked: int, size: int, depth: Fraction | None) -> str:
        """The prompt with `size` others, and with the problem itself at `depth` unless that is None."""
        problems = self.problems
        shown = [_solved(problems[others[i % len(others)]]) for i in range(size)]
        if depth is not None:
            shown.insert(round(size * depth), _solved(problems[asked]))
        return "\n\n".join([*shown, _unsolved(problems[asked])])


@dataclass(frozen=True)
class ZeroShotTask:
    """The problems of `plain` without solved ones before them: the zero-shot row of DoPE's Tables 2 and 4.

    Prompts have their own lengths. Sample i asks for problem i of the random order that the other tasks have.
    """

    problems: tuple[Problem, ...]
    fingerprint: str  # of their file
    max_new_tokens: int = NEW_TOKENS

    suite = "many_shot"
    name = "zero_shot"
    metric = "accuracy"
    sized = False

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"problems": self.fingerprint, "max_new_tokens": self.max_new_tokens}

    def samples(self, tokenizer: Tokenizer, length: int | None, count: int, seed: int) -> Sequence[Sample]:
        """See `PromptTask`."""
        order = _order(self.problems, seed)[:count]

        def make(index: int) -> Sample:
            problem = self.problems[order[index]]
            text, more = _unsolved(problem), {"problem": order[index], "cluster": order[index]}
            tokens = tokenizer.encode_prompt(text)
            return Sample(index, text, tokens, (problem.answer,), self.max_new_tokens, STOP, metadata=more)

        return Lazy(make, len(order))

    def score(self, sample: Sample, output: str) -> Scores:
        """1 if the final answer of the output is the reference, else 0."""
        return _accuracy(sample, output)


def _order(problems: Sequence[Problem], seed: int) -> list[int]:
    """The random order in which problems are asked for."""
    return random_for("many_shot", "problems", seed).sample(range(len(problems)), len(problems))


def _accuracy(sample: Sample, output: str) -> Scores:
    return {"accuracy": float(same_answer(final_answer(output), sample.references[0]))}


def _solved(problem: Problem) -> str:
    return f"Problem: {problem.text}\nSolution: {problem.solution}"


def _unsolved(problem: Problem) -> str:
    return f"Problem: {problem.text}\nSolution:"


def read_problems(path: Path) -> tuple[Problem, ...]:
    """The problems of a file of JSON lines. Without an answer, the last box of the solution is taken.

    Raises:
      DataError: the file is missing or has fewer than two different problems, or a line is no problem.
    """
    if not path.is_file():
        raise DataError(f"--problems={path}: there is no such file. {ADVICE}")

    def texts(record: dict[str, Any]) -> list[Any]:
        problem, solution, answer = map(record.get, FIELDS)
        return [problem, solution, last_boxed(solution) if answer is None and isinstance(solution, str) else answer]

    def wrong(record: dict[str, Any]) -> str:
        pairs = zip(FIELDS, texts(record), strict=True)
        missing = [field for field, text in pairs if not isinstance(text, str) or not text.strip()]
        return f"it has no text {', '.join(missing)}" if missing else half_pair(texts(record))

    records = read_records(path, "problem", ADVICE, check=wrong)
    problems = tuple(Problem(*(text.strip() for text in texts(record))) for record in records)
    if len({tuple(problem.text.split()) for problem in problems}) < 2:
        raise DataError(f"--problems={path} has not two problems. {ADVICE}")
    return problems


@dataclass(frozen=True)
class ManyShotSettings:
    problems: Path | None = option(None, "JSON lines with problem, solution, answer", Path, "FILE")
    samples: int | None = option(None, "a task and length (default: the paper's)", positive)
    max_new_tokens: int = option(NEW_TOKENS, f"of an answer (default {NEW_TOKENS})", positive)
    buffer: int = option(BUFFER, f"tokens that the exemplars leave free (default {BUFFER})", positive)


class ManyShot(PromptSuite):
    name = "many_shot"
    title = "Many-shot learning"
    protocol = 2
    about = "A task explained by examples alone, as many as the length holds."
    metrics = (SuiteMetric("score", "accuracy", unit="%", interval="wilson"),)
    tasks = (*SAMPLES, *ZERO_SHOT)
    samples = SAMPLES | ZERO_SHOT
    settings = ManyShotSettings

    def open(
        self, names: Sequence[str], settings: ManyShotSettings, limits: Sequence[int | None] = (None,)
    ) -> list[ManyShotTask | ZeroShotTask]:
        """The tasks `names`, or both with solved problems."""
        if settings.problems is None:
            raise ConfigError(f"--suite=many_shot: there is no file of problems. {ADVICE}")
        path = at_home(str(settings.problems))
        read, fingerprint = read_problems(path), hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return [
            ZeroShotTask(read, fingerprint, settings.max_new_tokens)
            if name in ZERO_SHOT
            else ManyShotTask(read, fingerprint, name == "needle", settings.buffer, settings.max_new_tokens)
            for name in names or SAMPLES
        ]


SUITE = ManyShot()
