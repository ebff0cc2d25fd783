// A barrier over all SMs. One SM adds 2^31 - (n - 1), the others 1: the top bit turns when the last one has arrived and the
// rest is zero again, so that the word needs no reset between launches, and every SM knows by counting which way it turns.
#pragma once

struct Grid {
  u32* word;
  u32 before;  // the top bit until the next barrier completes; only thread 0 knows

  DEVICE explicit Grid(u32* word) : word(word), before(0) {
    // It cannot turn before this SM has arrived for the first time.
    if (thread() == 0) before = load_acquire(word) & 0x80000000u;
  }
  // What the consumers of this SM have written is out.
  DEVICE void arrive() {
    sync_consumers();
    if (thread() == 0) add_release(word, cta() == 0 ? 0x80000000u - (ctas() - 1) : 1u);
  }
  DEVICE void wait() {
    if (thread() == 0) {
      Watchdog watchdog;
      while (((load_acquire(word) ^ before) & 0x80000000u) == 0) watchdog.check();
      before ^= 0x80000000u;
    }
    sync_consumers();
  }
  DEVICE void sync() {
    arrive();
    wait();
  }
};
