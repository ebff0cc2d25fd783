"""The megakernel's parameters: mega/params.cuh, field by field."""

from __future__ import annotations

import ctypes

from models.cuda.tensor_map import MAP_BYTES

MATRICES = 5
TILE_SIZES = 3
_ALIGNMENT = 64
"""Bytes, of a tensor map, and so of everything."""

_POINTERS = """tokens positions slots counts page_table logit_rows
    x qkv attended act partial partial_sums tickets arrivals logits hidden_out"""
_SIZES = """rows logit_count layers hidden heads kv_heads head_dim intermediate
    vocabulary embeddings logit_stride page_size page_stride split_tasks"""


class Matrix(ctypes.Structure):
    """A matrix of every layer."""

    _fields_ = (
        ("maps", ctypes.c_ubyte * MAP_BYTES * TILE_SIZES),
        ("tile_units", ctypes.c_int * TILE_SIZES),
        ("steps", ctypes.c_int * TILE_SIZES),
        ("units", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("rotation", ctypes.c_int),
        ("layer_units", ctypes.c_int),
        ("unused", ctypes.c_int * 6),
    )


class _Fields(ctypes.Structure):
    _fields_ = (
        ("matrices", Matrix * MATRICES),
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


class Params(_Fields):
    """Everything that a launch is told."""

    _fields_ = (("padding", ctypes.c_ubyte * (-ctypes.sizeof(_Fields) % _ALIGNMENT)),)
