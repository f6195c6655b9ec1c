r"""Makes many_shot_golden.json beside it: what others' code says of pairs of answers, and finds in boxes.

    python tests/data/make_many_shot_golden.py --lm-eval=DIR

DIR has the package lm_eval (0.4.13, unpacked from its wheel), of which tasks/hendrycks_math/utils.py is read; the
Python that runs this has math-verify and antlr4-python3-runtime 4.11. `same` is decided by hand: it is what ours should
say. `hendrycks` is is_equiv of lm_eval, which is Hendrycks' own; `math_verify` parses and compares values.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import types
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent

# what a model wrote, the right answer, whether it is right
CASES = [
    ("5", "5", True),
    ("5", "6", False),
    ("-5", "5", False),
    (" 5 ", "5", True),
    ("5.", "5", True),
    ("$5$", "5", True),
    ("5\n", "5", True),
    ("05", "5", True),
    ("15", "5", False),
    ("\\frac{1}{2}", "\\frac{1}{2}", True),
    ("\\dfrac{1}{2}", "\\frac{1}{2}", True),
    ("\\tfrac{1}{2}", "\\frac{1}{2}", True),
    ("\\frac12", "\\frac{1}{2}", True),
    ("\\frac 12", "\\frac{1}{2}", True),
    ("\\frac1{72}", "\\frac{1}{72}", True),
    ("\\frac{1}2", "\\frac{1}{2}", True),
    ("1/2", "\\frac{1}{2}", True),
    ("-1/2", "-\\frac{1}{2}", True),
    ("\\frac{-1}{2}", "-\\frac{1}{2}", True),
    ("-\\frac{-1}{2}", "\\frac{1}{2}", True),
    ("1/3", "\\frac{1}{2}", False),
    ("\\frac{2}{1}", "\\frac{1}{2}", False),
    ("\\frac{1}{0}", "0", False),
    ("0.5", "\\frac{1}{2}", True),
    (".5", "0.5", True),
    ("0.25", "\\frac{1}{4}", True),
    ("0.33", "\\frac{1}{3}", False),
    ("2/4", "\\frac{1}{2}", True),
    ("2.50", "2.5", True),
    ("3.0", "3", True),
    ("3.00", "3", True),
    ("30", "3", False),
    ("10.05", "10.5", False),
    ("100", "1", False),
    ("1,000", "1000", True),
    ("1{,}000", "1000", True),
    ("32,\\!348", "32348", True),
    ("1,234,567.50", "1234567.5", True),
    ("1,2", "12", False),
    ("(1,200)", "(1200)", False),
    ("(1,2)", "(1, 2)", True),
    ("(1,2)", "(2,1)", False),
    ("\\left(1, 2\\right)", "(1,2)", True),
    ("\\left( \\frac{1}{2}, 3 \\right)", "(1/2,3)", True),
    ("[0,1)", "[0,1]", False),
    ("x=5", "5", True),
    ("x = 5", "5", True),
    ("k = \\frac{1}{2}", "\\frac{1}{2}", True),
    ("y=2x+1", "2x+1", True),
    ("y = 2x + 1", "y=2x+1", True),
    ("x=5", "6", False),
    ("x \\in [1,2]", "[1,2]", True),
    ("90^\\circ", "90", True),
    ("90^{\\circ}", "90", True),
    ("90°", "90", True),
    ("90 degrees", "90", True),
    ("5\\text{ cm}", "5", True),
    ("5\\text{ cm}^2", "5", True),
    ("5 \\mbox{ inches}", "5", True),
    ("5 cm", "5", True),
    ("12 square units", "12", True),
    ("5\\ \\text{meters}", "5", True),
    ("\\frac{5}{2} \\text{ hours}", "\\frac{5}{2}", True),
    ("\\$5", "5", True),
    ("\\$32,000", "32000", True),
    ("5 dollars", "\\$5", True),
    ("25\\%", "25", True),
    ("25%", "25", True),
    ("5x", "5", False),
    ("5 m", "5", False),
    ("\\text{Evelyn}", "Evelyn", True),
    ("\\text{Evelyn}", "\\text{Carla}", False),
    ("\\textbf{(A)}", "A", True),
    ("(A)", "\\text{(A)}", True),
    ("\\text{(B)}", "\\text{(A)}", False),
    ("3 \\text{ and } 5", "3,5", True),
    ("3, 5", "3 \\text{ or } 5", True),
    ("1, 2, and 3", "1,2,3", True),
    ("\\sqrt3", "\\sqrt{3}", True),
    ("2\\sqrt 3", "2\\sqrt{3}", True),
    ("\\sqrt{3}", "\\sqrt{5}", False),
    ("\\sqrt[3]{2}", "\\sqrt{2}", False),
    ("\\sqrt\\pi", "\\sqrt\\pi", True),
    ("\\frac{\\sqrt3}2", "\\frac{\\sqrt{3}}{2}", True),
    ("\\frac{\\pi}{4}", "\\frac\\pi4", True),
    ("2\\pi", "2 \\pi", True),
    ("\\pi", "3.14", False),
    ("x^{2}+1", "x^2 + 1", True),
    ("x^{12}", "x^12", False),
    ("a_{1}", "a_1", True),
    ("x^2 + 1", "x^2 - 1", False),
    ("11\\sqrt2", "11\\sqrt{2}", True),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", True),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}2\\\\1\\end{pmatrix}", False),
    ("\\displaystyle \\frac{3}{4}", "\\frac{3}{4}", True),
    ("\\(7\\)", "7", True),
    ("7 \\quad", "7", True),
    ("10_{2}", "10_2", True),
    ("2516_8", "2516_{8}", True),
    ("\\emptyset", "0", False),
    ("", "5", False),
    ("even", "\\text{even}", True),
    ("odd", "\\text{even}", False),
    ("even.", "\\text{even}", True),
    ("5 cm.", "5", True),
    ("x^2,", "x^2", True),
]

# Texts with boxes; what is in the last one.
BOXES = [
    "So $x = \\boxed{5}$.",
    "First \\boxed{1}, no: \\boxed{\\frac{1}{2}}.",
    "\\boxed{\\left\\{ 1, \\frac{2}{3} \\right\\}}",
    "\\fbox{7}",
    "The answer is $\\boxed 5$.",
    "\\boxed{x^{2} + {3}} and more",
    "no box at all",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lm-eval", type=Path, required=True)
    lm_eval = parser.parse_args().lm_eval
    sys.modules.setdefault("datasets", types.SimpleNamespace(Dataset=object))  # named in an annotation only
    where = lm_eval / "lm_eval" / "tasks" / "hendrycks_math" / "utils.py"
    spec = importlib.util.spec_from_file_location("hendrycks", where)
    hendrycks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hendrycks)
    from math_verify import parse, verify

    def math_verify(given: str, right: str) -> bool:
        return bool(verify(parse(f"${right}$"), parse(f"${given}$")))

    boxes = {}
    for text in BOXES:
        box = hendrycks.last_boxed_only_string(text)
        boxes[text] = None if box is None else box[6:-1] if box.startswith("\\fbox{") else hendrycks.remove_boxed(box)
    golden = {
        "by": f"lm_eval 0.4.13 tasks/hendrycks_math/utils.py; math-verify {version('math-verify')}",
        "cases": [
            {
                "given": given,
                "right": right,
                "same": same,
                "hendrycks": hendrycks.is_equiv(given, right),
                "math_verify": math_verify(given, right),
            }
            for given, right, same in CASES
        ],
        "boxes": boxes,
    }
    text = json.dumps(golden, indent=1, ensure_ascii=False)
    (HERE / "many_shot_golden.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
