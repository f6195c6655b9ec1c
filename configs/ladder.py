"""Models of one shape at several widths, 20 tokens a parameter: the rungs of a ladder of what a drop costs by size.

Paper: DroPE (Gelberg et al. 2025), appendix D.1: a drop late in pretraining, here at sizes from 0.3M parameters on.
claims/ladder.py has the arms, docs/claims.md what came of them. Rates and initial weights are those of the width 64,
which muP carries to other widths (model.mup_base_width).

Train:
  python -m pe_lab.train --config=configs/ladder.py:width=64
  python -m pe_lab.train --config=configs/ladder.py:width=64,method=nope,from=runs/ladder_rope,at=0.875
  python -m pe_lab.claims ladder --jobs=2

Arguments: width=64, layers=8; method=rope, nope, half (the slower half of the pairs does not rotate), p_rope_75 or
p_rope_25 (the share of the pairs that do), partial_rope_10 or partial_rope_25 (the percentage of the channels), yarn
(RoPE of windows of 512, extended to these), or kept, the encodings of the checkpoint. from=RUN continues it with a new
warm-up: from the share `at` of its steps to their end, or from its end for the share `more`. qk_norm=none (or head,
whose scale starts at 1), head_dim=32, heads (as many as fill the width), block=pre_norm. rate, per_parameter=20
(training tokens), window=512, batch=2048 (tokens a step), mup=64 (0: the usual parametrization), data (a directory of
pe_lab.prepare, or a source such as prose), attention=chunked (auto on GPUs), size=laptop (quick).

Data: python -m pe_lab.prepare --source=manuals --tokenizer=sentencepiece:train:4096 --language=en --exact-duplicates
  --near-duplicates=0.8 --out=data/manuals
Cost: 5.1, 9.2 and 14.1 MFLOPs a token at widths 64, 96 and 128: 12 minutes, 40 minutes and 100 minutes on a CPU core.
Expected: docs/claims.md.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from pe_lab.positional import NoPE, PartialRope, Rope, Yarn
from pe_lab.recipes import phase, recipe_arguments

# As many of the pairs rotate less than once in a window of 512 as in DroPE's model of 494M: base 1e6 at 1,024 tokens.
BASE = 150_000.0
BASE_WIDTH, INIT_STD = 64, 0.125  # 1 / sqrt(64)
MILESTONES = (0.5, 0.875)
WINDOW = 512


def encoding(method: str, window: int = WINDOW) -> Any:
    """The `positional` of a method in windows of so many tokens, or of a text."""
    if method == "yarn":
        return Rope(base=BASE, scaling=Yarn(factor=window / WINDOW, original_length=WINDOW))
    known = {
        "rope": Rope(base=BASE),
        "nope": NoPE(),
        "half": Rope(base=BASE, fraction=0.5),
        "p_rope_75": Rope(base=BASE, fraction=0.75),
        "p_rope_25": Rope(base=BASE, fraction=0.25),
        "partial_rope_10": PartialRope(base=BASE, fraction=0.1),
        "partial_rope_25": PartialRope(base=BASE, fraction=0.25),
    }
    return known.get(method, method)


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: width=64,method=rope, or others of the docstring's."""
    arguments = recipe_arguments(
        arg,
        width="64",
        layers="8",
        method="rope",
        at="",
        more="",
        qk_norm="",
        head_dim="32",
        heads="0",
        block="pre_norm",
        rate="1.6e-2",
        per_parameter="20",
        window=str(WINDOW),
        batch="2048",
        mup=str(BASE_WIDTH),
        data="data/manuals",
        attention="chunked",
        size=("laptop", "quick"),
        **{"from": "random"},
    )
    width, layers, window = (int(arguments[name]) for name in ("width", "layers", "window"))
    start, quick = arguments["from"], arguments["size"] == "quick"
    parameters = 10 * layers * width**2  # of the layers' matrices: 4 of attention, 3 of a feed-forward twice as wide
    steps = max(round(parameters * float(arguments["per_parameter"]) / int(arguments["batch"]) / 16), 1) * 16
    steps = 32 if quick else steps
    first = round(steps * float(arguments["at"])) if arguments["at"] else 0
    done = max(round(steps * float(arguments["more"])), 2) if arguments["more"] else steps - first  # of this phase
    heads = int(arguments["heads"]) or width // int(arguments["head_dim"])

    config = ConfigDict()
    config.name = f"ladder_{width}_{''.join(c if c.isalnum() else '_' for c in arguments['method'])}"
    config.notes = dict(
        paper="DroPE, appendix D.1, at other sizes",
        command="python -m pe_lab.train --config=configs/ladder.py" + (f":{arg}" if arg else ""),
        cost="12 minutes on a CPU core at width 64, 100 at width 128",
        expected="docs/claims.md",
    )
    config.model = dict(
        layers=layers,
        d_model=width,
        d_ff=2 * width,
        heads=heads,
        kv_heads=heads,
        head_dim=int(arguments["head_dim"]),
        init_std=INIT_STD,
        mup_base_width=int(arguments["mup"]),
        block=arguments["block"],
        dtype="float32",
        scan=False,
        attention=arguments["attention"],
        attention_chunk=64,
        loss_chunks=4,
    )
    if quick:
        config.data = dict(tokenizer="sentencepiece:train:1024")
    elif "/" in arguments["data"]:
        config.data = dict(prepared=arguments["data"])
        config.model.vocab_size = 4096  # known before the data are prepared
    else:
        config.data = dict(
            sources=[dict(source=arguments["data"])], tokenizer="sentencepiece:train:4096", validation_fraction=0.02
        )
    config.data.seed = 0
    config.mesh = dict(data=1)  # a run is one of many, on a device of its own
    made = phase(
        name="pretrain" if start == "random" else "recalibrate",
        steps=done,
        positional=encoding(arguments["method"], window),
        init_from="" if start == "random" else f"{start}/pretrain/checkpoints/{first}" if first else start,
        qk_norm=arguments["qk_norm"],
        qk_norm_init="ones" if arguments["qk_norm"] and start != "random" else "matched",
        sequence_length=window,
        batch_size=int(arguments["batch"]) // window,
        optimizer=dict(
            learning_rate=float(arguments["rate"]),
            warmup_steps=max(1, round(0.03 * done)),
            weight_decay=0.1,
        ),
    )
    if arguments["method"] == "kept":
        del made["positional"]
    config.phases = [made]
    milestones = [round(steps * share) for share in MILESTONES] if start == "random" else []
    config.checkpoint = dict(every_steps=max(steps // 16, 1), milestones=milestones, keep=1)
    config.log = dict(every_steps=10, validate_every_steps=max(steps // 16, 1), validation_batches=32, trackers=[])
    config.evaluation = dict(factors=[1, 2], options=dict(tokens=262_144))
    if quick:
        config.log.validation_batches = 2
        config.evaluation.options = dict(tokens=2048)
    return config
