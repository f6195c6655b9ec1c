"""Makes tests/data/earlier: a run, prepared data and results as the commit 692c913 wrote them.

Usage, with a checkout of that commit and its environment:
  PYTHONPATH=CHECKOUT CHECKOUT/.venv/bin/python tests/data/make_earlier_run.py tests/data/earlier CHECKOUT

`run.tar.gz` holds the recipe, the prepared data and a run whose last checkpoint was removed, as after a SIGKILL before
the last save. `expected` holds the log of the undisturbed run, what `evaluate` measured on it, and logits. A later
version has to resume the run to the same log and to evaluate it to the same numbers.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

RECIPE = """
from ml_collections import ConfigDict

ENCODINGS = "rope:base=500/window=16", "partial_rope:fraction=0.5/heads=1:nope"


def get_config(arg=""):
    config = ConfigDict()
    config.name = "earlier"
    config.model = dict(layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, qk_norm="none", dtype="float32", scan=False)
    config.data = dict(prepared="prepared", tokenizer="bytes", cache_dir="cache")
    adamw = dict(learning_rate=1e-2, warmup_steps=2)
    common = dict(sequence_length=32, batch_size=8, optimizer=adamw)
    config.phases = [
        dict(name="pretrain", steps=40, positional=list(ENCODINGS), **common),
        dict(name="recalibrate", steps=40, positional="drop", qk_norm="head", **common),
    ]
    config.log = dict(every_steps=1, validate_every_steps=10, validation_batches=1)
    config.checkpoint = dict(every_steps=20, keep=2)
    config.evaluation = dict(factors=[1, 2], options=dict(tokens=2048, fit_tokens=512))
    config.notes = dict(paper="none", expected="the same as before")
    return config
"""

LOGITS = """
import json, sys
import numpy as np, pe_lab
from pathlib import Path
found = {}
for phase in ("pretrain", "recalibrate"):
    lm = pe_lab.load(f"run/{phase}")
    found[phase] = np.asarray(lm.logits(np.arange(40) * 7 % 256)[0, [0, 5, 39], :8]).tolist()
Path("expected/logits.json").write_text(json.dumps(found, indent=1) + "\\n")
"""


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    (out / "expected").mkdir(parents=True)
    (out / "recipe.py").write_text(RECIPE)
    text = out / "text"
    text.mkdir()
    for n in range(40):
        (text / f"{n}.txt").write_text(" ".join(f"item {i * n % 97} of list {n}," for i in range(40)))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}

    def run(*argv: str) -> None:
        subprocess.run([sys.executable, *argv], cwd=out, check=True, env=environment)

    run("-m", "pe_lab.prepare", "--source=text:text/*.txt", "--tokenizer=bytes", "--out=prepared",
        "--validation-fraction=0.2")  # fmt: skip
    run("-m", "pe_lab.train", "--config=recipe.py", "--workdir=run")
    run("-m", "pe_lab.evaluate", "--from=run")
    run("-c", LOGITS)
    for phase in ("pretrain", "recalibrate"):
        shutil.copy(out / "run" / phase / "metrics.jsonl", out / "expected" / f"{phase}.jsonl")
        shutil.rmtree(out / "run" / phase / "tensorboard")
    shutil.copytree(out / "run" / "evaluation", out / "expected" / "evaluation")
    shutil.rmtree(out / "run" / "evaluation")
    shutil.rmtree(out / "run" / "recalibrate" / "checkpoints" / "40")
    shutil.rmtree(out / "run" / "pretrain" / "checkpoints" / "20")
    run("-m", "tarfile", "-c", "run.tar.gz", "run", "prepared", "recipe.py")
    for made in ("run", "prepared", "text"):
        shutil.rmtree(out / made)
    (out / "recipe.py").unlink()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(sys.argv[2]), capture_output=True, text=True)
    (out / "expected" / "commit.json").write_text(json.dumps({"commit": commit.stdout.strip()}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
