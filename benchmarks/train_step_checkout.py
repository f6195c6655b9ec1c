"""A side of `train_step.py`: the train step of a checkout, which takes steps when a line of JSON on stdin asks for it.

Run by `train_step.py --against=CHECKOUT` for both checkouts, with this Python, and the benchmark and pe_lab of each.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    checkout = Path(sys.argv[1])
    sys.path[0] = str(checkout)  # in place of this file's folder
    import pe_lab
    from benchmarks import train_step
    from pe_lab.parallel.host_memory import keep_freed_memory

    if not Path(pe_lab.__file__).is_relative_to(checkout):
        sys.exit(f"pe_lab is that of {pe_lab.__file__}, not of {checkout}.")
    keep_freed_memory()
    shape = train_step.SHAPES[json.loads(sys.stdin.readline())["shape"]]
    side = train_step.Ours(shape, *train_step.prepare(shape))
    print(json.dumps({"parameters": side.parameters, "versions": {}}), flush=True)
    for line in sys.stdin:
        print(json.dumps(side.run(json.loads(line)["steps"])), flush=True)


if __name__ == "__main__":
    main()
