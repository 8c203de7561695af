// Linear and max aggregation over compressed rows, and the gradients of their inputs. Arguments are one struct,
// because every instruction set has its own copy of the functions behind one table.
#pragma once
#include <cstdint>

namespace gnnfleet {

enum class Element : int { float32 = 0, bfloat16 = 1, float64 = 2 };

// Row i of the structure has columns col[indptr[i] .. indptr[i+1]) and is row `rows[i]` of the output (i without rows).
struct Rows {
  const int64_t* indptr;
  const void* col;        // int32, or int64 when wide
  bool wide;
  const int32_t* rows;    // may be null
  int64_t n;
};

// out[rows[i]] = base[rows[i]] + row_scale[i] * sum_e weight[e] * col_scale[col[e]] * x[col[e]]. The three factors may be
// null. x is `element`, everything else its wide type (float32 for bfloat16); out and base are bfloat16 if `narrow`.
// `base` has the first `base_rows` rows of the output and may be the output itself; further rows start from 0.
struct SumArgs {
  Rows structure;
  const void* x;
  int64_t width;
  Element element;
  const void* weight;
  const void* row_scale;
  const void* col_scale;
  void* out;
  const void* base;
  int64_t base_rows;
  bool narrow;
  int threads;
};

// out[rows[i]] = max_e x[col[e]] elementwise, winner[rows[i]] = the number of the edge it came from, -1 without edges (out is 0
// then). Of equal values the lowest number wins in any order of edges; NaN is the largest value. With `merge` out
// and winner are a running maximum that the edges are added to. Output is float32 or float64.
struct MaxArgs {
  Rows structure;
  const int64_t* number;  // of each edge, 0 or more; null: its position
  const void* x;
  int64_t width;
  Element element;
  void* out;
  int64_t* winner;
  bool merge;
  int threads;
};

// Backward of max over the reversed structure: dx[rows[j]] (+)= sum over out-edges e of g[col[e]] where winner[col[e]] is the
// number of e: number[positions[e]]. Without numbers it is the position itself, without positions the index of the edge.
struct MaxBackArgs {
  Rows structure;
  const int64_t* number;
  const int64_t* positions;
  const void* grad;
  const int64_t* winner;
  int64_t width;
  Element element;   // of grad and dx: float32 or float64
  void* dx;
  bool add;
  int threads;
};

// dot[e] = <a[row of e], b[col[e]]> * scale[row]: the gradient of edge weights.
struct DotArgs {
  Rows structure;
  const void* a;
  const void* b;
  int64_t width;
  Element element;   // of both
  const void* row_scale;
  void* out;
  int threads;
};

}  // namespace gnnfleet
