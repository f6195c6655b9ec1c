"""Training: state, optimizer, pure step, the visible loop."""

from pe_lab.training.loop import Stopped, train_phase
from pe_lab.training.optimizer import learning_rate, make_optimizer
from pe_lab.training.run import PhasePlan, Run, open_run, plan_phases
from pe_lab.training.step import TrainState, compile_train_step, init_state, make_shardings, place_batch, train_step
