"""The ladder's rung of width 192, on a GPU: benchmarks/gpu/ladder.sh."""

from .ladder import later

CLAIM = later(192)
