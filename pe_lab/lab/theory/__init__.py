"""The analysis `theory`: constructions and bounds of the papers, computed as numbers that can disagree with them."""

from pe_lab.lab.theory.analysis import statements
from pe_lab.lab.theory.statement import Statement
