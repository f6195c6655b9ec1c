"""The decoder: its initialization, and pure functions of parameters, tokens and a schedule."""

from pe_lab.model.decoder import LossSums, Model, Params
from pe_lab.model.generation import Decoder, GenerationRequest, GenerationStatistics, Schedules
from pe_lab.model.loss import cross_entropy
from pe_lab.model.modules import Auxiliary, register_feed_forward
from pe_lab.model.presets import PRESETS, preset
from pe_lab.model.programs import DecodingWeights, ForwardPasses
from pe_lab.model.projections import constant, normal
from pe_lab.model.sampling import Sampling
from pe_lab.model.shape import REMAT_POLICIES, Flops, complete, least_parameters, model_schedule, train_flops_per_token
from pe_lab.positional import import_encodings
from pe_lab.terminal import import_encodings_by

import_encodings_by(import_encodings)
