"""The peer of `train_step.py`: transformers' Llama under torch, which steps when a line of JSON on stdin asks for it.

Run by `train_step.py` with a Python that has torch and transformers; imports nothing of pe_lab.
"""

import json
import os
import sys
import time

import numpy as np
import torch
import transformers


def build(job: dict) -> torch.nn.Module:
    """A LlamaForCausalLM with the weights of the file `job["weights"]`, whose names are the peer's own."""
    config = transformers.LlamaConfig(
        **job["config"], tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa"
    )
    model = transformers.LlamaForCausalLM(config)
    weights = {name: torch.from_numpy(array) for name, array in np.load(job["weights"]).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    return model.train()


def make_optimizer(model: torch.nn.Module, settings: dict, kind: str) -> torch.optim.Optimizer:
    """AdamW in its `fused` or `foreach` form; weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (settings["b1"], settings["b2"])
    return torch.optim.AdamW(groups, settings["learning_rate"], betas, settings["epsilon"], **{kind: True})


class Trainer:
    """One model in training."""

    def __init__(self, job: dict):
        torch.set_num_threads(job["threads"])
        self.model, self.clip_norm = build(job), job["optimizer"]["clip_norm"]
        self.batch = {k: torch.from_numpy(v).long() for k, v in np.load(job["batch"]).items()}
        self.optimizer = make_optimizer(self.model, job["optimizer"], job["optimizer_kind"])
        self.loss = torch.compile(self._loss) if job["compile"] else self._loss

    def _loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.batch["tokens"], self.batch["targets"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        return loss.detach()

    def run(self, steps: int) -> dict:
        """Takes steps; their losses, and the wall-clock and processor seconds they took."""
        start, cpu = time.perf_counter(), time.process_time()
        losses = [self.step() for _ in range(steps)]
        losses = [float(loss) for loss in losses]
        return {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu, "losses": losses}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")  # whatever libraries print goes to stderr, not among the replies
    os.dup2(2, 1)

    def reply(message: dict) -> None:
        print(json.dumps(message), file=replies, flush=True)

    trainer = Trainer(json.loads(sys.stdin.readline()))
    reply(
        {
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
    )
    for line in sys.stdin:
        reply(trainer.run(json.loads(line)["steps"]))


if __name__ == "__main__":
    main()
