"""Decoders for CUDA devices. Nothing here needs triton or flashinfer to be imported."""
