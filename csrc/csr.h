// Stable counting sort by small integer keys: the one primitive from which CSR, CSC and transposes are built.
#pragma once
#include <cstdint>

namespace gnnfleet {

// order[offsets[k] .. offsets[k+1]) become the positions i with keys[i] == k, ascending.
// offsets has buckets + 1 entries, order n. Returns the first key outside 0..buckets-1 as its position, or -1.
template <typename Index>
int64_t counting_sort(const Index* keys, int64_t n, int64_t buckets, int64_t* offsets, int64_t* order, int threads);

}  // namespace gnnfleet
