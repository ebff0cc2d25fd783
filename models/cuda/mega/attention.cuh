// Attention of a layer: norm and rotation of q and k, K and V into their pages, softmax(q k^T) v by runs.
//
// A run's rows see the cached keys before the run and those of the run up to themselves. The latter come from the QKV product
// itself, so that nobody waits for the pages to be written. Each warp takes tiles of 16 keys with an online softmax (arXiv
// 2205.14135) for 16 query rows; warps of the same query rows are merged in shared memory, parts of a long context by the SM
// that finishes last, both in a fixed order. Everything that does not depend on the step is read before the barrier.
#pragma once

struct Merge {
  uint4* memory;     // 4 KB per warp, in the place of Reduction's sums: first query rows and own keys, then outputs
  float2* sums;      // [WARPS][16] maximum and sum
  float2* totals;    // [WARPS][16] the same over all warps of 16 query rows
  u32* last;         // whether this SM finishes a task's parts
};

template <int DIM>
struct Attention {
  static constexpr int BLOCKS = DIM / 32;   // 16-byte pieces of a row that a lane holds: 32 b + 8 c ...
  static constexpr int WIDE = DIM / 64;     // the same for V: 64 b + 8 g ...
  static constexpr int COLUMNS = DIM / 8;   // multiplications over the features
  static constexpr int MEMORY = DIM * 2;    // of a warp, in pieces of 16 bytes

  const Params& p;
  const Schedule& schedule;
  const Plan& plan;
  const bf16 *q_norm, *k_norm;              // or nullptr
  bf16 *k_cache, *v_cache;
  const int group;                          // query heads of a KV head
  const u32 inverse;                        // of it, as a fraction of 2^24
  const int g, c;                           // lane = 4 g + c

  DEVICE Attention(const Params& p, const Schedule& schedule, const Plan& plan, int layer)
      : p(p), schedule(schedule), plan(plan), group(p.heads / p.kv_heads), inverse((1u << 24) / group + 1), g(lane() / 4), c(lane() % 4) {
    const bf16* vectors = p.vectors + (long long)layer * p.vector_stride;
    q_norm = p.q_norm < 0 ? nullptr : vectors + p.q_norm;
    k_norm = p.k_norm < 0 ? nullptr : vectors + p.k_norm;
    k_cache = p.k_cache + layer * p.cache_layer;
    v_cache = p.v_cache + layer * p.cache_layer;
  }

  // The run's row of a query row: query / group.
  DEVICE int run_row(int query) const { return static_cast<int>(static_cast<u64>(query) * inverse >> 24); }

  DEVICE const bf16* projected(int row, int head) const {
    return p.qkv + ((long long)row * (p.heads + 2 * p.kv_heads) + head) * DIM;
  }

  // A head's vector, normed and rotated, spread over the 4 lanes of equal g; rows that do not exist are zero. By whole warps.
  // All that it reads is asked for at once.
  DEVICE void rotated(uint4 (&to)[BLOCKS], bool exists, const bf16* from, const bf16* norm, int position) const {
    uint4 scales[BLOCKS], cosines[BLOCKS / 2][2], sines[BLOCKS / 2][2];
    const float* turns = p.rotations + (long long)(exists ? position : 0) * DIM;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      to[b] = make_uint4(0, 0, 0, 0);
      if (exists) to[b] = load_l2(from + 32 * b + 8 * c);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
      if (norm != nullptr) scales[b] = load_fixed(norm + 32 * b + 8 * c);
#pragma unroll
    for (int b = 0; b < BLOCKS / 2; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        cosines[b][half] = load_fixed(turns + 32 * b + 8 * c + 4 * half);
        sines[b][half] = load_fixed(turns + DIM / 2 + 32 * b + 8 * c + 4 * half);
      }
    if (norm != nullptr) {
      float square = 0.0f;
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 pair = (&to[b].x)[i];
          square += low(pair) * low(pair) + high(pair) * high(pair);
        }
      square += shuffle_xor(square, 1);
      square += shuffle_xor(square, 2);
      const float scale = reciprocal_root(square * (1.0f / DIM) + p.eps);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          u32& pair = (&to[b].x)[i];
          pair = multiply(pack(low(pair) * scale, high(pair) * scale), (&scales[b].x)[i]);
        }
    }
#pragma unroll
    for (int b = 0; b < BLOCKS / 2; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 &one = (&to[b].x)[i], &two = (&to[b + BLOCKS / 2].x)[i];
        const u32 *cosine = &cosines[b][i / 2].x + i % 2 * 2, *sine = &sines[b][i / 2].x + i % 2 * 2;
        const float c0 = as_float(cosine[0]), c1 = as_float(cosine[1]), s0 = as_float(sine[0]), s1 = as_float(sine[1]);
        const float a0 = low(one), a1 = high(one), b0 = low(two), b1 = high(two);
        one = pack(a0 * c0 - b0 * s0, a1 * c1 - b1 * s1);
        two = pack(b0 * c0 + a0 * s0, b1 * c1 + a1 * s1);
      }
  }

  // A tile of 16 keys: lane (g, c) holds K of keys g and g + 8, and V of keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9.
  struct Keys {
    uint4 k[2][BLOCKS], v[4][WIDE];
  };
  // What a warp has summed: rows g and g + 8 of 16 query rows.
  struct Sums {
    float out[COLUMNS][4];
    float maximum[2], sum[2];
  };

  // Where tile `tile` of a task's cached keys begins.
  DEVICE int begin(const Task& task, bool planned, int tile) const {
    return planned && tile < PLACES ? plan.places[tile] : place(p, task.slot, task.head, (task.tile + tile) * KEY_TILE);
  }
  // K behind the last cached key may be anything: it gets no weight. V is left out.
  DEVICE void load_k(int row, Keys& to) const {
    const bf16* from = k_cache + (long long)(row + g) * DIM + 8 * c;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) to.k[half][b] = load_once(from + 8 * half * DIM + 32 * b);
  }
  DEVICE void load_v(int row, int count, Keys& to) const {
    const bf16* from = v_cache + (long long)(row + 2 * c) * DIM + 8 * g;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = i % 2 + 8 * (i / 2);
#pragma unroll
      for (int b = 0; b < WIDE; ++b) {
        to.v[i][b] = make_uint4(0, 0, 0, 0);
        if (2 * c + key < count) to.v[i][b] = load_once(from + key * DIM + 64 * b);
      }
    }
  }
  DEVICE int left(const Task& task, int tile) const { return task.start - (task.tile + tile) * KEY_TILE; }

  // V of tile `tile` of the run's own keys.
  DEVICE void load_own(const Task& task, int tile, Keys& to) const {
    const bf16* from = projected(task.first + tile * KEY_TILE + 2 * c, p.heads + p.kv_heads + task.head) + 8 * g;
    const int width = (p.heads + 2 * p.kv_heads) * DIM, count = task.count - tile * KEY_TILE;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = i % 2 + 8 * (i / 2);
#pragma unroll
      for (int b = 0; b < WIDE; ++b) {
        to.v[i][b] = make_uint4(0, 0, 0, 0);
        if (2 * c + key < count) to.v[i][b] = load_l2(from + key * width + 64 * b);
      }
    }
  }

  // q k^T of 16 query rows and a tile of keys.
  DEVICE void score(const uint4* q, const Keys& keys, float (&s)[2][2][4]) const {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      const uint4 upper = q[b * 32], lower = q[(BLOCKS + b) * 32];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4& k = keys.k[half][b];
        mma(s[half][0], upper.x, lower.x, upper.y, lower.y, k.x, k.y);
        mma(s[half][1], upper.z, lower.z, upper.w, lower.w, k.z, k.w);
      }
    }
  }

  // Add a tile, of which row half h sees the first `seen[h]` keys.
  DEVICE void add_tile(Sums& w, const float (&s)[2][2][4], const Keys& keys, const int (&seen)[2]) const {
    const float scale = 1.4426950408889634f * (DIM == 128 ? 0.08838834764831845f : 0.125f);  // of powers of 2
    float shrink[2];
    u32 a[4];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float scores[4];
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float score = s[i / 2][0][2 * row + i % 2] + s[i / 2][1][2 * row + i % 2];
        scores[i] = 8 * (i / 2) + 2 * c + i % 2 < seen[row] ? score * scale : -INFINITY;
        top = fmaxf(top, scores[i]);
      }
      top = fmaxf(top, shuffle_xor(top, 1));
      top = fmaxf(top, shuffle_xor(top, 2));
      const float maximum = fmaxf(w.maximum[row], top);  // finite: it begins at -1e30
      shrink[row] = exp2_fast(w.maximum[row] - maximum);
      w.maximum[row] = maximum;
      w.sum[row] *= shrink[row];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[i] = exp2_fast(scores[i] - maximum);
        w.sum[row] += scores[i];  // this lane's keys; lanes are added up at the end
      }
      a[row] = pack(scores[0], scores[1]);
      a[row + 2] = pack(scores[2], scores[3]);
    }
    // Column 8 b + i of the product is feature 64 b + 8 g + i of lane g: no transposition, only a choice of halves.
#pragma unroll
    for (int b = 0; b < WIDE; ++b)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const u32 select = i % 2 ? 0x7632 : 0x5410;
        const u32 b0 = permute((&keys.v[0][b].x)[i / 2], (&keys.v[1][b].x)[i / 2], select);
        const u32 b1 = permute((&keys.v[2][b].x)[i / 2], (&keys.v[3][b].x)[i / 2], select);
        float(&out)[4] = w.out[8 * b + i];
        out[0] *= shrink[0];
        out[1] *= shrink[0];
        out[2] *= shrink[1];
        out[3] *= shrink[1];
        mma(out, a[0], a[1], a[2], a[3], b0, b1);
      }
  }

  // 8 rows on their way: q and the run's own K to shared memory, as operands of add_tile: [16 rows][half][block][lane]; own K
  // and V to their pages. By one warp.
  struct Job {
    const bf16 *from, *norm;
    uint4* to;    // or nullptr for V
    bf16* page;   // or nullptr
    int position;
    bool exists;
  };
  DEVICE int query_jobs(const Task& task) const { return ceil_div(task.queries - task.block, 8); }
  DEVICE int own_jobs(const Task& task) const { return task.new_tiles == 0 ? 0 : ceil_div(task.count, 8); }
  // The first of the task's query rows also bring the run's K and V to their pages.
  DEVICE int all_jobs(const Task& task) const { return query_jobs(task) + own_jobs(task) * (task.block == 0 ? 2 : 1); }
  DEVICE uint4* own_keys(const Task& task, uint4* memory) const { return memory + task.tall * MEMORY; }

  DEVICE Job make_job(const Task& task, int index, uint4* memory) const {
    Job job = {nullptr, nullptr, nullptr, nullptr, 0, false};
    const int queries = query_jobs(task), keys = own_jobs(task);
    if (index < queries) {
      const int query = task.block + index * 8 + g, own = run_row(query);
      job.exists = query < task.queries;
      job.from = projected(task.first + own, task.head * group + query - own * group);
      job.norm = q_norm;
      job.to = memory + index * (MEMORY / 2) + lane();
      job.position = task.start + own;
    } else if (index < all_jobs(task)) {
      const bool v = index >= queries + keys;
      const int eight = index - queries - (v ? keys : 0), own = eight * 8 + g;
      job.exists = own < task.count;
      job.from = projected(task.first + own, p.heads + task.head + (v ? p.kv_heads : 0));
      job.norm = k_norm;
      if (!v) job.to = own_keys(task, memory) + eight * (MEMORY / 2) + lane();
      job.position = task.start + own;
      if (job.exists && task.block == 0)
        job.page = (v ? v_cache : k_cache) + (long long)place(p, task.slot, task.head, job.position) * DIM;
    }
    return job;
  }
  DEVICE void run_job(const Job& job) const {
    uint4 x[BLOCKS];
    if (job.to != nullptr) {
      rotated(x, job.exists, job.from, job.norm, job.position);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) job.to[b * 32] = x[b];
    } else {
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        x[b] = make_uint4(0, 0, 0, 0);
        if (job.exists) x[b] = load_l2(job.from + 32 * b + 8 * c);
      }
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
      if (job.page != nullptr) *reinterpret_cast<uint4*>(job.page + 32 * b + 8 * c) = x[b];
  }

  DEVICE void store(const Task& task, int query, int column, float4 x) const {
    const int own = run_row(query), head = task.head * group + query - own * group;
    u32* to = reinterpret_cast<u32*>(p.attended + ((long long)(task.first + own) * p.heads + head) * DIM);
    to[feature(column) / 2] = pack(x.x, x.y);
    to[feature(column) / 2 + 4] = pack(x.z, x.w);
  }
  // Where the outputs of columns `column` (even) and column + 1 of lane c begin; 8 further on the same of the next g.
  DEVICE int feature(int column) const { return column / 8 * 64 + 16 * c + column % 8; }

  // Items of the merge: (16 query rows, pair of columns, lane) for one half of the rows.
  struct Item {
    int rows, column, query;  // which 16 rows, first column, query row of the task
  };
  DEVICE Item item(int index, int half) const {
    const int rows = index / (COLUMNS / 2 * 32), column = index / 32 % (COLUMNS / 2) * 2;
    return {rows, column, rows * 16 + half * 8 + g};
  }

  // Merge the warps' sums, and write the result or, where the run's keys lie in several tasks, this part of it.
  DEVICE void merge(const Sums& w, const Task& task, int id, Merge& shared) const {
    const int rows = task.queries - task.block, items = task.tall * (COLUMNS / 2) * 32;
    const int sixteen = warp() & (task.tall - 1);
    float2* outputs = reinterpret_cast<float2*>(shared.memory);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = w.sum[half];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      if (c == 0) shared.sums[warp() * 16 + half * 8 + g] = make_float2(w.maximum[half], sum);
    }
    sync_consumers();  // nobody reads query rows any more
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (half * 8 >= rows) break;
      if (half == 1) sync_consumers();
      float2 all[WARPS];
      float maximum = -1e30f, total = 0.0f;
#pragma unroll
      for (int other = 0; other < WARPS; ++other) {
        all[other] = shared.sums[other * 16 + half * 8 + g];
        if ((other & (task.tall - 1)) == sixteen) maximum = fmaxf(maximum, all[other].x);
      }
#pragma unroll
      for (int other = 0; other < WARPS; ++other)
        if ((other & (task.tall - 1)) == sixteen) total += all[other].y * exp2_fast(all[other].x - maximum);
      if (c == 0) shared.totals[warp() * 16 + half * 8 + g] = make_float2(maximum, total);
      const float weight = exp2_fast((half ? w.maximum[1] : w.maximum[0]) - maximum);
      float2* to = outputs + warp() * COLUMNS * 32 + lane();
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) {
        const float* out = w.out[column];
        to[column * 32] = make_float2((half ? out[2] : out[0]) * weight, (half ? out[3] : out[1]) * weight);
      }
      sync_consumers();
#pragma unroll 1
      for (int index = thread(); index < items; index += CONSUMERS) {
        const Item at = item(index, half);
        if (at.query >= rows) continue;
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int other = 0; other < WARPS; ++other) {
          if ((other & (task.tall - 1)) != at.rows) continue;
          const float2* from = outputs + (other * COLUMNS + at.column) * 32 + lane();
          const float2 first = from[0], second = from[32];
          out.x += first.x;
          out.y += second.x;
          out.z += first.y;
          out.w += second.y;
        }
        const float2 whole = shared.totals[at.rows * 16 + half * 8 + g];
        if (task.parts == 1) {
          const float scale = divide(1.0f, whole.y);
          out = make_float4(out.x * scale, out.y * scale, out.z * scale, out.w * scale);
          store(task, task.block + at.query, at.column, out);
        } else {
          *partial(id, at) = out;
          if (at.column == 0 && c == 0) reinterpret_cast<float2*>(p.partial_sums)[id * QUERY_BLOCK + at.query] = whole;
        }
      }
    }
    if (task.parts > 1) merge_parts(task, id - task.part, shared);
  }

  // [task][query row][pair of columns][c]
  DEVICE float4* partial(int id, const Item& at) const {
    return reinterpret_cast<float4*>(p.partial) + (((long long)id * QUERY_BLOCK + at.query) * (COLUMNS / 2) + at.column / 2) * 4 + c;
  }

  // The SM that comes last adds the parts up; `id` is the first one's task.
  DEVICE void merge_parts(const Task& task, int id, Merge& shared) const {
    fence_gpu();
    sync_consumers();
    if (thread() == 0) {
      u32* ticket = p.tickets + task.ticket;
      *shared.last = take_ticket(ticket) == static_cast<u32>(task.parts - 1);
      if (*shared.last) *ticket = 0;
    }
    sync_consumers();
    if (!*shared.last) return;
    const int rows = task.queries - task.block, items = task.tall * (COLUMNS / 2) * 32;
#pragma unroll 1
    for (int index = thread(); index < 2 * items; index += CONSUMERS) {
      const Item at = index < items ? item(index, 0) : item(index - items, 1);
      if (at.query >= rows) continue;
      float maximum = -1e30f, sum = 0.0f;
      float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
      for (int from = 0; from < task.parts; from += MERGED_AT_ONCE) {
        uint4 raw[MERGED_AT_ONCE];
        float tops[MERGED_AT_ONCE], sums[MERGED_AT_ONCE];
#pragma unroll
        for (int i = 0; i < MERGED_AT_ONCE; ++i) {
          raw[i] = make_uint4(0, 0, 0, 0);
          tops[i] = -1e30f;
          sums[i] = 0.0f;
          if (from + i >= task.parts) continue;
          const int part = id + from + i;
          const float* scales = p.partial_sums + (part * QUERY_BLOCK + at.query) * 2;
          raw[i] = load_l2(partial(part, at));
          tops[i] = as_float(load_l2_word(scales));
          sums[i] = as_float(load_l2_word(scales + 1));
        }
#pragma unroll
        for (int i = 0; i < MERGED_AT_ONCE; ++i) {
          const float both = fmaxf(maximum, tops[i]);
          const float shrink = exp2_fast(maximum - both), weight = exp2_fast(tops[i] - both);
          maximum = both;
          sum = sum * shrink + sums[i] * weight;
          out.x = out.x * shrink + as_float(raw[i].x) * weight;
          out.y = out.y * shrink + as_float(raw[i].y) * weight;
          out.z = out.z * shrink + as_float(raw[i].z) * weight;
          out.w = out.w * shrink + as_float(raw[i].w) * weight;
        }
      }
      const float scale = divide(1.0f, sum);
      out = make_float4(out.x * scale, out.y * scale, out.z * scale, out.w * scale);
      store(task, task.block + at.query, at.column, out);
    }
  }

  // This warp's tiles of keys: every `warps`-th from `mine` on, first of the cached ones, then of the run's own.
  DEVICE void attend(Sums& w, const Task& task, bool planned, Merge& shared, const Grid& grid, bool waits) const {
    const int sixteen = warp() & (task.tall - 1), mine = warp() / task.tall, warps = WARPS / task.tall;
    const int block = task.block + 16 * sixteen, old = task.old_tiles;
    const int tiles = block < task.queries ? old + task.new_tiles : 0;
    Keys keys;
    // One lane finds the first tile of cached keys, the next one that after it.
    const int early = mine + (lane() & 1) * warps, found = early < old ? begin(task, planned, early) : 0;
    const int first = shuffle(found, 0);
    int row = shuffle(found, 1);  // of the next tile
    if (mine < smaller(old, tiles)) {
      load_k(first, keys);
      load_v(first, left(task, mine), keys);
      if (sixteen == 0 && lane() == 1 && early < old) ask_for(row);
    }
    int rows[2];  // the run's row of each half's query row
#pragma unroll
    for (int half = 0; half < 2; ++half) rows[half] = run_row(block + 8 * half + g);
    // Query rows, and K of the run's own rows, come for all warps of the task.
    const int jobs = all_jobs(task);
    int index = warp();
    Job job = make_job(task, index, shared.memory);
    if (waits) grid.wait();
    mark(1);
    if (mine >= old && mine < tiles) load_own(task, mine - old, keys);
#pragma unroll 1
    for (;;) {
      if (index < jobs) run_job(job);
      index += WARPS;
      if (index >= jobs) break;
      job = make_job(task, index, shared.memory);
    }
#pragma unroll
    for (int i = 0; i < COLUMNS * 4; ++i) w.out[i / 4][i % 4] = 0.0f;
    w.maximum[0] = w.maximum[1] = -1e30f;
    w.sum[0] = w.sum[1] = 0.0f;
    sync_consumers();
    const uint4* q = shared.memory + sixteen * MEMORY + lane();
#pragma unroll 1
    for (int tile = mine; tile < tiles; tile += warps) {
      const int next = tile + warps;
      int seen[2];
      if (tile < old) {
        seen[0] = seen[1] = left(task, tile);
      } else {
        const int own = tile - old;
        const uint4* k = own_keys(task, shared.memory) + own * MEMORY + lane();
#pragma unroll
        for (int b = 0; b < 2 * BLOCKS; ++b) keys.k[b / BLOCKS][b % BLOCKS] = k[b * 32];
#pragma unroll
        for (int half = 0; half < 2; ++half) seen[half] = smaller(rows[half] + 1, task.count) - own * KEY_TILE;
      }
      int further = 0;
      if (next + warps < old) {
        further = begin(task, planned, next + warps);
        if (sixteen == 0 && lane() == 0) ask_for(further);
      }
      float s[2][2][4] = {};
      score(q, keys, s);
      if (next < old) load_k(row, keys);
      add_tile(w, s, keys, seen);
      if (next < old)
        load_v(row, left(task, next), keys);
      else if (next < tiles)
        load_own(task, next - old, keys);
      row = further;
    }
    mark(2);
  }

  // Have a tile of cached keys on its way to L2. By one lane.
  DEVICE void ask_for(int row) const {
    prefetch_l2(k_cache + (long long)row * DIM, KEY_TILE * DIM * sizeof(bf16));
    prefetch_l2(v_cache + (long long)row * DIM, KEY_TILE * DIM * sizeof(bf16));
  }

  DEVICE void run(Merge& shared, const Grid& grid) const {
    if (cta() >= schedule.tasks) grid.wait();
#pragma unroll 1
    for (int turn = 0; turn * ctas() < schedule.tasks; ++turn) {
      const int id = turn * ctas() + (turn % 2 == 0 ? cta() : ctas() - 1 - cta());
      if (id >= schedule.tasks) continue;
      const bool planned = turn == 0;
      const Task task = planned ? plan.task : Task(p, schedule, id);
      if (!planned) sync_consumers();  // the task before is done with shared memory
      Sums w;
      attend(w, task, planned, shared, grid, planned);
      merge(w, task, id, shared);
    }
  }
};
