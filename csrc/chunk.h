// A slice of a graph as read from disk: consecutive destinations with their in-edges.
#pragma once
#include <cstdint>

namespace gnnfleet {

// Destinations first .. first + count - 1; in-edges of destination first + i are src[indptr[i] .. indptr[i + 1]).
template <class Index>
struct EdgeChunk {
  int64_t first;
  int64_t count;
  const int64_t* indptr;  // count + 1 entries, the first is 0
  const Index* src;
};

}  // namespace gnnfleet
