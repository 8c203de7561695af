#include "csr.h"

#include <omp.h>

#include <algorithm>
#include <vector>

namespace gnnfleet {

// Each thread owns a range of buckets balanced by population and walks all keys: no atomics, no per-thread histograms
// of the size of the graph, and a fixed order. Walking the keys again per thread is a sequential read; the scattered
// writes, which cost the most, are split.
template <typename Index>
int64_t counting_sort(const Index* keys, int64_t n, int64_t buckets, int64_t* offsets, int64_t* order, int threads) {
  std::fill(offsets, offsets + buckets + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t key = static_cast<int64_t>(keys[i]);
    if (key < 0 || key >= buckets) return i;
    ++offsets[key + 1];
  }
  for (int64_t k = 0; k < buckets; ++k) offsets[k + 1] += offsets[k];
  if (n == 0) return -1;

  std::vector<int64_t> cursor(offsets, offsets + buckets);
  threads = std::max(1, std::min<int>(threads, 16));
#pragma omp parallel num_threads(threads)
  {
    const int64_t parts = omp_get_num_threads(), part = omp_get_thread_num();
    const auto bound = [&](int64_t p) {
      return std::lower_bound(offsets, offsets + buckets, n * p / parts) - offsets;
    };
    const int64_t first = bound(part), last = part + 1 == parts ? buckets : bound(part + 1);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t key = static_cast<int64_t>(keys[i]);
      if (key >= first && key < last) order[cursor[key]++] = i;
    }
  }
  return -1;
}

template int64_t counting_sort<int32_t>(const int32_t*, int64_t, int64_t, int64_t*, int64_t*, int);
template int64_t counting_sort<int64_t>(const int64_t*, int64_t, int64_t, int64_t*, int64_t*, int);

}  // namespace gnnfleet
