"""SmolLM2-135M-Instruct, the real one: in from GGUF, read, edited, continued, trained, and out again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real_material import essays, smollm2_gguf
from transformers_environments import environment, projections, read, tokenize

import pe_lab
from pe_lab.analysis import frequency_use
from pe_lab.data.tokenizers.tokenizer import DIFFICULT
from pe_lab.positional import Yarn, rescale

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
PROMPT = "The capital of France is"


def command(name: str, *arguments: str) -> str:
    """A command as a user runs it; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", f"pe_lab.{name}", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint as a native one, after the parity check."""
    to = tmp_path_factory.mktemp("real") / "smollm2"
    python = environment("5")
    printed = command(
        "convert", f"--from=gguf:{smollm2_gguf()}", f"--to={to}", "--parity=require", f"--parity-python={python}"
    )
    assert "most probable next tokens equal at 100.0%" in printed, printed
    return to


@pytest.fixture(scope="module")
def lm(converted: Path) -> pe_lab.LanguageModel:
    return pe_lab.load(converted)


@pytest.fixture(scope="module")
def text(lm: pe_lab.LanguageModel) -> np.ndarray:
    """8,192 tokens of essays."""
    ids = np.concatenate([lm.tokenizer.encode(path.read_text(encoding="utf-8")) for path in essays()])
    return ids[:8192]


@pytest.mark.parametrize("length", [64, 2048, 8192])
def test_it_says_what_transformers_says(lm: pe_lab.LanguageModel, text: np.ndarray, length: int) -> None:
    """transformers reads the same quantized file, multiplies it out and permutes it for itself."""
    gguf = smollm2_gguf()
    theirs = read("5", gguf.parent, text[None, :length], gguf_file=gguf.name, timeout=1500)[0]
    ours = np.asarray(lm.logits(text[:length]))[0]
    agree, divergence = 0, 0.0
    for start in range(0, length, 512):
        p, q = (log_probabilities(x[start : start + 512]) for x in (theirs, ours))
        agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        divergence += float((np.exp(p) * (p - q)).sum())
    print(f"{length} tokens: next-token agreement {agree / length:.4%}, mean KL {divergence / length:.2e}, "
          f"largest difference {np.abs(theirs - ours).max():.2e}")  # fmt: skip
    assert agree == length
    assert divergence / length < 1e-6


def test_the_frequencies_that_heads_use_are_those_of_transformers(lm: pe_lab.LanguageModel, text: np.ndarray) -> None:
    """Norms of the pairs of channels at 512 tokens, from hooks on transformers' own projections."""
    tokens, gguf = text[None, :512], smollm2_gguf()
    theirs = projections("5", gguf.parent, tokens, gguf_file=gguf.name, timeout=900)
    ours = frequency_use.measure(lm, tokens)
    for name, found in (("q_proj", ours.query), ("k_proj", ours.key), ("v_proj", ours.value)):
        first, second = np.split(theirs[name].reshape(30, 512, -1, 64), 2, axis=-1)
        norms = np.hypot(first, second).mean(1)  # [L, heads, R]
        difference = np.abs(found[0] - norms)
        print(f"{name}: mean norm {norms.mean():.3f}, largest difference {difference.max():.1e}")
        assert difference.max() < 1e-4 * norms.mean()


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """In float64: the divergence is smaller than what float32 leaves of a sum over 49,152 tokens."""
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_it_continues_a_prompt_sensibly_and_otherwise_once_it_is_dropped(lm: pe_lab.LanguageModel) -> None:
    continued = lm.generate(PROMPT, max_new_tokens=12)
    assert continued.startswith(" Paris.")
    # It still knows of Paris, and no more what follows what.
    assert lm.drop_positional().generate(PROMPT, max_new_tokens=12) != continued


def test_the_generate_verb_streams_it(converted: Path) -> None:
    printed = command("generate", f"--from={converted}", "--prompt=What is the capital of France?", "--chat",
                "--max-new-tokens=24")  # fmt: skip
    assert "Paris" in printed and "<|im_end|>" not in printed


def test_the_perplexity_of_what_a_drop_costs(converted: Path, tmp_path: Path) -> None:
    """What docs/checkpoints.md shows at full length: a dropped model needs recalibration, a stretched one does not."""
    command("evaluate", f"--from={converted}", f"--text={essays()[0].parent}/*.txt", "--suite=perplexity",
         "--lengths=512,2048", "--methods=as-trained,dropped", "--tokens=4096", f"--out={tmp_path}")  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "perplexity.jsonl").read_text().splitlines()]
    found = {(row["variant"], row["length"]): row["perplexity"] for row in rows}
    assert 10 < found["as trained", 512] < 45 and found["as trained", 2048] < found["as trained", 512]
    assert found["dropped", 512] > 10 * found["as trained", 512]


def test_edits_go_out_to_both_majors(
    converted: Path, lm: pe_lab.LanguageModel, text: np.ndarray, tmp_path: Path
) -> None:
    edits = {
        "rope": lm,
        "dropped": lm.drop_positional(),
        "yarn": lm.with_positional(rescale(Yarn(2, 8192))),
        "mixed": lm.drop_positional(range(3, 30, 4)),
    }
    tokens = text[None, :256]
    for name, edited in edits.items():
        source = converted
        if name != "rope":
            source = edited.save(tmp_path / name).parents[1]
        command("convert", f"--from={source}", f"--to=hf:{tmp_path / name}_hf", "--parity=off")
        wanted = np.asarray(edited.logits(tokens))
        for version in ("4.56", "5"):
            found = read(version, tmp_path / f"{name}_hf", tokens)
            difference = np.abs(found - wanted).max()
            print(f"{name}, transformers {version}: {difference:.2e} of {np.abs(wanted).max():.1f}")
            assert difference < 2e-5 * np.abs(wanted).max() and (found.argmax(-1) == wanted.argmax(-1)).all()


def test_its_tokenizer_goes_out(converted: Path, tmp_path: Path) -> None:
    command("convert", f"--from={converted}", f"--to=hf:{tmp_path / 'hf'}", "--parity=off")
    tokenizer = pe_lab.load(converted).tokenizer
    difficult = "\n".join(DIFFICULT)
    for version in ("4.56", "5"):
        assert tokenize(version, tmp_path / "hf", difficult)["plain"] == tokenizer.encode_prompt(difficult).tolist()


def test_surgery_on_it(converted: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(path.read_text(encoding="utf-8") for path in essays()[:6]), encoding="utf-8")
    scores = tmp_path / "scores.json"
    scores.write_text(json.dumps(np.random.default_rng(0).random((30, 9)).tolist()))
    for name, options in {
        "some": ["--drop", "--layers=15-29"],
        "yarn": ["--positional=yarn:factor=4"],
        "norm": ["--drop", "--add-qk-norm", f"--text={book}"],
        "masked": [f"--mask-heads={scores}", "--count=4"],
    }.items():
        command("surgery", f"--from={converted}", f"--to={tmp_path / name}", *options)
        lm = pe_lab.load(tmp_path / name)
        what = [ancestor["what"] for ancestor in lm.checkpoint.metadata["lineage"]]
        assert what[0].startswith("converted from gguf:") and len(what) == 2, what
        assert np.isfinite(np.asarray(lm.logits(PROMPT))).all()
    assert pe_lab.load(tmp_path / "yarn").layers[0].encoding.base == 100_000
    assert pe_lab.load(tmp_path / "norm").config.qk_norm == "head"


def test_the_recipe_recalibrates_it(converted: Path, tmp_path: Path) -> None:
    """configs/drope_smollm.py as it is, but for the length of its windows and the number of its steps."""
    command("prepare", f"--source=text:{essays()[0].parent}/*.txt", f"--tokenizer=saved:{converted / 'tokenizer'}",
         f"--out={tmp_path / 'data'}", "--validation-fraction=0.2")  # fmt: skip
    command("train", f"--config=configs/drope_smollm.py:model=135m,from={converted},data={tmp_path / 'data'}",
         f"--workdir={tmp_path / 'run'}", "--config.phases.0.steps=3", "--config.phases.0.sequence_length=128",
         "--config.phases.0.batch_size=4", "--config.phases.0.accumulate=1", "--config.log.validation_batches=1",
         "--config.log.every_steps=1", "--config.model.dtype=float32",
         "--config.phases.0.optimizer.warmup_steps=1")  # fmt: skip
    lm = pe_lab.load(tmp_path / "run")
    whats = [ancestor["what"] for ancestor in lm.checkpoint.metadata["lineage"]]
    assert whats[0].startswith("converted from gguf:") and "-> nope on layers 0-29" in whats[1], whats
    rows = [json.loads(line) for line in (tmp_path / "run" / "recalibrate" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 3 and losses[-1] < losses[0]
