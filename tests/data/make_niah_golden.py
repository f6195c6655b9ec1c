"""Makes niah_golden.json: one prompt of each of RULER's needle tasks, by lm-evaluation-harness 0.4.13's port of RULER.

    python -m venv /tmp/v && /tmp/v/bin/pip install lm-eval==0.4.13 wonderwords nltk
    /tmp/v/bin/python tests/data/make_niah_golden.py

NLTK's sentence model, which the port downloads, is replaced by a cut at ". ": which sentences a haystack has is not
what the golden prompts are for. The haystack of essays is a few sentences of our own. The port keeps the answer prefix
apart, without its leading space and in the singular or plural of RULER; it is put behind the prompt as RULER's does.
"""

import json
import random
import sys
import types
from pathlib import Path


def load_port() -> types.ModuleType:
    """lm_eval.tasks.ruler.prepare_niah, without NLTK's data."""
    import nltk

    nltk.data.find = lambda *_: True
    # The port imports it for tokenizers, which nothing here asks for.
    sys.modules.setdefault("transformers", types.SimpleNamespace(AutoTokenizer=None))
    from lm_eval.tasks.ruler import prepare_niah

    prepare_niah.cached_sent_tokenize = lambda text: [part for part in text.split(". ") if part]
    return prepare_niah


# scripts/synthetic.yaml of RULER
TASKS = {
    "niah_single_1": ("repeat", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}


def main() -> None:
    random.seed(0)
    port = load_port()
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE

    essay = " ".join(f"Sentence {n} has a few words." for n in range(60)).split(" ")
    haystacks = {"essay": essay, "repeat": port.get_haystack("repeat"), "needle": port.get_haystack("needle")}
    found = {}
    for name, (kind, keys, values, k, v, q) in TASKS.items():
        prompt, _, query = port.generate_input_output(
            300 if kind == "essay" else 12,
            haystacks[kind],
            type_haystack=kind,
            num_needle_k=k,
            type_needle_k=keys,
            num_needle_v=v,
            type_needle_v=values,
            template=TEMPLATE,
            num_needle_q=q,
        )
        # As generate_samples writes gen_prefix.
        one = q * v == 1
        prefix = (
            f"The special magic {values[:-1]} for {query} mentioned in the provided text is"
            if one
            else f"The special magic {values} for {query} mentioned in the provided text are"
        )
        found[name] = f"{prompt} {prefix}"
    path = Path(__file__).with_name("niah_golden.json")
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(found)} prompts", file=sys.stderr)


if __name__ == "__main__":
    main()
