"""Gemma 3 with Gemma 4's global rotation: p-RoPE in the layers without a window, and training goes on.

Paper: none has this. The rotation is that of "Round and Round We Go! What makes Rotary Positional Encodings useful?"
(Barbero et al. 2024), section 6.1, p-RoPE: the lowest frequencies do not rotate. Gemma 4 has it in the layers that see
all tokens: base 1,000,000, of which the 25% highest frequencies rotate, and no scaling; RoPE of base 10,000 in windows.

Arguments: model=1b (or 4b), encoding=p_rope (or own, rope, nope: what the global layers have), tokens=5b (or 1b, 20b),
from=CHECKPOINT, data=SOURCE (a directory of pe_lab.prepare, or as in configs/finetune.py), rate=1e-4.

Prepare (models and tokenizer are huggingface.co/google/gemma-3-1b-pt and gemma-3-4b-pt; of the 4B, which also reads
images, take an export of the language model alone, Gemma3ForCausalLM; 24M documents are about 24B tokens):
  python -m pe_lab.convert --from=hf:gemma-3-1b-pt --to=runs/gemma3_1b
  python -m pe_lab.prepare --source=parquet:'fineweb-edu/sample/100BT/*.parquet' \\
      --tokenizer=hf:gemma-3-1b-pt/tokenizer.json --limit-documents=24000000 --out=data/fineweb-edu-gemma3
and likewise for runs/gemma3_4b, which has the same data.

Train:
  python -m pe_lab.train --config=configs/p_rope_gemma.py:encoding=p_rope
  python -m pe_lab.train --config=configs/p_rope_gemma.py:encoding=own
  python -m pe_lab.train --config=configs/p_rope_gemma.py:encoding=nope
  python -m pe_lab.train --config=configs/p_rope_gemma.py:model=4b,encoding=p_rope
  python -m pe_lab.train --config=configs/p_rope_gemma.py:model=4b,encoding=own
  python -m pe_lab.train --config=configs/p_rope_gemma.py:model=4b,encoding=rope
  python -m pe_lab.train --config=configs/p_rope_gemma.py:model=4b,encoding=nope
  python -m pe_lab.train --config=configs/p_rope_gemma.py:encoding=p_rope,tokens=1b,from=runs/gemma3_1b

Cost at 40% MFU, in v5e chip-hours:
  model   1b tokens   5b tokens   20b tokens
  1b             30         152          607
  4b            106         531         2124
v5e:16x16 takes a 256th of these hours. Does it fit?
  python -m pe_lab.plan --config=configs/p_rope_gemma.py:model=1b --topology=v5e:16x16
  python -m pe_lab.plan --config=configs/p_rope_gemma.py:model=4b --topology=v5e:16x16
  python -m pe_lab.plan --config=configs/p_rope_gemma.py:model=4b --topology=v5p:4x4x4
A node of 8 GPUs: --config.mesh.fsdp=8.

Expected: no number is published. What is compared, after as many tokens: own is the control, which only reads more
text; p_rope against own is the price or the gain of Gemma 4's rotation; nope drops the rotation of the global layers
(the arrangement of Cohere 2). The 4B divides positions by 8 in its global layers, so that p_rope changes two things
there; rope is own without that scaling, and between p_rope and rope the frequencies alone differ. (The 1B has no
scaling: its rope is its own.) Read validation loss, then perplexity and needles beyond 8192 tokens, where the global
layers matter:
  python -m pe_lab.evaluate --from=runs/p_rope_gemma_1b_p_rope_5b --suite=niah --lengths=8k,16k,32k

From the models: 5 layers with windows (of 512 tokens in the 1B, 1024 in the 4B) to 1 without, and all else, which stays
as it is. Gemma 4 has 512 channels a head in global layers, where 64 pairs rotate; Gemma 3 has 256, so here 32 do.
Decided here: windows of 8192 tokens, 256 a step (2.1M tokens), AdamW with DroPE's constants, and 1e-4, its code's rate
for Llama2-7B without an added norm: the slow pairs hardly rotate within a window, so that less is to be relearned than
after a drop. 2% of the steps are warm-up; the cosine ends at 0. Attention crosses the ends of documents
(segments=False).
"""

from ml_collections import ConfigDict

from pe_lab.model import preset
from pe_lab.positional import PI, Layer, NoPE, Rope, pattern
from pe_lab.recipes import AUTO, corpus, number, phase, recipe_arguments

LOCAL, GLOBAL = 10_000.0, 1_000_000.0  # bases
WINDOWS = {"1b": 512, "4b": 1024}
OWN = {"1b": Rope(GLOBAL), "4b": Rope(GLOBAL, scaling=PI(8.0))}
STEPS = {"5b": 2_384, "1b": 477, "20b": 9_537}  # of 2.1M tokens
# v5e chip-hours at 40% MFU
CHIP_HOURS = {"1b": {"1b": "30", "5b": "152", "20b": "607"}, "4b": {"1b": "106", "5b": "531", "20b": "2124"}}


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: model=1b,encoding=p_rope, or others of the docstring's."""
    free = {"from": "", "data": "data/fineweb-edu-gemma3", "rate": "1e-4"}
    encodings = ("p_rope", "own", "rope", "nope")
    arguments = recipe_arguments(arg, model=tuple(WINDOWS), encoding=encodings, tokens=tuple(STEPS), **free)
    model, encoding, tokens, rate = (arguments[key] for key in ("model", "encoding", "tokens", "rate"))
    steps = STEPS[tokens]
    everywhere = {"p_rope": Rope(GLOBAL, fraction=0.25), "own": OWN[model], "rope": Rope(GLOBAL), "nope": NoPE()}

    config = ConfigDict()
    config.name = f"p_rope_gemma_{model}_{encoding}_{tokens}"
    config.name += f"_{rate}" if rate != "1e-4" else ""
    config.model = preset(f"gemma3_{model}", **AUTO)
    config.data = dict(corpus(arguments["data"]), segments=False)
    config.mesh = dict(data=-1, fsdp=32 if model == "1b" else 64)  # d_model is 2^7 * 9, or 2^9 * 5
    adamw = dict(schedule="cosine", b1=0.9, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0)
    config.phases = [
        phase(
            name="recalibrate",
            steps=steps,
            positional=pattern([Layer(Rope(LOCAL), WINDOWS[model])] * 5 + [Layer(everywhere[encoding])], cut=True),
            init_from=arguments["from"] or f"runs/gemma3_{model}",
            sequence_length=8192,
            batch_size=256,
            accumulate="auto",
            optimizer=dict(learning_rate=number(arguments, "rate"), warmup_steps=steps // 50, **adamw),
        )
    ]
    config.checkpoint = dict(every_steps=500)
    config.log = dict(every_steps=10)
    config.evaluation = dict(factors=[1, 2, 4], options=dict(tokens=2**20, fit_tokens=2**18))

    config.notes = dict(
        paper=f"none: Gemma 3 {model.upper()}, global layers with {encoding}, trained on {tokens} tokens more",
        command="python -m pe_lab.train --config=configs/p_rope_gemma.py" + (f":{arg}" if arg else ""),
        cost=f"{CHIP_HOURS[model][tokens]} v5e chip-hours at 40% MFU",
        expected="no number is published",
    )
    return config
