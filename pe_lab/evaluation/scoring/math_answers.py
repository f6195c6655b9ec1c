"""The final answer of a mathematical solution, and whether two answers are equal."""

from __future__ import annotations

import re
from fractions import Fraction

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(?P<bare>[^\s${}]+)|\\boxed(?P<glued>[0-9.]+)")
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")
_STATED = re.compile(r"answer[*_`]*\s+is(?![a-z'])[\s:*_`]*", re.IGNORECASE)
# The end of an answer in a sentence: before some words, or after a number before any word.
_REASON = re.compile(
    r"[,;]\s+(?:and\s+)?(?:since|because|as|so|which|thus|hence|therefore|where|for|but|not|by)\b"
    r"|\s(?:since|because)\b",
    re.IGNORECASE,
)
_NUMBER_OF_SENTENCE = re.compile(
    rf"({_NUMBER.pattern})[*_`]*[,;]\s+(?:(?:and|or)\s+)?(?!(?:and|or)\b)[a-z]{{2}}", re.IGNORECASE
)
_VALUE = re.compile(r"(-?)(?:(\d{1,99}(?:\.\d{1,99})?)|\\frac\{(-?)(\d{1,99})\}\{(\d{1,99})\})")
_LONGEST = 1000  # characters; a digit repeated to the end is no answer
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
        (r"\\\\", "¶"),  # the end of a row of a matrix
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
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}`, its braces balanced; None if there is none."""
    found = None
    for box in _BOX.finditer(text):
        bare = box["bare"] or box["glued"]
        inside = bare if bare else _balanced(text, box.end())
        found = inside if inside is not None else found
    return found


def _balanced(text: str, start: int) -> str | None:
    """The text between the brace at `start` and the one that closes it; None if none does."""
    open_braces = 0
    for at in range(start, len(text)):
        escaped = at > 0 and text[at - 1] == "\\"
        open_braces += (text[at] == "{" and not escaped) - (text[at] == "}" and not escaped)
        if open_braces == 0:
            return text[start + 1 : at]
    return None


def final_answer(output: str) -> str | None:
    r"""The final answer of a solution; None if it has none of these, of which the first counts:

    - its last `\boxed{...}`;
    - the text after its last "answer is", without marks of emphasis, up to the end of the formula, sentence or line,
      or to a reason ("5, since ...");
    - its last number.
    """
    boxed = last_boxed(output)
    if boxed is not None:
        return boxed
    stated = list(_STATED.finditer(output))
    if stated:
        rest = output[stated[-1].end() :]
        formula = re.match(r"(\$\$?)(.+?)\1", rest, re.DOTALL)
        sentence = re.split(r"\n|\.(?=[\s*_`]|$)", rest, maxsplit=1)[0]
        number = _NUMBER_OF_SENTENCE.match(sentence)
        if formula or number:
            answer = formula[2] if formula else number[1]
        else:
            answer = _REASON.split(sentence, maxsplit=1)[0].strip(" \t*_`")
        if answer.strip():
            return answer
    numbers = _NUMBER.findall(output)
    return numbers[-1] if numbers else None


def same_answer(given: str | None, right: str) -> bool:
    """Whether two final answers are equal after `normalized`, as text or as numbers."""
    if given is None or len(given) > _LONGEST:
        return False
    texts = normalized(given), normalized(right)
    if texts[0] == texts[1]:
        return bool(texts[0])
    values = _value(texts[0]), _value(texts[1])
    return None not in values and values[0] == values[1]


def _value(text: str) -> Fraction | None:
    """The value of an integer, a decimal or a fraction of integers; None of any other text."""
    found = _VALUE.fullmatch(text)
    if not found:
        return None
    sign, number, inner, above, below = found.groups()
    if number is None and int(below) == 0:
        return None
    value = Fraction(number) if number is not None else Fraction(int(above), int(below))
    return -value if bool(sign) != bool(inner) else value


def normalized(text: str) -> str:
    r"""An answer in a normal form, after Hendrycks' `is_equiv` (MATH, 2021):

    - no dollar signs, `\(...\)`, `\left`, `\right`, `\displaystyle`, spaces of any kind, percent and degree signs;
    - `\dfrac`, `\tfrac`, `\cfrac` are `\frac`; `\frac12`, `\frac1{2}` and `1/2` are `\frac{1}{2}`; `\sqrt3` is
      `\sqrt{3}`; `x^{2}` is `x^2`;
    - `\text{...}` and similar commands are their text; units after a number are dropped, as words or as `\text{...}`;
      `and` and `or` between answers are commas; a choice (A) is A;
    - `x =` before an answer is dropped, if the name has at most two characters;
    - commas in a number (1,000) and zeros at the end of a decimal (2.50) are dropped; .5 is 0.5; full stops, commas,
      colons and semicolons at the end are dropped.
    """
    for pattern, to in _RULES:
        text = pattern.sub(to, text.strip())
    return text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text) else text
