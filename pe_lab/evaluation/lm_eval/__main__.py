"""`python -m pe_lab.evaluation.lm_eval`."""

import sys

from pe_lab.evaluation.lm_eval import main

if __name__ == "__main__":
    sys.exit(main())
