"""lm-evaluation-harness on the real SmolLM2-135M-Instruct: through its own Hugging Face backend, and through ours.

The same tasks, the same weights, two implementations of everything below the harness's requests: tokens, contexts
that are cut, windows, log-likelihoods, generated texts. A tiny model with a tokenizer that puts BOS before a text and
drops its first space, as Llama 2's does, goes the same way.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from lm_eval_tasks import NAMES, write_tasks
from real_material import smollm2_gguf
from transformers_environments import environment, variables

import pe_lab
from pe_lab.evaluation.lm_eval import adapter

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
SHORT = 24  # contexts are cut, and passages read in windows; an answer of 16 tokens leaves 8 for its question
CASES = ("smollm2", "smollm2 short", "smollm2 chat", "llama", "llama short")


def llama_like_tokenizer(directory: Path) -> None:
    """61 characters and merges between them, written as Llama 2's tokenizer.json is."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    characters = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789.,?:'-\nQARWT"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("e", "r"), ("i", "n"), ("▁", "w")]
    pieces = ["<unk>", "<s>", "</s>", *characters, *(a + b for a, b in merges)]
    assert len(pieces) <= 64  # the model's vocabulary
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    configuration = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
                     "unk_token": "<unk>", "clean_up_tokenization_spaces": False}  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(configuration))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[pe_lab.LanguageModel, str]]:
    """By name, as we read it, and the directory that transformers reads."""
    scratch = tmp_path_factory.mktemp("models")
    gguf, exported, llama = f"gguf:{smollm2_gguf()}", scratch / "smollm2", scratch / "llama"
    command = [sys.executable, "-m", "pe_lab.convert", f"--from={gguf}", f"--to=hf:{exported}", "--parity=off"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.copytree(ROOT / "tests" / "data" / "hf" / "llama", llama)
    llama_like_tokenizer(llama)
    return {"smollm2": (pe_lab.load(gguf), str(exported)), "llama": (pe_lab.load(llama), str(llama))}


def settings(case: str) -> dict[str, Any]:
    """What a case asks both for."""
    chat = case.endswith("chat")
    return {
        "names": ["local_questions"] if chat else list(NAMES),
        "max_length": SHORT if case.endswith("short") else None,
        "chat": chat,
        "limit": None if case in ("smollm2", "llama") else 10,
    }


@pytest.fixture(scope="module")
def theirs(
    tasks: Path, models: dict[str, tuple[pe_lab.LanguageModel, str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the harness's own backend answers, by case."""
    scratch = tmp_path_factory.mktemp("theirs")
    jobs = [{"model": models[case.split()[0]][1], **settings(case)} for case in CASES]
    (scratch / "jobs.json").write_text(json.dumps(jobs))
    script = ROOT / "tests" / "data" / "score_with_lm_eval.py"
    command = [str(environment("5+lm_eval")), "-I", str(script), f"--tasks={tasks}", f"--jobs={scratch / 'jobs.json'}",
               f"--out={scratch / 'out.json'}"]  # fmt: skip
    # Threads that wait for each other asleep: awake they take the time of whatever else runs.
    more = {"HF_DATASETS_CACHE": str(scratch / "datasets"), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=variables() | more, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    return dict(zip(CASES, json.loads((scratch / "out.json").read_text()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_both_answer_alike(
    case: str,
    theirs: dict[str, Any],
    tasks: Path,
    models: dict[str, tuple[pe_lab.LanguageModel, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    wanted, asked = theirs[case], settings(case)
    ours = adapter()(models[case.split()[0]][0], max_length=asked["max_length"], devices=jax.devices()[:1])
    for name in ("prefix_token_id", "eot_token_id", "max_length"):
        assert getattr(ours, name) == wanted[name], name
    found = simple_evaluate(
        ours,
        tasks=asked["names"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        limit=asked["limit"],
        apply_chat_template=asked["chat"],
        fewshot_as_multiturn=asked["chat"],
    )
    assert (ours.truncated > 0) == case.endswith("short")
    for task in asked["names"]:
        pairs = list(answers(found["samples"][task], wanted["samples"][task]))
        assert len(pairs) == (asked["limit"] or 30) * (4 if task == "local_choices" else 1)
        texts = [(a, b) for a, b in pairs if isinstance(a, str)]
        differences = [abs(a[0] - b[0]) for a, b in pairs if not isinstance(a, str)]
        scores = {
            key.removesuffix(",none"): (value, wanted["results"][task][key])
            for key, value in found["results"][task].items()
            if "," in key and "stderr" not in key
        }
        alike = sum(a == b for a, b in texts) if texts else sum(a[1] == b[1] for a, b in pairs)
        what = "the same texts" if texts else "the same greedy flags"
        largest = f", largest difference of log-likelihoods {max(differences):.1e} nats" if differences else ""
        shown = ", ".join(f"{key} {a:.6g} and {b:.6g}" for key, (a, b) in scores.items())
        print(f"{case:13} {task:16} {len(pairs):3} requests: {alike:3} {what}{largest}; {shown}")
        assert all(a == b for a, b in texts), [pair for pair in texts if pair[0] != pair[1]]
        assert all(a[1] == b[1] for a, b in pairs if not isinstance(a, str))
        assert max(differences, default=0) < 1e-3
        for ours_is, theirs_is in scores.values():
            assert ours_is == pytest.approx(theirs_is, rel=1e-4)


def answers(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Any:
    """The answers of each request, ours and theirs: a text, or (log-likelihood, whether it is the greedy one)."""
    for mine, other in zip(ours, theirs, strict=True):
        assert json.loads(json.dumps(mine["arguments"])) == other["arguments"]
        for (a,), (b,) in zip(mine["resps"], other["resps"], strict=True):
            if isinstance(a, float) or isinstance(b, float):  # of a whole passage
                yield (float(a), None), (float(b), None)
            elif isinstance(a, str):
                yield a, b
            else:
                yield (float(a[0]), str(a[1])), (float(b[0]), str(b[1]))
