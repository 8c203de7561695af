// Edge-softmax attention over compressed rows, forward and backward. Arguments are one struct, because every
// instruction set has its own copy of the functions behind one table.
//
//   x_ij = src_j + dst_i (+ edge_ij)                    per head h of `heads`
//   add:  s_ij = LeakyReLU(x_ij)                         depth 1
//   v2:   s_ij = <vector, LeakyReLU(x_ij)>               depth D
//   dot:  s_ij = scale <src_j, dst_i>                    depth D
//   out_i = sum_j k_ij p_ij value_j,   p_ij = softmax over j of s_ij,   k_ij the dropout factor
#pragma once
#include <cstdint>

#include "aggregate.h"

namespace gnnfleet {

enum class Score : int { add = 0, v2 = 1, dot = 2 };

// Rows of numbers, `stride` elements apart, so that several arrays can be columns of one message.
struct Matrix {
  const void* data = nullptr;
  int64_t stride = 0;
};

// Dropout by key: head h of an edge keeps its weight unless word h % 4 of turn h / 4 of its id is below the threshold.
struct Keep {
  bool on = false;
  uint64_t key = 0;
  uint32_t place = 0;
  uint32_t threshold = 0;
  double factor = 1;
  const int64_t* ids = nullptr;  // by position; null: the position itself
};

// `structure` goes by destination, or by source with the destinations as columns: "own" rows are those of the structure
// (after structure.rows), "other" rows those of its columns. value is `element`, everything else its wide type.
struct AttendArgs {
  Rows structure{};
  const int64_t* positions = nullptr;  // of an edge in edge, d_edge and keep.ids; null: in the order of the structure
  Element element = Element::float32;
  Score score = Score::add;
  int64_t heads = 1, channels = 1, depth = 1;
  double slope = 0, scale = 1;
  Keep keep;
  Matrix value, src, dst, edge;
  const void* vector = nullptr;
  // Forward: the running state of each own row. `fresh` rows start here, `finish` divides by den and turns max into lse.
  void* num = nullptr;
  void* max = nullptr;
  void* den = nullptr;
  void* pos = nullptr;   // additive only, may be null: the part of num, and of den, whose x is positive
  void* mass = nullptr;
  bool fresh = false, finish = false;
  // Backward. side: [lse | D] of each destination, D = <grad, out>. Gradients are added to with `add`; null: not computed.
  Matrix grad, side;
  void* d_value = nullptr;
  void* d_src = nullptr;
  void* d_dst = nullptr;
  void* d_edge = nullptr;
  void* d_vector = nullptr;
  bool add = false;
  int threads = 1;
};

// Backward part that needs destinations only: side = [dst | lse | D] and, for additive scores, d_dst.
struct AttendLocalArgs {
  Element element = Element::float32;  // float32 or float64
  int64_t n = 0, heads = 1, channels = 1;
  double slope = 0;
  const void* grad = nullptr;
  const void* out = nullptr;
  const void* lse = nullptr;
  const void* dst = nullptr;   // [n, heads]; null: side is [lse | D]
  const void* pos = nullptr;   // with mass and d_dst, or none of them
  const void* mass = nullptr;
  void* side = nullptr;
  void* d_dst = nullptr;
  int threads = 1;
};

}  // namespace gnnfleet
