"""Triton kernels. The modules import triton, so they are imported only where a decoder for CUDA is built."""
