"""Sweeps: a recipe trained once for each setting of a grid and each seed, anywhere, and what came of it."""

from pe_lab.lab.sweeps.cells import Cell, Sweep, load_sweep, make_sweep, save_sweep
from pe_lab.lab.sweeps.grid import Axis, parse_axis, parse_seeds
from pe_lab.lab.sweeps.running import Outcome, Runner, run_sweep
from pe_lab.lab.sweeps.state import CellState, read_states
from pe_lab.lab.sweeps.table import collect, summarize
