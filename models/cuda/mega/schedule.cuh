// Attention's work list, made once per launch: lengths are the same in every layer.
//
// A block is up to 64 query rows of a run. For each KV head it is one task or, over parts of the run's cached keys, several; the
// last part also holds the run's own keys. Query row i * group + h is row i of the run, query head h of the group.
// Parts are cut by work, which is keys times groups of 16 query rows, with the limit that costs least. The longest tasks come
// first, and every other turn through the SMs goes backwards.
#pragma once

constexpr int KEY_TILE = 16;       // keys that a warp takes at once
constexpr int QUERY_BLOCK = 64;    // query rows of a task; they and 64 own keys fill the memory
constexpr int MERGED_AT_ONCE = 4;  // parts that a thread waits for at once

// Costs are in tiles that an SM takes for 16 query rows, 0.1 to 0.2 us each on an H200.
#ifndef MEGA_ROUND_TILES
#define MEGA_ROUND_TILES WARPS  // each warp takes one at a time
#endif
#ifndef MEGA_MERGE_COST  // of a block in parts
#define MEGA_MERGE_COST(parts, queries) (8 + ceil_div(parts, MERGED_AT_ONCE) * MERGED_AT_ONCE * (0.6f + (queries) / 16.0f))
#endif
#ifndef MEGA_TURNS_COST  // of turns after the first; `share` is an SM's part of all work
#define MEGA_TURNS_COST(turns, share) ((turns) > 1 ? 48 * ((turns) - 1) + (share) : 0.0f)
#endif

struct Schedule {
  int blocks, tasks;
  int first[MAX_ROWS], count[MAX_ROWS], start[MAX_ROWS], slot[MAX_ROWS];  // of a block's run
  int query[MAX_ROWS];             // first query row of the block
  int queries[MAX_ROWS];           // its query rows
  int work[MAX_ROWS];              // before the blocks are sorted: tiles of cached keys times groups of query rows
  int tiles[MAX_ROWS];             // key tiles of a part
  int parts[MAX_ROWS];
  int base[MAX_ROWS + 1];          // first task
};
static_assert(MAX_ROWS <= 32, "a lane for each row, and for each block: a run of n rows has n blocks at most");

// Groups of 16 query rows, rounded up to 1, 2 or 4: the warps of a task are dealt to them, those of one group share its keys.
DEVICE int groups_of(int queries) {
  const int rows = ceil_div(queries, 16);
  return rows <= 2 ? rows : 4;
}

// All blocks. By one warp.
DEVICE void list_blocks(const Params& p, Schedule& s) {
  const int row = lane();
  const bool leads = row < p.rows && load_fixed_int(p.counts + row) > 0 && load_fixed_int(p.positions + row) >= 0;
  const int count = leads ? smaller(load_fixed_int(p.counts + row), p.rows - row) : 0;
  const int queries = count * (p.heads / p.kv_heads), own = ceil_div(queries, QUERY_BLOCK);
  int before = 0, blocks = 0;
#pragma unroll 1
  for (int other = 0; other < MAX_ROWS; ++other) {
    const int others = shuffle(own, other);
    before += other < row ? others : 0;
    blocks += others;
  }
#pragma unroll 1
  for (int block = 0; block < own; ++block) {
    const int at = before + block, query = block * QUERY_BLOCK;
    s.first[at] = row;
    s.count[at] = count;
    s.start[at] = load_fixed_int(p.positions + row);
    s.slot[at] = load_fixed_int(p.slots + row);
    s.query[at] = query;
    s.queries[at] = smaller(queries - query, QUERY_BLOCK);
    s.work[at] = ceil_div(s.start[at], KEY_TILE) * groups_of(s.queries[at]);
  }
  if (lane() == 0) s.blocks = blocks;
  sync_warp();
}

// work / divisor, rounded up, at least 1. For estimates: ten-thousandths do not count, and above 2,048 it may be 1 too many.
DEVICE int parts_of(int work, float inverse) { return larger(static_cast<int>(work * inverse + 0.9999f), 1); }

// What a step's attention takes, if parts have up to so much work.
struct Limit {
  int most;
  float cost;

  // `turns`: how many it makes on the SMs.
  DEVICE Limit(const Params& p, const Schedule& s, int most, int& turns) : most(most), cost(0.0f) {
    const float inverse = divide(1.0f, most);
    int tasks = 0, work = 0;
#pragma unroll 2
    for (int block = 0; block < s.blocks; ++block) {
      const int own = s.work[block], parts = parts_of(own, inverse), part = parts_of(own, divide(1.0f, parts));
      const float merged = parts > 1 ? MEGA_MERGE_COST(parts, s.queries[block]) : 0.0f;
      cost = fmaxf(cost, ceil_div(part, MEGA_ROUND_TILES) * MEGA_ROUND_TILES + merged);
      tasks += parts;
      work += own;
    }
    const bool split = tasks > s.blocks;
    tasks *= p.kv_heads;
    turns = ceil_div(tasks, ctas());
    cost += MEGA_TURNS_COST(turns, work * p.kv_heads * divide(1.0f, ctas()));
    if (split && tasks > p.split_tasks) cost = 1e30f;
  }
  // The cheapest of all lanes, of equals the one with the longest parts.
  DEVICE void agree() {
#pragma unroll 1
    for (int mask = 1; mask < 32; mask *= 2) {
      const float other_cost = shuffle_xor(cost, mask);
      const int other = shuffle(most, lane() ^ mask);
      if (other_cost < cost || (other_cost == cost && other > most)) {
        cost = other_cost;
        most = other;
      }
    }
  }
};

// Most work of a part. By one warp.
DEVICE int best_limit(const Params& p, const Schedule& s) {
  int longest = 1;
#pragma unroll 1
  for (int block = 0; block < s.blocks; ++block) longest = larger(longest, s.work[block]);
  // The longest block in 1, 2, ... 32 parts or, from 16 on further apart, a few more than SMs for a KV head; then what lies
  // around the best one that takes no more turns than whole blocks: with so few tasks each SM counts.
  const int apart = larger(ceil_div(ctas() / p.kv_heads - 16, 16), 1);
  int turns;
  Limit any(p, s, ceil_div(longest, lane() < 16 ? lane() + 1 : 16 + (lane() - 15) * apart), turns), rough = any;
  any.agree();
  if (turns > ceil_div(s.blocks * p.kv_heads, ctas())) rough.cost = 1e30f;
  rough.agree();
  const int parts = ceil_div(longest, rough.most), step = parts < 16 ? 1 : apart;
  const int shorter = ceil_div(longest, parts + 2 * step), longer = ceil_div(longest, larger(parts - step, 1));
  Limit fine(p, s, larger(shorter + (longer - shorter) * lane() / 31, 1), turns);
  fine.agree();
  return fine.cost < any.cost ? fine.most : any.most;
}

// By one warp.
DEVICE void make_schedule(const Params& p, Schedule& s) {
  list_blocks(p, s);
  const int most = best_limit(p, s), at = smaller(lane(), larger(s.blocks - 1, 0));
  const bool exists = lane() < s.blocks;
  const int first = s.first[at], count = s.count[at], start = s.start[at], slot = s.slot[at];
  const int query = s.query[at], queries = s.queries[at], all = ceil_div(start, KEY_TILE);
  const int wanted = parts_of(s.work[at], divide(1.0f, most));
  const int tiles = larger(ceil_div(all, wanted), 1), parts = larger(ceil_div(all, tiles), 1);
  const int work = exists ? tiles * groups_of(queries) : -1;
  int rank = 0;
#pragma unroll 1
  for (int other = 0; other < MAX_ROWS; ++other) {
    const int others = shuffle(work, other);
    rank += others > work || (others == work && other < lane()) ? 1 : 0;
  }
  sync_warp();
  if (exists) {
    s.first[rank] = first;
    s.count[rank] = count;
    s.start[rank] = start;
    s.slot[rank] = slot;
    s.query[rank] = query;
    s.queries[rank] = queries;
    s.tiles[rank] = tiles;
    s.parts[rank] = parts;
  }
  sync_warp();
  if (lane() == 0) {
    int base = 0;
#pragma unroll 1
    for (int block = 0; block < s.blocks; ++block) {
      s.base[block] = base;
      base += p.kv_heads * s.parts[block];
    }
    s.base[s.blocks] = s.tasks = base;
  }
  sync_warp();
}

// A row of K or V of its layer, in rows of head_dim.
DEVICE int place(const Params& p, int slot, int head, int position) {
  const int page = load_fixed_int(p.page_table + (long long)slot * p.page_stride + position / p.page_size);
  return (page * p.kv_heads + head) * p.page_size + position % p.page_size;
}

// A task, as its warps see it.
struct Task {
  int first, count, start, slot, head;  // of the run
  int block, queries;                   // first query row; end of the task's
  int tall;                             // groups of 16 query rows; the other warps share keys
  int tile, old_tiles, new_tiles;       // first tile of cached keys; tiles of cached keys and of the run's own
  int part, parts;
  int ticket;                           // of its parts

  Task() = default;
  DEVICE Task(const Params& p, const Schedule& s, int id) {
    int at = 0;
    while (s.base[at + 1] <= id) ++at;
    first = s.first[at];
    count = s.count[at];
    start = s.start[at];
    slot = s.slot[at];
    parts = s.parts[at];
    const int inside = id - s.base[at];
    head = inside / parts;
    part = inside - head * parts;
    block = s.query[at];
    queries = block + s.queries[at];
    tall = groups_of(s.queries[at]);
    tile = part * s.tiles[at];
    old_tiles = smaller(s.tiles[at], ceil_div(start, KEY_TILE) - tile);
    new_tiles = part == parts - 1 ? ceil_div(count, KEY_TILE) : 0;
    ticket = at * p.kv_heads + head;
  }
};

constexpr int PLACES = 128;

// This SM's first task, the same in all layers.
struct Plan {
  Task task;
  int places[PLACES];  // where its tiles of cached keys begin

  // By one warp.
  DEVICE void make(const Params& p, const Schedule& s, int id) {
    const Task made(p, s, id);
    if (lane() == 0) task = made;
    for (int tile = lane(); tile < smaller(made.old_tiles, PLACES); tile += 32)
      places[tile] = place(p, made.slot, made.head, (made.tile + tile) * KEY_TILE);
  }
};
