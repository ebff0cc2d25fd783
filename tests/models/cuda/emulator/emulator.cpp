// Runs the megakernel on a CPU: a scheduler for the fibers of emulated_device.h.
#include "megakernel.cu"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <vector>

namespace emulator {

Fiber* current;
int grid;
u64 events;

namespace {

constexpr size_t STACK = 128 * 1024;
constexpr int PATIENCE = 2000;  // rounds without an event: a deadlock

struct Copy {
  void* to;
  std::vector<unsigned char> data;
  u64* barrier;
  u64 due;
};
ucontext_t scheduler;
std::vector<Copy> copies;
std::mt19937 random_numbers;
u64 rounds;
std::function<void()> code;  // of every thread

void start() {
  code();
  Fiber& own = *current;
  own.done = true;
  ++events;
  swapcontext(&own.context, &scheduler);
}

void resume(Fiber& fiber) {
  current = &fiber;
  fiber.wait = Wait::NOTHING;
  swapcontext(&scheduler, &fiber.context);
}

// Run a warp until it can do nothing more without others.
void visit(Fiber* lanes) {
  bool moved = true;
  for (int i = 0; i < 32; ++i) lanes[i].wait = Wait::NOTHING;
  while (moved) {
    moved = false;
    for (int i = 0; i < 32; ++i) {
      Fiber& fiber = lanes[i];
      if (fiber.done || fiber.wait == Wait::OTHERS) continue;
      const u64 before = events;
      resume(fiber);
      moved |= events != before || fiber.wait == Wait::OTHERS || fiber.done;
      moved |= fiber.wait == Wait::WARP && fiber.warp->arrived == 0;
    }
    bool waiting = false;
    for (int i = 0; i < 32; ++i) waiting |= !lanes[i].done && lanes[i].wait != Wait::OTHERS;
    if (!waiting) return;
  }
}

void land_copies() {
  for (size_t i = 0; i < copies.size();) {
    if (copies[i].due > rounds) {
      ++i;
      continue;
    }
    const Copy copy = copies[i];
    copies.erase(copies.begin() + i);
    std::memcpy(copy.to, copy.data.data(), copy.data.size());
    Barrier& own = barrier(copy.barrier);
    own.bytes -= copy.data.size();
    settle(own);
  }
}

}  // namespace

void yield(Wait wait) {
  current->wait = wait;
  swapcontext(&current->context, &scheduler);
}

void fail(const char* what) {
  std::fprintf(stderr, "emulator: block %d thread %d: %s\n", current->cta, current->thread, what);
  std::abort();
}

void queue_copy(void* to, std::vector<unsigned char> data, u64* barrier) {
  std::memset(to, 0xff, data.size());  // not a number, until it lands
  copies.push_back({to, std::move(data), barrier, rounds + random_numbers() % (random_numbers() % 8 ? 4 : 40)});
}

// Runs code by so many blocks of so many threads. Returns 0, or 1 after a deadlock.
int run(int count, int threads, u32 seed, std::function<void()> own) {
  code = std::move(own);
  random_numbers.seed(seed);
  copies.clear();
  rounds = 0;
  std::vector<Block> blocks(count);
  std::vector<Warp> warps(count * threads / 32);
  std::vector<Fiber> fibers(count * threads);
  std::vector<std::unique_ptr<unsigned char[]>> stacks;
  for (size_t i = 0; i < fibers.size(); ++i) {
    Fiber& fiber = fibers[i];
    fiber.cta = i / threads;
    fiber.thread = i % threads;
    fiber.block = &blocks[fiber.cta];
    fiber.warp = &warps[i / 32];
    stacks.emplace_back(new unsigned char[STACK]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks.back().get();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, start, 0);
  }
  std::vector<int> order(warps.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  u64 seen = events;
  for (int idle = 0; idle < PATIENCE; ++idle) {
    std::shuffle(order.begin(), order.end(), random_numbers);
    for (int warp : order) visit(&fibers[warp * 32]);
    ++rounds;
    land_copies();
    if (std::all_of(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return fiber.done; })) return 0;
    if (events != seen) idle = 0;
    seen = events;
  }
  return 1;
}

}  // namespace emulator

// Returns 0, or 1 after a deadlock.
extern "C" int emulate(const Params* params, int rows, int grid, u32 seed) {
  emulator::grid = grid;
  std::vector<std::unique_ptr<unsigned char[]>> memory;
  for (int block = 0; block < grid; ++block) {
    memory.emplace_back(new unsigned char[sizeof(Shared) + 1024]);
    std::memset(memory.back().get(), 0xff, sizeof(Shared) + 1024);
  }
  return emulator::run(grid, THREADS, seed, [&] {
    unsigned char* own = memory[cta()].get();
    own += 1024 - reinterpret_cast<uintptr_t>(own) % 1024;
    switch (rows) {
      case 8: forward<8>(*params, own); break;
      case 16: forward<16>(*params, own); break;
      default: std::abort();
    }
  });
}

// Attention's tasks on so many SMs, made by one warp as each SM makes them. Returns how many there are, of which the first `room`
// are written, or -1 after a deadlock.
extern "C" int emulate_schedule(const Params* params, int grid, Task* tasks, int room) {
  emulator::grid = grid;
  Schedule schedule;
  std::memset(&schedule, 0xff, sizeof schedule);
  const int failed = emulator::run(1, 32, 0, [&] {
    make_schedule(*params, schedule);
    for (int id = lane(); id < smaller(schedule.tasks, room); id += 32) tasks[id] = Task(*params, schedule, id);
  });
  return failed ? -1 : schedule.tasks;
}

extern "C" int params_size() { return sizeof(Params); }
extern "C" int shared_size() { return sizeof(Shared); }
extern "C" int task_size() { return sizeof(Task); }
