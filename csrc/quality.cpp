#include "quality.h"

namespace gnnfleet {

template <typename Index>
void count_traffic(const EdgeChunk<Index>& chunk, const int32_t* part, int64_t parts, int64_t base, uint64_t* seen,
                   int64_t* edges, int64_t* rows) {
  for (int64_t k = 0; k < chunk.count; ++k) {
    const int64_t p = part[chunk.first + k];
    const bool in_group = p >= base && p < base + 64;
    if (!in_group && base != 0) continue;
    const uint64_t bit = in_group ? uint64_t{1} << (p - base) : 0;
    for (int64_t e = chunk.indptr[k]; e < chunk.indptr[k + 1]; ++e) {
      const int64_t j = static_cast<int64_t>(chunk.src[e]);
      const int64_t q = part[j];
      if (base == 0) ++edges[p * parts + q];
      if (p != q && in_group && !(seen[j] & bit)) {
        seen[j] |= bit;
        ++rows[p * parts + q];
      }
    }
  }
}

template void count_traffic<int32_t>(const EdgeChunk<int32_t>&, const int32_t*, int64_t, int64_t, uint64_t*, int64_t*, int64_t*);
template void count_traffic<int64_t>(const EdgeChunk<int64_t>&, const int32_t*, int64_t, int64_t, uint64_t*, int64_t*, int64_t*);

}  // namespace gnnfleet
