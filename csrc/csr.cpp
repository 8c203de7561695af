#include "csr.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace gnnfleet {
namespace {

constexpr int64_t kGrain = 1 << 14;  // edges; with less work, starting threads costs more than they save
constexpr int64_t kRows = 512;  // rows per task: enough to hide scheduling, few enough to balance hubs

template <typename Index>
bool outside(Index key, int64_t buckets) {
  return static_cast<uint64_t>(static_cast<int64_t>(key)) >= static_cast<uint64_t>(buckets);
}

void accumulate(int64_t* offsets, int64_t buckets) {
  for (int64_t k = 0; k < buckets; ++k) offsets[k + 1] += offsets[k];
}

// put(position, i) for every key i, in input order within a bucket. Each thread owns a range of buckets balanced by
// population and reads all keys: no atomics, no histograms per thread, and a fixed order. Reading the keys once per
// thread is sequential; the scattered writes, which cost the most, are split.
template <typename Index, typename Put>
void scatter(const Index* keys, int64_t n, int64_t buckets, const int64_t* offsets, int threads, Put put) {
  std::vector<int64_t> cursor(offsets, offsets + buckets);
  threads = std::max(1, std::min<int>(threads, 16));
#pragma omp parallel num_threads(threads) if (n >= kGrain)
  {
    const int64_t parts = omp_get_num_threads(), part = omp_get_thread_num();
    const auto bound = [&](int64_t p) {
      return std::lower_bound(offsets, offsets + buckets, n * p / parts) - offsets;
    };
    const int64_t first = bound(part), last = part + 1 == parts ? buckets : bound(part + 1);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t key = static_cast<int64_t>(keys[i]);
      if (key >= first && key < last) put(cursor[key]++, i);
    }
  }
}

int64_t count_ends(const int32_t* src, const int32_t* dst, int64_t n, int64_t num_src, int64_t num_dst, int64_t* indptr) {
  std::fill(indptr, indptr + num_dst + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    if (outside(src[i], num_src) || outside(dst[i], num_dst)) return i;
    ++indptr[dst[i] + 1];
  }
  accumulate(indptr, num_dst);
  return -1;
}

template <typename Item>
void sort_row(Item* first, Item* last) {
  if (!std::is_sorted(first, last)) std::sort(first, last);
}

}  // namespace

template <typename Index>
int64_t counting_sort(const Index* keys, int64_t n, int64_t buckets, int64_t* offsets, int64_t* order, int threads) {
  std::fill(offsets, offsets + buckets + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    if (outside(keys[i], buckets)) return i;
    ++offsets[static_cast<int64_t>(keys[i]) + 1];
  }
  accumulate(offsets, buckets);
  scatter(keys, n, buckets, offsets, threads, [=](int64_t at, int64_t i) { order[at] = i; });
  return -1;
}

template int64_t counting_sort<int32_t>(const int32_t*, int64_t, int64_t, int64_t*, int64_t*, int);
template int64_t counting_sort<int64_t>(const int64_t*, int64_t, int64_t, int64_t*, int64_t*, int);

template <typename Index>
int64_t transpose(const int64_t* indptr, const Index* col, int64_t rows, int64_t cols, int64_t* offsets, Index* row, int64_t* order) {
  std::fill(offsets, offsets + cols + 1, 0);
  for (int64_t e = 0; e < indptr[rows]; ++e) {
    if (outside(col[e], cols)) return e;
    ++offsets[static_cast<int64_t>(col[e]) + 1];
  }
  accumulate(offsets, cols);
  // The offsets serve as cursors: each ends where the next one began.
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t e = indptr[r]; e < indptr[r + 1]; ++e) {
      const int64_t at = offsets[col[e]]++;
      row[at] = static_cast<Index>(r);
      order[at] = e;
    }
  }
  std::move_backward(offsets, offsets + cols, offsets + cols + 1);
  offsets[0] = 0;
  return -1;
}

template int64_t transpose<int32_t>(const int64_t*, const int32_t*, int64_t, int64_t, int64_t*, int32_t*, int64_t*);
template int64_t transpose<int64_t>(const int64_t*, const int64_t*, int64_t, int64_t, int64_t*, int64_t*, int64_t*);

template <typename Index>
void count_looped(const int64_t* indptr, const Index* col, int64_t rows, int64_t* looped, int threads) {
  looped[0] = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic, kRows) if (threads > 1 && indptr[rows] >= kGrain)
  for (int64_t row = 0; row < rows; ++row) {
    int64_t count = 1;
    for (int64_t e = indptr[row]; e < indptr[row + 1]; ++e) count += static_cast<int64_t>(col[e]) != row;
    looped[row + 1] = count;
  }
  accumulate(looped, rows);
}

template <typename Index>
void fill_looped(const int64_t* indptr, const Index* col, int64_t rows, const int64_t* looped, Index* out, int64_t* edge, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, kRows) if (threads > 1 && indptr[rows] >= kGrain)
  for (int64_t row = 0; row < rows; ++row) {
    int64_t at = looped[row];
    for (int64_t e = indptr[row]; e < indptr[row + 1]; ++e) {
      if (static_cast<int64_t>(col[e]) == row) continue;
      out[at] = col[e];
      edge[at++] = e;
    }
    out[at] = static_cast<Index>(row);
    edge[at] = -1;
  }
}

template void count_looped<int32_t>(const int64_t*, const int32_t*, int64_t, int64_t*, int);
template void count_looped<int64_t>(const int64_t*, const int64_t*, int64_t, int64_t*, int);
template void fill_looped<int32_t>(const int64_t*, const int32_t*, int64_t, const int64_t*, int32_t*, int64_t*, int);
template void fill_looped<int64_t>(const int64_t*, const int64_t*, int64_t, const int64_t*, int64_t*, int64_t*, int);

int64_t sort_edges(const int32_t* src, const int32_t* dst, int64_t n, int64_t num_src, int64_t num_dst, int64_t* indptr,
                   int64_t* order, int32_t* sorted, int threads) {
  const int64_t wrong = count_ends(src, dst, n, num_src, num_dst, indptr);
  if (wrong >= 0) return wrong;
  // (source, position) in one word sorts as the pair does; the words are in the memory of `order` until they are split.
  scatter(dst, n, num_dst, indptr, threads, [=](int64_t at, int64_t i) { order[at] = static_cast<int64_t>(src[i]) << 32 | i; });
#pragma omp parallel for num_threads(threads) schedule(dynamic, kRows) if (n >= kGrain)
  for (int64_t row = 0; row < num_dst; ++row) {
    sort_row(order + indptr[row], order + indptr[row + 1]);
    for (int64_t at = indptr[row]; at < indptr[row + 1]; ++at) {
      sorted[at] = static_cast<int32_t>(order[at] >> 32);
      order[at] &= 0xffffffff;
    }
  }
  return -1;
}

int64_t sort_rows(const int32_t* src, const int32_t* dst, int64_t n, int64_t num_src, int64_t num_dst, int64_t* indptr,
                  int32_t* sorted, int threads) {
  const int64_t wrong = count_ends(src, dst, n, num_src, num_dst, indptr);
  if (wrong >= 0) return wrong;
  scatter(dst, n, num_dst, indptr, threads, [=](int64_t at, int64_t i) { sorted[at] = src[i]; });
#pragma omp parallel for num_threads(threads) schedule(dynamic, kRows) if (n >= kGrain)
  for (int64_t row = 0; row < num_dst; ++row) sort_row(sorted + indptr[row], sorted + indptr[row + 1]);
  return -1;
}

void count_distinct(const int64_t* indptr, const int32_t* sorted, int64_t rows, int64_t* distinct, int threads) {
  distinct[0] = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic, kRows) if (indptr[rows] >= kGrain)
  for (int64_t row = 0; row < rows; ++row) {
    int64_t count = 0;
    for (int64_t at = indptr[row]; at < indptr[row + 1]; ++at) count += at == indptr[row] || sorted[at] != sorted[at - 1];
    distinct[row + 1] = count;
  }
  accumulate(distinct, rows);
}

void take_distinct(const int64_t* indptr, const int32_t* sorted, int64_t rows, const int64_t* distinct, int32_t* out,
                   int32_t* times, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, kRows) if (indptr[rows] >= kGrain)
  for (int64_t row = 0; row < rows; ++row) {
    int64_t to = distinct[row] - 1;
    for (int64_t at = indptr[row]; at < indptr[row + 1]; ++at) {
      if (at == indptr[row] || sorted[at] != sorted[at - 1]) {
        out[++to] = sorted[at];
        times[to] = 0;
      }
      ++times[to];
    }
  }
}

void put_segments(const uint8_t* values, const int64_t* from, const int64_t* rows, int64_t n, int64_t width, const int64_t* to,
                  uint8_t* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n >= kGrain)
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(out + to[rows[i]] * width, values + from[i] * width, static_cast<size_t>((from[i + 1] - from[i]) * width));
  }
}

}  // namespace gnnfleet
