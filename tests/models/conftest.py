"""Settings for tests that run tensors: one thread, and no deadlines on a machine shared with others."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("models", deadline=None)
settings.load_profile("models")
