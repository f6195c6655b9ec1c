"""Any positional encoding with DroPE's Table 1 model and budget, so that all of them compare on one axis.

Paper: the budget is that of "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings"
(DroPE), appendix C.1; the schemes are those of docs/encodings.md, each with its own paper.

Arguments: scheme=NAME, a registered encoding, or a text such as 'rope/with=t5' (in quotes if it has a comma);
size=494m (or laptop). Encodings that add to others are put beside RoPE: ssmax means rope/with=ssmax. One of your own
has its name here, and its file is given by --encodings=FILE (docs/your-own-encoding.md).

Prepare: as for configs/table1.py.

Train:
  python -m pe_lab.train --config=configs/encodings.py:scheme=fire
  python -m pe_lab.train --config=configs/encodings.py:scheme=t5,size=laptop
  python -m pe_lab.sweep --config=configs/encodings.py:scheme=rope,size=laptop --seeds=3

Cost of each: that of configs/table1.py, 5.42e19 FLOPs and 191 v5e chip-hours at 40% MFU, times the cost of the encoding
over RoPE's (docs/encodings.md). Does it fit?
  python -m pe_lab.plan --config=configs/encodings.py:scheme=fire --topology=v5e:16x16
size=laptop: about 6 minutes on two CPU cores, times the same.
Expected: no paper has all of them at this size. Table 1's RoPE has validation perplexity 21.72.

RoPE's base is that of the table's model (1e6; 200 at laptop size, where windows have 64 tokens), and lengths in the
settings of pe_lab's schemes that mean the training length follow it: 1024, or 64. One of your own has its defaults.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.positional import HOOKS, Layer, Rope, has, layers
from pe_lab.positional.registry import ENCODINGS
from pe_lab.recipes import recipe_arguments

from .table1 import get_config as table1

# The fields of schemes that mean the training length.
LENGTHS = ("original_length", "training_length", "initial_length")


def scheme(text: str, base: float, length: int) -> Any:
    """The layer of a scheme at a base of RoPE and a training length.

    Raises:
      ConfigError: no encoding has this name, or it needs settings.
    """
    if text not in ENCODINGS:
        if text.partition("/")[0].partition(":")[0] not in ENCODINGS:
            raise ConfigError(f"scheme={text}: there is no such encoding. {did_you_mean(text, [*ENCODINGS])}")
        return layers(text, 1)[0]
    kind = ENCODINGS[text]
    fields = {f.name for f in dataclasses.fields(kind)}
    settings = {}
    if kind.__module__.startswith("pe_lab."):  # one of your own has its own defaults
        settings = {name: length for name in LENGTHS if name in fields} | ({"base": base} if "base" in fields else {})
    try:
        encoding = kind(**settings)
    except TypeError:
        raise ConfigError(
            f"scheme={text}: {kind.__name__} needs settings; give them: scheme='{text}:key=value'."
        ) from None
    return Layer(encoding) if encoding.stands_alone else Layer(Rope(base=base), extras=(encoding,))


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: scheme=NAME,size=494m, or others of the docstring's."""
    arguments = recipe_arguments(arg, scheme="rope", size=("494m", "laptop"))
    config = table1(f"method=rope,size={arguments['size']}")
    (phase,) = config.phases
    layer = scheme(arguments["scheme"], phase.positional.base, phase.sequence_length)
    phase.positional = layer
    acting = [type(encoding).__name__ for _, encoding in layer.acting()]
    hooks = [hook for hook in HOOKS if any(has(encoding, hook) for _, encoding in layer.acting())]
    named = "".join(c if c.isalnum() else "_" for c in arguments["scheme"])
    config.name = f"encodings_{named}" + ("_laptop" if arguments["size"] == "laptop" else "")
    config.notes = dict(
        paper=f"DroPE, Table 1's budget, with {' and '.join(acting)} (hooks: {', '.join(hooks) or 'none'})",
        command="python -m pe_lab.train --config=configs/encodings.py" + (f":{arg}" if arg else ""),
        cost=config.notes.cost,
        expected="no paper has it with this model and budget",
    )
    return config
