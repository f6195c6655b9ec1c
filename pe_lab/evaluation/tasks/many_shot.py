"""Many-shot in-context learning of mathematics (DoPE, section 5.3 and appendix A.2): solved problems fill the context,
and one that may be among them is asked for.

DoPE publishes neither its prompt nor its choice of problems. The lengths, buffer, depths, stop strings and numbers of
samples here are the paper's; the words of the prompt, and how answers are compared, are this file's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import UserError, did_you_mean
from pe_lab.evaluation.tasks.ruler.synthetic import Draft, size_within
from pe_lab.evaluation.tasks.task import HALF_A_PAIR, Lazy, Sample, Scores, random_for

STOP = ("</s>", "<|im_end|>", "<|endoftext|>", "Problem:")
DEPTHS = (Fraction(0), Fraction(1, 3), Fraction(2, 3), Fraction(1))
BUFFER, NEW_TOKENS = 2300, 2048
PAPER_SAMPLES = {"needle": 400, "plain": 100}  # 100 problems, at each depth and without
FIELDS = ("problem", "solution", "answer")
PROBLEMS_BY_HAND = (
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
class Problems:
    """A file's problems, and its SHA-256, shortened."""

    problems: tuple[Problem, ...]
    fingerprint: str


def exemplar(problem: Problem) -> str:
    """A solved problem."""
    return f"Problem: {problem.text}\nSolution: {problem.solution}"


def question(problem: Problem) -> str:
    """A problem to solve."""
    return f"Problem: {problem.text}\nSolution:"


@dataclass(frozen=True)
class ManyShotTask:
    """A problem to solve after as many solved ones as fit, in an order by lot; once more from the first where they do
    not suffice. Sample i of `plain` asks for problem i of a seed's order of the problems; sample i of `needle` for
    problem i // 4, which is among the solved ones, at depth i % 4 of 0, 1/3, 2/3 and 1. All five have the same solved
    ones around, at any length. Problems that leave no room for another are passed over. Samples of one problem have it
    as `cluster` in their facts.

    Attributes:
      needle: whether the problem itself is among the solved ones, exactly once; else it is not.
      buffer: tokens of the length that solved problems leave to the question and its answer.
      max_new_tokens: of an answer; at least these are left anyway.
    """

    data: Problems
    needle: bool
    buffer: int = BUFFER
    max_new_tokens: int = NEW_TOKENS

    suite: ClassVar[str] = "many_shot"
    metric: ClassVar[str] = "accuracy"
    sized: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "needle" if self.needle else "plain"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"problems": self.data.fingerprint, "buffer": self.buffer, "max_new_tokens": self.max_new_tokens}

    def samples(self, tokenizer: Tokenizer, length: int | None, count: int, seed: int) -> Sequence[Any]:
        """See `Task`. Prompts are as long as fit: one solved problem more would not."""
        if length is None:
            raise ValueError("many_shot needs a length")
        each = len(DEPTHS) if self.needle else 1
        chosen = list(self._fitting(tokenizer, length, -(-count // each), seed))
        number = min(count, each * len(chosen))
        return Lazy(lambda index: self._sample(tokenizer, length, index, seed, chosen[index // each]), number)

    def score(self, sample: Sample, output: str) -> Scores:
        """1 where the output's final answer is the reference, else 0."""
        return {"accuracy": float(same_answer(final_answer(output), sample.references[0]))}

    def found(self, sample: Sample, output: str) -> list[float]:
        """The score once for each of `Sample.depth`."""
        return [self.score(sample, output)["accuracy"]] * len(sample.depth)

    def _fitting(self, tokenizer: Tokenizer, length: int, count: int, seed: int) -> Iterator[int]:
        """The first problems of the seed's order that fit twice, solved and not, with one other."""
        chosen, needed, number = 0, [], len(self.data.problems)
        for asked in random_for(self.suite, "problems", seed).sample(range(number), number):
            if chosen == count:
                return
            others, ends = self._others(asked, seed), (DEPTHS[0], DEPTHS[-1])
            tokens = max(len(tokenizer.encode_prompt(self._text(others, asked, 1, depth))) for depth in ends)
            needed.append(tokens + self._reserved(tokenizer, asked))
            if needed[-1] <= length:
                chosen += 1
                yield asked
        if count and not chosen:
            raise UserError(
                f"--lengths: no problem of many_shot:{self.name} fits {length:,} tokens, of which {self.buffer:,} are "
                f"kept for it and its answer; the shortest take {min(needed):,}. Smaller models do with less: --buffer."
            )

    def _reserved(self, tokenizer: Tokenizer, asked: int) -> int:
        """Tokens beside the prompt's: of the answer, and what the question leaves of the buffer."""
        words = len(tokenizer.encode(question(self.data.problems[asked])))
        return max(self.max_new_tokens, self.buffer - words)

    def _others(self, asked: int, seed: int) -> list[int]:
        """The other problems in an order by lot; of the same words, none."""
        text = self.data.problems[asked].text.split()
        pool = [i for i, problem in enumerate(self.data.problems) if problem.text.split() != text]
        return random_for(self.suite, "exemplars", seed, asked).sample(pool, len(pool))

    def _text(self, others: Sequence[int], asked: int, size: int, depth: Fraction | None) -> str:
        """The prompt with `size` others, and the problem itself among them at `depth` if that is not None."""
        problems = self.data.problems
        shown = [exemplar(problems[others[i % len(others)]]) for i in range(size)]
        if depth is not None:
            shown.insert(round(size * depth), exemplar(problems[asked]))
        return "\n\n".join([*shown, question(problems[asked])])

    def _sample(self, tokenizer: Tokenizer, length: int, index: int, seed: int, asked: int) -> Sample:
        depth = DEPTHS[index % len(DEPTHS)] if self.needle else None
        others, problem = self._others(asked, seed), self.data.problems[asked]
        draft = Draft(lambda size: self._text(others, asked, size, depth), (problem.answer,), "exemplars", 1)
        size, _ = size_within(draft, tokenizer, length - self._reserved(tokenizer, asked))
        assert size is not None, "chosen to fit"
        text = draft.render(size)
        depths = () if depth is None else (round(100 * float(depth), 1),)
        facts = {"exemplars": size, "problem": asked, "cluster": asked}
        tokens = tokenizer.encode_prompt(text)
        return Sample(index, text, tokens, draft.references, self.max_new_tokens, STOP, depths, facts)


def many_shot_tasks(
    problems: str | Path,
    names: Sequence[str] = (),
    max_new_tokens: int | None = None,
    buffer: int | None = None,
) -> list[ManyShotTask]:
    """The tasks called so, or both, of the problems in a file; buffer and answer as in the paper if they are None.

    Raises:
      UserError: a name is unknown, or the file is missing or not in the schema.
    """
    for name in names:
        if name not in PAPER_SAMPLES:
            raise UserError(f"--suite=many_shot:{name}: no such task. {did_you_mean(name, list(PAPER_SAMPLES))}")
    data = read_problems(Path(problems).expanduser())
    buffer = BUFFER if buffer is None else buffer
    new_tokens = NEW_TOKENS if max_new_tokens is None else max_new_tokens
    return [ManyShotTask(data, name == "needle", buffer, new_tokens) for name in names or PAPER_SAMPLES]


def read_problems(path: Path, fields: Sequence[str] = FIELDS) -> Problems:
    """The problems of a file of JSON lines.

    Args:
      fields: how the lines call the problem, the solution and the answer. Where there is no answer, it is what the
        solution has in its last box.

    Raises:
      UserError: the file cannot be read, a line is not in the schema, or all problems are the same.
    """
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"--problems={path} cannot be read ({why}). {PROBLEMS_BY_HAND}") from None
    problems = []
    for number, written in enumerate(lines, 1):
        if not written.strip():
            continue
        try:
            line = json.loads(written)
        except ValueError:
            line = None
        found = [line.get(field) for field in fields] if isinstance(line, dict) else [None] * 3
        if found[2] is None and isinstance(found[1], str):
            found[2] = last_boxed(found[1])
        if not all(isinstance(text, str) and text.strip() for text in found):
            missing = ", ".join(field for field, text in zip(fields, found, strict=True) if not isinstance(text, str))
            raise UserError(
                f"--problems={path}, line {number}, is no problem: {missing or 'a field'} is missing, or no text. "
                f"{PROBLEMS_BY_HAND}"
            )
        if any(HALF_A_PAIR.search(text) for text in found):
            raise UserError(
                f"--problems={path}, line {number}, has half of a surrogate pair, which is no character. Remove it, or "
                "the line."
            )
        problems.append(Problem(found[0].strip(), found[1].strip(), found[2].strip()))
    if len({tuple(problem.text.split()) for problem in problems}) < 2:
        raise UserError(f"--problems={path} has not two problems. {PROBLEMS_BY_HAND}")
    return Problems(tuple(problems), hashlib.sha256(content).hexdigest()[:16])


# ------------------------------------------------------------------------------------------------------------------
# Answers

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(?P<bare>[^\s${}]+)|\\boxed(?P<glued>[0-9.]+)")
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")
_SAID = re.compile(r"answer[*_`]*\s+is(?![a-z'])[\s:*_`]*", re.IGNORECASE)
# What ends an answer that is told in a sentence: some words do, and after a number any.
_REASON = re.compile(
    r"[,;]\s+(?:and\s+)?(?:since|because|as|so|which|thus|hence|therefore|where|for|but|not|by)\b"
    r"|\s(?:since|because)\b",
    re.IGNORECASE,
)
_NUMBER_OF_SENTENCE = re.compile(
    rf"({_NUMBER.pattern})[*_`]*[,;]\s+(?:(?:and|or)\s+)?(?!(?:and|or)\b)[a-z]{{2}}", re.IGNORECASE
)
_VALUE = re.compile(r"(-?)(?:(\d{1,99}(?:\.\d{1,99})?)|\\frac\{(-?)(\d{1,99})\}\{(\d{1,99})\})")
_LONGEST = 1000  # characters; whoever repeats a digit to the end has not answered
_TEXT = r"\\(?:text|textbf|textrm|textit|mbox|mathrm|mathbf)\s*\{([^{}]*)\}"
_UNIT = (
    r"(?:square|sq|cubic|[cmk]m|mph|kg|ft|(?:centi|kilo)?met(?:er|re)s?|inch|inches|feet|foot|yards?|miles?|acres?|units?"
    r"|degrees?|radians?|cents?|dollars?|percent|seconds?|minutes?|hours?|days?|weeks?|months?|years?|grams?|pounds?"
    r"|ounces?|liters?|gallons?|ways|points|people|students)"
)
# Rules of `normalized`, in their order.
_RULES = [
    (re.compile(pattern), to)
    for pattern, to in [
        (r"\\?[$%]", ""),
        (r"\\\\", "¶"),  # the end of a matrix's row
        (r"\\[()\[\]]|\\(?:left|right|displaystyle|[bB]ig[lr]?)(?![a-zA-Z])", ""),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])|\\degree(?![a-zA-Z])|°", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"(?:\\(?:text|mbox)\s*\{)?,?\s+(?:and|or)\s+\}?", ","),
        (r"[\s.,:;]+$", ""),
        (r"(?<=[\d})])(?:\\[,;:! ]|\s)*" + _TEXT + r"(?:\^\{?[23]\}?)?$", ""),
        (_TEXT, r"\1"),
        (r"(?<=[\d})])(?:\\?\s+" + _UNIT + r"\b)+(?:\^\{?[23]\}?)?$", ""),
        (r"\\[,;:!> ]|\\q?quad(?![a-zA-Z])|~|\s+", ""),
        (r"\{,\}", ","),
        (r"^[^=]{1,2}=(?=[^=]*$)|^[a-zA-Z]\\in(?![a-zA-Z])", ""),
        (r"\\sqrt([^{\[\\])", r"\\sqrt{\1}"),
        (r"\\frac(\\[a-zA-Z]+|\w)", r"\\frac{\1}"),
        (r"(\\frac\{(?:[^{}]|\{[^{}]*\})*\})(\w)", r"\1{\2}"),
        (r"(?<![\w}/^])(\d+)/(\d+)(?![\w/\\({])", r"\\frac{\1}{\2}"),
        (r"([\^_])\{(\w)\}", r"\1\2"),
        (r"(?<![\d.])\.(?=\d)", "0."),
        (r"(\.\d*?)0+(?!\d)", r"\1"),
        (r"(?<=\d)\.(?!\d)", ""),
        (r"^\(([A-Z])\)$", r"\1"),
    ]
]


def last_boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` or `\fbox{...}` holds, braces balanced; None where there is none."""
    found = None
    for box in _BOX.finditer(text):
        bare = box["bare"] or box["glued"]
        inside = bare if bare else _balanced(text, box.end())
        found = inside if inside is not None else found
    return found


def _balanced(text: str, start: int) -> str | None:
    """What is between the brace at `start` and the one that closes it."""
    open_braces = 0
    for at in range(start, len(text)):
        escaped = at > 0 and text[at - 1] == "\\"
        open_braces += (text[at] == "{" and not escaped) - (text[at] == "}" and not escaped)
        if open_braces == 0:
            return text[start + 1 : at]
    return None


def final_answer(output: str) -> str | None:
    r"""The answer that a solution ends with: its last `\boxed{...}`; else what follows its last "answer is", without
    marks of emphasis, up to the end of the formula, sentence or line, or the beginning of a reason ("5, since ...");
    else its last number; None where there is none of these."""
    boxed = last_boxed(output)
    if boxed is not None:
        return boxed
    said = list(_SAID.finditer(output))
    if said:
        rest = output[said[-1].end() :]
        formula = re.match(r"(\$\$?)(.+?)\1", rest, re.DOTALL)
        sentence = re.split(r"\n|\.(?=[\s*_`]|$)", rest, maxsplit=1)[0]
        number = _NUMBER_OF_SENTENCE.match(sentence)
        if formula or number:
            told = formula[2] if formula else number[1]
        else:
            told = _REASON.split(sentence, maxsplit=1)[0].strip(" \t*_`")
        if told.strip():
            return told
    numbers = _NUMBER.findall(output)
    return numbers[-1] if numbers else None


def same_answer(given: str | None, right: str) -> bool:
    """Whether two final answers are the same after `normalized`, as words or, where both are numbers, as numbers."""
    if given is None or len(given) > _LONGEST:
        return False
    ours, theirs = normalized(given), normalized(right)
    if ours == theirs:
        return bool(ours)
    values = _value(ours), _value(theirs)
    return None not in values and values[0] == values[1]


def _value(text: str) -> Fraction | None:
    """The number that is written as an integer, a decimal, or a fraction of integers."""
    found = _VALUE.fullmatch(text)
    if not found:
        return None
    sign, number, inner, above, below = found.groups()
    if number is None and int(below) == 0:
        return None
    value = Fraction(number) if number is not None else Fraction(int(above), int(below))
    return -value if bool(sign) != bool(inner) else value


def normalized(text: str) -> str:
    r"""An answer without what does not change it, in the tradition of Hendrycks' `is_equiv` (MATH, 2021):

    - no dollar signs, `\(...\)`, `\left`, `\right`, `\displaystyle`, spaces of any kind, percent and degree signs;
    - `\dfrac`, `\tfrac`, `\cfrac` are `\frac`; `\frac12`, `\frac1{2}` and `1/2` are `\frac{1}{2}`; `\sqrt3` is
      `\sqrt{3}`; `x^{2}` is `x^2`;
    - `\text{...}` and its kin are their text; units after a number are dropped, as words or as `\text{...}`; `and` and
      `or` between answers are commas; a choice (A) is A;
    - `x =` before an answer is dropped, if the name has at most two characters;
    - commas in a number (1,000) and zeros at the end of a decimal (2.50) are dropped; .5 is 0.5; full stops, commas,
      colons and semicolons at the end are dropped.
    """
    for pattern, to in _RULES:
        text = pattern.sub(to, text.strip())
    return text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text) else text
