// Activations without a barrier: small variants leave a mark in every word of a buffer that is not written yet, and readers ask
// until it is gone.
//
// No conversion to bfloat16 gives the pair of halves 0xffff, so that it can be the mark. Each of x after OUT, x after DOWN, qkv,
// attended and act has COPIES copies, used by layer in turn. The thread that writes a word in a layer puts the mark back into
// that of the layer before: its readers are done, since what is written now depends on everything that any of them made of
// it (every product needs all words of its rows, every word of qkv goes into some word of attended). The word is used again two
// layers later, by the same thread, or, where tasks of attention are split, behind a ticket that is taken in the layer
// between. A launch begins with marks everywhere and one barrier over all SMs.
#pragma once

#ifndef MEGA_MARKED_ROWS
#define MEGA_MARKED_ROWS 0  // variants for up to so many rows do this; the others have a barrier after each phase
#endif

constexpr u32 UNWRITTEN = 0xffffffffu;
constexpr int COPIES = 3;

DEVICE bool unwritten(const uint4& words) {
  const u32 one = words.x > words.y ? words.x : words.y, two = words.z > words.w ? words.z : words.w;
  return (one > two ? one : two) == UNWRITTEN;
}

// Words that may have been read before they were written.
template <int COUNT>
DEVICE void complete(uint4 (&words)[COUNT], const bf16* const (&from)[COUNT]) {
  Watchdog watchdog;
  for (bool again = true; again;) {
    again = false;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (unwritten(words[i])) {
        words[i] = load_marked(from[i]);
        again = true;
      }
    if (again) watchdog.check();
  }
}

// A buffer of `width` columns in the copies of a layer: what is written now, and how far from it the words lie that get their
// mark back.
template <int ROWS>
struct Copies {
  static constexpr bool MARKED = ROWS <= MEGA_MARKED_ROWS;

  DEVICE static bf16* of(bf16* base, int width, int layer, int set = 0) {
    return MARKED ? base + (set * COPIES + layer % COPIES) * ROWS * width : base;
  }
  DEVICE static int behind(int width, int layer) {
    return MARKED ? ((layer + COPIES - 1) % COPIES - layer % COPIES) * ROWS * width : 0;
  }
  DEVICE static void mark_all(bf16* base, int width, int sets) {
    const int count = sets * COPIES * ROWS * width / 8;
    for (int i = cta() * CONSUMERS + thread(); i < count; i += ctas() * CONSUMERS)
      reinterpret_cast<uint4*>(base)[i] = make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
  }
};

template <bool MARKED>
DEVICE void store_pair(bf16* at, u32 pair, int behind) {
  if constexpr (MARKED) {
    store_marked(at, pair);
    store_marked(at + behind, UNWRITTEN);
  } else {
    *reinterpret_cast<u32*>(at) = pair;
  }
}
