// A barrier over all SMs. Every SM counts its arrivals in a word of its own, which all others watch; the words keep their values
// between launches, all the same one, so that they need no reset.
#pragma once

struct Grid {
  u32* words;  // [SMs]
  u32 passed;  // the value that everyone has reached

  DEVICE explicit Grid(u32* words) : words(words), passed(load_relaxed(words + cta())) {}

  // What the consumers of this SM have written is out.
  DEVICE void arrive() {
    ++passed;
    sync_consumers();
    if (thread() == 0) store_release(words + cta(), passed);
  }
  // Everything that others wrote before they arrived is read with load_l2, so that L1 need not be invalidated.
  DEVICE void wait() const {
    for (int other = thread(); other < ctas(); other += CONSUMERS) {
      Watchdog watchdog;
      while (static_cast<int>(load_relaxed(words + other) - passed) < 0) watchdog.check();
    }
    sync_consumers();
  }
};
