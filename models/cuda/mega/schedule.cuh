// Attention's work list, made once per launch: lengths are the same in every layer.
//
// A task is one run's query rows of one KV head (up to 128 of them) over a part of the run's cached keys; the last part also
// holds the run's own keys. Query row i * group + h is row i of the run, query head h of the group.
#pragma once

constexpr int MAX_ROWS = 64;
constexpr int KEY_TILE = 16;       // keys that a warp takes at once
constexpr int QUERY_BLOCK = 128;   // query rows of a task: 16 per warp at most
constexpr int CHOICES = 16;        // lengths of a part that are considered: PART_KEYS << choice

// What a task costs besides its keys, and the merging of parts, in keys.
#ifndef MEGA_PART_KEYS
#define MEGA_PART_KEYS 128
#define MEGA_TASK_COST 256
#define MEGA_MERGE_COST 512
#endif
constexpr int PART_KEYS = MEGA_PART_KEYS;

struct Schedule {
  int runs, tasks;
  int first[MAX_ROWS], count[MAX_ROWS], start[MAX_ROWS], slot[MAX_ROWS];
  int tiles[MAX_ROWS];             // key tiles of a part
  int parts[MAX_ROWS];
  int base[MAX_ROWS + 1];          // first task
};

struct Task {
  int run, head, block, part, group_id;  // group_id: the first part's task
};

DEVICE int query_blocks(const Params& p, int count) { return ceil_div(count * (p.heads / p.kv_heads), QUERY_BLOCK); }

// Cost of a choice in keys: an SM's tasks one after the other, each with a fixed part, and the merging of parts.
DEVICE int part_cost(const Params& p, const Schedule& s, int keys, int& tasks) {
  int longest = 0;
  tasks = 0;
  for (int run = 0; run < s.runs; ++run) {
    tasks += query_blocks(p, s.count[run]) * larger(ceil_div(s.start[run], keys), 1);
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
  const int keys = choice < CHOICES - 1 ? PART_KEYS << choice : 0x7fffffff;
  int tasks;
  int cost = part_cost(p, s, keys, tasks);
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
    for (int run = 0; run < runs; ++run) {
      const int all = ceil_div(s.start[run], KEY_TILE);
      const int wanted = best < CHOICES - 1 ? larger(ceil_div(s.start[run], PART_KEYS << best), 1) : 1;
      s.tiles[run] = larger(ceil_div(all, wanted), 1);
      s.parts[run] = larger(ceil_div(all, s.tiles[run]), 1);
      s.base[run] = base;
      base += query_blocks(p, s.count[run]) * p.kv_heads * s.parts[run];
    }
    s.base[runs] = s.tasks = base;
  }
  sync_warp();
}

DEVICE Task find_task(const Params& p, const Schedule& s, int id) {
  Task task;
  task.run = 0;
  while (s.base[task.run + 1] <= id) ++task.run;
  const int inside = id - s.base[task.run], rest = inside / s.parts[task.run];
  task.part = inside % s.parts[task.run];
  task.group_id = id - task.part;
  task.head = rest % p.kv_heads;
  task.block = rest / p.kv_heads;
  return task;
}
