// What the megakernel asks of a Hopper GPU, one small function per instruction. The CPU emulator of the tests implements the
// same names, so that everything above this file runs without a GPU as well.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

using u32 = uint32_t;
using u64 = uint64_t;
using bf16 = uint16_t;  // the bits of a bfloat16; arithmetic goes through the pair functions below

constexpr int CONSUMERS = 256;               // threads of the 8 warps that compute
constexpr int THREADS = CONSUMERS + 128;     // and a warp that streams weights, with three that only make its registers free
#ifndef MEGA_TIMEOUT_NS
#define MEGA_TIMEOUT_NS 4000000000ull
#endif

#define DEVICE __device__ __forceinline__

DEVICE int thread() { return threadIdx.x; }
DEVICE int lane() { return threadIdx.x & 31; }
DEVICE int cta() { return blockIdx.x; }
DEVICE int ctas() { return gridDim.x; }
DEVICE int warp() { return threadIdx.x >> 5; }

// Registers move from the streaming warps to the others: 8 warps of 240 and 4 of 24 fill an SM.
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }

DEVICE void sync_all() { __syncthreads(); }
DEVICE void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE int shuffle(int value, int source) { return __shfl_sync(~0u, value, source); }
DEVICE u32 vote(bool value) { return __ballot_sync(~0u, value); }

// To the compiler it is another value from here on.
template <class T>
DEVICE void keep_apart(T& value) {
  if constexpr (sizeof(T) == 8)
    asm volatile("" : "+l"(value));
  else
    asm volatile("" : "+r"(value));
}

// ---- global memory ----

// Data that other SMs write during the launch: L1 is not coherent with them, so read at L2.
DEVICE uint4 load_l2(const void* at) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
DEVICE u32 load_l2_word(const void* at) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
// Data that nobody writes during the launch.
DEVICE uint4 load_fixed(const void* at) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
DEVICE int load_fixed_int(const int* at) { return __ldg(at); }
DEVICE u32 load_fixed_word(const void* at) { return __ldg(static_cast<const u32*>(at)); }
// The same, read once by this SM.
DEVICE uint4 load_once(const void* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}
DEVICE void prefetch_l2(const void* at, u32 bytes) {  // multiples of 16
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
}

// ---- synchronisation across SMs ----

DEVICE void store_release(u32* at, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
DEVICE u32 load_relaxed(const u32* at) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DEVICE u32 take_ticket(u32* at) {
  u32 v;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DEVICE void fence_gpu() { __threadfence(); }
// The end of the kernel before this one, should a launch ever allow to begin earlier: today's does not.
DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A waiting loop calls this each time around: a mistake must end in an error, not in a machine that hangs.
struct Watchdog {
  u32 rounds = 0;
  u64 start = 0;
  DEVICE void check() {
    if ((++rounds & 1023u) != 0) return;
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (start == 0) start = now;
    // Ends in "illegal address". With a trap, ptxas would not give the two roles different numbers of registers.
    if (now - start > MEGA_TIMEOUT_NS) asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(0) : "memory");
  }
};

// ---- the copy engine ----

DEVICE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }
DEVICE void barrier_init(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
DEVICE void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Until phase `phase` (from 0 on; -1 is over from the beginning) is complete, if the one before it is.
template <bool WATCHED>  // consumers do
DEVICE void barrier_wait(u64* barrier, int phase) {
  u32 done;
  Watchdog watchdog;
  do {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(phase & 1)
        : "memory");
    if (WATCHED && !done) watchdog.check();
  } while (!done);
}
// Weights pass through L2 once per step: they are the first to go.
DEVICE u64 streaming_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// What the engine is told of a matrix: models/cuda/tensor_map.py.
struct alignas(64) TensorMap {
  u64 words[16];
};
// A box of a stack of matrices, from this unit and block of input features on.
DEVICE void box_load(void* to, const TensorMap* map, int unit, int block, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %2, %2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(0), "r"(unit), "r"(block), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// ---- arithmetic ----

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE u32 pack(float first, float second) {  // round to nearest even, `first` in the low half
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
DEVICE float rounded(float value) { return low(pack(value, 0.0f)); }
DEVICE u32 multiply(u32 a, u32 b) {  // pairwise, rounded once
  u32 pair;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float reciprocal_root(float x) { return rsqrtf(x); }
DEVICE float divide(float a, float b) { return __fdividef(a, b); }

// d += a b for a 16 x 16 and b 16 x 8, the fragments of mma.m16n8k16: lane = 4 g + c holds a's rows g (a0, a2) and g + 8
// (a1, a3), b's column g, and d's rows g (d0, d1) and g + 8 (d2, d3) at columns 2 c and 2 c + 1.
DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
