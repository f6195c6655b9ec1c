"""Writes mup_golden.npz: a decoder without positions in torch, trained by the muP of its authors' package.

    pip install torch==2.13.0 mup==1.0.0 numpy pyyaml && python tests/data/make_mup_golden.py

`mup` is Yang & Hu's implementation (github.com/microsoft/mup): `set_base_shapes` compares the model with one of a base
width, `MuSharedReadout` divides the input of the tied head by the width ratio, `MuAdamW` sets the rates and the decay
of each parameter. Parameters have the names of pe_lab: `before/...`, `after/...` three steps, and the losses.
"""

from pathlib import Path

import mup
import numpy as np
import torch
from torch import nn
from torch.nn import functional

BASE, WIDTH, HEAD_DIM, LAYERS, VOCABULARY = 8, 32, 8, 2, 24
BATCH, LENGTH, STEPS, RATE, DECAY, STD = 4, 12, 3, 1e-2, 0.1, 0.25


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.scale


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attention_norm, self.mlp_norm = Norm(width), Norm(width)
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        heads = [
            one(normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for one in (self.query, self.key, self.value)
        ]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.final_norm = Norm(width)
        self.readout = mup.MuSharedReadout(self.embedding.weight, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.readout(self.final_norm(x))


def named(model: Decoder) -> dict[str, np.ndarray]:
    """Parameters by pe_lab's names and shapes; those of the layers are stacked."""

    def of_layer(layer: Layer) -> dict[str, np.ndarray]:
        weight = {
            name: getattr(layer, name).weight.detach().numpy().T.copy()
            for name in ("query", "key", "value", "out", "gate", "up", "down")
        }
        split = {name: weight[name].reshape(WIDTH, -1, HEAD_DIM) for name in ("query", "key", "value")}
        found = {f"attention.{name}": value for name, value in split.items()}
        found |= {"attention.out": weight["out"].reshape(-1, HEAD_DIM, WIDTH)}
        found |= {f"mlp.{name}": weight[name] for name in ("gate", "up", "down")}
        return found | {
            f"{norm}.scale": getattr(layer, norm).scale.detach().numpy().copy()
            for norm in ("attention_norm", "mlp_norm")
        }

    layers = [of_layer(layer) for layer in model.layers]
    found = {f"layers.{name}": np.stack([one[name] for one in layers]) for name in layers[0]}
    found["token_embedder.embedding"] = model.embedding.weight.detach().numpy().copy()
    found["token_embedder.final_norm.scale"] = model.final_norm.scale.detach().numpy().copy()
    return found


def main() -> None:
    torch.manual_seed(0)
    model = Decoder(WIDTH)
    mup.set_base_shapes(model, Decoder(BASE), delta=Decoder(2 * BASE), rescale_params=False)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            init = nn.init.normal_ if "embedding" in name else mup.init.normal_  # the latter by the width
            init(parameter, std=STD)
    decayed = [p for name, p in model.named_parameters() if "norm" not in name]
    others = [p for name, p in model.named_parameters() if "norm" in name]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = mup.MuAdamW(groups, lr=RATE, weight_decay=DECAY, betas=(0.9, 0.95), eps=1e-8)
    tokens = torch.randint(VOCABULARY, (STEPS, BATCH, LENGTH + 1))
    before, losses = named(model), []
    for batch in tokens:
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    arrays = {f"before/{name}": value for name, value in before.items()}
    arrays |= {f"after/{name}": value for name, value in named(model).items()}
    np.savez_compressed(
        Path(__file__).with_name("mup_golden.npz"), tokens=tokens.numpy(), losses=np.asarray(losses), **arrays
    )


if __name__ == "__main__":
    main()
