"""What read_with_vllm.py and read_with_sglang.py have in common: the attention that they compute, and their results.

Attention is a kernel in both servers, compiled for GPUs. `attend` stands in for it: float32, causal, with the scale,
soft cap, window and sinks that the server's own code hands to its kernel. Queries and keys arrive rotated.
"""

import argparse
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch


@dataclass
class Seen:
    """What one forward pass shows: the window of each layer that attends, and the rotation that it called before."""

    positions: torch.Tensor | None = None  # [P], where rotations are evaluated
    pending: np.ndarray | None = None  # the rotation that was called since the last layer
    windows: list[int] = field(default_factory=list)  # tokens, the query's included; 0: all
    rotations: list[np.ndarray | None] = field(default_factory=list)  # [P, R, 2]; None: no rotation was called

    def begin(self, positions: torch.Tensor) -> None:
        self.positions, self.pending, self.windows, self.rotations = positions, None, [], []

    def watch(self, model: torch.nn.Module) -> None:
        """Notes each call of a rotation of the server's own; transformers' classes have none of these."""
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "rotary_dim"):
                module.register_forward_hook(lambda module, *_: self.rotate(module))

    def rotate(self, module: torch.nn.Module) -> None:
        """Evaluates a server's rotation on unit vectors: what each pair's first channel becomes, (cos, sin) x gain."""
        channels, halves = module.rotary_dim, getattr(module, "is_neox_style", True)
        first = slice(None, channels // 2) if halves else slice(0, channels, 2)
        second = slice(channels // 2, channels) if halves else slice(1, channels, 2)
        units = torch.zeros(len(self.positions), module.head_size)
        units[:, first] = 1.0
        query, _ = getattr(module, "forward_native", module.forward)(self.positions, units.clone(), units.clone())
        self.pending = torch.stack([query[:, first], query[:, second]], -1).numpy()

    def attend(self, window: int) -> None:
        self.windows.append(window)
        self.rotations.append(self.pending)
        self.pending = None

    def read(
        self,
        sequences: Sequence[torch.Tensor],
        longest: int,
        forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> dict[str, object]:
        """The logits [T, V] of each sequence of no more than `longest` tokens, or its error, by names in the file.

        `forward` takes tokens and positions. What the last sequence without an error showed stays.
        """
        found: dict[str, object] = {}
        for sequence in sequences:
            if len(sequence) > longest:
                continue
            before = self.positions, self.windows, self.rotations
            positions = torch.arange(len(sequence))
            self.begin(positions)
            try:
                found[f"logits_{len(sequence)}"] = forward(sequence, positions).detach().float().numpy()
            except Exception as error:  # what a person would meet is a result
                traceback.print_exc()
                found[f"error_{len(sequence)}"] = f"{type(error).__name__}: {error}"
                self.positions, self.windows, self.rotations = before
        return found


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int,
    cap: float | None = None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention, [T, H, K] from [T, H, K] and twice [T, G, K]; the window in tokens, the query's included."""
    length, heads = query.shape[:2]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1).float() for x in (key, value))
    logits = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if cap:
        logits = torch.tanh(logits / cap) * cap
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    if slopes is not None:
        logits = logits - slopes[:, None, None] * distance
    seen = distance >= 0
    if window:
        seen &= distance < window
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.float()[:, None, None].expand(-1, length, 1)], -1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., :length], value)


def still(widest: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """The pairs that a rotation [P, R, 2] has fewer than the widest, as if they were not rotated."""
    missing = np.zeros((len(rotation), widest.shape[1] - rotation.shape[1], 2), rotation.dtype)
    missing[..., 0] = 1
    return missing


def main(
    description: str, prepare: Callable[[Path], Callable[[str, list[torch.Tensor], int | None, Seen], dict]]
) -> None:
    """Reads the arguments of either script, and writes the result of every model to its --out, or its error.

    `prepare` makes, from the folder with the server's files, what computes the arrays of one model.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--packages", required=True, type=Path, help="the folder that the server's wheel is unpacked in"
    )
    parser.add_argument("--model", action="append", required=True, help="a directory")
    parser.add_argument("--tokens", action="append", required=True, help=".npy, [T] integers")
    parser.add_argument("--prefixes", default="", help="lengths, separated by commas: read so many tokens; none: all")
    parser.add_argument("--length", action="append", required=True, type=int, help="the longest sequence; 0: derived")
    parser.add_argument("--out", action="append", required=True, help=".npz")
    arguments = parser.parse_args()
    compute = prepare(arguments.packages)
    jobs = zip(arguments.model, arguments.tokens, arguments.length, arguments.out, strict=True)
    for directory, tokens, length, out in jobs:
        seen = Seen()
        try:
            with torch.no_grad():
                sequence = torch.tensor(np.load(tokens))
            prefixes = [int(n) for n in arguments.prefixes.split(",") if n] or [len(sequence)]
            found = compute(directory, [sequence[:n] for n in prefixes], length or None, seen)
            own = [rotation for rotation in seen.rotations if rotation is not None]
            widest = max(own, key=lambda rotation: rotation.shape[1], default=np.zeros((0, 0, 2), np.float32))
            nothing = np.full_like(widest, np.nan)
            found["max_length"] = str(found["max_length"])  # 256e30 is no integer of numpy
            found["windows"] = np.array(seen.windows)
            # Layers with narrower heads end with pairs that are not rotated.
            wide = [r if r is None else np.concatenate([r, still(widest, r)], 1) for r in seen.rotations]
            found["rotations"] = np.array([nothing if r is None else r for r in wide])
            found["positions"] = np.zeros(0, int) if seen.positions is None else seen.positions.numpy()
        except Exception as error:  # what a person would meet at the server's start is a result
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        np.savez(out, **found)
        print(f"{directory}: {found.get('error', found.get('class_name'))}", flush=True)
