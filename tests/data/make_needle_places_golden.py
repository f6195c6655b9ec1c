"""Makes needle_places_golden.json: where LLMTest_NeedleInAHaystack puts its needle, by needlehaystack 0.1.0.

    python -m venv /tmp/v && /tmp/v/bin/pip install --no-deps needlehaystack==0.1.0 && /tmp/v/bin/pip install numpy
    /tmp/v/bin/python tests/data/make_needle_places_golden.py

The package's `insert_needle` runs as it is; the clients of language models that it imports are replaced by nothing.
Two tokenizers: bytes, and words with the space before them. The text is ours, and the needle no part of it.
"""

import json
import re
import sys
import types
from pathlib import Path
from unittest import mock

DEPTHS = (0, 3, 10, 20, 30, 40, 50, 60, 70, 80, 90, 97, 100)
NEEDLE = "<<needle>>"
TEXT = " ".join(
    f"Note {n} has {'a few' if n % 3 else 'rather many more'} words, e.g. {n}.5 of them. Is that so? It is!"
    for n in range(40)
)


class Words:
    """A word with the space before it is a token, and so is any other character."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def encode_text_to_tokens(self, text: str) -> list[int]:
        found = re.findall(r" ?\w+|[^\w]", text)
        self.pieces += [piece for piece in dict.fromkeys(found) if piece not in self.pieces]
        return [self.pieces.index(piece) for piece in found]

    def decode_tokens(self, tokens: list[int]) -> str:
        return "".join(self.pieces[token] for token in tokens)


class Bytes:
    def encode_text_to_tokens(self, text: str) -> list[int]:
        return list(text.encode())

    def decode_tokens(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()


def main() -> None:
    clients = ("providers", "evaluators")
    replaced = {f"needlehaystack.{name}": types.SimpleNamespace(ModelProvider=None, Evaluator=None) for name in clients}
    with mock.patch.dict(sys.modules, replaced):
        package = types.ModuleType("needlehaystack")
        package.__path__ = [str(Path(path, "needlehaystack")) for path in sys.path]
        sys.modules["needlehaystack"] = package
        from needlehaystack.llm_needle_haystack_tester import LLMNeedleHaystackTester
    found = {}
    for name, model in (("bytes", Bytes()), ("words", Words())):
        tester = types.SimpleNamespace(model_to_test=model, needle=NEEDLE, final_context_length_buffer=0)
        long_enough = 2 * len(TEXT)
        contexts = [LLMNeedleHaystackTester.insert_needle(tester, TEXT, depth, long_enough) for depth in DEPTHS]
        found[name] = [context.index(NEEDLE) for context in contexts]
    path = Path(__file__).with_name("needle_places_golden.json")
    path.write_text(json.dumps({"text": TEXT, "depths": DEPTHS, "characters_before": found}, indent=1) + "\n")
    print(f"{path}: {found}", file=sys.stderr)


if __name__ == "__main__":
    main()
