"""Partial RoPE from scratch: models of 1B and 8B with RoPE on 0% to 100% of the channels of each head.

Paper: "Fractional Rotation, Full Potential? Investigating Performance and Convergence of Partial RoPE" (Khan et
al. 2026), sections 3 to 5 and appendices A and B, and its code, github.com/aflah02/Partial_RoPE_Analysis.
Reproduces Figures 2 to 5 and 7 and Table 4: 10% is enough; without positions the parallel block diverges unless
queries and keys are normalized.

Arguments: model=llama_1b (or pythia_1b, llama_8b), percent=100 (or 0, 10, 25, 50, 75; also 4 for llama_1b and 1
for pythia_1b: two channels), length=2048 (or 1024, 4096, 8192), data=fineweb (or fineweb_edu, the default of
pythia_1b), qk_norm=none (or head), rate=4e-4 (or 4e-3, 4e-5: Figure 6).

Prepare (the tokenizer is Pythia's, huggingface.co/EleutherAI/pythia-1b; all of the 100B-token sample):
  python -m pe_lab.prepare --source=parquet:'fineweb/sample/100BT/*.parquet' \\
      --tokenizer=hf:pythia-1b/tokenizer.json --out=data/fineweb-pythia
  python -m pe_lab.prepare --source=parquet:'fineweb-edu/sample/100BT/*.parquet' \\
      --tokenizer=hf:pythia-1b/tokenizer.json --out=data/fineweb-edu-pythia

Train, for example (any percent goes with any model that has it, and with any length):
  python -m pe_lab.train --config=configs/partial_rope.py:percent=10
  python -m pe_lab.train --config=configs/partial_rope.py:percent=4,length=1024
  python -m pe_lab.train --config=configs/partial_rope.py:percent=25,length=4096
  python -m pe_lab.train --config=configs/partial_rope.py:percent=0,length=8192,qk_norm=head
  python -m pe_lab.train --config=configs/partial_rope.py:percent=50,data=fineweb_edu
  python -m pe_lab.train --config=configs/partial_rope.py:model=pythia_1b,percent=1
  python -m pe_lab.train --config=configs/partial_rope.py:model=pythia_1b,percent=0,qk_norm=head
  python -m pe_lab.train --config=configs/partial_rope.py:model=llama_8b,percent=10

Cost in v5e chip-hours at 40% MFU:
  model         T = 1024    2048    4096    8192
  llama_1b          2434    2577    2863    3434
  pythia_1b         2077    2220    2505    3077
  llama_8b         17799   18442   19728   22299
v5e:16x16 takes a 256th of these hours: 10 for llama_1b at 2048. A chip of it has 32,768 tokens of a batch, in as many
micro-batches as its memory needs. A node of 8 H200: --config.mesh.fsdp=8. Does it fit?
  python -m pe_lab.plan --config=configs/partial_rope.py:percent=10 --topology=v5e:16x16
  python -m pe_lab.plan --config=configs/partial_rope.py:model=llama_8b,percent=10 --topology=v5e:16x16

Expected (Table 4): perplexities on LAMBADA, listed in the code below; the paper gives losses only in figures.
On 2048 tokens of FineWeb llama_1b has 26.03 at 0%, 25.75 at 4%, 19.89 at 10% and 20.26 at 100%. Spikes are part of the
result: without QK-norm, NoPE diverges in llama_1b at 8192 (237.85; with it 33.49) and in pythia_1b (2029213; 94.31).

Appendix B: AdamW at 4e-4, 5% of the steps warm-up, cosine to a tenth, 4096 windows of 2048 tokens a step and
100B tokens; at other lengths as many tokens a step. QK-norm is per head. From the code, since the
paper does not give them: 12,000 steps, Adam's constants, weight decay 0.1, gradient clipping 1.0, untied embeddings
(Llama-3.2-1B's are tied), initialization with 0.02 for all weights, output projections included
(scaled_residual_init=False), and RoPE's base: the code sets none, so it is GPT-NeoX's 10,000, also for the Llamas
(500,000 in the published models).
Decided here: Pythia-1B's published block (parallel, LayerNorm, GELU, biases), as in the paper's text; the code's
file for it has a sequential one with RMSNorm and SwiGLU. Attention crosses the ends of documents (segments=False).
"""

from ml_collections import ConfigDict

from pe_lab.errors import ConfigError
from pe_lab.model import preset
from pe_lab.positional import NoPE, PartialRope
from pe_lab.recipes import AUTO, phase, recipe_arguments

# appendix A, Table 1
PERCENTS = {
    "llama_1b": ("0", "4", "10", "25", "50", "75", "100"),
    "pythia_1b": ("0", "1", "10", "25", "50", "75", "100"),
    "llama_8b": ("0", "10", "25", "50", "75", "100"),
}
# Table 4, mean of LAMBADA's two versions, at the percents above; then NoPE with QK-norm
LAMBADA = {
    ("llama_1b", "fineweb_edu", "2048"): (48.30, 48.25, 43.87, 44.14, 44.38, 49.67, 40.41),
    ("llama_1b", "fineweb", "1024"): (22.72, 22.90, 18.84, 19.73, 18.87, 18.21, 19.59),
    ("llama_1b", "fineweb", "2048"): (26.03, 25.75, 19.89, 21.43, 20.03, 22.01, 20.26),
    ("llama_1b", "fineweb", "4096"): (30.00, 30.01, 21.88, 23.60, 22.05, 22.16, 20.41),
    ("llama_1b", "fineweb", "8192"): (237.85, 33.95, 23.54, 26.78, 27.49, 23.02, 24.10),
    ("pythia_1b", "fineweb_edu", "2048"): (2029212.62, 93.79, 74.64, 88.00, 82.36, 73.27, 77.89),
    ("llama_8b", "fineweb", "2048"): (8.91, 8.25, 8.01, 8.12, 7.71, 7.57),
}
LAMBADA_NORMED = {
    ("llama_1b", "fineweb", "8192"): (33.49,),
    ("pythia_1b", "fineweb_edu", "2048"): (94.31,),
}
# v5e chip-hours at 40% MFU, by length
CHIP_HOURS = {
    "llama_1b": {"1024": 2434, "2048": 2577, "4096": 2863, "8192": 3434},
    "pythia_1b": {"1024": 2077, "2048": 2220, "4096": 2505, "8192": 3077},
    "llama_8b": {"1024": 17799, "2048": 18442, "4096": 19728, "8192": 22299},
}


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: model=llama_1b,percent=100, or others of the docstring's."""
    arguments = recipe_arguments(
        arg,
        model=tuple(PERCENTS),
        percent=("100", "0", "1", "4", "10", "25", "50", "75"),
        length=("2048", "1024", "4096", "8192"),
        data=("", "fineweb", "fineweb_edu"),
        qk_norm=("none", "head"),
        rate=("4e-4", "4e-3", "4e-5"),
    )
    model, percent, length, kind = (arguments[key] for key in ("model", "percent", "length", "qk_norm"))
    if percent not in PERCENTS[model]:
        raise ConfigError(f"The paper has no {percent}% of {model}; it has {', '.join(PERCENTS[model])}.")
    data = arguments["data"] or ("fineweb_edu" if model == "pythia_1b" else "fineweb")

    config = ConfigDict()
    config.name = f"partial_rope_{model}_{percent}_{length}_{data}" + ("_qk_norm" if kind == "head" else "")
    config.name += f"_{arguments['rate']}" if arguments["rate"] != "4e-4" else ""
    common = dict(qk_norm=kind, scaled_residual_init=False, **AUTO)
    config.model = {
        "llama_1b": preset("llama_1b", tie_embeddings=False, **common),
        "pythia_1b": preset("pythia_1b", **common),
        "llama_8b": preset("llama_8b_36", **common),
    }[model]
    config.data = dict(prepared=f"data/{data.replace('_', '-')}-pythia", segments=False)
    config.mesh = dict(data=-1, fsdp=64 if model == "llama_8b" else 8)
    adamw = dict(schedule="cosine", final_fraction=0.1, b1=0.9, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0)
    config.phases = [
        phase(
            name="pretrain",
            steps=12_000,  # 100.7B tokens
            positional=PartialRope(base=10_000.0, fraction=int(percent) / 100) if percent != "0" else NoPE(),
            sequence_length=int(length),
            batch_size=4096 * 2048 // int(length),  # 8.4M tokens a step
            accumulate="auto",
            optimizer=dict(learning_rate=float(arguments["rate"]), warmup_steps=600, **adamw),
        )
    ]
    config.checkpoint = dict(every_steps=1000)
    config.log = dict(every_steps=10)
    config.evaluation = dict(factors=[1, 2, 4], options=dict(tokens=2**20, fit_tokens=2**18))

    paper = (LAMBADA_NORMED if kind == "head" else LAMBADA).get((model, data, length), ())
    paper = paper if arguments["rate"] == "4e-4" else ()
    perplexity = dict(zip(PERCENTS[model], paper, strict=False)).get(percent)
    config.notes = dict(
        paper=f"Partial RoPE, Table 4: {model}, RoPE on {percent}% of the channels, T = {length}, {data}",
        command="python -m pe_lab.train --config=configs/partial_rope.py" + (f":{arg}" if arg else ""),
        cost=f"{CHIP_HOURS[model][length]} v5e chip-hours at 40% MFU",
        expected=f"perplexity on LAMBADA {perplexity:.2f}" if perplexity else "not in the paper",
    )
    return config
