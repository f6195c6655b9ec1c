"""The metrics of RULER, LongBench v1 and HELMET, 0..1, each equal to the original's.

The originals: scripts/eval/synthetic/constants.py and scripts/eval/evaluate.py of NVIDIA/RULER; metrics.py and eval.py
of THUDM/LongBench; utils.py of princeton-nlp/HELMET.
"""

from __future__ import annotations

import difflib
import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pe_lab.errors import UnsupportedError

CONTROL = re.compile(r"[\x00-\x1f]")  # RULER reads these characters of an answer as line ends
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NUMBER = re.compile(r"\d+")  # of any script, as Python's \d
_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
# LongBench's list: ASCII, full-width forms, and other marks of Chinese texts.
_PUNCTUATION = str.maketrans(
    "",
    "",
    string.punctuation + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】"
    "〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏",
)


def string_match_all(output: str, references: Sequence[str]) -> float:
    """The share of the references that occur in the output, ignoring case: RULER's metric of all tasks but questions.

    As in RULER, control characters of the output count as line ends, and blanks around it are removed.

    Raises:
      ValueError: there is no reference.
    """
    return sum(_found(output, references)) / len(references)


def string_match_part(output: str, references: Sequence[str]) -> float:
    """1 if any of the references occurs in the output, else 0: RULER's metric of questions (see `string_match_all`).

    In lm-evaluation-harness 0.4.13 this name is the share of the references.

    Raises:
      ValueError: there is no reference.
    """
    return float(any(_found(output, references)))


def _found(output: str, references: Sequence[str]) -> list[bool]:
    if not references:
        raise ValueError("no references to look for")
    text = CONTROL.sub("\n", output.strip()).strip().lower()
    return [reference.lower() in text for reference in references]


def qa_f1(output: str, reference: str) -> float:
    """F1 of the bags of words, in lower case, without ASCII punctuation and without a, an, the (SQuAD's)."""
    return _bag_f1(_words(output), _words(reference))


def qa_f1_zh(output: str, reference: str) -> float:
    """F1 of the bags of jieba's words, in lower case, without ASCII and Chinese punctuation.

    Raises:
      UnsupportedError: jieba is not installed.
    """
    return _bag_f1(_chinese_words(output), _chinese_words(reference))


def _words(text: str) -> list[str]:
    return _ARTICLE.sub(" ", text.lower().translate(_ASCII_PUNCTUATION)).split()


def _chinese_words(text: str) -> list[str]:
    bare = ("".join(word.lower().translate(_PUNCTUATION).split()) for word in jieba().lcut(text))
    return [word for word in bare if word]


def _bag_f1(output: list[str], reference: list[str]) -> float:
    shared = (Counter(output) & Counter(reference)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(output), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def rouge_l_zh(output: str, reference: str) -> float:
    """`rouge_l` of jieba's words. Chinese full stops do not end sentences.

    Raises:
      UnsupportedError: jieba is not installed.
    """
    cut = jieba().lcut
    return rouge_l(" ".join(cut(output)), " ".join(cut(reference)))


def jieba() -> Any:
    """The package jieba, which splits Chinese into words, without its messages.

    Raises:
      UnsupportedError: it is not installed.
    """
    try:
        import jieba
    except ImportError as error:
        raise UnsupportedError("LongBench's Chinese scores need jieba. Install it: pip install jieba") from error
    jieba.setLogLevel("WARNING")
    return jieba


def classification(output: str, reference: str, classes: Sequence[str]) -> float:
    """1 / the number of classes that the output names, if the right one is among them, else 0.

    A named class that is a part of the right one's name ("manner" of "manner of an action") is not counted. The
    original removes such a name from the list during its iteration, and so skips the next name, which is counted even
    if it is such a part too. So does this function.
    """
    named = [name for name in classes if name in output]
    i = 0
    while i < len(named):
        if named[i] in reference and named[i] != reference:
            named.remove(named[i])
        i += 1
    return 1.0 / len(named) if reference in named else 0.0


def count(output: str, reference: str) -> float:
    """The share of the output's numbers whose digits are the reference."""
    numbers = _NUMBER.findall(output)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(output: str, reference: str, mark: str = "Paragraph ") -> float:
    """The share of the output's numbers that are the k of a reference `Paragraph k`.

    Raises:
      ValueError: the reference has no such k.
    """
    right = re.search(mark + r"(\d+)", reference)
    if right is None:
        raise ValueError(f"{reference!r} names no {mark.strip()}")
    return count(output, right.group(1))


def code_similarity(output: str, reference: str) -> float:
    """The similarity of the output's first line of code (`first_code_line`) and the reference, to whole per cents.

    This is `fuzz.ratio` of fuzzywuzzy as LongBench's requirements install it, without python-Levenshtein: the matching
    blocks of Python's difflib. With python-Levenshtein, fuzzywuzzy silently computes another measure,
    `code_similarity_levenshtein`, by which unrelated lines score about 4 points more.
    """
    line = first_code_line(output)
    if line == reference:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def code_similarity_levenshtein(output: str, reference: str) -> float:
    """`code_similarity` by the longest common subsequence: fuzzywuzzy with python-Levenshtein.

    `fuzz.ratio` of rapidfuzz and thefuzz is the same without rounding.
    """
    line = first_code_line(output)
    if line == reference:
        return 1.0
    both = len(line) + len(reference)
    return round(100 * (1 - (both - 2 * common_length(line, reference)) / both)) / 100


def first_code_line(output: str) -> str:
    """The first line without a backquote, `#` or `//`, after leading line ends; "" if there is none."""
    lines = output.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")


def first_line(output: str) -> str:
    """The first line after leading line ends, which LongBench scores of few-shot answers."""
    return output.lstrip("\n").split("\n")[0]


# --------------------------------------------------------------------------------------------------------------------
# ROUGE-L by the rules of the PyPI package `rouge` 1.0.1, as in LongBench


def rouge_l(output: str, reference: str) -> float:
    """F of ROUGE-L over whole texts, 0..1, without a change of case or words.

    Only full stops end sentences. The shared words are the set of all words of the longest common subsequences of each
    sentence of the reference with each of the output. Their number, divided by the number of different words of the
    output and of the reference, is precision and recall. F is 2pr / (p + r + 1e-8), so that equal texts score 1 - 5e-9.
    The package follows Lin (2004, "ROUGE", section 3.2), with sets in place of counts.

    An output or a reference without a sentence (empty, or full stops alone) scores 0: the package raises, and LongBench
    catches that. LongBench also catches the package's RecursionError for two sentences of about 1,000 words together,
    and so gives 0 to a summary without full stops; here such sentences are scored like others.
    """
    given, wanted = _sentences(output), _sentences(reference)
    if not given or not wanted:
        return 0.0
    shared: set[str] = set()
    for sentence in wanted:
        for other in given:
            shared |= common_words(sentence, other)
    precision = len(shared) / len({word for sentence in given for word in sentence})
    recall = len(shared) / len({word for sentence in wanted for word in sentence})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence. A blank, non-empty sentence has one empty word."""
    return [piece.split() or [""] for piece in text.split(".") if piece]


def common_words(reference: Sequence[str], output: Sequence[str]) -> set[str]:
    """The words of a longest common subsequence: of several the one that `rouge` finds.

    That is, of two equally long ones the one without the last word of the output, not of the reference.
    """
    if set(reference).isdisjoint(output):
        return set()
    table = _lcs_table(reference, output)
    words: set[str] = set()
    i, j = len(reference), len(output)
    while i and j:
        if reference[i - 1] == output[j - 1]:
            words.add(reference[i - 1])
            i, j = i - 1, j - 1
        elif table[i] >> (j - 1) & 1:  # without the output's last word the subsequence would be shorter
            i -= 1
        else:
            j -= 1
    return words


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence; of two strings, in characters."""
    return _lcs_table(one, other)[-1].bit_count()


def _lcs_table(one: Sequence[str], other: Sequence[str]) -> list[int]:
    """The table of the lengths of common subsequences: a row before the first item of `one`, and one after each.

    Along a row, the length grows by 0 or 1 from an item of `other` to the next. A row is stored as an integer whose bit
    j is 1 if it grows at item j, and follows from the previous row by one addition (Hyyro 2004, "Bit-parallel
    LCS-length computation revisited").
    """
    full = (1 << len(other)) - 1
    places: dict[str, int] = {}
    for j, item in enumerate(other):
        places[item] = places.get(item, 0) | 1 << j
    level, rows = full, [0]
    for item in one:
        matches = level & places.get(item, 0)
        level = ((level + matches) | (level - matches)) & full
        rows.append(full & ~level)
    return rows


def exact_match(output: str, reference: str) -> float:
    """1 if the words are the same, in lower case, without ASCII punctuation and without a, an, the: HELMET's."""
    return float(_words(output) == _words(reference))


def substring_match(output: str, reference: str) -> float:
    """1 if the reference's words, joined, are a part of the output's (see `exact_match`): HELMET's."""
    return float(" ".join(_words(reference)) in " ".join(_words(output)))


# LongBench's and HELMET's, without `classification`, which needs the classes too.
METRICS: dict[str, Callable[[str, str], float]] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge_l": rouge_l,
    "rouge_l_zh": rouge_l_zh,
    "count": count,
    "retrieval": retrieval,
    "retrieval_zh": functools.partial(retrieval, mark="段落"),
    "code_similarity": code_similarity,
    "code_similarity_levenshtein": code_similarity_levenshtein,
    "exact_match": exact_match,
    "substring_match": substring_match,
}
