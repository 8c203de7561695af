// The table of kernels that exist once per instruction set. Each set is compiled in its own namespace from the same
// sources with its own vector width; dispatch.cpp chooses when the module is loaded.
#pragma once
#include <cstdint>

#include "aggregate.h"
#include "attend.h"
#include "attend_recent.h"
#include "cosines.h"
#include "dropout.h"
#include "epilogue.h"
#include "gates.h"

namespace gnnfleet {

struct Kernels {
  const char* isa;
  // out[at[i]] = table[rows[i]] for rows of `width` bytes, out[i] without `at`; rows of out lie `stride` apart.
  void (*gather_rows)(const uint8_t* table, const void* rows, bool wide, const int64_t* at, int64_t n, int64_t width,
                      uint8_t* out, int64_t stride, int threads);
  // The same for rows of `width` half-precision numbers, widened to float32.
  void (*gather_half)(const uint16_t* table, const void* rows, bool wide, const int64_t* at, int64_t n, int64_t width,
                      float* out, int64_t stride, int threads);
  void (*gather_bfloat)(const uint16_t* table, const void* rows, bool wide, const int64_t* at, int64_t n, int64_t width,
                      float* out, int64_t stride, int threads);
  void (*aggregate_sum)(const SumArgs&);
  void (*aggregate_max)(const MaxArgs&);
  void (*aggregate_max_back)(const MaxBackArgs&);
  void (*edge_dot)(const DotArgs&);
  void (*dropout_rows)(const DropoutArgs&);
  void (*epilogue)(const EpilogueArgs&);
  void (*epilogue_back)(const EpilogueArgs&);
  // Attention (attend.h): softmax sums, their normalization, and backward for additive and for other scores.
  void (*attend_forward)(const AttendArgs&);
  void (*attend_finish)(const AttendArgs&, int64_t n);
  void (*attend_local)(const AttendLocalArgs&);
  void (*attend_source)(const AttendArgs&);
  void (*attend_edge_source)(const AttendArgs&);
  void (*attend_edge_target)(const AttendArgs&);
  void (*attend_recent)(const RecentArgs&);
  void (*attend_recent_back)(const RecentArgs&);
  void (*cosines)(const CosineArgs&);
  void (*gates)(const GateArgs&);
  void (*gates_back)(const GateArgs&);
};

namespace baseline { extern const Kernels table; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
#endif

const Kernels& kernels();                // the set in use
bool select_kernels(const char* isa);    // false if this machine or build lacks it
const char* supported_kernels();         // names, best first, separated by spaces

}  // namespace gnnfleet
