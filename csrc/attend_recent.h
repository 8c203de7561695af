// Attention of queries over their latest events. The input of an event is x = [row of its other node, its features,
// cos(since * frequency + phase)], computed when needed and never stored. A score is LeakyReLU(query · x + offset); the
// output of a head is the sum of x weighted by the softmax of the scores. Slots without an event (near < 0) are skipped.
#pragma once
#include <cstdint>

namespace gnnfleet {

struct RecentArgs {
  bool wide;  // float64 instead of float32
  int64_t n, places, heads;  // queries, events of each, heads
  int64_t row_width, feature_width, time_width;
  int64_t rows;  // of `row`
  const void* query;   // [n, heads, width], width the three together
  const void* offset;  // [n, heads]
  const void* row;     // [rows, row_width]
  const int64_t* near;  // [n, places]
  const void* feature;  // [·, feature_width]
  const int64_t* edge;  // [n, places]
  const void* since;    // [n, places]
  const void* frequency;  // [time_width]
  const void* phase;      // [time_width]
  double slope;
  // Dropout of attention weights, by the words of a query's id; threshold 0 without dropout.
  const int64_t* ids;
  uint64_t key;
  uint32_t place, threshold;
  double scale;
  int threads;
  // forward writes, backward reads:
  void* score;  // [n, heads, places] before LeakyReLU
  // forward:
  void* out;     // [n, heads, width]
  void* weight;  // [n, heads] sums of attention weights
  // backward:
  const void* grad_out = nullptr;
  const void* grad_weight = nullptr;
  void* grad_query = nullptr;
  void* grad_offset = nullptr;
  void* grad_row = nullptr;  // [rows, row_width] or none
  void* grad_frequency = nullptr;
  void* grad_phase = nullptr;
};

}  // namespace gnnfleet
