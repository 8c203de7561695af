// Cutting the in-edges of one part into blocks by the part of their source.
#pragma once
#include <cstdint>

namespace gnnfleet {

// In-edges of the destinations dst[0..n) (store ids, in part order) of one edge type, cut by owner[src].
template <typename Index>
struct InEdges {
  const int64_t* indptr;   // whole edge type
  const Index* src;        // whole edge type, store ids
  const int64_t* dst;
  int64_t n;
  const int32_t* owner;    // of every source node: its part ...
  const int32_t* local;    // ... and its row there
  int64_t parts;
};

// edges[q], rows[q]: number of edges from part q, and of their distinct destinations. Both are cleared first.
template <typename Index>
void count_blocks(const InEdges<Index>& in, int64_t* edges, int64_t* rows);

// Fills the blocks, concatenated by q: `row` the local destinations with edges from q, `degree` their number, and per edge
// `col` (the source's row at its owner) and `edge_id`. Starts are prefix sums of what count_blocks returned and advance.
template <typename Index>
void fill_blocks(const InEdges<Index>& in, int64_t* edge_start, int64_t* row_start, int32_t* row, int64_t* degree,
                 int32_t* col, int64_t* edge_id);

// `rank` (range entries) becomes the rank of each value among the distinct values, -1 for values that do not occur.
// Returns the number of distinct values. n = 0 is legal.
int64_t rank_distinct(const int32_t* values, int64_t n, int64_t range, int32_t* rank);

}  // namespace gnnfleet
