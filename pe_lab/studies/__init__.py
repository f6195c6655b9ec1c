"""Studies: claims of papers, the runs that test them, and verdicts with intervals over seeds."""

from pe_lab.studies.measures import losses, scores, spikes, together
from pe_lab.studies.references import shape, trigram
from pe_lab.studies.study import Arm, Reference, Study, load_studies, load_study
from pe_lab.studies.verdict import Criterion, Precondition, judge
