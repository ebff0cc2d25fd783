// y[T, N] = x[T, K] W[N, K]^T for up to 64 rows: weights from the ring, activations from L2 straight into registers.
//
// The 8 warps of an SM share K: each takes chunks of the stream and keeps sums of all of the tile's outputs; one reduction in
// a fixed order follows. Where rows are more than 32, warps go in pairs that hold half of the rows each.
// The order of input features inside a block of 32 is free as long as both operands agree: lane (g, c) holds features
// 8 c ... 8 c + 7 of row g, 16 contiguous bytes in memory, as pairs 0 1 2 3. Pairs 0 and 2 feed one multiplication of depth 16,
// pairs 1 and 3 the other; weights are packed in the order 0 2 1 3. So up to 8 rows need no zeros beside them: the same four
// registers are the operand of both multiplications, as rows g (pairs 0 and 2) and g + 8 (pairs 1 and 3), of whose results
// the upper half of the first and the lower half of the second count.
#pragma once

// What the kernel's variant for up to ROWS rows does.
template <int ROWS>
struct Plan {
  static constexpr int GROUPS = ROWS / 8;                      // of 8 rows
  static constexpr int HALVES = ROWS > 32 ? 2 : 1;             // warps that share a chunk
  static constexpr int OWN = GROUPS / HALVES;                  // row groups of a warp
  static constexpr bool FOLDED = OWN == 1;                     // 8 rows: see above
  static constexpr int TALL = FOLDED ? 2 : OWN / 2;            // sums of 16 rows
  static constexpr int DEEP = WARPS / HALVES;                  // warps that share K
  static constexpr int BATCH = WARPS / GROUPS;                 // units reduced at once: a warp finishes one of 8 rows
};

constexpr int SUM_BYTES = WARPS * WARPS * 32 * 8;              // sums of every warp for a batch of outputs
constexpr int SQUARE_FLOATS = 8 * 32;                          // sums of squares: warps that share K x rows

// Rows of activations.
struct Source {
  const bf16* base;
  int stride;
  const int* index;  // of each row, or nullptr
  int limit;         // of an index
  int count;         // rows

  DEVICE const bf16* row(int r) const {
    if (r >= count) return nullptr;
    const int at = index == nullptr ? r : smaller(larger(load_fixed_int(index + r), 0), limit - 1);
    return base + (long long)at * stride;
  }
};

// What becomes of a product.
struct Sink {
  Kind kind;
  const bf16* bias;    // [8 * units] or nullptr
  Source old;          // OUT, DOWN: the residual stream to add to
  bf16* to;
  float* logits;       // HEAD
  int stride, columns;

  DEVICE bool adds() const { return kind == OUT || kind == DOWN; }

  // Outputs 8 unit + 2 c and the one after it.
  DEVICE void put(int row, int unit, int c, float first, float second, u32 previous) const {
    const int column = unit * 8 + 2 * c;
    if (bias != nullptr) {
      const u32 pair = load_fixed_word(bias + column);
      first += low(pair);
      second += high(pair);
    }
    if (kind == HEAD) {
      float* at = logits + (long long)row * stride + column;
      if (column < columns) at[0] = first;
      if (column + 1 < columns) at[1] = second;
    } else if (kind == GATE_UP) {
      const float gate = rounded(first), up = rounded(second);
      const float silu = rounded(divide(gate, 1.0f + exp2_fast(gate * -1.4426950408889634f)));
      to[(long long)row * stride + unit * 4 + c] = static_cast<bf16>(pack(silu * up, 0.0f));
    } else {
      if (adds()) {
        first = low(previous) + rounded(first);
        second = high(previous) + rounded(second);
      }
      *reinterpret_cast<u32*>(to + (long long)row * stride + column) = pack(first, second);
    }
  }
};

// Shared memory of the reduction, in two copies used in turn: one synchronisation per batch is enough.
struct Reduction {
  float2* sums;
  float* squares;
  u32 turn = 0;

  DEVICE float2* sums_now() const { return sums + (turn & 1) * (SUM_BYTES / 8); }
  DEVICE float* squares_now() const { return squares + (turn & 1) * SQUARE_FLOATS; }
};

struct Product {
  Source source;
  Sink sink;
  const bf16* norm;  // weights of the norm before the product, or nullptr
  float eps;
  float inverse_width;  // 1 / K
};

// Where a warp is in a tile: blocks block ... of a chunk that ends at `end`.
struct Place {
  int chunk, block, end;
};

template <int ROWS, int UNITS, bool NORM>
struct Tile {
  using P = Plan<ROWS>;
  // Blocks whose activations are in flight together, twice; few sums leave registers for many.
  static constexpr int WISH = UNITS <= 2 ? 8 : UNITS <= 4 ? 4 : UNITS <= 8 ? 2 : 1;
  static constexpr int ROOM = P::OWN == 1 ? 8 : P::OWN == 2 ? 4 : 2;
  static constexpr int DEPTH = WISH < ROOM ? WISH : ROOM;
  // Independent chains of sums, where there are too few units to hide a multiplication's latency.
  static constexpr int CHAINS = UNITS <= 4 && P::OWN <= 2 ? 2 : 1;

  struct Fetch {
    uint4 x[DEPTH][P::OWN];
    uint4 weight[NORM ? DEPTH : 1];
  };

  const Product& product;
  Ring& ring;
  u32 first_chunk;
  int blocks, step, chunks, deep;
  const bf16* rows[P::OWN];
  float sums[CHAINS][UNITS][P::TALL][4];
  float squares[P::OWN];

  DEVICE Tile(const Product& product, Ring& ring, u32 first_chunk, int blocks)
      : product(product), ring(ring), first_chunk(first_chunk), blocks(blocks) {
    step = chunk_blocks(UNITS, blocks);
    chunks = ceil_div(blocks, step);
    deep = warp() / P::HALVES;
    const int group = warp() % P::HALVES * P::OWN;
#pragma unroll
    for (int own = 0; own < P::OWN; ++own) {
      rows[own] = product.source.row((group + own) * 8 + lane() / 4);
      if (rows[own] != nullptr) rows[own] += lane() % 4 * 8;
      squares[own] = 0.0f;
    }
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain)
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit)
#pragma unroll
        for (int tall = 0; tall < P::TALL; ++tall)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[chain][unit][tall][i] = 0.0f;
  }

  DEVICE Place place(int chunk) const { return {chunk, chunk * step, smaller(chunk * step + step, blocks)}; }
  DEVICE bool over(const Place& at) const { return at.chunk >= chunks; }
  DEVICE Place next(Place at) const {
    at.block += DEPTH;
    return at.block < at.end ? at : place(at.chunk + P::DEEP);
  }

  DEVICE void fetch(Fetch& into, const Place& at) const {
    if (over(at)) return;
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (at.block + i >= at.end) continue;
#pragma unroll
      for (int own = 0; own < P::OWN; ++own) {
        into.x[i][own] = make_uint4(0, 0, 0, 0);
        if (rows[own] != nullptr) into.x[i][own] = load_l2(rows[own] + (at.block + i) * 32);
      }
      if (NORM) into.weight[i] = load_fixed(product.norm + (at.block + i) * 32 + lane() % 4 * 8);
    }
  }

  DEVICE void normalise(uint4& x, const uint4& weight, float& square) const {
    u32* pairs = &x.x;
    const u32* scales = &weight.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      square += low(pairs[i]) * low(pairs[i]);
      square += high(pairs[i]) * high(pairs[i]);
      pairs[i] = multiply(pairs[i], scales[i]);
    }
  }

  DEVICE void consume(Fetch& from, const Place& at) {
    const int begin = at.chunk * step;
    if (at.block == begin) ring.wait(first_chunk + at.chunk);
    const u32 stage = (first_chunk + at.chunk) % STAGES;
    const unsigned char* data = ring.data + stage * STAGE_BYTES + (at.block - begin) * UNITS * BLOCK_BYTES + lane() * 16;
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (at.block + i >= at.end) continue;
      if (NORM) {
#pragma unroll
        for (int own = 0; own < P::OWN; ++own) normalise(from.x[i][own], from.weight[i], squares[own]);
      }
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit) {
        const uint4 w = *reinterpret_cast<const uint4*>(data + (i * UNITS + unit) * BLOCK_BYTES);
#pragma unroll
        for (int tall = 0; tall < P::TALL; ++tall) {
          if constexpr (P::FOLDED) {
            const uint4& x = from.x[i][0];
            mma(sums[i % CHAINS][unit][tall], x.x, x.y, x.z, x.w, tall ? w.z : w.x, tall ? w.w : w.y);
          } else {
            const uint4 &upper = from.x[i][2 * tall], &lower = from.x[i][2 * tall + 1];
            mma(sums[2 * i % CHAINS][unit][tall], upper.x, lower.x, upper.z, lower.z, w.x, w.y);
            mma(sums[(2 * i + 1) % CHAINS][unit][tall], upper.y, lower.y, upper.w, lower.w, w.z, w.w);
          }
        }
      }
    }
    if (at.block + DEPTH >= at.end) ring.release(first_chunk + at.chunk);
  }

  DEVICE void multiply_all() {
    Fetch even, odd;
    Place now = place(deep), then = next(now);
    fetch(even, now);
    fetch(odd, then);
    while (!over(now)) {
      consume(even, now);
      now = next(then);
      fetch(even, now);
      if (over(then)) break;
      consume(odd, then);
      then = next(now);
      fetch(odd, then);
    }
#pragma unroll
    for (int chain = 1; chain < CHAINS; ++chain)
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit)
#pragma unroll
        for (int tall = 0; tall < P::TALL; ++tall)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[0][unit][tall][i] += sums[chain][unit][tall][i];
    if constexpr (P::FOLDED) {
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit)
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[0][unit][0][i] += sums[0][unit][1][2 + i];
    }
  }

  // Lay the sums of units `batch` ... out for the warps that finish them: [deep][unit][row group][lane].
  DEVICE void lay_out(float2* to, int batch) const {
    const int group = warp() % P::HALVES * P::OWN;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
      if (unit < batch || unit >= batch + P::BATCH) continue;
#pragma unroll
      for (int own = 0; own < P::OWN; ++own) {
        const float* pair = &sums[0][unit][own / 2][own % 2 * 2];
        to[((deep * P::BATCH + unit - batch) * P::GROUPS + group + own) * 32 + lane()] = make_float2(pair[0], pair[1]);
      }
    }
  }

  DEVICE void lay_out_squares(float* to) {
    const int group = warp() % P::HALVES * P::OWN;
#pragma unroll
    for (int own = 0; own < P::OWN; ++own) {
      float square = squares[own];
      square += shuffle_xor(square, 1);
      square += shuffle_xor(square, 2);
      if (lane() % 4 == 0) to[deep * ROWS + (group + own) * 8 + lane() / 4] = square;
    }
  }

  // Every warp finishes one unit of a batch for 8 rows.
  DEVICE void run(int first_unit, Reduction& reduction) {
    const int row = warp() % P::GROUPS * 8 + lane() / 4, mine = warp() / P::GROUPS, c = lane() % 4;
    const bf16* old = product.sink.adds() ? product.sink.old.row(row) : nullptr;
    u32 previous = 0;
    if (old != nullptr && mine < UNITS) previous = load_l2_word(old + (first_unit + mine) * 8 + 2 * c);
    multiply_all();
    float scale = 1.0f;
    if (NORM) lay_out_squares(reduction.squares_now());
#pragma unroll
    for (int batch = 0; batch < UNITS; batch += P::BATCH) {
      float2* laid = reduction.sums_now();
      lay_out(laid, batch);
      sync_consumers();
      if (NORM && batch == 0) {
        float square = 0.0f;
#pragma unroll
        for (int other = 0; other < P::DEEP; ++other) square += reduction.squares_now()[other * ROWS + row];
        scale = reciprocal_root(square * product.inverse_width + product.eps);
      }
      const int unit = batch + mine;
      if (unit < UNITS && row < product.source.count) {
        float first = 0.0f, second = 0.0f;
#pragma unroll
        for (int other = 0; other < P::DEEP; ++other) {
          const float2 sum = laid[(other * WARPS + warp()) * 32 + lane()];
          first += sum.x;
          second += sum.y;
        }
        if (batch > 0 && old != nullptr) previous = load_l2_word(old + (first_unit + unit) * 8 + 2 * c);
        product.sink.put(row, first_unit + unit, c, first * scale, second * scale, previous);
      }
      ++reduction.turn;
    }
  }
};

// Which tile sizes the model and grid have, one bit each from 1 unit on: each costs seconds of compilation.
#ifndef MEGA_NORM_UNITS
#define MEGA_NORM_UNITS 0xffff
#endif
#ifndef MEGA_PLAIN_UNITS
#define MEGA_PLAIN_UNITS 0xffff
#endif

template <int ROWS, bool NORM, int UNITS = 1>
DEVICE void run_tile(const Product& product, Ring& ring, u32 chunk, int blocks, int units, int first, Reduction& reduction) {
  if constexpr (((NORM ? MEGA_NORM_UNITS : MEGA_PLAIN_UNITS) >> (UNITS - 1) & 1) != 0) {
    if (units == UNITS) Tile<ROWS, UNITS, NORM>(product, ring, chunk, blocks).run(first, reduction);
  }
  if constexpr (UNITS < MAX_UNITS) run_tile<ROWS, NORM, UNITS + 1>(product, ring, chunk, blocks, units, first, reduction);
}

// This SM's share of a product. `chunk` counts the stream's chunks.
template <int ROWS, bool NORM>
DEVICE void multiply_share(const Product& product, const Matrix& matrix, Ring& ring, u32& chunk, Reduction& reduction) {
  const Share share(matrix, cta(), ctas());
  int first = share.first;
  for (int tile = 0; tile < share.tiles; ++tile) {
    const int units = share.tile_units(tile);
    run_tile<ROWS, NORM>(product, ring, chunk, matrix.blocks, units, first, reduction);
    first += units;
    chunk += ceil_div(matrix.blocks, chunk_blocks(units, matrix.blocks));
  }
}
