"""Triton kernels. The modules import triton, so they are imported only where a decoder for CUDA is built.

Each combination of constants, and of arguments that are 1 or whose value or address is or is not a multiple of 16, is compiled by
itself, in up to seconds. Where token rows lie, and how many there are, changes from step to step: no kernel is compiled for that,
and none would gain, as its loads of rows are masked.
"""
