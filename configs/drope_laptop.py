"""DroPE on a laptop: pretrain with RoPE, drop it in two stages, recalibrate after each: minutes on two CPU cores.

Paper: "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (Gelberg et al. 2025), which
drops all pairs at once. The stage before it, without the slower half of the pairs, is claims/slow_pairs.py.
Command: python -m pe_lab.train --config=configs/drope_laptop.py   (`make demo` also evaluates and reports)
Arguments: `:quick` trains for seconds, to see that everything works; `:full` adds a NoPE model trained for as many
    steps as the other phases together; `:rope` trains the first phase alone, also as `:rope,size=quick`.
Cost: 4 to 5 minutes on 2 CPU cores, and 2 more to evaluate; twice that with `:full`.
Expected: RoPE finds every needle at 64 tokens, two thirds at 128, hardly any at 512. Without the slower half of the
    pairs the model finds 93% at 512, not rescaled, and its text is 4% worse at 64. The dropped model, with a logit
    scale that is fitted on text, finds 91% at 512 and 77% at 2,048, YaRN 99% and 96%. On text it is much worse
    than RoPE up to 4x, and worse than YaRN at most lengths: three layers of width 64 depend on positions more than the
    paper's 24 layers. docs/log.md has other seeds, and other settings that were tried.

Half of the windows are synthetic needles (facts in filler, asked for at the end of the window): a model this small
learns retrieval from nothing else in minutes. The other half is the source code of the Python standard library.
"""

from ml_collections import ConfigDict

from pe_lab.errors import ConfigError
from pe_lab.positional import NoPE, Rope
from pe_lab.recipes import phase

LENGTH = 64
SHORT = (120, 60)
STEPS = {"": (3000, 750), "full": (3000, 750), "rope": (3000, 750), "quick": SHORT, "rope,size=quick": SHORT}


def get_config(arg: str = "") -> ConfigDict:
    if arg not in STEPS:
        raise ConfigError(f"configs/drope_laptop.py has no argument '{arg}'; it takes quick, full, rope, or nothing.")
    pretrain, recalibrate = STEPS[arg]

    config = ConfigDict()
    config.name = "drope_laptop" + (f"_{arg.partition(',')[0]}" if arg else "")
    config.notes = dict(
        paper="DroPE (Gelberg et al. 2025), Sections 3 to 5, at the scale of a laptop",
        command="python -m pe_lab.train --config=configs/drope_laptop.py" + (f":{arg}" if arg else ""),
        cost="4 to 5 minutes on 2 CPU cores" + (", and as many for the NoPE model" if arg == "full" else ""),
        expected="RoPE loses the needles beyond 64 tokens, the dropped model keeps them, at a cost on text; without "
        "half of the pairs text is nearly as good as RoPE's",
    )
    # The usual init_std of 0.02 suits widths near 1000, where it is about 1 / sqrt(width); at 64 that is 0.1.
    small = dict(layers=3, d_model=64, d_ff=256, heads=4, kv_heads=4, qk_norm="head", init_std=0.1)
    config.model = dict(dtype="float32", scan=False, **small)
    needles = dict(facts="symbol", pairs=8, queries=4, keys=16, values=16, filler_symbols=16)
    needles |= dict(answer_weight=8.0, filler_weight=0.02)
    config.data = dict(
        sources=[dict(source="stdlib", weight=0.5), dict(source="needles", weight=0.5, options=needles)],
        tokenizer="sentencepiece:train:512",
        validation_fraction=0.04,
    )

    # Base 10000 belongs to windows of 2048 tokens: 15% of its pairs rotate less than once in eight windows. At 64
    # tokens, base 200 has that fraction; with 10000, half of the pairs would hardly rotate, as in NoPE.
    rope, half = Rope(base=200.0), Rope(base=200.0, fraction=0.5)
    adamw = dict(learning_rate=3e-3, warmup_steps=50, weight_decay=0.05)
    window = dict(sequence_length=LENGTH, batch_size=32, optimizer=adamw)
    config.phases = [
        phase(name="pretrain", steps=pretrain, positional=rope, **window),
        phase(name="half", steps=recalibrate, positional=half, **window),
        phase(name="recalibrate", steps=recalibrate, positional=NoPE(), **window),
    ]
    if arg.startswith("rope"):
        config.phases = config.phases[:1]
    if arg == "full":
        steps = pretrain + 2 * recalibrate
        config.phases.append(phase(name="nope", steps=steps, positional=NoPE(), init_from="random", **window))
    config.log = dict(every_steps=10, validate_every_steps=250)
    config.checkpoint = dict(every_steps=500)
    config.evaluation = dict(factors=[1, 2, 4, 8, 32], options=dict(tokens=32768, windows=64))
    return config
