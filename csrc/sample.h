// Neighbour sampling by keyed draws, and the relabelling of what was sampled into a block.
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

// ---- frontier: the nodes of one type that a batch reads, in the order of its rows -----------------------------------
// place[v] is the row of node v, or -1; marks has a bit for every node that will get a row. Both belong to one thread's
// batch and are as they were at first (-1 and 0) after `leave`.

// Rows first .. for the nodes ids[0 .. n). Returns the first id out of range or there already as its position, or -1.
int64_t enter(const int64_t* ids, int64_t n, int64_t first, int64_t nodes, int32_t* place);

// sources[i] = col[edges[i]]; those without a row are marked.
template <typename Index>
void mark_sources(const Index* col, const int64_t* edges, int64_t n, const int32_t* place, uint64_t* marks, Index* sources,
                  int threads);

int64_t count_marked(const uint64_t* marks, int64_t words);

// Gives marked nodes rows first .. in ascending order, writes their ids and clears the marks.
void place_marked(uint64_t* marks, int64_t words, int64_t first, int32_t* place, int64_t* ids);

// rows[i] = place[sources[i]].
template <typename Index>
void relabel(const Index* sources, int64_t n, const int32_t* place, int32_t* rows, int threads);

void leave(const int64_t* ids, int64_t n, int32_t* place);

}  // namespace gnnfleet
