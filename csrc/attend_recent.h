// Attention of queries over their latest events. What an event shows is x = [row of its other end, its features,
// cos(since * frequency + phase)], made where it is needed and never stored. A score is LeakyReLU(query · x + offset); what
// comes out of a head is the sum of x by softmax of the scores. Without an event (near < 0) a place does not count.
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
  // Dropout of shares, by the words of a query's id; without it threshold is 0.
  const int64_t* ids;
  uint64_t key;
  uint32_t place, threshold;
  double scale;
  int threads;
  // forward writes, backward reads:
  void* score;  // [n, heads, places] before LeakyReLU
  // forward:
  void* out;     // [n, heads, width]
  void* weight;  // [n, heads] shares summed
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
