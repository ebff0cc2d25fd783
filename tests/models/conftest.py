"""Tests that run tensors use one thread."""

import torch

torch.set_num_threads(1)
