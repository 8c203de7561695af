#include "shard.h"

#include <algorithm>
#include <vector>

namespace gnnfleet {

template <typename Index>
void count_blocks(const InEdges<Index>& in, int64_t* edges, int64_t* rows) {
  std::fill(edges, edges + in.parts, 0);
  std::fill(rows, rows + in.parts, 0);
  std::vector<int64_t> last(static_cast<size_t>(in.parts), -1);
  for (int64_t i = 0; i < in.n; ++i) {
    for (int64_t e = in.indptr[in.dst[i]]; e < in.indptr[in.dst[i] + 1]; ++e) {
      const int64_t q = in.owner[in.src[e]];
      ++edges[q];
      if (last[static_cast<size_t>(q)] != i) {
        last[static_cast<size_t>(q)] = i;
        ++rows[q];
      }
    }
  }
}

template <typename Index>
void fill_blocks(const InEdges<Index>& in, int64_t* edge_start, int64_t* row_start, int32_t* row, int64_t* degree,
                 int32_t* col, int64_t* edge_id) {
  std::vector<int64_t> last(static_cast<size_t>(in.parts), -1);
  for (int64_t i = 0; i < in.n; ++i) {
    for (int64_t e = in.indptr[in.dst[i]]; e < in.indptr[in.dst[i] + 1]; ++e) {
      const int64_t u = static_cast<int64_t>(in.src[e]);
      const int64_t q = in.owner[u];
      if (last[static_cast<size_t>(q)] != i) {
        last[static_cast<size_t>(q)] = i;
        row[row_start[q]] = static_cast<int32_t>(i);
        degree[row_start[q]++] = 0;
      }
      ++degree[row_start[q] - 1];
      col[edge_start[q]] = in.local[u];
      edge_id[edge_start[q]++] = e;
    }
  }
}

int64_t rank_distinct(const int32_t* values, int64_t n, int64_t range, int32_t* rank) {
  std::fill(rank, rank + range, -1);
  for (int64_t i = 0; i < n; ++i) rank[values[i]] = 0;
  int32_t next = 0;
  for (int64_t v = 0; v < range; ++v) {
    if (rank[v] == 0) rank[v] = next++;
  }
  return next;
}

template void count_blocks<int32_t>(const InEdges<int32_t>&, int64_t*, int64_t*);
template void count_blocks<int64_t>(const InEdges<int64_t>&, int64_t*, int64_t*);
template void fill_blocks<int32_t>(const InEdges<int32_t>&, int64_t*, int64_t*, int32_t*, int64_t*, int32_t*, int64_t*);
template void fill_blocks<int64_t>(const InEdges<int64_t>&, int64_t*, int64_t*, int32_t*, int64_t*, int32_t*, int64_t*);

}  // namespace gnnfleet
