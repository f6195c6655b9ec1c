"""The 21 tasks of LongBench v1 as a table, with groups of tasks and buckets of lengths.

From THUDM/LongBench: config/dataset2prompt.json, config/dataset2maxlen.json, pred.py and eval.py.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """The original's prompt and scoring of a task."""

    prompt: str  # with {context}, and {input} if the task has one; letter for letter, slips included ("asconcisely")
    max_new_tokens: int
    metric: str  # a name in `scoring.metrics`; the best of a record's answers counts
    first_line: bool = False  # whether only the first line of an answer is scored
    one_line: bool = False  # whether the newline's token ends an answer
    chat: bool = True  # whether a chat model reads it in its chat format; not where it continues examples or code


_BRIEFLY = "asconcisely as you can, using a single phrase if possible. Do not provide any explanation."
_QASPER = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.'
)
_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
_MULTI_DOCUMENT = (
    f"{_PASSAGES}\n\nThe following are given passages.\n{{context}}\n\n{_PASSAGES}\n\nQuestion: {{input}}\nAnswer:"
)

TASKS: dict[str, Rules] = {
    "narrativeqa": Rules(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        f"{_BRIEFLY}\n\nStory: {{context}}\n\nNow, answer the question based on the story {_BRIEFLY}\n\n"
        "Question: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "qasper": Rules(
        f"You are given a scientific article and a question. Answer the question {_QASPER}\n\nArticle: {{context}}\n\n "
        f"Answer the question based on the above article {_QASPER}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "multifieldqa_en": Rules(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "qa_f1",
    ),
    "multifieldqa_zh": Rules(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
        64,
        "qa_f1_zh",
    ),
    "hotpotqa": Rules(_MULTI_DOCUMENT, 32, "qa_f1"),
    "2wikimqa": Rules(_MULTI_DOCUMENT, 32, "qa_f1"),
    "musique": Rules(_MULTI_DOCUMENT, 32, "qa_f1"),
    "dureader": Rules(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        128,
        "rouge_l_zh",
    ),
    "gov_report": Rules(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "qmsum": Rules(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        "rouge_l",
    ),
    "multi_news": Rules(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "vcsum": Rules(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
        512,
        "rouge_l_zh",
    ),
    "trec": Rules(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        "classification",
        first_line=True,
        chat=False,
    ),
    "triviaqa": Rules(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        32,
        "qa_f1",
        first_line=True,
        chat=False,
    ),
    "samsum": Rules(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        "rouge_l",
        first_line=True,
        one_line=True,
        chat=False,
    ),
    "lsht": Rules(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
        64,
        "classification",
        first_line=True,
        chat=False,
    ),
    "passage_count": Rules(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": Rules(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: ",
        32,
        "retrieval",
    ),
    "passage_retrieval_zh": Rules(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n{input}"
        '\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
        32,
        "retrieval_zh",
    ),
    "lcc": Rules(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, "code_similarity", chat=False
    ),
    "repobench-p": Rules(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        "code_similarity",
        chat=False,
    ),
}

# LongBench-E: thirteen of the tasks, sampled evenly over lengths.
_EVEN = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum"),
    *("passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)

# Names for several tasks. The six between `drope` and `all` are the original's categories; `e` is LongBench-E.
GROUPS: dict[str, tuple[str, ...]] = {
    "drope": ("multifieldqa_en", "musique", "gov_report", "lcc"),  # DroPE, Table 2
    "single_doc_qa": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "multi_doc_qa": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "summarization": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "few_shot": ("trec", "triviaqa", "samsum", "lsht"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "code": ("lcc", "repobench-p"),
    "all": tuple(TASKS),
    "e": tuple(f"{name}_e" for name in _EVEN),
}

# The buckets of DroPE's Tables 8 and 9, by the tokens of a prompt before truncation; K is 1,024.
EDGES, BUCKETS = (4096, 8192, 16384, 32768), ("0-4K", "4-8K", "8-16K", "16-32K", "32K+")
# The buckets of eval.py --e (`scorer_e`) for LongBench-E, by a record's `length` in words; k is 1,000.
RECORD_EDGES, RECORD_BUCKETS = (0, 4000, 8000), ("0-4k", "4-8k", "8k+")


def bucket_of(tokens: int) -> str:
    """The bucket of a prompt."""
    return BUCKETS[bisect.bisect(EDGES, tokens)]


def record_bucket_of(length: int) -> str:
    """The bucket of a record of LongBench-E."""
    return RECORD_BUCKETS[bisect.bisect(RECORD_EDGES[1:], length)]
