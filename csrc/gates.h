// The gates of a GRU, element by element: everything except the products, forward and backward.
#pragma once
#include <cstdint>

namespace gnnfleet {

struct GateArgs {
  bool wide;  // float64 instead of float32
  int64_t n, width;
  int threads;
  // [n, 3 width]: reset, update, candidate. forward: input_gates become the gates r, z and the candidate c.
  void* input_gates;
  const void* memory_gates;
  const void* memory;  // [n, width]
  // forward: out = c + z (memory − c), with i = input_gates and m = memory_gates:
  // r = σ(i_r + m_r), z = σ(i_z + m_z), c = tanh(i_c + r m_c).
  void* out = nullptr;
  // backward:
  const void* grad = nullptr;  // [n, width] of out
  void* grad_input_gates = nullptr;  // [n, 3 width]
  void* grad_memory_gates = nullptr;   // [n, 3 width]
};

}  // namespace gnnfleet
