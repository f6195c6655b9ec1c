"""What a line of the documentation is at quick size: its replacements, for `documented_code`."""

from __future__ import annotations

import glob
import re

# Where paths outside the working directory and a corpus of the hub are in the sandbox; the size of a vocabulary there.
PLACES = {"gs://bucket": "bucket", "/mnt/": "mnt/", "/shared/": "shared/"}
PLACES |= {"HuggingFaceFW/fineweb-edu": "mirrors/fineweb", "HuggingFaceFW/fineweb:": "mirrors/fineweb:"}
PLACES |= {"https://host/part-{00..31}.jsonl.zst": "corpus/{0..0}.jsonl.gz", "train:4096": "train:400"}
PLACES |= {"length=16384,data=stdlib": "length=64,data=text:essays/*.txt", "--text=stdlib": "--text=essays/*.txt"}
PLACES |= {"data=prose": "data=text:essays/*.txt", "--text=prose": "--text=essays/*.txt"}  # else minutes of downloads
PLACES |= {"--source=manuals": "--source=text:essays/*.txt"}

_TINY = {
    "vocab_size": 2048,
    "layers": 3,
    "d_model": 32,
    "d_ff": 32,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 0,
    "dtype": "float32",
}
_PHASE = {"steps": 4, "sequence_length": 32, "batch_size": 2, "accumulate": 1, "optimizer.warmup_steps": 1}


def quick_training(reference: str) -> list[str]:
    """Overrides that make a recipe's run a matter of seconds on one device."""
    from pe_lab.recipes import load_config

    config = load_config(reference)
    small = {f"model.{key}": value for key, value in _TINY.items()} if not config.phases[0].init_from else {}
    small |= {f"phases.{i}.{key}": value for i in range(len(config.phases)) for key, value in _PHASE.items()}
    small |= {"mesh.fsdp": 1, "mesh.tensor": 1, "mesh.context": 1, "checkpoint.every_steps": 4, "log.every_steps": 1}
    small |= {"evaluation.factors": [1, 2], "evaluation.options.tokens": 128}
    small |= {"evaluation.options.fit_tokens": 128, "evaluation.options.windows": 4}
    small |= {"evaluation.options.crop_steps": 1}
    small |= {"checkpoint.milestones": [], "log.validate_every_steps": 4, "log.validation_batches": 1}
    return [f"--config.{key}={value}" for key, value in small.items()]


# Flags whose values are replaced, by command. Lengths: the stand-in for SmolLM2 was trained at 64 tokens, not 8,192;
# prompts of needles and few-shot examples need a thousand.
PROMPTED = "niah|ruler|longbench|many_shot|nolima"
SUITES = {
    "--suite=niah": "--suite=niah:standard",
    "--suite=niah:noisy,clean": "--suite=niah:noisy",
    "--suite=ruler": "--suite=ruler:niah_single_2",
    "--suite=longbench": "--suite=longbench:trec",
    "--suite=many_shot:needle,plain": "--suite=many_shot:plain",
}
QUICK = {
    "pe_lab.train": {"--until": "8"},
    "pe_lab.evaluate": {"--tokens": "128", "--samples": "1", "--max-new-tokens": "4", "--depths": "0", "--stride": "8"},
    "pe_lab.analyze": {
        "--sequences": "2",
        "--samples": "1",
        "--length": "64",
        "--lengths": "64",
        "--heads-length": "64",
        "--candidates": "1",
        "--greedy": "3",
        "--points": "1,2,3,6",
        "--grid": "method=all-nope;indicator=query;rank=1;heads=1;order=ascending",
    },
    "pe_lab.extend": {"--tokens": "50k", "--data": "corpus/*.jsonl.gz"},
    "pe_lab.generate": {"--max-new-tokens": "4"},
    "pe_lab.surgery": {"--length": "64", "--most": "1"},
    "pe_lab.prepare": {"--limit-documents": "20"},
    "pe_lab.sweep": {"--seeds": "1"},
    "pe_lab.claims": {"--seeds": "2", "--size": "quick", "--jobs": "1"},
    "pe_lab.audit": {"--python": None},
    "pe_lab.plan": {"--explain": None, "--json": None, "--against": None},
}
# In Python: two small cells; layers that the stand-in for SmolLM2 has.
QUICK_PYTHON = {"seeds=3, directory": "seeds=1, overrides=small, directory"}
QUICK_PYTHON |= {"layers=[16]": "layers=[2]", "layers=[0, 15]": "layers=[0, 3]", "with_heads(16,": "with_heads(2,"}
# What is added to a line.
ADDED = {
    "pe_lab.plan": ["--no-compile"],  # tests/planning/test_tpu_steps.py compiles, for minutes
    "pe_lab.convert": ["--parity=off"],  # needs torch; tests/checkpoints compares logits with transformers
    "pe_lab.generate": ["--max-new-tokens=4"],
    "pe_lab.claims": ["--size=quick"],
    "pe_lab.extend": ["--dry-run"],  # tests/test_extend.py runs one, for a minute
    "pe_lab.audit": ["--runtime=logits:audit.npz"],  # of the stand-in; other runtimes need torch or llama.cpp
}


def quick(module: str, arguments: list[str]) -> list[str]:
    """The arguments at quick size, with the paths of the sandbox."""
    from pe_lab.recipes import load_config

    for place, here in PLACES.items():
        arguments = [one.replace(place, here) for one in arguments]
    found = []
    for one in arguments:
        flag, equals, value = one.partition("=")
        if flag in QUICK.get(module, {}):
            value = QUICK[module][flag]
            found += [] if value is None else [f"{flag}={value}"]
        elif flag == "--lengths":
            found.append("--lengths=32,64")
        elif one in SUITES:
            found.append(SUITES[one])
        else:
            found += sorted(glob.glob(one)) if not one.startswith("--") and "*" in one else [one]
    if module == "pe_lab.surgery" and "--search" in found:
        found = [one for one in found if not one.startswith(("--length", "--population", "--iterations"))]
        found += ["--length=2x", "--population=8", "--iterations=0", "--sequences=2", "--objective=text"]
    if any("passkeys" in one for one in found if one.startswith("--suite=")):
        found = [one for one in found if not one.startswith("--lengths")]
        alone = any(one.startswith("--distractors=") for one in found)  # the prompt of RULER's is longer
        found = [one for one in found if not one.startswith(("--distractors=", "--passkey-windows="))]
        found += ["--documents=2", "--passkey-windows=1"]
        found += ["--lengths=512", "--distractors=1"] if alone else ["--lengths=128,256", "--passkeys=1"]
    if any(one.startswith("--suite=lm_eval:local") for one in arguments):
        found.append("--samples=1")
    if "dope" in arguments and "--length=65536" in arguments:
        found.append("--dry-run")  # the page's other lengths run: 12 s a line
    if "dope" in arguments and not any(one.startswith("--grid=") for one in found):
        found.append(f"--grid={QUICK[module]['--grid']}")
    suite = re.search(f"--suite=({PROMPTED})", " ".join(arguments))
    if suite and module in ("pe_lab.evaluate", "pe_lab.analyze"):
        tokens = "512" if suite[1] == "niah" else "1k"
        length = f"--lengths={tokens}" if module == "pe_lab.evaluate" else f"--length={tokens}"
        added = [length, "--samples=1", "--max-new-tokens=4"]
        added += ["--buffer=64"] if suite[1] == "many_shot" else []
        added = added[2:] if suite[1] == "longbench" else added
        added = added[:1] if "head_entropy" in arguments else added  # its prompts are read, and not answered
        names = {one.partition("=")[0] for one in [*added, "--heads-length"]}
        found = [one for one in found if one.partition("=")[0] not in names] + added
    config = next((one.partition("=")[2] for one in arguments if one.startswith("--config=")), None)
    if module == "pe_lab.train" and config:
        found += quick_training(config)
        if not any(one.startswith("--workdir=") for one in found):
            found.append(f"--workdir=runs/{load_config(config).name}")  # its default
    if module == "pe_lab.sweep" and config and "--dry-run" not in arguments:
        axes = [i + 1 for i, one in enumerate(found) if one == "--grid"]
        for i in axes:  # two cells: two values of the first key
            found[i] = ",".join(found[i].split(",")[: 2 if i == axes[0] else 1])
        found += quick_training(config)
    return found + [one for one in ADDED.get(module, []) if one not in found]
