"""The peer of `decode.py` and `niah.py`: transformers' `generate` under torch, controlled by lines of JSON.

Run by them with a Python that has torch and transformers; imports nothing of pe_lab.
"""

import json
import os
import sys
import time

import numpy as np
import torch
import transformers


def build(job: dict) -> torch.nn.Module:
    """The model of a directory, or a Llama with the weights of a file, whose names are the peer's own."""
    if "model" in job:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=getattr(torch, job.get("dtype", "float32")), attn_implementation="sdpa"
        )
    else:
        config = transformers.LlamaConfig(**job["config"], tie_word_embeddings=True, attn_implementation="sdpa")
        model = transformers.LlamaForCausalLM(config)
        weights = {name: torch.from_numpy(array) for name, array in np.load(job["weights"]).items()}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        if set(missing) - {"lm_head.weight"} or unexpected:
            raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
        model.tie_weights()
    # Nothing ends a text early, and nothing is drawn.
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return model.to(job.get("device", "cpu"), getattr(torch, job.get("dtype", "float32"))).eval()


class Clock:
    """What `generate` hands every token to: when the first and the last came."""

    def __init__(self):
        self.times = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(model: torch.nn.Module, prompts: torch.Tensor, new: int) -> dict:
    """Seconds to the first new token and from it to the last, processor seconds, the new ids."""
    clock, cpu, start = Clock(), time.process_time(), time.perf_counter()
    ids = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, use_cache=True, streamer=clock
    )
    first = clock.times[1]  # before it comes the prompt
    return {
        "prefill": first - start,
        "decode": clock.times[-1] - first,
        "cpu": time.process_time() - cpu,
        "ids": ids[:, prompts.shape[1] :].tolist(),
    }


def answer(model: torch.nn.Module, prompts: list, new: int, eos: list) -> dict:
    """Seconds, and the new ids of prompts of any lengths, padded on the left; a text ends at one of `eos`."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    start = time.perf_counter()
    found = model.generate(ids, attention_mask=mask, max_new_tokens=new, use_cache=True, eos_token_id=eos)
    return {"seconds": time.perf_counter() - start, "ids": found[:, longest:].tolist()}


@torch.inference_mode()
def main() -> None:
    replies = os.fdopen(os.dup(1), "w")  # whatever libraries print goes to stderr, not among the replies
    os.dup2(2, 1)

    def reply(message: dict) -> None:
        print(json.dumps(message), file=replies, flush=True)

    job = json.loads(sys.stdin.readline())
    torch.set_num_threads(job["threads"])
    model = build(job)
    reply(
        {
            "parameters": sum(p.numel() for p in model.parameters()),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
    )
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "answer":
            reply(answer(model, asked["prompts"], asked["new"], asked["eos"]))
            continue
        prompts = torch.tensor(asked["prompts"], device=model.device)
        if asked["do"] == "logits":
            reply({"logits": model(prompts).logits[0, -1].tolist()})
        else:
            reply(generate(model, prompts, asked["new"]))


if __name__ == "__main__":
    main()
