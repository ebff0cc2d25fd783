// What the host tells the kernel. models/cuda/mega_params.py mirrors `Params` field by field.
#pragma once

enum Kind : int { QKV, OUT, GATE_UP, DOWN, HEAD, KINDS };

constexpr int MAX_ROWS = 16;   // token rows of a launch
constexpr int TILE_SIZES = 3;  // that the tiles of a matrix can have

// A weight matrix [8 * units, 64 * blocks] of every layer (see models/cuda/shares.py).
struct Matrix {
  TensorMap maps[TILE_SIZES];  // chunks of its tiles (see models/cuda/tensor_map.py), by the tiles' size:
  int tile_units[TILE_SIZES];  // units, or 0
  int steps[TILE_SIZES];       // blocks of a chunk
  int units;                   // groups of 8 output features
  int blocks;                  // groups of 64 input features
  int rotation;                // the SM that gets the first share
  int layer_units;             // from the first unit of a layer to that of the next, for the maps
  int unused[6];
};

struct Params {
  Matrix matrices[KINDS];

  // Other weights.
  const bf16* embedding;           // [vocabulary, hidden]
  const bf16* vectors;             // [layers, vector_stride]; where a layer's vectors begin, or -1 for none:
  int vector_stride;
  int input_norm, mlp_norm, q_norm, k_norm;
  int bias[HEAD];                  // of each kind; that of GATE_UP has gate and up of a feature side by side
  int unused;
  const bf16* final_norm;
  const float* rotations;          // [positions, 2, head_dim / 2] cos, sin

  // K and V, [layers, pages, kv_heads, page_size, head_dim] each.
  bf16* k_cache;
  bf16* v_cache;
  long long cache_layer;           // elements of a layer

  // Rows: see models/rows.py.
  const int* tokens;
  const int* positions;
  const int* slots;
  const int* counts;
  const int* page_table;
  const int* logit_rows;

  // Scratch.
  bf16* x;                         // [MAX_ROWS, hidden] the residual stream
  bf16* qkv;                       // [MAX_ROWS, (heads + 2 kv_heads) head_dim]
  bf16* attended;                  // [MAX_ROWS, heads head_dim]
  bf16* act;                       // [MAX_ROWS, intermediate]
  float* partial;                  // [split tasks, 64 query rows, head_dim] attention of a part of the keys
  float* partial_sums;             // [split tasks, 64, 2] its maximum and sum
  unsigned* tickets;               // [MAX_ROWS, kv_heads] of blocks of query rows, zero between uses
  unsigned* arrivals;              // [SMs] the grid barrier's words

  // Results.
  float* logits;                   // [R, logit_stride]
  bf16* hidden_out;                // [R, hidden]

  int rows, logit_count;           // T, R
  int layers, hidden, heads, kv_heads, head_dim, intermediate;
  int vocabulary;                  // columns of logits
  int embeddings;                  // rows of the embedding
  int logit_stride;
  int page_size, page_stride;      // tokens of a page; pages of a page table's row
  int split_tasks;                 // that `partial` has room for
  float eps, inverse_hidden;       // 1 / hidden
};
