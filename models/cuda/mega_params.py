"""The megakernel's parameters: mega/params.cuh, field by field."""

from __future__ import annotations

import ctypes

MATRICES = 5

_POINTERS = """tokens positions slots counts page_table logit_rows
    x qkv attended act partial partial_sums tickets arrivals logits hidden_out"""
_SIZES = """rows logit_count layers hidden heads kv_heads head_dim intermediate
    vocabulary embeddings logit_stride page_size page_stride split_tasks"""


class Matrix(ctypes.Structure):
    """A packed matrix."""

    _fields_ = (
        ("offset", ctypes.c_longlong),
        ("units", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("rotation", ctypes.c_int),
        ("unused", ctypes.c_int),
    )


class Params(ctypes.Structure):
    """Everything that a launch is told."""

    _fields_ = (
        ("matrices", Matrix * MATRICES),
        ("layer_bytes", ctypes.c_longlong),
        ("stream", ctypes.c_void_p),
        ("embedding", ctypes.c_void_p),
        ("vectors", ctypes.c_void_p),
        ("vector_stride", ctypes.c_int),
        ("input_norm", ctypes.c_int),
        ("mlp_norm", ctypes.c_int),
        ("q_norm", ctypes.c_int),
        ("k_norm", ctypes.c_int),
        ("bias", ctypes.c_int * (MATRICES - 1)),
        ("unused", ctypes.c_int),
        ("final_norm", ctypes.c_void_p),
        ("rotations", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("cache_layer", ctypes.c_longlong),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        *((name, ctypes.c_int) for name in _SIZES.split()),
        ("eps", ctypes.c_float),
        ("inverse_hidden", ctypes.c_float),
    )
