// Attention of a layer: norm and rotation of q and k, K and V into their pages, softmax(q k^T) v by runs.
//
// A run's rows see the cached keys before the run and those of the run up to themselves. The latter come from the QKV product
// itself, so that nobody waits for the pages to be written. Each warp takes tiles of 16 keys with an online softmax (arXiv
// 2205.14135) for 16 query rows; warps of the same query rows are merged in shared memory, parts of a long context by the SM
// that finishes last, both in a fixed order.
#pragma once

struct Merge {
  float2* outputs;   // [WARPS][head_dim / 8][32], in the place of Reduction's sums
  float2* sums;      // [WARPS][16] maximum and sum
  u32* last;         // whether this SM finishes a task's parts
};

template <int DIM>
struct Attention {
  static constexpr int BLOCKS = DIM / 32;   // 16-byte pieces of a row that a lane holds: 32 b + 8 c ...
  static constexpr int WIDE = DIM / 64;     // the same for V: 64 b + 8 g ...
  static constexpr int COLUMNS = DIM / 8;   // multiplications over the features

  const Params& p;
  const Schedule& schedule;
  const int layer;
  const bf16 *q_norm, *k_norm;              // or nullptr
  bf16 *k_cache, *v_cache;
  const int group;                          // query heads of a KV head
  const int g, c;                           // lane = 4 g + c

  DEVICE Attention(const Params& p, const Schedule& schedule, int layer)
      : p(p), schedule(schedule), layer(layer), group(p.heads / p.kv_heads), g(lane() / 4), c(lane() % 4) {
    const bf16* vectors = p.vectors + (long long)layer * p.vector_stride;
    q_norm = p.q_norm < 0 ? nullptr : vectors + p.q_norm;
    k_norm = p.k_norm < 0 ? nullptr : vectors + p.k_norm;
    k_cache = p.k_cache + layer * p.cache_layer;
    v_cache = p.v_cache + layer * p.cache_layer;
  }

  DEVICE const bf16* projected(int row, int head) const {
    return p.qkv + ((long long)row * (p.heads + 2 * p.kv_heads) + head) * DIM;
  }

  // A row of K or V of its layer, in rows of head_dim.
  DEVICE int place(int slot, int head, int position) const {
    const int page = load_fixed_int(p.page_table + (long long)slot * p.page_stride + position / p.page_size);
    return (page * p.kv_heads + head) * p.page_size + position % p.page_size;
  }

  // A head's vector, normed and rotated, spread over the 4 lanes of equal g; rows that do not exist are zero. By whole warps.
  DEVICE void rotated(uint4 (&to)[BLOCKS], bool exists, const bf16* from, const bf16* norm, int position) const {
    float x[BLOCKS][8];
    float square = 0.0f;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      uint4 raw = make_uint4(0, 0, 0, 0);
      if (exists) raw = load_l2(from + 32 * b + 8 * c);
      const u32* pairs = &raw.x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[b][2 * i] = low(pairs[i]);
        x[b][2 * i + 1] = high(pairs[i]);
        square += x[b][2 * i] * x[b][2 * i];
        square += x[b][2 * i + 1] * x[b][2 * i + 1];
      }
    }
    if (norm != nullptr) {
      square += shuffle_xor(square, 1);
      square += shuffle_xor(square, 2);
      const float scale = reciprocal_root(square * (1.0f / DIM) + p.eps);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        const uint4 raw = load_fixed(norm + 32 * b + 8 * c);
        const u32* weights = &raw.x;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 scaled = multiply(pack(x[b][2 * i] * scale, x[b][2 * i + 1] * scale), weights[i]);
          x[b][2 * i] = low(scaled);
          x[b][2 * i + 1] = high(scaled);
        }
      }
    }
    const float* turns = p.rotations + (long long)(exists ? position : 0) * DIM;
#pragma unroll
    for (int b = 0; b < BLOCKS / 2; ++b) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const uint4 cosines = load_fixed(turns + 32 * b + 8 * c + i);
        const uint4 sines = load_fixed(turns + DIM / 2 + 32 * b + 8 * c + i);
        const u32 *cosine = &cosines.x, *sine = &sines.x;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float one = x[b][i + j], two = x[b + BLOCKS / 2][i + j];
          x[b][i + j] = one * as_float(cosine[j]) - two * as_float(sine[j]);
          x[b + BLOCKS / 2][i + j] = two * as_float(cosine[j]) + one * as_float(sine[j]);
        }
      }
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
      to[b] = make_uint4(pack(x[b][0], x[b][1]), pack(x[b][2], x[b][3]), pack(x[b][4], x[b][5]), pack(x[b][6], x[b][7]));
  }

  // This warp's part of a task and what it has summed so far: rows g (half 0) and g + 8 (half 1) of 16 query rows.
  struct Work {
    int first, count, start, slot, head;   // of the run
    int queries, block;                    // query rows of the run in all; the first one of this warp
    int tile, old_tiles, new_tiles;        // first cached tile; tiles of cached keys and of the run's own
    bool writes;                           // stores the run's K and V
    float out[COLUMNS][4];
    float maximum[2], sum[2];
  };

  DEVICE void load_cached(const Work& w, int tile, uint4 (&k)[2][BLOCKS], uint4 (&v)[4][WIDE]) const {
    const int position = tile * KEY_TILE + lane() % KEY_TILE;
    const int at = position < w.start ? place(w.slot, w.head, position) : -1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = shuffle(at, 8 * half + g);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        k[half][b] = make_uint4(0, 0, 0, 0);
        if (row >= 0) k[half][b] = load_once(k_cache + (long long)row * DIM + 32 * b + 8 * c);
      }
    }
#pragma unroll
    for (int key = 0; key < 4; ++key) {
      const int row = shuffle(at, 2 * c + key % 2 + 8 * (key / 2));
#pragma unroll
      for (int b = 0; b < WIDE; ++b) {
        v[key][b] = make_uint4(0, 0, 0, 0);
        if (row >= 0) v[key][b] = load_once(v_cache + (long long)row * DIM + 64 * b + 8 * g);
      }
    }
  }

  // Keys `first_key` ... of the run itself; one warp also stores them in their pages.
  DEVICE void load_own(const Work& w, int first_key, uint4 (&k)[2][BLOCKS], uint4 (&v)[4][WIDE]) const {
    const int key = first_key + lane() % KEY_TILE;
    const int at = w.writes && key < w.count ? place(w.slot, w.head, w.start + key) : -1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = first_key + 8 * half + g, row = shuffle(at, 8 * half + g);
      rotated(k[half], own < w.count, projected(w.first + own, p.heads + w.head), k_norm, w.start + own);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
        if (row >= 0) *reinterpret_cast<uint4*>(k_cache + (long long)row * DIM + 32 * b + 8 * c) = k[half][b];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 2 * c + i % 2 + 8 * (i / 2), own = first_key + column, row = shuffle(at, column);
      const bf16* from = projected(w.first + own, p.heads + p.kv_heads + w.head);
#pragma unroll
      for (int b = 0; b < WIDE; ++b) {
        v[i][b] = make_uint4(0, 0, 0, 0);
        if (own < w.count) v[i][b] = load_l2(from + 64 * b + 8 * g);
        if (row >= 0) *reinterpret_cast<uint4*>(v_cache + (long long)row * DIM + 64 * b + 8 * g) = v[i][b];
      }
    }
  }

  // One tile of keys, of which row half h sees the first `seen[h]`.
  DEVICE void add_tile(Work& w, const uint4* q, const uint4 (&k)[2][BLOCKS], const uint4 (&v)[4][WIDE],
                       const int (&seen)[2]) const {
    const float scale = 1.4426950408889634f * (DIM == 128 ? 0.08838834764831845f : 0.125f);  // of powers of 2
    float s[2][4] = {};
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      const uint4 even = q[2 * b * 32], odd = q[(2 * b + 1) * 32];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mma(s[half], even.x, even.y, even.z, even.w, k[half][b].x, k[half][b].y);
        mma(s[half], odd.x, odd.y, odd.z, odd.w, k[half][b].z, k[half][b].w);
      }
    }
    float shrink[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float top = -INFINITY;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = s[half][2 * row + i];
          score = 8 * half + 2 * c + i < seen[row] ? score * scale : -INFINITY;
          top = fmaxf(top, score);
        }
      top = fmaxf(top, shuffle_xor(top, 1));
      top = fmaxf(top, shuffle_xor(top, 2));
      const float maximum = fmaxf(w.maximum[row], top);  // finite: it begins at -1e30
      shrink[row] = exp2_fast(w.maximum[row] - maximum);
      w.maximum[row] = maximum;
      w.sum[row] *= shrink[row];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = s[half][2 * row + i];
          score = exp2_fast(score - maximum);
          w.sum[row] += score;  // this lane's keys; lanes are added up at the end
        }
    }
    const u32 a0 = pack(s[0][0], s[0][1]), a1 = pack(s[0][2], s[0][3]);
    const u32 a2 = pack(s[1][0], s[1][1]), a3 = pack(s[1][2], s[1][3]);
    // Column 8 b + i of the product is feature 64 b + 8 g + i of lane g: no transposition, only a choice of halves.
#pragma unroll
    for (int b = 0; b < WIDE; ++b)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const u32 select = i % 2 ? 0x7632 : 0x5410;
        const u32 b0 = permute((&v[0][b].x)[i / 2], (&v[1][b].x)[i / 2], select);
        const u32 b1 = permute((&v[2][b].x)[i / 2], (&v[3][b].x)[i / 2], select);
        float(&out)[4] = w.out[8 * b + i];
        out[0] *= shrink[0];
        out[1] *= shrink[0];
        out[2] *= shrink[1];
        out[3] *= shrink[1];
        mma(out, a0, a1, a2, a3, b0, b1);
      }
  }

  // The operands of add_tile, in this warp's part of the memory that its results go to.
  DEVICE void load_queries(const Work& w, int (&own)[2], uint4* to) const {
    uint4 q[2][BLOCKS];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = w.block + 8 * half + g;
      own[half] = query / group;
      const int head = w.head * group + query % group;
      rotated(q[half], query < w.queries, projected(w.first + own[half], head), q_norm, w.start + own[half]);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      to[2 * b * 32] = make_uint4(q[0][b].x, q[1][b].x, q[0][b].y, q[1][b].y);
      to[(2 * b + 1) * 32] = make_uint4(q[0][b].z, q[1][b].z, q[0][b].w, q[1][b].w);
    }
  }

  // All tiles of this warp: every `warps`-th one from `mine` on, the run's own keys first.
  DEVICE void attend(Work& w, int mine, int warps, Merge& shared) const {
#pragma unroll
    for (int i = 0; i < COLUMNS * 4; ++i) w.out[i / 4][i % 4] = 0.0f;
    w.maximum[0] = w.maximum[1] = -1e30f;
    w.sum[0] = w.sum[1] = 0.0f;
    if (w.block >= w.queries || mine >= w.new_tiles + w.old_tiles) return;
    int own[2];  // the run's row of each half's query row
    uint4* q = reinterpret_cast<uint4*>(shared.outputs + warp() * COLUMNS * 32) + lane();
    load_queries(w, own, q);
    for (int tile = mine; tile < w.new_tiles + w.old_tiles; tile += warps) {
      uint4 k[2][BLOCKS], v[4][WIDE];
      int seen[2];
      if (tile < w.new_tiles) {
        const int first_key = tile * KEY_TILE;
        load_own(w, first_key, k, v);
        seen[0] = smaller(own[0] + 1, w.count) - first_key;
        seen[1] = smaller(own[1] + 1, w.count) - first_key;
      } else {
        const int cached = w.tile + tile - w.new_tiles;
        load_cached(w, cached, k, v);
        seen[0] = seen[1] = w.start - cached * KEY_TILE;
      }
      add_tile(w, q, k, v, seen);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      w.sum[row] += shuffle_xor(w.sum[row], 1);
      w.sum[row] += shuffle_xor(w.sum[row], 2);
    }
  }

  DEVICE void store(const Work& w, int query, int column, float4 x) const {
    const int row = w.first + query / group, head = w.head * group + query % group;
    u32* to = reinterpret_cast<u32*>(p.attended + ((long long)row * p.heads + head) * DIM);
    to[feature(column) / 2] = pack(x.x, x.y);
    to[feature(column) / 2 + 4] = pack(x.z, x.w);
  }
  // Where the outputs of columns `column` (even) and column + 1 of lane c begin; 8 further on the same of the next g.
  DEVICE int feature(int column) const { return column / 8 * 64 + 16 * c + column % 8; }

  // Items of the merge: (16 query rows, pair of columns, lane) for one half of the rows.
  struct Item {
    int rows, column, row;  // which 16 rows, first column, query row among the task's
  };
  DEVICE Item item(int index, int half) const {
    const int rows = index / (COLUMNS / 2 * 32), column = index / 32 % (COLUMNS / 2) * 2;
    return {rows, column, rows * 16 + half * 8 + g};
  }

  // Merge the warps' sums, and write the result or, where the run's keys lie in several tasks, this part of it.
  DEVICE void merge(const Work& w, const Task& task, int id, int tall, Merge& shared) const {
    const int parts = schedule.parts[task.run], block = task.block * QUERY_BLOCK;
    const int queries = smaller(w.queries - block, QUERY_BLOCK), items = tall * (COLUMNS / 2) * 32;
    sync_warp();
    if (c == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        shared.sums[warp() * 16 + half * 8 + g] = make_float2(w.maximum[half], w.sum[half]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half * 8 >= queries) continue;
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column)
        shared.outputs[(warp() * COLUMNS + column) * 32 + lane()] =
            make_float2(w.out[column][2 * half], w.out[column][2 * half + 1]);
      sync_consumers();
      for (int index = thread(); index < items; index += CONSUMERS) {
        const Item at = item(index, half);
        if (at.row >= queries) continue;
        float maximum = -1e30f, sum = 0.0f;
        for (int other = at.rows; other < WARPS; other += tall)
          maximum = fmaxf(maximum, shared.sums[other * 16 + at.row % 16].x);
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int other = at.rows; other < WARPS; other += tall) {
          const float2 part = shared.sums[other * 16 + at.row % 16];
          const float weight = exp2_fast(part.x - maximum);
          const float2* from = shared.outputs + (other * COLUMNS + at.column) * 32 + lane();
          sum += part.y * weight;
          out.x += from[0].x * weight;
          out.y += from[32].x * weight;
          out.z += from[0].y * weight;
          out.w += from[32].y * weight;
        }
        if (parts == 1) {
          const float scale = divide(1.0f, sum);
          store(w, block + at.row, at.column, make_float4(out.x * scale, out.y * scale, out.z * scale, out.w * scale));
        } else {
          *partial(id, at) = out;
          if (at.column == 0 && c == 0)
            reinterpret_cast<float2*>(p.partial_sums)[id * QUERY_BLOCK + at.row] = make_float2(maximum, sum);
        }
      }
      sync_consumers();
    }
    if (parts > 1) merge_parts(w, task, tall, queries, shared);
  }

  // [task][query row][pair of columns][c]
  DEVICE float4* partial(int id, const Item& at) const {
    return reinterpret_cast<float4*>(p.partial) + (((long long)id * QUERY_BLOCK + at.row) * (COLUMNS / 2) + at.column / 2) * 4 + c;
  }

  // The SM that comes last adds the parts up.
  DEVICE void merge_parts(const Work& w, const Task& task, int tall, int queries, Merge& shared) const {
    const int parts = schedule.parts[task.run], block = task.block * QUERY_BLOCK;
    fence_gpu();
    sync_consumers();
    if (thread() == 0) {
      u32* ticket = p.tickets + (w.first + task.block) * p.kv_heads + w.head;
      *shared.last = take_ticket(ticket) == static_cast<u32>(parts - 1);
      if (*shared.last) *ticket = 0;
    }
    sync_consumers();
    if (!*shared.last) return;
    const int items = tall * (COLUMNS / 2) * 32;
    for (int half = 0; half < 2; ++half) {
      for (int index = thread(); index < items; index += CONSUMERS) {
        const Item at = item(index, half);
        if (at.row >= queries) continue;
        float maximum = -1e30f, sum = 0.0f;
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int part = 0; part < parts; ++part) {
          const int id = task.group_id + part;
          const float* at_sums = p.partial_sums + (id * QUERY_BLOCK + at.row) * 2;
          const float top = as_float(load_l2_word(at_sums)), total = as_float(load_l2_word(at_sums + 1));
          const uint4 raw = load_l2(partial(id, at));
          const float both = fmaxf(maximum, top);
          const float shrink = exp2_fast(maximum - both), weight = exp2_fast(top - both);
          maximum = both;
          sum = sum * shrink + total * weight;
          out.x = out.x * shrink + as_float(raw.x) * weight;
          out.y = out.y * shrink + as_float(raw.y) * weight;
          out.z = out.z * shrink + as_float(raw.z) * weight;
          out.w = out.w * shrink + as_float(raw.w) * weight;
        }
        const float scale = divide(1.0f, sum);
        store(w, block + at.row, at.column, make_float4(out.x * scale, out.y * scale, out.z * scale, out.w * scale));
      }
    }
  }

  DEVICE void run_task(int id, Merge& shared) const {
    const Task task = find_task(p, schedule, id);
    Work w;
    w.first = schedule.first[task.run];
    w.count = schedule.count[task.run];
    w.start = schedule.start[task.run];
    w.slot = schedule.slot[task.run];
    w.head = task.head;
    w.queries = w.count * group;
    const int rows = ceil_div(smaller(w.queries - task.block * QUERY_BLOCK, QUERY_BLOCK), 16);
    const int tall = rows <= 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : 8;  // 16 query rows each; the other warps share keys
    w.block = task.block * QUERY_BLOCK + warp() % tall * 16;
    const int tiles = schedule.tiles[task.run], all = ceil_div(w.start, KEY_TILE);
    const bool last = task.part == schedule.parts[task.run] - 1;
    w.tile = task.part * tiles;
    w.old_tiles = smaller(tiles, all - w.tile);
    w.new_tiles = last ? ceil_div(w.count, KEY_TILE) : 0;
    w.writes = task.block == 0 && warp() % tall == 0;
    attend(w, warp() / tall, WARPS / tall, shared);
    merge(w, task, id, tall, shared);
  }

  DEVICE void run(Merge& shared) const {
    for (int id = cta(); id < schedule.tasks; id += ctas()) run_task(id, shared);
  }

  // Ask for this SM's first keys early: they do not depend on the step. By one warp.
  DEVICE void prefetch() const {
    if (cta() >= schedule.tasks || p.page_size % KEY_TILE != 0) return;
    const Task task = find_task(p, schedule, cta());
    const int tile = task.part * schedule.tiles[task.run] + lane();
    const int start = schedule.start[task.run];
    if (lane() >= schedule.tiles[task.run] || tile * KEY_TILE >= start) return;
    const long long at = place(schedule.slot[task.run], task.head, tile * KEY_TILE);
    prefetch_l2(k_cache + at * DIM, KEY_TILE * DIM * sizeof(bf16));
    prefetch_l2(v_cache + at * DIM, KEY_TILE * DIM * sizeof(bf16));
  }
};
