"""The ladder's rung of width 384, on a GPU: benchmarks/gpu/ladder.sh."""

from .ladder import later

CLAIM = later(384)
