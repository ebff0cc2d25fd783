// A whole forward pass of a dense Llama, Qwen2 or Qwen3 decoder for up to 16 token rows in one launch, for Hopper.
//
// One block per SM. Its ninth warp streams the SM's share of all weights through shared memory (stream.cuh); the other eight go
// through the phases of each layer, with a barrier over all SMs after each: QKV product, attention, output product + residual,
// gate and up products + SiLU, down product + residual; then the LM head. Norms before products need no phase: their weights
// are applied to the activations in registers, their scale to the sums. Activations stay in L2. A launch without an active row is
// over at once.
#ifdef MEGA_EMULATED
#include "emulated_device.h"
#else
#include "device.cuh"
#endif

#include "params.cuh"

#include "stream.cuh"

#include "barrier.cuh"

#include "timeline.cuh"

#include "product.cuh"

#include "schedule.cuh"

#include "attention.cuh"

#ifndef MEGA_HEAD_DIM
#define MEGA_HEAD_DIM 128
#endif

struct Shared {
  alignas(1024) unsigned char ring[STAGES * STAGE_BYTES];
  alignas(16) float2 sums[2 * SUM_BYTES / sizeof(float2)];
  float squares[2 * SQUARE_FLOATS];
  float2 maxima[WARPS * 16], totals[WARPS * 16];
  u64 full[LANDINGS], empty[STAGES];
  Share shares[KINDS];
  Schedule schedule;
  Plan plan;
  u32 last;
};
static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of a block on Hopper");
static_assert(sizeof(float2) * WARPS * 16 * 32 <= 2 * SUM_BYTES, "the merge of attention fits where products are reduced");

template <int ROWS>
struct Forward {
  const Params& p;
  Shared& shared;
  Ring ring;
  Grid grid;
  Reduction reduction;
  Merge merge;
  u32 chunk = 0;

  DEVICE Forward(const Params& p, Shared& shared, const Ring& ring)
      : p(p),
        shared(shared),
        ring(ring),
        grid(p.arrivals),
        reduction{shared.sums, shared.squares},
        merge{reinterpret_cast<uint4*>(shared.sums), shared.maxima, shared.totals, &shared.last} {}

  DEVICE const bf16* vector(int layer, int offset) const {
    return offset < 0 ? nullptr : p.vectors + (long long)layer * p.vector_stride + offset;
  }
  DEVICE Source rows(const bf16* base, int width) const { return {base, width, nullptr, 0, p.rows}; }
  // The residual stream before the first layer.
  DEVICE Source embedded() const { return {p.embedding, p.hidden, p.tokens, p.embeddings, p.rows}; }
  DEVICE Source logit_rows() const { return {p.x, p.hidden, p.logit_rows, p.rows, p.logit_count}; }

  // The product of one phase; the weights of the norm before it, where there is one, go to `norm`.
  DEVICE Product describe(int layer, Kind kind) const {
    const int wide = (p.heads + 2 * p.kv_heads) * p.head_dim, attended = p.heads * p.head_dim;
    const Source x = rows(p.x, p.hidden), first = layer == 0 ? embedded() : x;
    const bf16* bias = kind == HEAD ? nullptr : vector(layer, p.bias[kind]);
    const Sink sink = {kind, bias, kind == OUT ? first : x, p.x, p.logits, p.hidden, p.vocabulary};
    Product product = {x, sink, nullptr, p.eps, p.inverse_hidden};
    if (kind == QKV) {
      product.source = first;
      product.norm = vector(layer, p.input_norm);
      product.sink.to = p.qkv;
      product.sink.stride = wide;
    } else if (kind == OUT) {
      product.source = rows(p.attended, attended);
    } else if (kind == GATE_UP) {
      product.norm = vector(layer, p.mlp_norm);
      product.sink.to = p.act;
      product.sink.stride = p.intermediate;
    } else if (kind == DOWN) {
      product.source = rows(p.act, p.intermediate);
    } else {
      product.source = logit_rows();
      product.norm = p.final_norm;
      product.sink.stride = p.logit_stride;
    }
    return product;
  }

  // The LM head's input, as it is given out: one row per warp.
  DEVICE void hidden_rows(const Source& source) {
    for (int row = ctas() - 1 - cta() + warp() * ctas(); row < source.count; row += WARPS * ctas()) {
      const bf16* from = source.row(row);
      float square = 0.0f;
      for (int at = lane() * 8; at < p.hidden; at += 256) {
        const uint4 raw = load_l2(from + at);
        const u32* pairs = &raw.x;
#pragma unroll
        for (int i = 0; i < 4; ++i) square += low(pairs[i]) * low(pairs[i]) + high(pairs[i]) * high(pairs[i]);
      }
      for (int mask = 16; mask > 0; mask /= 2) square += shuffle_xor(square, mask);
      const float scale = reciprocal_root(square / p.hidden + p.eps);
      for (int at = lane() * 8; at < p.hidden; at += 256) {
        uint4 raw = load_l2(from + at);
        const uint4 weight = load_fixed(p.final_norm + at);
        u32* pairs = &raw.x;
        const u32* weights = &weight.x;
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = multiply(pack(low(pairs[i]) * scale, high(pairs[i]) * scale), weights[i]);
        *reinterpret_cast<uint4*>(p.hidden_out + (long long)row * p.hidden + at) = raw;
      }
    }
  }

  DEVICE void schedule_attention() {
    if (warp() == WARPS - 1) {
      make_schedule(p, shared.schedule);
      if (cta() < shared.schedule.tasks) shared.plan.make(p, shared.schedule, cta());
    }
    sync_consumers();
  }

  DEVICE void run() {
    sync_consumers();
    // One loop over all products, so that each kind of tile is in the code once: instruction caches are small.
#pragma unroll 1
    for (int phase = 0;; ++phase) {
      const int layer = phase / HEAD;
      const Kind kind = layer < p.layers ? static_cast<Kind>(phase % HEAD) : HEAD;
      if (kind == HEAD && p.logit_count == 0) break;
      mark_phase(layer == p.layers / 2, kind);
      mark(0);
      const Product product = describe(layer, kind);
      const int blocks = p.matrices[kind].blocks;
      if (product.norm != nullptr)
        multiply_share<ROWS, true>(product, shared.shares[kind], blocks, ring, chunk, reduction, grid, phase > 0);
      else
        multiply_share<ROWS, false>(product, shared.shares[kind], blocks, ring, chunk, reduction, grid, phase > 0);
      mark(3);
      if (kind == HEAD) break;
      grid.arrive();
      mark(4);
      if (kind != QKV) continue;
      if (layer == 0) schedule_attention();
      mark_phase(layer == p.layers / 2, KINDS);
      mark(0);
      Attention<MEGA_HEAD_DIM>(p, shared.schedule, shared.plan, layer).run(merge, grid);
      mark(3);
      grid.arrive();
      mark(4);
    }
    if (p.logit_count > 0) hidden_rows(logit_rows());
  }
};

// Whether any row is an active one; for all lanes of a warp alike.
DEVICE bool is_live(const Params& p) {
  bool found = false;
  for (int row = lane(); row < p.rows; row += 32) found |= load_fixed_int(p.positions + row) >= 0;
  return vote(found) != 0;
}

// A step was queued while the one that its requests left in still ran: what comes of its rows means nothing, but is finite.
DEVICE void clear_results(const Params& p) {
  const int first = cta() * THREADS + thread(), all = ctas() * THREADS;
  for (int row = 0; row < p.logit_count; ++row) {
    for (int at = first; at < p.vocabulary; at += all) p.logits[(long long)row * p.logit_stride + at] = 0.0f;
    for (int at = first; at < p.hidden; at += all) p.hidden_out[(long long)row * p.hidden + at] = 0;
  }
}

template <int ROWS>
DEVICE void forward(const Params& p, unsigned char* memory) {
  wait_for_predecessor();
  if (!is_live(p)) {
    clear_results(p);
    return;
  }
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  Ring ring = {shared.full, shared.empty, shared.ring};
  if (thread() == 0) ring.init();
  if (thread() >= 32 && thread() < 32 + KINDS) shared.shares[thread() - 32].make(p.matrices[thread() - 32]);
  sync_all();
  if (thread() >= CONSUMERS) {
    give_registers();
    if (thread() == CONSUMERS) Producer{ring, shared.shares, 0}.run(p);
  } else {
    take_registers();
    Forward<ROWS>(p, shared, ring).run();
  }
}

#ifndef MEGA_EMULATED
static __global__ void __launch_bounds__(THREADS, 1) forward_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  forward<MEGA_ROWS>(p, memory);
}

#define NAME_OF(rows) mega_launch_##rows
#define NAME(rows) NAME_OF(rows)

// Enqueues the kernel for up to MEGA_ROWS rows. The launch is cooperative: all blocks run at the same time, or none does.
// Returns what is wrong, or a null pointer.
extern "C" const char* NAME(MEGA_ROWS)(const void* params, int grid, void* stream) {
  Params aligned;
  std::memcpy(&aligned, params, sizeof aligned);
  cudaError_t error = cudaFuncSetAttribute(forward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, forward_kernel, aligned);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
#endif
