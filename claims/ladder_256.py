"""The ladder's rung of width 256, on a GPU: benchmarks/gpu/ladder.sh."""

from .ladder import later

CLAIM = later(256)
