"""Claims: sentences of papers, the runs that test them, and verdicts with intervals over seeds."""

from pe_lab.lab.claims.claim import Arm, Claim, Reference, load_claim, load_claims
from pe_lab.lab.claims.measures import losses, scores, shape, spikes, together, trigram
from pe_lab.lab.claims.verdict import Criterion, Precondition, judge
