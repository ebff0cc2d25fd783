// The weight stream: one warp copies this SM's share of every matrix, in the order of use, into a ring in shared memory.
//
// A matrix is dealt to SMs in units of 8 output features. An SM's share is cut into tiles of up to 15 units, whose sums are
// kept in registers at once, and a tile into chunks of consecutive input features; a chunk is one copy of a box and is read by one
// warp. The stream never waits for anything but room in the ring, so it runs ahead of the
// computation, over barriers and layers.
#pragma once

#ifndef MEGA_STAGES
#define MEGA_STAGES 12
#endif

constexpr int STAGES = MEGA_STAGES;
constexpr int STAGE_BYTES = MEGA_STAGE_BYTES;
constexpr int BLOCK_BYTES = 1024;  // 8 output features x 64 input features
constexpr int MAX_UNITS = 15;      // of a tile
constexpr int WARPS = CONSUMERS / 32;
static_assert(STAGE_BYTES == MAX_UNITS * BLOCK_BYTES, "models/cuda/shares.py has the same");
static_assert(STAGE_BYTES % 1024 == 0, "the engine swizzles by addresses");
// A stage's chunks belong to different warps, so that one can ask for a chunk while the one before it is still on its way; but the
// one before that has been read. So barriers come in two sets, used in turn.
constexpr int LANDINGS = 2 * STAGES;
static_assert(STAGES >= WARPS, "a warp is never two rounds of the ring ahead");

DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }

struct Ring {
  u64* full;   // [LANDINGS] completes when a chunk has landed
  u64* empty;  // [STAGES] completes when it has been read
  unsigned char* data;

  DEVICE void init() {
    for (int landing = 0; landing < LANDINGS; ++landing) barrier_init(full + landing, 1);
    for (int stage = 0; stage < STAGES; ++stage) barrier_init(empty + stage, 1);
    barrier_init_done();
  }
  DEVICE unsigned char* stage(u32 chunk) const { return data + chunk % STAGES * STAGE_BYTES; }
  DEVICE void wait(u32 chunk) const {
    barrier_wait<true>(full + chunk % LANDINGS, chunk / LANDINGS);
  }
  // By every lane of a reading warp.
  DEVICE void release(u32 chunk) const {
    sync_warp();
    if (lane() == 0) barrier_arrive(empty + chunk % STAGES);
  }
};

// The units of one SM, and how they are cut. Made once per launch: divisions take long.
struct Share {
  int first, tiles;
  int large;      // tiles that have a unit more than the others; they come first
  int units;      // of the others
  int size[2];    // which of the matrix's tile sizes small and large tiles have
  int step[2];    // blocks of input features in a chunk
  int chunks[2];  // of a tile

  DEVICE void make(const Matrix& matrix) {
    const int base = matrix.units / ctas(), extra = matrix.units % ctas();
    int index = cta() - matrix.rotation;
    if (index < 0) index += ctas();
    first = index * base + smaller(index, extra);
    const int count = base + (index < extra);
    tiles = ceil_div(count, MAX_UNITS);
    units = count / larger(tiles, 1);
    large = count - units * tiles;
    for (int i = 0; i < 2; ++i) {
      size[i] = 0;
      while (size[i] < TILE_SIZES - 1 && matrix.tile_units[size[i]] != units + i) ++size[i];
      step[i] = larger(matrix.steps[size[i]], 1);
      chunks[i] = ceil_div(matrix.blocks, step[i]);
    }
  }
};

struct Producer {
  Ring ring;
  const Share* shares;  // [KINDS]
  u64 policy;
  u32 stage = 0;
  int round = 0;

  DEVICE void matrix(const Matrix& matrix, const Share& share, int layer) {
    int unit = layer * matrix.layer_units + share.first;
    for (int tile = 0; tile < share.tiles; ++tile) {
      const int large = tile < share.large, step = share.step[large], units = share.units + large;
      // A box has its full size at the edges of the matrix, too: what lies outside comes as zeros.
      const u32 bytes = units * step * BLOCK_BYTES;
      for (int block = 0; block < matrix.blocks; block += step) {
        barrier_wait<false>(ring.empty + stage, round - 1);  // the first round finds every stage empty
        u64* landed = ring.full + round % 2 * STAGES + stage;
        barrier_expect(landed, bytes);
        box_load(ring.data + stage * STAGE_BYTES, matrix.maps + share.size[large], unit, block, landed, policy);
        if (++stage == STAGES) {
          stage = 0;
          ++round;
        }
      }
      unit += units;
    }
  }

  DEVICE void run(const Params& p) {
    policy = streaming_policy();
    for (int layer = 0; layer < p.layers; ++layer)
      for (int kind = QKV; kind < HEAD; ++kind) matrix(p.matrices[kind], shares[kind], layer);
    if (p.logit_count > 0) matrix(p.matrices[HEAD], shares[HEAD], 0);
  }
};
