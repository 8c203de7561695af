// What follows a dense product, in one pass over rows that are still in the cache: bias and ReLU, and their way back.
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
  // backward: part[i] = grad[i] where out[i] > 0 (all of it without relu, and then nothing is written); sums += Σ part[i].
  const void* grad = nullptr;
  const void* out = nullptr;
  void* part = nullptr;
  void* sums = nullptr;  // or none
};

}  // namespace gnnfleet
