// Sorting by small integer keys: the primitives from which CSR, CSC and transposes are built.
#pragma once
#include <cstdint>

namespace gnnfleet {

// order[offsets[k] .. offsets[k+1]) become the positions i with keys[i] == k, ascending.
// offsets has buckets + 1 entries, order n. Returns the first key outside 0..buckets-1 as its position, or -1.
template <typename Index>
int64_t counting_sort(const Index* keys, int64_t n, int64_t buckets, int64_t* offsets, int64_t* order, int threads);

// Compressed rows to compressed columns, by one thread: offsets [cols + 1], and for every edge of a column its row and its
// position in the input, ascending within a column. Returns the first edge with a column out of range, or -1.
template <typename Index>
int64_t transpose(const int64_t* indptr, const Index* col, int64_t rows, int64_t cols, int64_t* offsets, Index* row, int64_t* order);

// Compressed rows whose self-loops are replaced by exactly one each, last in its row: first the row starts, then columns
// and, for every edge, its former position, -1 for the loops.
template <typename Index>
void count_looped(const int64_t* indptr, const Index* col, int64_t rows, int64_t* looped, int threads);
template <typename Index>
void fill_looped(const int64_t* indptr, const Index* col, int64_t rows, const int64_t* looped, Index* out, int64_t* edge, int threads);

// Edges by destination, then source, then input position: row starts, input positions, sources in that order.
// For fewer than 2^32 edges. Returns the first edge with an end out of range as its position, or -1.
int64_t sort_edges(const int32_t* src, const int32_t* dst, int64_t n, int64_t num_src, int64_t num_dst, int64_t* indptr,
                   int64_t* order, int32_t* sorted, int threads);

// The same without the positions: half the memory, for edges that carry no data.
int64_t sort_rows(const int32_t* src, const int32_t* dst, int64_t n, int64_t num_src, int64_t num_dst, int64_t* indptr,
                  int32_t* sorted, int threads);

// Distinct entries of sorted rows: first the row starts, then entries and their counts.
void count_distinct(const int64_t* indptr, const int32_t* sorted, int64_t rows, int64_t* distinct, int threads);
void take_distinct(const int64_t* indptr, const int32_t* sorted, int64_t rows, const int64_t* distinct, int32_t* out,
                   int32_t* times, int threads);

// Segment i of `values` (entries of `width` bytes) copied to segment rows[i] of `out`, which has the same length.
void put_segments(const uint8_t* values, const int64_t* from, const int64_t* rows, int64_t n, int64_t width, const int64_t* to,
                  uint8_t* out, int threads);

}  // namespace gnnfleet
