// Where the time goes inside a layer, for measurements: with MEGA_TIMELINE, every SM leaves the clock of some points.
#pragma once

#ifdef MEGA_TIMELINE
__device__ unsigned timeline_words[256 * 64];  // [SMs][8 phases][8 points]

DEVICE unsigned*& timeline_now() {
  static __shared__ unsigned* now;
  return now;
}
DEVICE void mark_phase(bool wanted, int phase) {
  if (thread() == 0) timeline_now() = wanted ? timeline_words + cta() * 64 + phase * 8 : nullptr;
}
DEVICE void mark(int point) {
  if (thread() == 0 && timeline_now() != nullptr) {
    unsigned now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    timeline_now()[point] = now;
  }
}
extern "C" int mega_timeline(unsigned* to) {
  return static_cast<int>(cudaMemcpyFromSymbol(to, timeline_words, sizeof(timeline_words)));
}
#else
DEVICE void mark_phase(bool, int) {}
DEVICE void mark(int) {}
#endif
