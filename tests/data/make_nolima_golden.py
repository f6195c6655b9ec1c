"""Makes nolima_golden.json beside it: the prompts and scores of NoLiMa's own code, on the files of small_benchmarks.py.

    PYTHONPATH=tests python tests/data/make_nolima_golden.py --nolima=DIR

DIR is a checkout of adobe-research/NoLiMa (Adobe Research License, for research that is not commercial; commit
7532e4ee). Its evaluation/run_tests.py is run for 250 and 1,000 tokens of two books; the packages of servers that it
imports are stand-ins, its connector counts bytes and answers with names in turn. The books are in the order of their
names, which os.listdir does not promise. Made under Python 3.11 with NumPy 2.4.

Each entry is (test, book, tokens, depth, SHA-256 of the prompt, answer, score).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import runpy
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from small_benchmarks import write_nolima
from stubbed_modules import StubbedModules

ANSWERS = ("Ada", "It is Boris.", "chen", "Dora or Chen", "In Riga", "riga", "Latvia", "")


class Connector:
    """Bytes for tokens; keeps what it is asked."""

    SYSTEM_PROMPT = ""
    asked: list[str] = []
    answers = itertools.cycle(ANSWERS)

    def __init__(self, **_: Any):
        pass

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def token_count(self, text: str) -> int:
        return len(self.encode(text))

    def generate_response(self, user_prompt: str, **_: Any) -> Any:
        Connector.asked.append(user_prompt)
        answer = next(Connector.answers)

        async def respond() -> dict[str, Any]:
            return {"response": answer, "prompt_tokens": 0, "completion_tokens": 0}

        return respond()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nolima", type=Path, required=True)
    checkout = parser.parse_args().nolima.resolve()
    StubbedModules(
        "openai", "tiktoken", "transformers", "vertexai", "langchain_aws", "google", "tenacity", "jsonargparse"
    )
    sys.path[:0] = [str(checkout), str(checkout / "evaluation")]
    connector = types.ModuleType("async_api_connector")
    connector.APIConnector = Connector
    sys.modules["async_api_connector"] = connector
    listed = os.listdir
    os.listdir = lambda path=".": sorted(listed(path))
    asyncio.set_event_loop(asyncio.new_event_loop())
    golden = []
    with tempfile.TemporaryDirectory() as folder:
        write_nolima(Path(folder))
        Path(folder, "model.json").write_text(json.dumps({"max_tokens": 192, "temperature": 0.0, "top_p": 1.0}))
        for size in (250, 1000):
            results = Path(folder, f"results_{size}")
            given = argparse.Namespace(
                model_name="model",
                model_configs_dir=folder,
                needle_set_path=f"{folder}/data/needlesets/needle_set.json",
                haystack_dir=f"{folder}/data/haystack/rand_shuffle",
                use_default_system_prompt=True,
                parent_results_dir=str(results),
                context_length=size,
                document_depth_percent_min=0,
                document_depth_percent_max=100,
                document_depth_percent_intervals=26,
                shift=0,
                static_depth=-1,
                metric="contains",
                log_placements_dir="",
                base_seed=42,
                prevent_duplicate_tests=True,
            )
            arguments = types.SimpleNamespace(add_argument=lambda *_, **__: None, parse_args=lambda given=given: given)
            sys.modules["jsonargparse"] = types.ModuleType("jsonargparse")
            sys.modules["jsonargparse"].ArgumentParser = lambda arguments=arguments, **_: arguments
            sys.modules["jsonargparse"].ActionConfigFile = None
            order: list[Any] = []
            tester = __import__("async_evaluate").NoLiMa_Tester
            evaluate = tester.evaluate

            def kept(self: Any, evaluate: Any = evaluate, order: list[Any] = order) -> None:
                Connector.asked.clear()
                # Its names have seconds, in which two books may fall.
                self.eval_name += Path(self.haystack_path).stem
                evaluate(self)
                path = Path(self.results_dir, f"{self.eval_name}.json")
                order.append(
                    (self.test_name, Path(self.haystack_path).stem, list(Connector.asked), json.loads(path.read_text()))
                )

            tester.evaluate = kept
            runpy.run_path(str(checkout / "evaluation" / "run_tests.py"), run_name="__main__")
            tester.evaluate = evaluate
            for test, book, prompts, result in order:
                for prompt, one in zip(prompts, result["results"], strict=True):
                    digest = hashlib.sha256(prompt.encode()).hexdigest()[:16]
                    depth = one["placement_metadata"]["depth"]
                    golden.append([test, book, size, depth, digest, one["response"], one["metric"]])
    lines = ",\n".join(json.dumps(entry) for entry in golden)
    Path(__file__).with_name("nolima_golden.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
