// Multilevel k-way partitioning of a weighted graph in memory, edge cut under two balance constraints.
//
// Made for the graph between clusters of a stream (stream.h), which is small and held in 32 bits: contract by capped label
// propagation, grow parts on the smallest graph several times, then project back and refine with moves that may go uphill.
// The graph is symmetric CSR without loops. The result depends on the arguments only. Caps are kept whenever the search finds
// a way; the caller must check.
#pragma once

#include <cstdint>
#include <vector>

namespace gnnfleet {

struct KwayGraph {
  int32_t nodes;
  const int32_t* indptr;
  const int32_t* neighbour;
  const int32_t* weight;  // of edges
  const int64_t* load;    // of nodes: what is balanced
  const int64_t* size;    // of nodes: what is kept sane beside it
};

struct KwayCaps {
  int64_t load;
  int64_t size;
};

// A graph that owns its arrays, and how the finer graph's nodes map to its own.
struct KwayLevel {
  std::vector<int32_t> indptr, neighbour, weight;
  std::vector<int64_t> load, size;
  std::vector<int32_t> map;

  KwayGraph view() const;
};

// splitmix64: unlike those of the standard library, the same numbers everywhere.
class KwayRandom {
 public:
  explicit KwayRandom(uint64_t seed) : state_(seed) {}
  uint64_t next();
  uint64_t below(uint64_t bound) { return next() % bound; }
  std::vector<int32_t> permutation(int32_t count);

 private:
  uint64_t state_;
};

// One step of contraction; no node grows beyond the caps. With `within` (or null), nodes of different parts stay apart.
KwayLevel kway_coarsen(const KwayGraph& graph, KwayCaps caps, const int32_t* within, KwayRandom& random);

// Grows parts from random seeds one after another.
void kway_grow(const KwayGraph& graph, int32_t parts, KwayCaps caps, KwayRandom& random, int32_t* part);

// Improves an assignment in place: first towards the caps, then the cut. Returns the cut, doubled, or the greatest int64 if a
// cap is exceeded.
int64_t kway_refine(const KwayGraph& graph, int32_t parts, KwayCaps caps, int32_t* part);

// Fills part (graph.nodes) with values in [0, parts).
void partition_kway(const KwayGraph& graph, int32_t parts, KwayCaps caps, uint64_t seed, int32_t* part);

}  // namespace gnnfleet
