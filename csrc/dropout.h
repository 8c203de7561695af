// Dropout by key: whether an element survives is a function of its row's store id and its column, so that any rank, any
// thread and the backward pass see the same mask without storing it.
#pragma once
#include <cstdint>

#include "aggregate.h"

namespace gnnfleet {

// out[i][f] = x[i][f] * scale where word f % 4 of philox({ids[i], f / 4, place}, key) >= threshold, else 0.
struct DropoutArgs {
  const void* x;
  void* out;
  Element element;
  const int64_t* ids;
  int64_t n, width;
  uint64_t key;
  uint32_t place, threshold;
  double scale;
  int threads;
};

}  // namespace gnnfleet
