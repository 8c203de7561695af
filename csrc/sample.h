// Neighbour sampling by keyed draws.
//
// What is drawn for a node is a function of (key, hop, relation, store id): neither threads nor the order of seeds matter.
#pragma once
#include <cstdint>

#include "philox.h"

namespace gnnfleet {

// The in-edges of one relation by destination, and how they are drawn from. Without weights every edge is as likely as
// another. A negative fanout takes every edge; otherwise edges of weight 0 are never taken.
struct SampleArgs {
  const int64_t* indptr;
  const float* weight;  // or null
  const int64_t* seeds;
  const int64_t* ids;  // what draws go by: store ids, where rows are numbered otherwise; the seeds themselves if not
  int64_t n;
  int64_t fanout;
  bool replace;
  Draws draws;
  int threads;
};

// offsets [n + 1]: where the edges drawn for each seed begin.
void count_samples(const SampleArgs& args, int64_t* offsets);

// edges[offsets[i] .. offsets[i + 1]): positions of the edges drawn for seed i, ascending.
void draw_samples(const SampleArgs& args, const int64_t* offsets, int64_t* edges);

}  // namespace gnnfleet
