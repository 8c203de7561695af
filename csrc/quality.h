// Cost of a partition, counted exactly from a stream of edges with eight bytes of state per node.
#pragma once
#include <cstdint>

#include "chunk.h"

namespace gnnfleet {

// Adds to edges[p * parts + q] the edges from part q into part p, and to rows[p * parts + q] (p != q) the distinct
// sources of q that p needs. Only destination parts base .. base + 63 count rows: bit p - base of seen[j] is set if
// source j is counted for p. One pass per 64 parts, seen cleared in between; edges are counted when base == 0.
template <typename Index>
void count_traffic(const EdgeChunk<Index>& chunk, const int32_t* part, int64_t parts, int64_t base, uint64_t* seen,
                   int64_t* edges, int64_t* rows);

}  // namespace gnnfleet
