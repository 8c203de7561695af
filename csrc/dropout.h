// Dropout by key: the mask is a function of the row's store id and the column, so all ranks, threads and the backward pass
// compute the same mask without storing it.
#pragma once
#include <cstdint>

#include "aggregate.h"

namespace gnnfleet {

// out[i][f] = x[i][f] * scale if word f % 4 of philox({ids[i], f / 4, place}, key) >= threshold, else 0.
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
