"""The analysis `theory`: constructions and bounds of the papers, computed as numbers that can disagree with them."""
