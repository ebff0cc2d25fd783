// The weight stream: one warp copies this SM's share of every matrix, in the order of use, into a ring in shared memory.
//
// A matrix is dealt to SMs in units of 8 output features. An SM's share is cut into tiles of up to 16 units, whose sums are
// kept in registers at once, and a tile into chunks of consecutive input features; a chunk is one bulk copy and is read by one
// warp (two, when they hold different rows). The stream never waits for anything but room in the ring, so it runs ahead of the
// computation, over barriers and layers.
#pragma once

#ifndef MEGA_STAGES
#define MEGA_STAGES 23
#endif
#ifndef MEGA_STAGE_BYTES
#define MEGA_STAGE_BYTES 8192
#endif

constexpr int STAGES = MEGA_STAGES;
constexpr int STAGE_BYTES = MEGA_STAGE_BYTES;
constexpr int BLOCK_BYTES = 512;  // 8 output features x 32 input features
constexpr int MAX_UNITS = 16;     // of a tile
constexpr int WARPS = CONSUMERS / 32;
static_assert(STAGE_BYTES >= MAX_UNITS * BLOCK_BYTES, "a stage holds at least one block of every unit");

DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }

struct Ring {
  u64* full;   // [STAGES] completes when a chunk has landed
  u64* empty;  // [STAGES] completes when its readers are done
  unsigned char* data;

  DEVICE void init(int readers) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(full + stage, 1);
      barrier_init(empty + stage, readers);
    }
    barrier_init_done();
  }
  DEVICE unsigned char* stage(u32 chunk) const { return data + chunk % STAGES * STAGE_BYTES; }
  DEVICE void wait(u32 chunk) const {
#ifndef MEGA_WITHOUT_STREAM
    barrier_wait<true>(full + chunk % STAGES, chunk / STAGES & 1);
#endif
  }
  // By every lane of a reading warp.
  DEVICE void release(u32 chunk) const {
    sync_warp();
    if (lane() == 0) barrier_arrive(empty + chunk % STAGES);
  }
};

// The units of one SM.
struct Share {
  int first, count, tiles;

  DEVICE Share(const Matrix& matrix, int cta, int ctas) {
    const int base = matrix.units / ctas, extra = matrix.units % ctas;
    int index = cta - matrix.rotation;
    if (index < 0) index += ctas;
    first = index * base + smaller(index, extra);
    count = base + (index < extra);
    tiles = ceil_div(count, MAX_UNITS);
  }
  DEVICE int tile_units(int tile) const { return count / tiles + (tile < count % tiles); }
};

// Blocks of input features in a chunk: as many as fit into a stage, but so that all warps get the same number of chunks.
DEVICE int chunk_blocks(int units, int blocks) {
  const int most = STAGE_BYTES / (units * BLOCK_BYTES);
  return ceil_div(blocks, WARPS * ceil_div(blocks, WARPS * most));
}

struct Producer {
  Ring ring;
  u64 policy;
  u32 chunk = 0;

  DEVICE void matrix(const Matrix& matrix, const unsigned char* base) {
    const Share share(matrix, cta(), ctas());
    const unsigned char* from = base + matrix.offset + (long long)share.first * matrix.blocks * BLOCK_BYTES;
    for (int tile = 0; tile < share.tiles; ++tile) {
      const int units = share.tile_units(tile), step = chunk_blocks(units, matrix.blocks);
      for (int block = 0; block < matrix.blocks; block += step, ++chunk) {
        const u32 bytes = smaller(step, matrix.blocks - block) * units * BLOCK_BYTES;
        const u32 stage = chunk % STAGES;
        barrier_wait<false>(ring.empty + stage, (chunk / STAGES & 1) ^ 1);  // the first round finds every stage empty
        barrier_expect(ring.full + stage, bytes);
        bulk_load(ring.stage(chunk), from, bytes, ring.full + stage, policy);
        from += bytes;
      }
    }
  }

  DEVICE void run(const Params& p) {
    policy = streaming_policy();
    const unsigned char* base = p.stream;
    for (int layer = 0; layer < p.layers; ++layer, base += p.layer_bytes)
      for (int kind = QKV; kind < HEAD; ++kind) matrix(p.matrices[kind], base);
    if (p.logit_count > 0) matrix(p.matrices[HEAD], p.stream);
  }
};
