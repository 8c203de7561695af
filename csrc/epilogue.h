// Bias and ReLU after a dense product, in one pass over rows that are still in the cache, and their backward.
#pragma once
#include <cstdint>

#include "aggregate.h"

namespace gnnfleet {

struct EpilogueArgs {
  Element element;  // of rows; bias and sums are its wide type (float32 for bfloat16)
  bool relu;
  int64_t n, width;
  int threads;
  // forward: x[i] += bias, then ReLU.
  void* x = nullptr;
  const void* bias = nullptr;  // or none
  // backward: part[i] = grad[i] if out[i] > 0 else 0; sums += Σ part[i]. Without relu part is grad and is not written.
  const void* grad = nullptr;
  const void* out = nullptr;
  void* part = nullptr;
  void* sums = nullptr;  // or none
};

}  // namespace gnnfleet
