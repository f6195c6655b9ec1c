"""Sends the records of standard input to Weights & Biases.

pe_lab starts this file as a process of its own, so that W&B's library cannot slow, stop or outlive training. The first
line of the input has the arguments of `wandb.init`, the prefix of the names, and the seconds that W&B may take once
pe_lab has ended; every other line has the numbers of one step.
"""

import json
import os
import signal
import sys
import threading
import time


def end_after_parent(parent: int, patience: float) -> None:
    """Ends this process, and W&B's own, `patience` seconds after pe_lab has ended, however it ended."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(patience)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    # A signal to the whole job is for training, whose end is the end of the input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    about = json.loads(sys.stdin.readline())
    threading.Thread(target=end_after_parent, args=(os.getppid(), about["patience"]), daemon=True).start()
    import wandb

    settings = wandb.Settings(console="off", silent=True)
    run = wandb.init(**about["init"], resume="allow", save_code=False, settings=settings)
    prefix = about["prefix"]
    # The steps of every phase count from 0, and W&B's own step only rises.
    run.define_metric(f"{prefix}/step", hidden=True)
    run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")
    for line in sys.stdin:
        try:
            record = json.loads(line)
        except ValueError:  # training was killed within a line
            break
        run.log({f"{prefix}/{name}": value for name, value in record.items()})
    run.finish()


if __name__ == "__main__":
    main()
