"""The peer's side of `attention.py`: torch's scaled_dot_product_attention, and transformers' train step under
torch.compile, told by lines of JSON on stdin what to do.

Run by `attention.py` with a Python that has torch; imports nothing of pe_lab.
"""

import base64
import contextlib
import json
import math
import os
import resource
import sys
import time
from typing import Any

import numpy as np
import torch
from attention_cases import SOFT_CAP, WINDOW, Case, arrays, beside, bias_table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BIAS, FLEX = "bias ", "flex "
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Attention:
    """Answers of one device. `how`: flash or cudnn (with grouped heads), grouped (torch chooses), or repeated: the
    same with a key head for every query head, which are made before anything is timed; with `BIAS` before it, the same
    with a learned bias for every distance: as products and a softmax, as a mask, or by flex_attention; with `FLEX`
    before it, a feature of `attention_features.py` by flex_attention."""

    def __init__(self, job: dict):
        torch.set_num_threads(job["threads"])
        self.device = job["device"]
        if self.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} sees no GPU")
        self._made: tuple = (None, None)
        self._places: tuple = ()
        self._flex: Any = None
        self._calls: dict = {}

    def tensors(self, case: Case, how: str) -> list:
        """Queries, keys and values as they lie in a model [B, T, H, K], viewed as [B, H, T, K]; on a CPU as torch likes
        them best, heads first. With a bias, its table [H, T]; of a feature, what is learned."""
        biased = how.startswith(BIAS)
        key = (case, how == "repeated" or biased, biased, how if how.startswith(FLEX) else "")
        if self._made[0] != key:
            self._made = (None, None)  # first away with the old ones
            made = [torch.from_numpy(x).to(self.device, getattr(torch, case.dtype)) for x in arrays(case)]
            made = [x.transpose(1, 2) for x in made]
            if key[1]:
                made[1:] = [x.repeat_interleave(case.H // case.G, 1) for x in made[1:]]
            if self.device == "cpu":
                made = [x.contiguous() for x in made]
            if biased:
                made.append(torch.from_numpy(bias_table(case, case.T)).to(self.device))
                places = torch.arange(case.T, device=self.device)
                self._places = ((places[:, None] - places).clamp(0), places[:, None] < places)
            if key[3]:
                what = how.removeprefix(FLEX)
                given = {name: torch.from_numpy(x).to(self.device) for name, x in beside(what, case).items()}
                made += [given[name] for name in ("distance_bias", "key_bias", "sink") if name in given]
                self._flex = self.flex(what, case, given)
            self._made = (key, made)
        return self._made[1]

    def attend(self, query: Any, key: Any, value: Any, *learned: Any, how: str, causal: bool = True) -> Any:
        if how.startswith(FLEX):
            return self._flex(query, key, value, *learned)
        if learned:
            return self.biased(query, key, value, *learned, how.removeprefix(BIAS))
        return scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=how != "repeated")

    def biased(self, query: Any, key: Any, value: Any, table: Any, how: str) -> Any:
        distance, later = self._places
        if how == "flex":
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            T = len(distance)
            causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=self.device)

            def add(logit: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
                return logit + table[h, (i - j).clamp(0)]

            return torch.compile(flex_attention)(query, key, value, score_mod=add, block_mask=causal)
        bias = table[:, distance].masked_fill(later, -math.inf)
        if how == "sdpa":
            return scaled_dot_product_attention(query, key, value, attn_mask=bias[None])
        return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5 + bias, -1) @ value

    def flex(self, feature: str, case: Case, given: dict) -> Any:
        """flex_attention with a feature, as a function of queries, keys, values and what is learned."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        ids, slope = given.get("segments"), given.get("slope")
        window = WINDOW if "window" in feature else case.T

        def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
            near = (i >= j) & (i - j < window)
            return near if ids is None else near & (ids[b, i] == ids[b, j])

        mask = create_block_mask(seen, case.B if ids is not None else None, None, case.T, case.T, device=self.device)

        def call(query: Any, key: Any, value: Any, learned: Any = None) -> Any:
            def changed(logit: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
                if slope is not None:
                    return logit - slope[h] * (i - j)
                if "distance_bias" in given:
                    return logit + learned[h, (i - j).clamp(0, learned.shape[1] - 1)]
                if "key_bias" in given:
                    return logit + learned[0, h, j]
                return SOFT_CAP * torch.tanh(logit / SOFT_CAP) if "cap" in feature else logit

            plain = feature == "plain" or ids is not None or window < case.T or "sink" in given
            options = {"score_mod": None if plain else changed, "block_mask": mask, "enable_gqa": True}
            if "sink" not in given:
                return flex_attention(query, key, value, **options)
            out, logsumexp = flex_attention(query, key, value, **options, return_lse=True)
            # One more term of the softmax's denominator.
            return out * torch.sigmoid(logsumexp - learned[:, None])[..., None].to(out.dtype)

        return torch.compile(call)

    def peak(self, asked: dict) -> dict:
        """Bytes of the process's memory at most, so far."""
        return {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}

    def rows(self, asked: dict) -> dict:
        """What `TorchPeer.rows` says, as base64."""
        case, how = Case(*asked["case"]), asked["how"]
        given, what = self.tensors(case, how), asked["what"]
        with self.backend(how):
            if what == "out":
                out = self.attend(*given, how=how, causal=case.T == case.S).detach()
            else:
                leaves = [x.detach().clone().requires_grad_() for x in given]
                self.attend(*leaves, how=how).backward(given[0])
                out = leaves[3 if what == "table gradient" else 0].grad
        out = out if what == "table gradient" else out.transpose(1, 2)
        chosen = out[:, asked["rows"]].float().cpu().numpy()
        return {"rows": base64.b64encode(np.ascontiguousarray(chosen).tobytes()).decode()}

    def backend(self, how: str) -> contextlib.AbstractContextManager:
        return sdpa_kernel(BACKENDS[how]) if how in BACKENDS else contextlib.nullcontext()

    def time(self, asked: dict) -> dict:
        """Seconds of a call, and of processors, the mean of as many as fill a turn."""
        case, how = Case(*asked["case"]), asked["how"]
        key = (case, how, asked["what"])
        with self.backend(how):
            if key not in self._calls:
                if any(old[0] != case for old in self._calls):
                    self._calls.clear()  # and what they hold
                call = self.call(case, how, asked["what"], asked["layers"])
                self.run(call, 2)
                once = min(self.run(call, 1), self.run(call, 1))[0]
                self._calls[key] = call, max(1, min(1000, math.ceil(asked["turn"] / once)))
            seconds, cpu = self.run(*self._calls[key])
            return {"seconds": seconds, "cpu": cpu}

    def run(self, call: Any, calls: int) -> tuple:
        if self.device == "cuda":
            torch.cuda.synchronize()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            call()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls, (time.process_time() - cpu) / calls

    def call(self, case: Case, how: str, what: str, layers: int) -> Any:
        query, key, value = (given := self.tensors(case, how))[:3]
        if what == "forward":
            return torch.inference_mode()(lambda: self.attend(*given, how=how))
        if what in ("backward", "biased"):
            leaves = [x.detach().clone().requires_grad_() for x in given]

            def both() -> None:
                for leaf in leaves:
                    leaf.grad = None
                self.attend(*leaves, how=how).backward(query)

            return both
        # Caches of several layers, so that none is found in the processor's own cache; each layer's output is the
        # next one's query.
        caches = [(key.contiguous(), value.contiguous())]
        caches += [(key.clone(), value.clone()) for _ in range(layers - 1)]

        def through() -> None:
            out = query
            for k, v in caches:
                out = self.attend(out, k, v, how=how, causal=False)

        through = torch.no_grad()(through)
        if self.device == "cpu":
            return through
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            through()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            through()
        return graph.replay


def make_trainer(job: dict) -> Any:
    """`train_step_peer.py`'s Llama on the device: float32 parameters, products in bfloat16, as ours."""
    import train_step_peer

    class Trainer(train_step_peer.Trainer):
        def __init__(self, job: dict):
            super().__init__(job)
            self.device = job["device"]
            self.model.to(self.device)
            self.batch = {name: x.to(self.device) for name, x in self.batch.items()}
            self.optimizer = train_step_peer.make_optimizer(self.model, job["optimizer"], job["optimizer_kind"])

        def _loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            with torch.autocast(self.device, torch.bfloat16):
                return super()._loss(tokens, targets)

        def peak(self, asked: dict) -> dict:
            """Bytes of the device's memory at most, so far; on a CPU those of the process."""
            if self.device == "cuda":
                return {"bytes": torch.cuda.max_memory_allocated()}
            return {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}

    return Trainer(job)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")  # whatever libraries print goes to stderr, not among the replies
    os.dup2(2, 1)

    def answer(compute: Any) -> None:
        try:
            message = compute()
        except Exception as failure:  # e.g. a backend that does not take these heads: the next may
            print(repr(failure), file=sys.stderr)
            message = {"error": (str(failure).strip().splitlines() or [repr(failure)])[0]}
        print(json.dumps(message), file=replies, flush=True)

    job, side = json.loads(sys.stdin.readline()), None
    versions = {"torch": torch.__version__}

    def begin() -> dict:
        nonlocal side
        if "weights" not in job:
            side = Attention(job)
            return {"versions": versions}
        side = make_trainer(job)
        import transformers

        count = sum(p.numel() for p in side.model.parameters())
        return {"versions": versions | {"transformers": transformers.__version__}, "parameters": count}

    answer(begin)
    for line in sys.stdin:
        asked = json.loads(line)
        if "steps" in asked:
            answer(lambda asked=asked: side.run(asked["steps"]))
        else:
            answer(lambda asked=asked: getattr(side, asked["do"])(asked))


if __name__ == "__main__":
    main()
