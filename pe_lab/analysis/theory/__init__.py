"""The study `theory`: constructions and bounds of the papers, computed as numbers that can disagree with them."""

from pe_lab.analysis.theory.claims import Claim, claims
