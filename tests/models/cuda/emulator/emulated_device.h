// models/cuda/mega/device.cuh on a CPU: every GPU thread is a fiber, every instruction that other threads can notice a point where
// it may be stopped. Warps run in a random order and bulk copies land late, so that missing synchronisation shows.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

using u32 = uint32_t;
using u64 = uint64_t;
using bf16 = uint16_t;

#define DEVICE inline
constexpr int CONSUMERS = 256;
constexpr int THREADS = CONSUMERS + 128;

struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

enum class Wait { NOTHING, WARP, OTHERS };

struct Block {
  int arrived[2] = {};
  u32 generation[2] = {};
};
struct Lane {
  u32 words[8];
};
struct Warp {
  Lane lanes[2][32];
  int arrived = 0;
  u32 generation = 0;
  const char* operation = nullptr;
};
struct Fiber {
  ucontext_t context;
  int thread, cta;
  u32 turn = 0;
  bool done = false;
  Wait wait = Wait::NOTHING;
  Block* block;
  Warp* warp;
};

extern Fiber* current;
extern int grid;
extern u64 events;  // things that another thread may have waited for
void yield(Wait wait);
[[noreturn]] void fail(const char* what);
void queue_copy(void* to, std::vector<unsigned char> data, u64* barrier);

struct Barrier {  // the 8 bytes of an mbarrier
  int64_t bytes : 21;  // as on the device
  uint64_t pending : 11;
  uint64_t count : 11;
  uint64_t completed : 21;  // phases
};
static_assert(sizeof(Barrier) == 8);
inline Barrier& barrier(u64* at) { return *reinterpret_cast<Barrier*>(at); }
inline void settle(Barrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count;
  ++barrier.completed;
  ++events;
}

inline void sync_block(int which, int count) {
  Block& block = *current->block;
  const u32 generation = block.generation[which];
  if (++block.arrived[which] == count) {
    block.arrived[which] = 0;
    ++block.generation[which];
    ++events;
  }
  while (block.generation[which] == generation) yield(Wait::OTHERS);
}

// All lanes bring words; each sees those of all.
inline const Lane* exchange(const char* operation, std::initializer_list<u32> words) {
  Warp& warp = *current->warp;
  Lane* lanes = warp.lanes[current->turn++ & 1];
  int place = 0;
  for (u32 word : words) lanes[current->thread & 31].words[place++] = word;
  if (warp.arrived == 0) warp.operation = operation;
  if (std::strcmp(warp.operation, operation) != 0) fail("lanes of a warp meet in different operations");
  const u32 generation = warp.generation;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
    ++events;
  }
  while (warp.generation == generation) yield(Wait::WARP);
  return lanes;
}

template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace emulator

DEVICE int thread() { return emulator::current->thread; }
DEVICE int lane() { return thread() & 31; }
DEVICE int warp() { return thread() / 32; }
DEVICE int cta() { return emulator::current->cta; }
DEVICE int ctas() { return emulator::grid; }
DEVICE void take_registers() {}
DEVICE void give_registers() {}

DEVICE void sync_all() { emulator::sync_block(0, THREADS); }
DEVICE void sync_consumers() { emulator::sync_block(1, CONSUMERS); }
DEVICE void sync_warp() { emulator::exchange("sync", {}); }
DEVICE float shuffle_xor(float value, int mask) {
  return emulator::bits<float>(emulator::exchange("xor", {emulator::bits<u32>(value)})[lane() ^ mask].words[0]);
}
DEVICE int shuffle(int value, int source) {
  return static_cast<int>(emulator::exchange("shuffle", {static_cast<u32>(value)})[source].words[0]);
}
DEVICE u32 vote(bool value) {
  const emulator::Lane* lanes = emulator::exchange("vote", {value});
  u32 result = 0;
  for (int i = 0; i < 32; ++i) result |= lanes[i].words[0] << i;
  return result;
}

template <class T>
DEVICE void keep_apart(T&) {}

template <class T>
T load(const void* at) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0) emulator::fail("misaligned load");
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
DEVICE uint4 load_l2(const void* at) { return load<uint4>(at); }
DEVICE u32 load_l2_word(const void* at) { return load<u32>(at); }
DEVICE uint4 load_fixed(const void* at) { return load<uint4>(at); }
DEVICE int load_fixed_int(const int* at) { return load<int>(at); }
DEVICE u32 load_fixed_word(const void* at) { return load<u32>(at); }
DEVICE uint4 load_once(const void* at) { return load<uint4>(at); }
DEVICE void prefetch_l2(const void* at, u32 bytes) {
  volatile char last = static_cast<const char*>(at)[bytes - 1];  // it must be there
  (void)last;
  if (bytes % 16 != 0) emulator::fail("a prefetch of part of 16 bytes");
}

DEVICE void store_release(u32* at, u32 value) {
  *at = value;
  ++emulator::events;
}
DEVICE u32 load_relaxed(const u32* at) {
  emulator::yield(emulator::Wait::OTHERS);
  return *at;
}
DEVICE u32 take_ticket(u32* at) { return (*at)++; }
DEVICE void fence_gpu() {}
DEVICE void wait_for_predecessor() {}
struct Watchdog {
  void check() {}
};

DEVICE void barrier_init(u64* at, u32 count) {
  emulator::Barrier& barrier = emulator::barrier(at);
  barrier.bytes = 0;
  barrier.pending = barrier.count = count;
  barrier.completed = 0;
}
DEVICE void barrier_init_done() {}
DEVICE void barrier_arrive(u64* at) {
  emulator::Barrier& barrier = emulator::barrier(at);
  if (barrier.pending == 0) emulator::fail("too many arrivals");
  --barrier.pending;
  emulator::settle(barrier);
}
DEVICE void barrier_expect(u64* at, u32 bytes) {
  emulator::barrier(at).bytes += bytes;
  barrier_arrive(at);
}
template <bool WATCHED>
DEVICE void barrier_wait(u64* at, int phase) {
  const emulator::Barrier& barrier = emulator::barrier(at);
  while ((barrier.completed & 1) == (phase & 1)) emulator::yield(emulator::Wait::OTHERS);
  if (barrier.completed != phase + 1u) emulator::fail("a wait that takes an older phase for its own");
}
DEVICE u64 streaming_policy() { return 0; }
// Instead of the driver's words: tests/models/cuda/emulated.py.
struct alignas(64) TensorMap {
  const unsigned char* base;
  u64 strides[4];
  u32 sizes[5], box[5];
  u32 unused[12];
};
static_assert(sizeof(TensorMap) == 128);
DEVICE void box_load(void* to, const TensorMap* map, int unit, int block, u64* barrier, u64) {
  if (reinterpret_cast<uintptr_t>(to) % 1024 != 0) emulator::fail("a box that begins inside of 1,024 bytes");
  const u32 first[5] = {0, 0, 0, static_cast<u32>(unit), static_cast<u32>(block)}, *box = map->box;
  constexpr int ROW = 128, PIECE = 16;
  if (box[0] * sizeof(bf16) != ROW) emulator::fail("a swizzled row of another length");
  std::vector<unsigned char> data(ROW * box[1] * box[2] * box[3] * box[4]);
  for (u32 row = 0; row < data.size() / ROW; ++row) {
    const u32 steps[5] = {0, row % box[1], row / box[1] % box[2], row / (box[1] * box[2]) % box[3],
                          row / (box[1] * box[2] * box[3])};
    const unsigned char* from = map->base;
    bool inside = true;
    for (int i = 1; i < 5; ++i) {
      inside &= first[i] + steps[i] < map->sizes[i];
      from += (first[i] + steps[i]) * map->strides[i - 1];
    }
    for (int piece = 0; inside && piece < ROW / PIECE; ++piece)
      std::memcpy(&data[row * ROW + (piece ^ row % 8) * PIECE], from + piece * PIECE, PIECE);
  }
  emulator::queue_copy(to, std::move(data), barrier);
}

DEVICE float as_float(u32 bits) { return emulator::bits<float>(bits); }
DEVICE float low(u32 pair) { return as_float(pair << 16); }
DEVICE float high(u32 pair) { return as_float(pair & 0xffff0000u); }
DEVICE u32 to_bf16(float value) {
  const u32 bits = emulator::bits<u32>(value);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 pack(float first, float second) { return to_bf16(second) << 16 | to_bf16(first); }
DEVICE float rounded(float value) { return low(pack(value, 0.0f)); }
DEVICE u32 multiply(u32 a, u32 b) { return pack(low(a) * low(b), high(a) * high(b)); }
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
  const u64 both = static_cast<u64>(b) << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<u32>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
DEVICE float exp2_fast(float x) { return std::exp2(x); }
DEVICE float reciprocal_root(float x) { return 1.0f / std::sqrt(x); }
DEVICE float divide(float a, float b) { return a / b; }

DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const emulator::Lane* lanes = emulator::exchange("mma", {a0, a1, a2, a3, b0, b1});
  const int g = lane() / 4, c = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int column = 2 * c + i % 2;
    float sum = 0.0f;
    for (int j = 0; j < 4; ++j)
      for (int deep = 0; deep < 2; ++deep) {
        const u32 a = lanes[4 * g + j].words[2 * deep + i / 2], b = lanes[4 * column + j].words[4 + deep];
        sum += low(a) * low(b) + high(a) * high(b);
      }
    d[i] += sum;
  }
}
