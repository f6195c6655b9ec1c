"""Sweeps: a recipe trained once for each setting of a grid and each seed, anywhere, and what came of it."""

from pe_lab.lab.sweeps.cells import (
    Sweep,
    SweepCell,
    load_sweep,
    make_sweep,
    parse_axes,
    parse_seeds,
    save_sweep,
)
from pe_lab.lab.sweeps.results import collect, summarize
from pe_lab.lab.sweeps.running import Runner, run_sweep
from pe_lab.lab.sweeps.state import CellState, read_states
