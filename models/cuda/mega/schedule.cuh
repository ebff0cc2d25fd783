// Attention's work list, made once per launch: lengths are the same in every layer.
//
// A task is one run's query rows of one KV head (up to 64 of them) over a part of the run's cached keys; the last part also
// holds the run's own keys. Query row i * group + h is row i of the run, query head h of the group.
#pragma once

constexpr int KEY_TILE = 16;       // keys that a warp takes at once
constexpr int QUERY_BLOCK = 64;    // query rows of a task; they and 64 own keys fill the memory
constexpr int CHOICES = 16;        // lengths of a part that are considered: PART_KEYS << choice

// What a task costs besides its keys, and the merging of parts, in keys.
#ifndef MEGA_PART_SHIFT
#define MEGA_PART_SHIFT 7
#define MEGA_TASK_COST 256
#define MEGA_MERGE_COST 512
#endif
constexpr int PART_SHIFT = MEGA_PART_SHIFT;
constexpr int PART_KEYS = 1 << PART_SHIFT;

struct Schedule {
  int runs, tasks;
  int first[MAX_ROWS], count[MAX_ROWS], start[MAX_ROWS], slot[MAX_ROWS];
  int tiles[MAX_ROWS];             // key tiles of a part
  int parts[MAX_ROWS];
  int base[MAX_ROWS + 1];          // first task
};


DEVICE int query_blocks(const Params& p, int count) { return ceil_div(count * (p.heads / p.kv_heads), QUERY_BLOCK); }

// Parts of a run with `start` cached keys.
DEVICE int parts_of(int start, int choice) {
  const int shift = PART_SHIFT + choice;
  return choice < CHOICES - 1 ? larger((start + (1 << shift) - 1) >> shift, 1) : 1;
}

// Cost of a choice in keys: an SM's tasks one after the other, each with a fixed part, and the merging of parts.
DEVICE int part_cost(const Params& p, const Schedule& s, int choice, int& tasks) {
  const int keys = choice < CHOICES - 1 ? PART_KEYS << choice : 0x7fffffff;
  int longest = 0;
  tasks = 0;
#pragma unroll 1
  for (int run = 0; run < s.runs; ++run) {
    tasks += query_blocks(p, s.count[run]) * parts_of(s.start[run], choice);
    longest = larger(longest, s.start[run]);
  }
  tasks *= p.kv_heads;
  return ceil_div(tasks, ctas()) * (smaller(keys, longest) + MEGA_TASK_COST) + (longest > keys ? MEGA_MERGE_COST : 0);
}

// By one warp.
DEVICE void make_schedule(const Params& p, Schedule& s) {
  int runs = 0;
  for (int begin = 0; begin < p.rows; begin += 32) {
    const int row = begin + lane();
    const bool leads = row < p.rows && load_fixed_int(p.counts + row) > 0 && load_fixed_int(p.positions + row) >= 0;
    const u32 leaders = vote(leads);
    if (leads) {
      const int run = runs + popcount(leaders & ((1u << lane()) - 1u));
      s.first[run] = row;
      s.count[run] = smaller(load_fixed_int(p.counts + row), p.rows - row);
      s.start[run] = load_fixed_int(p.positions + row);
      s.slot[run] = load_fixed_int(p.slots + row);
    }
    runs += popcount(leaders);
  }
  if (lane() == 0) s.runs = runs;
  sync_warp();
  // The cheapest choice; the last one does not split.
  const int choice = lane() < CHOICES ? lane() : CHOICES - 1;
  int tasks;
  int cost = part_cost(p, s, choice, tasks);
  if (choice < CHOICES - 1 && tasks > p.split_tasks) cost = 0x3fffffff;
  int best = choice;
  for (int mask = 1; mask < 32; mask *= 2) {
    const int other_cost = shuffle(cost, lane() ^ mask), other = shuffle(best, lane() ^ mask);
    if (other_cost < cost || (other_cost == cost && other > best)) {
      cost = other_cost;
      best = other;
    }
  }
  if (lane() == 0) {
    int base = 0;
#pragma unroll 1
    for (int run = 0; run < runs; ++run) {
      const int all = ceil_div(s.start[run], KEY_TILE);
      const int wanted = parts_of(s.start[run], best);
      s.tiles[run] = larger(ceil_div(all, wanted), 1);
      s.parts[run] = larger(ceil_div(all, s.tiles[run]), 1);
      s.base[run] = base;
      base += query_blocks(p, s.count[run]) * p.kv_heads * s.parts[run];
    }
    s.base[runs] = s.tasks = base;
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
  int tall;                             // groups of 16 query rows, rounded up to 1, 2 or 4; the other warps share keys
  int tile, old_tiles, new_tiles;       // first tile of cached keys; tiles of cached keys and of the run's own
  int part, parts;

  Task() = default;
  DEVICE Task(const Params& p, const Schedule& s, int id) {
    int run = 0;
    while (s.base[run + 1] <= id) ++run;
    first = s.first[run];
    count = s.count[run];
    start = s.start[run];
    slot = s.slot[run];
    parts = s.parts[run];
    const int inside = id - s.base[run], rest = inside / parts;
    part = inside - rest * parts;
    block = rest / p.kv_heads;
    head = rest - block * p.kv_heads;
    block *= QUERY_BLOCK;
    queries = smaller(count * (p.heads / p.kv_heads), block + QUERY_BLOCK);
    const int rows = ceil_div(queries - block, 16);
    tall = rows <= 1 ? 1 : rows <= 2 ? 2 : 4;
    tile = part * s.tiles[run];
    old_tiles = smaller(s.tiles[run], ceil_div(start, KEY_TILE) - tile);
    new_tiles = part == parts - 1 ? ceil_div(count, KEY_TILE) : 0;
  }
};

constexpr int PLACES = 64;

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
