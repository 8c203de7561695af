// The gates of a GRU, element by element: what is left of a cell when its products are done, and their way back.
#pragma once
#include <cstdint>

namespace gnnfleet {

struct GateArgs {
  bool wide;  // float64 instead of float32
  int64_t n, width;
  int threads;
  // given, kept [n, 3 width]: reset, keep, new. forward: given becomes the gates r, z and the candidate c.
  void* given;
  const void* kept;
  const void* memory;  // [n, width]
  // forward: out = c + z (memory − c) with r = σ(given_r + kept_r), z = σ(given_z + kept_z), c = tanh(given_n + r kept_n).
  void* out = nullptr;
  // backward:
  const void* grad = nullptr;  // [n, width] of out
  void* grad_given = nullptr;  // [n, 3 width]
  void* grad_kept = nullptr;   // [n, 3 width]
};

}  // namespace gnnfleet
