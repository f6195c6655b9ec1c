"""Any checkpoint, trained further on whole long documents at a longer context, under any positional encoding.

`python -m pe_lab.extend` compares encodings without training, trains the best of them with this recipe, and answers
which to take; this is one of its arms by hand.

Arguments: from=CHECKPOINT (a run, a phase or a step; hf:DIR, gguf:FILE), positional=ENCODING (kept: the checkpoint's
own; drop: DroPE; or a text, as 'rope:base=1e6'), length=TOKENS (of the windows; 32768), data=SOURCE (stdlib, prose,
manuals, text:GLOB, jsonl:GLOB, parquet:GLOB, hf:ORG/NAME, a directory of pe_lab.prepare; own: the data of the
checkpoint's run), steps (200), batch (windows a step; 8), rate (3e-5), long (share of the text that is of documents
that fill a window; 0.5), stages (1: all steps at `length`; 2: the first half of them at half of it, and so on),
distill=none (or logits, hidden: the checkpoint as it was is the teacher), size=full (or quick: 4 steps), name. Values
with a comma are quoted.

Train, after surgery:
  python -m pe_lab.surgery --from=runs/smollm2 --to=runs/yarn --positional=yarn:factor=4
  python -m pe_lab.train --config=configs/extend.py:from=runs/yarn,length=32768,data=prose
  python -m pe_lab.train --config=configs/extend.py:from=runs/yarn,length=32768,data=data/books,long=0.7,stages=2

Cost: that of the checkpoint's shape at this length; does it fit?
  python -m pe_lab.plan --config=configs/extend.py:from=runs/yarn,length=32768 --topology=h100:1

Expected: a lower loss beyond the checkpoint's own length, at some price within it. `pe_lab.extend` measures both.

Windows hold whole documents: `best_fit` cuts none that fits, and attention stays within each. A share `long` of the
windows is of documents of at least one window, which are rare in most corpora: short documents alone teach nothing
about a long context, and long ones alone lose the short one (ProLong, arXiv 2410.02660, has 60% long). Without such
documents the recipe stops before the first step.
The rate warms up over a twentieth of the steps and falls to a tenth. There is no weight decay: it would pull towards
zero, not towards the checkpoint.
"""

from ml_collections import ConfigDict

from pe_lab.errors import ConfigError
from pe_lab.positional import drop
from pe_lab.recipes import (
    AUTO,
    corpus,
    data_of_checkpoint,
    name_of,
    number,
    phase,
    recipe_arguments,
    with_long_documents,
)


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: from=CHECKPOINT,positional=ENCODING,length=TOKENS, and others of the docstring's."""
    free = {"from": "runs/smollm2", "positional": "kept", "length": "32768", "data": "prose", "name": ""}
    free |= {"steps": "200", "batch": "8", "rate": "3e-5", "long": "0.5", "stages": "1"}
    arguments = recipe_arguments(arg, distill=("none", "logits", "hidden"), size=("full", "quick"), **free)
    start, source = arguments["from"].rstrip("/"), arguments["data"]
    length, steps, batch, stages = (number(arguments, key, int) for key in ("length", "steps", "batch", "stages"))
    steps = min(steps, 4) if arguments["size"] == "quick" else steps
    share = number(arguments, "long")
    if not 0 <= share <= 1:
        raise ConfigError(f"long={share:g}: give the share of the windows from long documents, from 0 to 1.")
    if stages < 1 or steps < stages or length % 2 ** (stages - 1):
        raise ConfigError(f"stages={stages}: each needs a step, and half of the length of the next.")

    config = ConfigDict()
    config.name = arguments["name"] or f"extend_{name_of(start)}"
    text = data_of_checkpoint(start) if source == "own" else corpus(source)
    config.data = with_long_documents(text, share, length)
    if source != "own" and "prepared" not in text:
        config.data.validation_fraction = 0.05
    config.model = dict(AUTO)

    encoding = arguments["positional"]
    first = {} if encoding == "kept" else dict(positional=drop() if encoding == "drop" else encoding)
    config.phases = []
    for stage in range(stages):
        last = stage == stages - 1
        config.phases.append(
            phase(
                name="extend" if last else f"stage{stage + 1}",
                steps=steps - stage * (steps // stages) if last else steps // stages,
                init_from="" if stage else start,
                **(dict(positional="kept") if stage else first),
                sequence_length=length >> (stages - 1 - stage),
                batch_size=batch << (stages - 1 - stage),
                accumulate="auto",
                optimizer=dict(
                    learning_rate=number(arguments, "rate"),
                    warmup_steps=max(1, steps // stages // 20),
                    final_fraction=0.1,
                    weight_decay=0.0,
                    b2=0.95,
                ),
            )
        )
        if arguments["distill"] != "none":
            config.phases[-1].distill = dict(teacher=start, logits=1.0, hidden=float(arguments["distill"] == "hidden"))
    half = max(1, steps // stages // 2)
    config.log = dict(every_steps=1 if steps <= 100 else 10, validate_every_steps=half, validation_batches=2)
    config.checkpoint = dict(every_steps=half, keep=1)
    config.evaluation = dict(factors=(1, 2), suites=("long_range", "passkeys"), options=dict(documents=16))

    config.notes = dict(
        paper=f"none: {start} trained further at {length:,} tokens",
        command="python -m pe_lab.train --config=configs/extend.py" + (f":{arg}" if arg else ""),
        cost="that of its checkpoint's shape: python -m pe_lab.plan",
        expected="a lower loss beyond the checkpoint's own length",
    )
    return config
