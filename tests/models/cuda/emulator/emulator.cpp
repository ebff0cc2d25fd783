// Runs the megakernel on a CPU: a scheduler for the fibers of emulated_device.h.
#include "megakernel.cu"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
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

struct Launch {
  const Params* params;
  int rows;
  std::vector<std::unique_ptr<unsigned char[]>> memory;
} launch;

void start() {
  Fiber& own = *current;
  unsigned char* memory = launch.memory[own.cta].get();
  memory += 1024 - reinterpret_cast<uintptr_t>(memory) % 1024;
  switch (launch.rows) {
    case 8: forward<8>(*launch.params, memory); break;
    case 16: forward<16>(*launch.params, memory); break;
    default: std::abort();
  }
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

}  // namespace emulator

// Returns 0, or 1 after a deadlock.
extern "C" int emulate(const Params* params, int rows, int grid, u32 seed) {
  using namespace emulator;
  emulator::grid = grid;
  random_numbers.seed(seed);
  copies.clear();
  rounds = 0;
  launch.params = params;
  launch.rows = rows;
  launch.memory.clear();
  std::vector<Block> blocks(grid);
  std::vector<Warp> warps(grid * THREADS / 32);
  std::vector<Fiber> fibers(grid * THREADS);
  std::vector<std::unique_ptr<unsigned char[]>> stacks;
  for (int block = 0; block < grid; ++block) {
    launch.memory.emplace_back(new unsigned char[sizeof(Shared) + 1024]);
    std::memset(launch.memory.back().get(), 0xff, sizeof(Shared) + 1024);
  }
  for (size_t i = 0; i < fibers.size(); ++i) {
    Fiber& fiber = fibers[i];
    fiber.cta = i / THREADS;
    fiber.thread = i % THREADS;
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

extern "C" int params_size() { return sizeof(Params); }
extern "C" int shared_size() { return sizeof(Shared); }
