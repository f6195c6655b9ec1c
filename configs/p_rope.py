"""Gemma 2B from scratch with RoPE, with p-RoPE and without positions.

Paper: "Round and Round We Go! What makes Rotary Positional Encodings useful?" (Barbero et al. 2024), section
6.1 and appendix C. Reproduces Table 2: removing the lowest frequencies of RoPE does not hurt.

Arguments: encoding=0.75 (or 0.25, rope, nope: the fraction of the frequencies that rotate), data=wiki (or flan).

Prepare (Gemma's tokenizer is in huggingface.co/google/gemma-2b; of FlanV2, write JSON lines whose `text` is an
example's input and target):
  tfds build wikipedia/20230601.en --file_format=array_record
  python -m pe_lab.prepare --source=tfds:wikipedia/20230601.en \\
      --tokenizer=sentencepiece:gemma-2b/tokenizer.model --out=data/wiki-gemma
  python -m pe_lab.prepare --source=jsonl:'flan_v2/*.jsonl' \\
      --tokenizer=sentencepiece:gemma-2b/tokenizer.model --out=data/flan-gemma

Train:
  python -m pe_lab.train --config=configs/p_rope.py:encoding=nope,data=wiki
  python -m pe_lab.train --config=configs/p_rope.py:encoding=rope,data=wiki
  python -m pe_lab.train --config=configs/p_rope.py:encoding=0.25,data=wiki
  python -m pe_lab.train --config=configs/p_rope.py:encoding=0.75,data=wiki
  python -m pe_lab.train --config=configs/p_rope.py:encoding=0.75,data=flan

Cost of each: 3.91e20 FLOPs; 1380 v5e chip-hours at 40% MFU (5.4 hours of v5e:16x16), or 275 H100-hours. A v5e
chip has one window of a batch. A node of 8 GPUs: --config.mesh.fsdp=8. Does it fit?
  python -m pe_lab.plan --config=configs/p_rope.py --topology=v5e:16x16

Expected (Table 2), validation perplexity. The text of the paper that we have lacks the two fractions of the table;
they are inferred from its description:
  encoding      Wiki   FlanV2
  nope        4.8594   6.6429
  rope        4.4627   6.4429
  0.25        4.5302   6.5111
  0.75        4.4414   6.4422

Gemma 2B's shape, its context of 8192 and the base of 10,000 are the paper's. Our text of it lacks the numbers of
steps, windows and documents, and it names neither optimizer nor initialization. Decided here: 10,000 steps of 256
windows (2.1M tokens a step, 21B in all: several epochs of the English Wikipedia), AdamW at 3e-4 after 500 steps of
warm-up, cosine to a tenth, and 1% of the documents held out. So these perplexities can be compared with each other;
of the paper's, only the order. Windows are packed, and attention crosses the ends of documents (segments=False).
"""

from ml_collections import ConfigDict

from pe_lab.model import preset
from pe_lab.positional import NoPE, Rope
from pe_lab.recipes import AUTO, phase, recipe_arguments

BASE = 10_000.0
ENCODINGS = {
    "0.75": Rope(base=BASE, fraction=0.75),
    "0.25": Rope(base=BASE, fraction=0.25),
    "rope": Rope(base=BASE),
    "nope": NoPE(),
}
# (Wiki, FlanV2)
PERPLEXITY = {
    "nope": ("4.8594", "6.6429"),
    "rope": ("4.4627", "6.4429"),
    "0.25": ("4.5302", "6.5111"),
    "0.75": ("4.4414", "6.4422"),
}


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: encoding=0.75,data=wiki, or others of the docstring's."""
    arguments = recipe_arguments(arg, encoding=tuple(ENCODINGS), data=("wiki", "flan"))
    encoding, data = arguments["encoding"], arguments["data"]

    config = ConfigDict()
    config.name = f"p_rope_{encoding}_{data}"
    config.model = preset("gemma_2b", **AUTO)
    config.data = dict(prepared=f"data/{data}-gemma", segments=False)
    config.mesh = dict(data=-1, fsdp=32)
    adamw = dict(schedule="cosine", final_fraction=0.1, b1=0.9, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0)
    config.phases = [
        phase(
            name="pretrain",
            steps=10_000,  # 21.0B tokens
            positional=ENCODINGS[encoding],
            sequence_length=8192,
            batch_size=256,
            accumulate="auto",
            optimizer=dict(learning_rate=3e-4, warmup_steps=500, **adamw),
        )
    ]
    config.checkpoint = dict(every_steps=1000)
    config.log = dict(every_steps=10)
    config.evaluation = dict(factors=[1, 2, 4], options=dict(tokens=2**20, fit_tokens=2**18))

    config.notes = dict(
        paper=f"p-RoPE, Table 2: Gemma 2B from scratch, {encoding} on {data}",
        command="python -m pe_lab.train --config=configs/p_rope.py" + (f":{arg}" if arg else ""),
        cost="1380 v5e chip-hours at 40% MFU",
        expected=f"validation perplexity {PERPLEXITY[encoding][data == 'flan']}",
    )
    return config
