"""Sweeps: a recipe trained once for each setting of a grid and each seed, anywhere, and what came of it."""

from pe_lab.lab.sweeps.cells import (
    GridAxis,
    Sweep,
    SweepCell,
    load_sweep,
    make_sweep,
    parse_axis,
    parse_seeds,
    save_sweep,
)
from pe_lab.lab.sweeps.running import Outcome, Runner, run_sweep
from pe_lab.lab.sweeps.state import CellState, read_states
from pe_lab.lab.sweeps.table import collect, summarize
