"""Makes scorer_golden.json beside it: what the originals' own code gives to answers made by hand.

    PYTHONPATH=DIR python tests/data/make_scorer_golden.py --longbench=DIR --ruler=FILE

--longbench is the folder LongBench of a checkout of THUDM/LongBench (metrics.py, eval.py, config/dataset2prompt.json,
config/dataset2maxlen.json); --ruler is scripts/eval/synthetic/constants.py of NVIDIA/RULER. The Python has what they
import: jieba 0.42.1, rouge 1.0.1, fuzzywuzzy 0.18.0 and Levenshtein 0.27.1 (PYTHONPATH's DIR held the last two). The
values here were made under Python 3.11 by metrics.py of 5,448 characters, eval.py of 3,776, dataset2prompt.json of
4,977 (its narrativeqa says "asconcisely", as in most copies; one that does not was left alone), and constants.py of
RULER's commit c3f5e3b. No network was at hand: they were typed from stored copies, and LongBench's lengths compared;
dataset2maxlen.json equals the table of lm-evaluation-harness.

Nothing is taken from lm-evaluation-harness, whose copies differ (0.4.13): its `string_match_part` is the share of the
references, its code metric skips blank lines, answers are stripped, and its prompts lost line ends and blanks.

What is made of PAIRS, NUMBERED and CLASSIFIED has one reference each and comes from LongBench's metrics.py.
`code_similarity` has fuzzywuzzy on difflib, as LongBench's requirements.txt installs it;
`code_similarity_levenshtein` has the class that fuzzywuzzy takes where python-Levenshtein is installed.
`string_match_*` is by RULER's constants.py, after what RULER's evaluate.py does to an output, in per cent with two
places. `tasks` is `scorer` of LongBench's eval.py on a record with all its answers, likewise. `prompts` is the SHA-256
of every template.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
import warnings
from pathlib import Path

LONG_REFERENCE = (
    "The agency spent 12 million dollars on repairs in 2019. It did not say which bridges were repaired. The report "
    "recommends that the agency publish a list of bridges. The agency agreed with the recommendation. It will publish "
    "the list by 2021."
)

# What a model says, and what is right.
ENGLISH = [
    ("Paris", "Paris"),
    ("paris", "Paris"),
    ("The capital is Paris.", "Paris"),
    ("Paris, France", "Paris"),
    ("Paris", "Paris, France"),
    ("London", "Paris"),
    ("", "Paris"),
    ("Paris", ""),
    ("", ""),
    (" ", "Paris"),
    ("\n\n", "Paris"),
    (".", "Paris"),
    ("...", "..."),
    ("a the an", "Paris"),
    ("the", "the"),
    ("A", "a"),
    ("the Beatles", "Beatles"),
    ("An apple and a pear", "apple, pear"),
    ("theater", "the theater"),
    ("another thesis", "other sis"),
    ("yes", "Yes."),
    ("Yes, it is", "yes"),
    ("no", "yes"),
    ("unanswerable", "unanswerable"),
    ("The question is unanswerable.", "unanswerable"),
    ("42", "42"),
    ("42.0", "42"),
    ("1,000", "1000"),
    ("1 000", "1000"),
    ("$3.5 million", "3.5 million dollars"),
    ("in 1999", "1999"),
    ("1998", "1999"),
    ("12-13", "12 13"),
    ("word word word", "word"),
    ("word", "word word word"),
    ("a b c d", "d c b a"),
    ("x y z w", "x z y w"),
    ("x y x y", "y x y x"),
    ("one two three four", "one three two four"),
    ("one. two. three", "three. two. one"),
    ("one two. one two. one two", "one two"),
    ("U.S.A.", "USA"),
    ("U.S.A.", "U.S.A."),
    ("e.g. this. And that", "e.g. this and that"),
    ("a . b . c", "a. b. c"),
    ("end. ", "end."),
    (" . . ", "x. "),
    ("ends with a blank. ", "blank. "),
    ("don't", "dont"),
    ("state-of-the-art", "state of the art"),
    ("state-of-the-art", "state-of-the-art"),
    ("“quoted”", "quoted"),
    ("it’s", "it's"),
    ("naïve café", "naive cafe"),
    ("naïve café", "NAÏVE CAFÉ"),
    ("Straße", "STRASSE"),
    ("İstanbul", "istanbul"),
    ("ﬁne", "fine"),
    ("non\u00a0breaking space", "non breaking space"),
    ("tab\tand\nline", "tab and line"),
    ("zero\u200bwidth", "zerowidth"),
    ("Answer: Paris\nQuestion: What else?", "Paris"),
    ("\nParis\nLondon", "Paris"),
    ("🙂 smile", "smile 🙂"),
    ("e\u0301", "é"),
    ("The the THE", "the"),
    ("a, an, the; and", "and"),
    ("C++ and C#", "C and C"),
    ("3 < 4 & 5 > 2", "3 4 5 2"),
    ("http://a.b/c?d=e", "a.b/c"),
    ("John F. Kennedy", "John Fitzgerald Kennedy"),
    ("Kennedy, John F.", "John F. Kennedy"),
    ("Barack Obama was the 44th president", "Barack Hussein Obama II"),
    ("The report found that the agency spent 12 million dollars on repairs.", LONG_REFERENCE),
    (LONG_REFERENCE, LONG_REFERENCE),
    ("It will publish the list by 2021. The agency agreed. It did not say which bridges.", LONG_REFERENCE),
    (LONG_REFERENCE.replace(". ", " "), LONG_REFERENCE),
    (LONG_REFERENCE.upper(), LONG_REFERENCE),
    ("the agency the agency the agency the agency", LONG_REFERENCE),
    ("Amanda baked cookies and will bring Jerry some tomorrow.", "Amanda baked cookies. Jerry will get some tomorrow."),
    ("Summary: Tom is late. He missed the bus.\nDialogue:\nA: hi", "Tom missed the bus and is late."),
    ("word%d " * 3 % (1, 2, 3), "word1 word3 word2"),
    (" ".join(f"w{i * i % 17}" for i in range(60)), " ".join(f"w{i * 5 % 17}" for i in range(60))),
    (". ".join(f"w{i * i % 7} w{i % 5}" for i in range(30)), ". ".join(f"w{i % 5} w{i * 3 % 7}" for i in range(30))),
]

CHINESE = [
    ("北京", "北京"),
    ("北京市", "北京"),
    ("答案是北京。", "北京"),
    ("上海", "北京"),
    ("", "北京"),
    ("北京", ""),
    ("。", "。"),
    ("，。！？", "北京"),
    ("北京。", "北京"),
    ("北京，上海", "上海、北京"),
    ("我爱北京天安门", "我爱天安门"),
    ("我来到北京清华大学", "清华大学在北京"),
    ("中国科学院计算所", "中国科学院计算技术研究所"),
    ("中华人民共和国", "中国"),
    ("2021年3月", "2021年"),
    ("2021 年 3 月", "2021年3月"),
    ("２０２１年", "2021年"),
    ("二〇二一年", "2021年"),
    ("三百元", "300元"),
    ("300 元", "300元"),
    ("约300元左右", "300元"),
    ("5.5%", "5.5％"),
    ("百分之五点五", "5.5%"),
    ("Python语言", "python 语言"),
    ("ＡＢＣ", "abc"),
    ("ABC公司", "abc公司"),
    ("“北京”", "北京"),
    ("《红楼梦》", "红楼梦"),
    ("【红楼梦】", "《红楼梦》"),
    ("红楼梦、西游记、水浒传", "西游记、红楼梦"),
    ("曹雪芹（清）", "曹雪芹"),
    ("张三和李四", "李四和张三"),
    ("张三", "张三丰"),
    ("是", "是的"),
    ("不是", "是"),
    ("不是。", "不是"),
    ("的的的", "的"),
    ("北京北京北京", "北京"),
    ("北京 北京", "北京北京"),
    ("北京\n上海", "北京上海"),
    ("北京\t上海", "北京 上海"),
    ("　北京　", "北京"),
    ("根据文章，作者认为经济会增长。", "作者认为经济会增长"),
    ("经济增长了，失业率下降了。", "失业率下降，经济增长。"),
    ("会议讨论了预算。会议通过了决议。", "会议讨论了预算，并通过了决议。"),
    ("会议讨论了预算.会议通过了决议.", "会议讨论了预算。会议通过了决议。"),
    ("会议讨论了预算。会议讨论了预算。会议讨论了预算。", "会议讨论了预算。"),
    ("本次会议主要讨论了人工智能的发展趋势以及对就业的影响", "会议讨论人工智能对就业的影响和发展趋势"),
    ("专家认为，人工智能会改变很多行业。", "专家们认为人工智能将改变许多行业。"),
    ("这是一个很长的回答，其中包含了许多无关的词语，但也包含了正确答案：苹果。", "苹果"),
    ("蘋果", "苹果"),
    ("臺灣", "台湾"),
    ("日本語のテキスト", "日本語"),
    ("カタカナ・ひらがな", "ひらがな"),
    ("한국어 문장", "한국어"),
    ("中English混合text", "中英混合文本"),
    ("中English混合text", "中 english 混合 TEXT"),
    ("——……", "——"),
    ("你好，世界！", "你好世界"),
    ("你好,世界!", "你好，世界！"),
    ("段落12", "段落1"),
    ("吃葡萄不吐葡萄皮", "不吃葡萄倒吐葡萄皮"),
    ("乒乓球拍卖完了", "乒乓球拍 卖完了"),
    ("南京市长江大桥", "南京长江大桥"),
    ("研究生命的起源", "生命起源的研究"),
    ("第一段。\n第二段。", "第二段。\n第一段。"),
]

# Code completed, and the line that came next.
CODE = [
    ("return x + 1", "return x + 1"),
    ("    return x + 1", "return x + 1"),
    ("return x + 1", "    return x + 1"),
    ("\treturn x", "        return x"),
    ("return x+1", "return x + 1"),
    ("return y + 1", "return x + 1"),
    ("raise ValueError(x)", "return x + 1"),
    ("\n\n    return x\n    y = 2", "    return x"),
    ("\n   \n    return x", "    return x"),
    ("# a comment\nreturn x", "return x"),
    ("return x  # a comment", "return x"),
    ("return x  # a comment\nreturn x", "return x"),
    ("// comment\nint x = 3;", "int x = 3;"),
    ("int x = 3; // three", "int x = 3;"),
    ("x = 7 // 2\ny = 3", "x = 7 // 2"),
    ("```python\nreturn x\n```", "return x"),
    ("`x`", "x"),
    ("# only\n# comments", "return x"),
    ("/* block */ int x;", "int x;"),
    ("/* block\n * more */\nint x;", "int x;"),
    ("#include <stdio.h>\nint main() {", "int main() {"),
    ("http://a.b\nx", "x"),
    ("/ /\nx", "x"),
    ("\r\nreturn x", "return x"),
    ("return x\r", "return x"),
    ("for (int i = 0; i < n; i++) {", "for (int i = 0; i < n; ++i) {"),
    ("for (int j = 0; j < m; j++) {", "for (int i = 0; i < n; i++) {"),
    ("self.assertEqual(a, b)", "self.assertEquals(b, a)"),
    ("public void setName(String name) {", "public String getName() {"),
    ("this.name = name;", "this.value = value;"),
    ('String s = "a#b";', 'String s = "a#b";'),
    ("private final Map<String, List<Integer>> counts = new HashMap<>();", "private final Map<String, Integer> count;"),
    ("var result = await client.GetAsync(url);", "var response = await _client.GetAsync(uri);"),
    ("import numpy as np", "import numpy"),
    ("from a import b", "import a.b"),
    ("{", "}"),
    ("}", "}"),
    (")", "))"),
    ("    ", "    pass"),
    ("pass", "    "),
    ("\t", "    "),
    ("    }", "        }"),
    ("abcd", "dcba"),
    ("abab", "baba"),
    ("aaaa", "aa"),
    ("a b c d e f", "f e d c b a"),
    ("abcdefgh", "abdcefhg"),
    ("xaxbxcxd", "abcd"),
    ("if x is None:\n    return", "if x is None:"),
    ("if not x:", "if x is None:"),
    ("else:", "elif y:"),
    ("x = [1, 2, 3]", "x = [1, 2, 3, 4]"),
    ("x = {'a': 1}", 'x = {"a": 1}'),
    ("print('é')", "print('e')"),
    ("名字 = '张三'", "名字 = '李四'"),
    ('logger.info(f"{name}: {value:.3f}")', 'logger.debug("%s: %.3f", name, value)'),
    ("@property", "@staticmethod"),
    ("def f(self, x: int = 0) -> str:", "def f(self, x=0):"),
    ("return self._cache[key]\n\n    def g(self):\n        pass", "return self._cache.get(key)"),
    ("x" * 250 + " = 1", "x" * 240 + " = 2"),
    ("assert " + "a == b and " * 20 + "c", "assert " + "b == a and " * 20 + "d"),
    ("a = b" * 60, "b = a" * 50),
    ("using System;\nusing System.Linq;", "using System.Linq;"),
    ("0x1F", "0x2F"),
    ("return", "returns"),
]

# What a model says, and the number that is right.
NUMBERED = [
    (output, str(right))
    for output, right in [
        ("Paragraph 3", 3), ("paragraph 3", 3), ("3", 3), ("Paragraph 3.", 3), ("The answer is: Paragraph 3", 3),
        ("Paragraph 13", 3), ("Paragraph 3", 13), ("Paragraph 33", 3), ("Paragraph 30", 3), ("Paragraph 03", 3),
        ("003", 3), ("Paragraph 4", 3), ("", 3), (" ", 3), ("\n", 3), ("none", 3), ("three", 3), ("Three 3", 3),
        ("3 3", 3), ("3 4", 3), ("4 3", 3), ("3, 4, 5", 3), ("3 3 4", 3), ("Paragraph 3 or Paragraph 7", 3),
        ("Paragraph 3\n\nParagraph 5", 3), ("1 2 3 4 5 6 7 8 9 10", 3), ("30 paragraphs; the abstract is from 3", 3),
        ("3.0", 3), ("3.3", 3), ("-3", 3), ("+3", 3), ("$3", 3), ("3%", 3), ("3rd", 3), ("no3", 3), ("3rd of 30", 3),
        ("1,003", 3), ("1,003", 1003), ("1003", 1003), ("3e3", 3), ("0", 0), ("00", 0), ("10", 10), ("1 0", 10),
        ("１０", 10), ("３", 3), ("٣", 3), ("③", 3), ("³", 3), ("Ⅲ", 3), ("三", 3), ("段落3", 3), ("段落13", 3),
        ("段落 3", 3),
        ("答案是：段落3。", 3), ("段落3和段落5", 3), ("第3段", 3), ("段落３", 3), ("x3y3z4", 3), ("3\t3\n3\r3", 3),
        ("3" * 40, 3),
        ("The final answer is: 17", 17), ("17 unique paragraphs out of 25", 17), ("There are 17.", 17), ("17/25", 17),
        ("I count: 1, 2, 3, 4, so 4", 4), ("２５ and 25", 25), ("\u200b3", 3), ("3\u0301", 3), ("~3", 3),
    ]
]  # fmt: skip

COARSE = ["Description", "Entity", "Human", "Location", "Number"]
FINE = [
    "Manner of an action", "Manner", "Definition of something", "Description of something", "Description", "Reason",
    "Food", "Date", "City", "Country", "Other location", "Other entity", "Individual",
    "Group or organization of person",
    "Group", "Number of something", "Other number", "Number", "Price", "Event", "Animal", "Letter like a-z", "a-z",
]  # fmt: skip
NEWS = ["体育", "体育新闻", "财经", "科技", "社会", "时政", "教育", "娱乐", "军事", "气象"]
NESTED = ["a", "ab", "abc", "abcd", "b", "bc"]
CLASSIFIED = [
    (output, reference, classes)
    for classes, pairs in [
        (COARSE, [
            ("Human", "Human"), ("human", "Human"), ("Type: Human", "Human"), ("Human.", "Human"), ("", "Human"),
            ("Location", "Human"), ("Human or Location", "Human"), ("Human, Location, Number", "Human"),
            ("Hum", "Human"),
            ("Humanity", "Human"), ("Location or Number", "Human"), ("Human Human Human", "Human"),
            ("Human\nNumber", "Human"),
            ("\nHuman", "Human"), ("Description Entity Human Location Number", "Entity"), ("NumberEntity", "Entity"),
            ("Entit y", "Entity"), ("  Entity  ", "Entity"), ("None of these", "Entity"), ("Human", "Animal"),
        ]),
        (FINE, [
            ("Manner of an action", "Manner of an action"), ("Manner", "Manner of an action"), ("Manner", "Manner"),
            ("Manner of an action", "Manner"), ("Number of something", "Number of something"),
            ("Other number", "Other number"), ("Number of something", "Number"), ("Number", "Number of something"),
            ("Description of something", "Description of something"), ("Description of something", "Description"),
            ("Group or organization of person", "Group or organization of person"), ("Group", "Group"),
            ("Group or organization of person", "Group"), ("Letter like a-z", "Letter like a-z"),
            ("a-z", "Letter like a-z"),
            ("Other location and Other entity", "Other entity"), ("Type: Date\nQuestion: next", "Date"),
            ("City, Country", "Country"), ("Definition of something", "Description of something"),
            ("Price Event", "Food"),
            ("Manner of an action, Number of something", "Number of something"),
        ]),
        (NEWS, [
            ("体育", "体育"), ("体育新闻", "体育新闻"), ("体育新闻", "体育"), ("体育", "体育新闻"),
            ("类别：财经", "财经"),
            ("财经、科技", "科技"), ("财经新闻", "财经"), ("", "社会"), ("社会新闻，时政", "社会"),
            ("新闻", "体育新闻"),
            ("體育", "体育"), ("教育\n娱乐", "娱乐"), ("军事 气象 军事", "军事"),
        ]),
        (NESTED, [
            ("abcd", "abcd"), ("abcd", "abc"), ("abcd", "ab"), ("abcd", "a"), ("abcd", "bc"), ("abc", "abcd"),
            ("ab", "ab"),
            ("b", "ab"), ("a b", "a"), ("abc bc", "bc"), ("abcdbc", "b"),
        ]),
        (["x", "x", "xy"], [("xy", "xy"), ("x", "x"), ("x", "xy")]),
        (["xy", "x", "x", "y", "y"], [("xy", "xy"), ("yx", "xy"), ("xy", "y")]),
        ([], [("x", "x")]),
    ]
    for output, reference in pairs
]  # fmt: skip

MATCHED = [
    ("The special magic number is 1234567.", ["1234567"]),
    ("1234567", ["1234567"]), ("12345678", ["1234567"]), ("123456", ["1234567"]), ("1,234,567", ["1234567"]),
    ("1234567, 7654321", ["1234567", "7654321"]), ("7654321 and 1234567", ["1234567", "7654321"]),
    ("1234567", ["1234567", "7654321"]), ("7654321", ["1234567", "7654321"]), ("none", ["1234567", "7654321"]),
    ("1, 2, 3", ["1", "2", "3", "4"]), ("4", ["1", "2", "3", "4"]), ("1 2 3 4", ["1", "2", "3", "4"]),
    ("1 2", ["1", "1"]), ("2", ["1", "1", "2"]), ("11", ["1", "11", "111"]), ("111", ["1", "11", "111"]),
    ("", ["x"]), ("", [""]), ("x", [""]), ("x", ["x", ""]), (" ", [" "]), ("\n", ["x"]), ("a b", [" "]),
    (" a ", [" a "]),
    ("Busy-Otter", ["busy-otter"]), ("busy otter", ["busy-otter"]), ("BUSY-OTTER!", ["busy-otter"]),
    ("busy", ["BUSY"]),
    ("Éclair", ["éclair"]), ("eclair", ["éclair"]), ("e\u0301clair", ["éclair"]), ("STRASSE", ["straße"]),
    ("Straße", ["STRASSE"]), ("İ", ["i"]), ("ǅ", ["ǆ"]), ("ΣΑΣ", ["σας"]), ("σας", ["ΣΑΣ"]), ("ﬁ", ["FI"]),
    ("K", ["k"]),
    ("北京和上海", ["北京"]), ("北京", ["北京", "上海"]), ("ＡＢＣ", ["ａｂｃ"]), ("ＡＢＣ", ["abc"]),
    ("１２３", ["123"]),
    ("a\tb", ["a\tb"]), ("a\tb", ["a\nb"]), ("a\nb", ["a\nb"]), ("a\r\nb", ["a\nb"]), ("a\r\nb", ["a\n\nb"]),
    ("a\x00b", ["ab"]),
    ("a\x1fb", ["a\nb"]), ("a\x7fb", ["a\x7fb"]), ("\x00x\x00", ["x"]), ("a\u0085b", ["a\u0085b"]),
    ("a\u00a0b", ["a b"]),
    ("a  b", ["a b"]), ("Answer: VAR1 VAR2", ["var1", "VAR2", "var3"]), ("1234-5678", ["1234", "5678"]),
    ("6f9619ff-8b86-4d01-b42d-00cf4fc964ff", ["6F9619FF-8B86-4D01-B42D-00CF4FC964FF"]),
    ("6f9619ff", ["6f9619ff-8b86"]),
    ("John F. Kennedy", ["Kennedy", "JFK", "President Kennedy"]), ("jfk", ["Kennedy", "JFK", "President Kennedy"]),
    ("It was in 1963.", ["1963", "November 1963", "22 November 1963"]), ("Nobody knows", ["1963", "November 1963"]),
    ("\x0b\x0cx", ["x"]), ("x\u2028y", ["x\ny"]), ("one two three", ["three", "two", "four"]), ("🙂", ["🙂"]),
    (".", ["."]),
]  # fmt: skip

# A whole record: several answers, and what is made of the output before.
TASKS = [
    ("narrativeqa", "A wise old wizard", ["The wizard", "a wise wizard"], None),
    ("narrativeqa", "nothing", ["The wizard", "a wise wizard"], None),
    ("qasper", "unanswerable\n\nQuestion: more", ["Unanswerable", "No"], None),
    ("qasper", "", ["Yes"], None),
    ("qasper", "Yes", [], None),
    ("multifieldqa_en", "\nIt is about 5 km.\n", ["5 km", "Five kilometers"], None),
    ("multifieldqa_zh", "大约五公里。\n问题：", ["五公里", "5公里"], None),
    ("hotpotqa", "Barack Obama", ["Barack Hussein Obama", "Obama"], None),
    ("2wikimqa", "The same. Both are from France", ["France"], None),
    ("musique", "1999\nPassage 2", ["1999", "the year 1999"], None),
    ("dureader", "可以。建议每天喝两杯水。", ["每天喝两杯水", "建议每天两杯", "可以"], None),
    ("gov_report", LONG_REFERENCE.replace("agency", "office"), [LONG_REFERENCE], None),
    ("gov_report", "\n\n" + LONG_REFERENCE + "\n\nQuestion:", [LONG_REFERENCE], None),
    (
        "qmsum",
        "They agreed on the budget. They did not agree on the date.",
        ["The team agreed on a budget only."],
        None,
    ),
    ("multi_news", "Two storms. One flood.", ["One flood. Two storms.", "Two storms hit. One flood."], None),
    ("vcsum", "会议总结：讨论了预算。", ["会议讨论了预算和人员。"], None),
    ("trec", "Human\nQuestion: Who?\nType: Number", ["Human"], COARSE),
    ("trec", "\n\nHuman", ["Human"], COARSE),
    ("trec", " \nHuman", ["Human"], COARSE),
    ("trec", "Type: Human or Number", ["Number", "Human"], COARSE),
    ("triviaqa", "Paris\n\nPassage:\nLondon", ["Paris", "City of Paris"], None),
    ("triviaqa", "\nCity of Paris", ["Paris", "City of Paris"], None),
    ("triviaqa", "Passage:\nParis", ["Paris"], None),
    ("samsum", "Tom is late.\nDialogue: more", ["Tom is late because he missed the bus."], None),
    ("samsum", "\nTom missed the bus.\nTom is late.", ["Tom is late because he missed the bus."], None),
    ("lsht", "体育\n新闻：下一条\n类别：财经", ["体育"], NEWS),
    ("lsht", "\n体育新闻", ["体育"], NEWS),
    ("passage_count", "17\n\nThere are 25 paragraphs", ["17"], None),
    ("passage_count", "17", ["25", "17"], None),
    ("passage_retrieval_en", "Paragraph 7\nParagraph 8", ["Paragraph 7"], None),
    ("passage_retrieval_en", "\n7", ["Paragraph 17", "Paragraph 7"], None),
    ("passage_retrieval_zh", "段落7。", ["段落7"], None),
    ("passage_retrieval_zh", "段落17", ["段落7"], None),
    ("lcc", "\n# comment\n    return x\n    y", ["    return x", "return y"], None),
    ("lcc", "", ["return x"], None),
    ("repobench-p", "```\nreturn self.x;\n```", ["return this.x;"], None),
    ("repobench-p", "// next\n\n    return this.x;", ["return this.x;"], None),
]

PAIRS = ENGLISH + CHINESE + CODE


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--longbench", type=Path, required=True)
    parser.add_argument("--ruler", type=Path, required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.longbench))
    warnings.simplefilter("ignore")
    import eval as longbench
    import jieba
    import metrics
    from fuzzywuzzy import fuzz
    from fuzzywuzzy.StringMatcher import StringMatcher

    jieba.setLogLevel("WARNING")
    specification = importlib.util.spec_from_file_location("ruler", arguments.ruler)
    ruler = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(ruler)

    def all_code(matcher: type) -> list[float]:
        fuzz.SequenceMatcher = matcher
        return [metrics.code_sim_score(output, reference) for output, reference in PAIRS]

    def as_ruler_reads(output: str) -> str:
        return re.sub(r"[\x00-\x1f]", "\n", output.strip()).strip()

    packages = ("jieba", "rouge", "fuzzywuzzy", "Levenshtein")
    made = {
        "by": {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages},
        "pairs": PAIRS,
        "code_similarity_levenshtein": all_code(StringMatcher),
        "code_similarity": all_code(difflib.SequenceMatcher),
        "qa_f1": [metrics.qa_f1_score(*pair) for pair in PAIRS],
        "qa_f1_zh": [metrics.qa_f1_zh_score(*pair) for pair in PAIRS],
        "rouge_l": [metrics.rouge_score(*pair) for pair in PAIRS],
        "rouge_l_zh": [metrics.rouge_zh_score(*pair) for pair in PAIRS],
        "numbered": NUMBERED,
        "count": [metrics.count_score(*pair) for pair in NUMBERED],
        "retrieval": [metrics.retrieval_score(output, f"Paragraph {k}") for output, k in NUMBERED],
        "retrieval_zh": [metrics.retrieval_zh_score(output, f"段落{k}") for output, k in NUMBERED],
        "classified": CLASSIFIED,
        "classification": [
            metrics.classification_score(output, reference, all_classes=classes)
            for output, reference, classes in CLASSIFIED
        ],
        "matched": MATCHED,
        "string_match_all": [ruler.string_match_all([as_ruler_reads(o)], [references]) for o, references in MATCHED],
        "string_match_part": [ruler.string_match_part([as_ruler_reads(o)], [references]) for o, references in MATCHED],
        "tasks": [
            [task, output, answers, classes, longbench.scorer(task, [output], [answers], classes)]
            for task, output, answers, classes in TASKS
        ],
        "prompts": {
            task: hashlib.sha256(prompt.encode()).hexdigest()
            for task, prompt in json.loads((arguments.longbench / "config/dataset2prompt.json").read_text()).items()
        },
        "max_new_tokens": json.loads((arguments.longbench / "config/dataset2maxlen.json").read_text()),
    }
    lines = [
        f'"{name}": '
        + (
            "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n]"
            if isinstance(value, list) and isinstance(value[0], list | tuple)
            else json.dumps(value, ensure_ascii=False)
        )
        for name, value in made.items()
    ]
    golden = Path(__file__).with_name("scorer_golden.json")
    golden.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(made["by"], {name: len(value) for name, value in made.items()})


if __name__ == "__main__":
    main()
