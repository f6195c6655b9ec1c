"""Writes sinusoidal_golden.json: sinusoidal positions (Vaswani et al. 2017) as transformers' CTRL computes them.

    python -m pip install transformers==5.23.0 torch==2.13.0
    python tests/data/make_sinusoidal_golden.py

`waves` [positions, D], float64: CTRL has all sines before all cosines; here they are in turn, as the paper has them.
"""

import json
from pathlib import Path

import torch
from transformers.models.ctrl.modeling_ctrl import positional_encoding

POSITIONS, D = [0, 1, 2, 17, 100, 1023, 4095], 12

found = positional_encoding(max(POSITIONS) + 1, D, torch.float64)[POSITIONS]
sines, cosines = found.chunk(2, dim=-1)
waves = torch.stack([sines, cosines], dim=-1).flatten(1)
content = {"positions": POSITIONS, "waves": waves.tolist()}
Path(__file__).with_name("sinusoidal_golden.json").write_text(json.dumps(content) + "\n")
