// Neighbour sampling by keyed draws.
//
// The draws of a node depend on (key, hop, relation, store id) only, not on threads or the order of seeds.
#pragma once
#include <cstdint>

#include "philox.h"

namespace gnnfleet {

// The in-edges of one relation by destination, and the sampling options. Without weights every edge is equally likely. A
// negative fanout takes every edge; otherwise edges of weight 0 are never taken.
struct SampleArgs {
  const int64_t* indptr;
  const float* weight;  // or null
  const int64_t* seeds;
  const int64_t* ids;  // store ids, the keys of draws; null: the seeds are store ids
  int64_t n;
  int64_t fanout;
  bool replace;
  Draws draws;
  int threads;
};

// offsets [n + 1]: first edge of each seed.
void count_samples(const SampleArgs& args, int64_t* offsets);

// edges[offsets[i] .. offsets[i + 1]): positions of the edges drawn for seed i, ascending.
void draw_samples(const SampleArgs& args, const int64_t* offsets, int64_t* edges);

}  // namespace gnnfleet
