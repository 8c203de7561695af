// Time features cos(since * frequency + phase), and the sines that backward needs.
#pragma once
#include <cstdint>

namespace gnnfleet {

struct CosineArgs {
  bool wide;  // float64 instead of float32
  int64_t n, width;
  const void* since;      // [n]
  const void* frequency;  // [width]
  const void* phase;      // [width]
  void* cosine;           // [n, width]
  void* sine;             // [n, width]
  int threads;
};

}  // namespace gnnfleet
