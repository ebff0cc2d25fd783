// y[T, N] = x[T, K] W[N, K]^T for up to 16 rows: weights from the ring, activations from L2 straight into registers.
//
// The 8 warps of an SM share K: each takes chunks of the stream and keeps sums of all of the tile's outputs; one reduction in
// a fixed order follows.
// Half a block, 32 input features, goes into two multiplications of depth 16. Their order inside of it is free as long as both
// operands agree: lane (g, c) holds features 8 c ... 8 c + 7 of row g, 16 contiguous bytes in memory, as pairs 0 1 2 3. Pairs 0
// and 2 feed one multiplication, pairs 1 and 3 the other. So up to 8 rows need no zeros beside them: the same four registers are
// the operand of both, as rows g (pairs 0 and 2) and g + 8 (pairs 1 and 3), of whose results the upper half of the first and the
// lower half of the second count.
#pragma once

// What the kernel's variant for up to ROWS rows does.
template <int ROWS>
struct Cut {
  static constexpr int GROUPS = ROWS / 8;                      // of 8 rows
  static constexpr bool FOLDED = GROUPS == 1;                  // 8 rows: see above
  static constexpr int TALL = FOLDED ? 2 : GROUPS / 2;         // sums of 16 rows
  static constexpr int BATCH = WARPS / GROUPS;                 // units reduced at once: a warp finishes one of 8 rows
};

constexpr int SUM_BYTES = WARPS * WARPS * 32 * 8;              // sums of every warp for a batch of outputs
constexpr int SQUARE_FLOATS = WARPS * MAX_ROWS;                // sums of squares: warps x rows

// Rows of activations.
struct Source {
  const bf16* base;
  int stride;
  const int* index;  // of each row, or nullptr
  int limit;         // of an index
  int count;         // rows

  // Rows past the last one repeat it.
  DEVICE const bf16* row(int r) const {
    r = smaller(r, count - 1);
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
      if (kind == OUT || kind == DOWN) {
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

template <int ROWS, int UNITS, bool NORM>
struct Tile {
  using P = Cut<ROWS>;
  // Independent chains of sums, where there are too few units to hide a multiplication's latency.
  static constexpr int CHAINS = UNITS <= 4 ? 2 : 1;

  // Halves of blocks whose activations are in flight together: what registers leave room for, twice, and not more than a chunk has.
  static constexpr int SUMS = CHAINS * UNITS * P::TALL * 4, ROOM = SUMS <= 64 ? 48 : SUMS < 96 ? 32 : 16;
  static constexpr int WISH = ROOM / (8 * P::GROUPS + (NORM ? 8 : 0)), MOST = 2 * (STAGE_BYTES / (BLOCK_BYTES * UNITS));
  static constexpr int DEPTH = WISH < 2 ? 1 : WISH < MOST ? WISH / 2 * 2 : MOST;
  static constexpr bool WHOLE = DEPTH > 1;  // blocks

  struct Piece {
    uint4 x[DEPTH][P::GROUPS];
    uint4 scales[NORM ? DEPTH : 1];
  };

  const Product& product;
  Ring& ring;
  const bf16* norm;
  u32 first_chunk;
  int halves, step;  // halves of blocks: of the matrix, of a chunk
  int own_warp;
  const bf16* rows[P::GROUPS];
  float sums[CHAINS][UNITS][P::TALL][4];
  float squares[P::GROUPS];

  DEVICE Tile(const Product& product, Ring& ring, u32 first_chunk, int blocks, int step)
      : product(product), ring(ring), norm(product.norm), first_chunk(first_chunk), halves(2 * blocks), step(2 * step) {
    own_warp = warp();
    // Or all sizes of tiles would share their addresses, and registers would be short for the whole time.
    keep_apart(this->norm);
    keep_apart(this->first_chunk);
    keep_apart(this->step);
    keep_apart(own_warp);
#pragma unroll
    for (int group = 0; group < P::GROUPS; ++group) squares[group] = 0.0f;
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain)
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit)
#pragma unroll
        for (int tall = 0; tall < P::TALL; ++tall)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[chain][unit][tall][i] = 0.0f;
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

  // Halves `begin` ... `end`, at most DEPTH; the rest is set all the same, or its registers would be taken all the time.
  DEVICE void load_scales(Piece& to, int begin, int end) const {
#pragma unroll
    for (int i = 0; i < (NORM ? DEPTH : 0); ++i) {
      if (begin + i < end)
        to.scales[i] = load_fixed(norm + (begin + i) * 32 + lane() % 4 * 8);
      else
        to.scales[i] = make_uint4(0, 0, 0, 0);
    }
  }
  DEVICE void load_rows(Piece& to, int begin, int end) const {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i)
#pragma unroll
      for (int group = 0; group < P::GROUPS; ++group) {
        if (begin + i < end)
          to.x[i][group] = load_l2(rows[group] + (begin + i) * 32);
        else
          to.x[i][group] = make_uint4(0, 0, 0, 0);
      }
  }

  // `count` halves of blocks, after `done` of those of which `data` is this lane's part.
  DEVICE void add(Piece& from, int count, const unsigned char* data, int done) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (i >= count) break;
      if (NORM) {
#pragma unroll
        for (int group = 0; group < P::GROUPS; ++group) normalise(from.x[i][group], from.scales[i], squares[group]);
      }
      const int number = WHOLE ? i : done + i;
      const unsigned char* half = data + number / 2 * (UNITS * BLOCK_BYTES);
      // The swizzle puts a row's other half 64 bytes before or behind.
      if (number % 2) half += 64 - 2 * static_cast<int>(reinterpret_cast<uintptr_t>(data) & 64);
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit) {
        const uint4 w = *reinterpret_cast<const uint4*>(half + unit * BLOCK_BYTES);
#pragma unroll
        for (int tall = 0; tall < P::TALL; ++tall) {
          if constexpr (P::FOLDED) {
            const uint4& both = from.x[i][0];
            mma(sums[i % CHAINS][unit][tall], both.x, both.y, both.z, both.w, tall ? w.y : w.x, tall ? w.w : w.z);
          } else {
            const uint4 &upper = from.x[i][2 * tall], &lower = from.x[i][2 * tall + 1];
            mma(sums[2 * i % CHAINS][unit][tall], upper.x, lower.x, upper.z, lower.z, w.x, w.z);
            mma(sums[(2 * i + 1) % CHAINS][unit][tall], upper.y, lower.y, upper.w, lower.w, w.y, w.w);
          }
        }
      }
    }
  }

  // This warp's chunks: those whose number in the stream leaves its own when divided by that of the warps.
  DEVICE void multiply_all(const Grid& grid, bool waits) {
    int index = (own_warp - first_chunk) % WARPS;
    int at = index * step, end = smaller(at + step, halves);
    Piece next;
    load_scales(next, at, end);
    if (waits) grid.wait();
    mark(1);
    int row = lane() / 4;
    keep_apart(row);
#pragma unroll
    for (int group = 0; group < P::GROUPS; ++group)
      rows[group] = product.source.row(row + group * 8) + lane() % 4 * 8;
    load_rows(next, at, end);
    const unsigned char* data = nullptr;
    int done = 0;
#pragma unroll 1
    while (at < end) {
      Piece now = next;
      const u32 chunk = first_chunk + index;
      const int count = end - at;
      const bool last = count <= DEPTH;
      at += DEPTH;
      if (last) {
        index += WARPS;
        at = index * step;
        end = smaller(at + step, halves);
      }
      load_scales(next, at, end);
      load_rows(next, at, end);
      if (data == nullptr) {
        // Even rows come first, and each row's pieces at their number xor the row's: models/cuda/tensor_map.py.
        int self = lane();
        keep_apart(self);
        const int place = self / 8 + self / 4 % 2 * 4, piece = self % 4 ^ place;
        data = ring.stage(chunk) + place * 128 + piece * 16;
        done = 0;
        ring.wait(chunk);
      }
      add(now, count, data, done);
      if (WHOLE)
        data += DEPTH / 2 * UNITS * BLOCK_BYTES;
      else
        done += DEPTH;
      if (last) {
        ring.release(chunk);
        data = nullptr;
      }
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

  // Lay the sums of units `batch` ... out for the warps that finish them: [warp][unit][row group][lane].
  DEVICE void lay_out(float2* to, int batch) const {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
      if (unit < batch || unit >= batch + P::BATCH) continue;
#pragma unroll
      for (int group = 0; group < P::GROUPS; ++group) {
        const float* pair = &sums[0][unit][group / 2][group % 2 * 2];
        to[((own_warp * P::BATCH + unit - batch) * P::GROUPS + group) * 32 + lane()] = make_float2(pair[0], pair[1]);
      }
    }
  }

  DEVICE void lay_out_squares(float* to) {
#pragma unroll
    for (int group = 0; group < P::GROUPS; ++group) {
      float square = squares[group];
      square += shuffle_xor(square, 1);
      square += shuffle_xor(square, 2);
      if (lane() % 4 == 0) to[own_warp * ROWS + group * 8 + lane() / 4] = square;
    }
  }

  // Every warp finishes one unit of a batch for 8 rows.
  DEVICE void run(int first_unit, Reduction& reduction, const Grid& grid, bool waits) {
    const int row = warp() % P::GROUPS * 8 + lane() / 4, mine = warp() / P::GROUPS, c = lane() % 4;
    // Only products without a norm before them add to the residual stream, which is older than the phase before.
    const bf16* old = NORM ? nullptr : product.sink.old.row(row);
    u32 previous = 0;
    if (!NORM && mine < UNITS) previous = load_l2_word(old + (first_unit + mine) * 8 + 2 * c);
    multiply_all(grid, waits);
    mark(2);
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
        for (int other = 0; other < WARPS; ++other) square += reduction.squares_now()[other * ROWS + row];
        scale = reciprocal_root(square * product.inverse_width + product.eps);
      }
      const int unit = batch + mine;
      if (unit < UNITS && row < product.source.count) {
        float first = 0.0f, second = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) {
          const float2 sum = laid[(other * WARPS + warp()) * 32 + lane()];
          first += sum.x;
          second += sum.y;
        }
        if (!NORM && batch > 0) previous = load_l2_word(old + (first_unit + unit) * 8 + 2 * c);
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
DEVICE void run_tile(const Product& product, Ring& ring, u32 chunk, int blocks, int step, int units, int first,
                     Reduction& reduction, const Grid& grid, bool waits) {
  if constexpr (((NORM ? MEGA_NORM_UNITS : MEGA_PLAIN_UNITS) >> (UNITS - 1) & 1) != 0) {
    if (units == UNITS) Tile<ROWS, UNITS, NORM>(product, ring, chunk, blocks, step).run(first, reduction, grid, waits);
  }
  if constexpr (UNITS < MAX_UNITS)
    run_tile<ROWS, NORM, UNITS + 1>(product, ring, chunk, blocks, step, units, first, reduction, grid, waits);
}

// This SM's share of a product. `chunk` counts the stream's chunks; it `waits` for the other SMs before it reads
// activations.
template <int ROWS, bool NORM>
DEVICE void multiply_share(const Product& product, const Share& share, int blocks, Ring& ring, u32& chunk,
                           Reduction& reduction, const Grid& grid, bool waits) {
  int first = share.first;
  if (share.tiles == 0 && waits) grid.wait();
#pragma unroll 1
  for (int tile = 0; tile < share.tiles; ++tile) {
    const int large = tile < share.large, units = share.units + large;
    run_tile<ROWS, NORM>(product, ring, chunk, blocks, share.step[large], units, first, reduction, grid, waits && tile == 0);
    first += units;
    chunk += share.chunks[large];
  }
}
