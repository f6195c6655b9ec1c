"""Claims: sentences of papers, the runs that test them, and verdicts with intervals over seeds."""

from pe_lab.lab.claims.claim import Arm, Claim, Reference, load_claim, load_claims
from pe_lab.lab.claims.equal_help import helped
from pe_lab.lab.claims.measures import losses, onset, previous_token_bias, scores, shape, spikes, together, trigram
from pe_lab.lab.claims.rates import Rates
from pe_lab.lab.claims.values import WindowMean
from pe_lab.lab.claims.verdict import Criterion, Precondition, judge
