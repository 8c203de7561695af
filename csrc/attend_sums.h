// Weighted sums of the other rows of a block of edges, one weight per head: the memory-bound part of attention. The dual
// form computes a second sum, with the weights `upper`, from the same loads.
#pragma once
#include "attend_edges.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

#if GNNFLEET_VECTOR_BYTES == 64
constexpr int kTile = 8;  // vectors of one row in registers: 32 of them with the dual sums
#else
constexpr int kTile = 4;
#endif

template <typename T>
struct Sums {
  using A = wide_t<T>;
  const T* table;
  int64_t stride, heads, channels;
  const A* weight;   // [edges, heads]
  const A* upper;    // the same, for the second sum
  const A* shrink;   // [heads] factor of the sums so far; null: they start at 0
  A* sum;            // [heads * channels]
  A* upper_sum;
  const typename Exp<A>::whole* head_of;  // [heads * channels] the head of a column
};

// Columns f .. f + Tile * lanes; `channels` is a multiple of the lanes, so that a vector belongs to one head.
template <int Tile, bool Dual, typename T>
inline void sum_tile(const Sums<T>& a, const Edges& edges, int64_t f) {
  using A = wide_t<T>;
  constexpr int lanes = Lanes<A>::count;
  vec_t<A> sum[Tile] = {}, upper[Tile] = {};
  int64_t head[Tile];
  for (int t = 0; t < Tile; ++t) head[t] = (f + t * lanes) / a.channels;
  if (a.shrink) {
    for (int t = 0; t < Tile; ++t) {
      sum[t] = load(a.sum + f + t * lanes) * a.shrink[head[t]];
      if constexpr (Dual) upper[t] = load(a.upper_sum + f + t * lanes) * a.shrink[head[t]];
    }
  }
  const T* table = a.table + f;
  for (int64_t k = 0; k < edges.count; ++k) {
    if (k + kAhead < edges.reach) prefetch_row(table + edges.col[k + kAhead] * a.stride, Tile * lanes);
    const T* row = table + edges.col[k] * a.stride;
    const A* weight = a.weight + k * a.heads;
    const A* above = a.upper + k * a.heads;
#pragma GCC unroll 8
    for (int t = 0; t < Tile; ++t) {
      const vec_t<A> value = load(row + t * lanes);
      sum[t] += value * weight[head[t]];
      if constexpr (Dual) upper[t] += value * above[head[t]];
    }
  }
  for (int t = 0; t < Tile; ++t) {
    store<A>(a.sum + f + t * lanes, sum[t]);
    if constexpr (Dual) store<A>(a.upper_sum + f + t * lanes, upper[t]);
  }
}

// One channel per head: every column has its own weight. Columns f .. f + Tile * lanes.
template <int Tile, bool Dual, typename T>
inline void sum_columns(const Sums<T>& a, const Edges& edges, int64_t f) {
  using A = wide_t<T>;
  constexpr int lanes = Lanes<A>::count;
  vec_t<A> sum[Tile] = {}, upper[Tile] = {};
  if (a.shrink) {
    for (int t = 0; t < Tile; ++t) {
      sum[t] = load(a.sum + f + t * lanes) * load(a.shrink + f + t * lanes);
      if constexpr (Dual) upper[t] = load(a.upper_sum + f + t * lanes) * load(a.shrink + f + t * lanes);
    }
  }
  for (int64_t k = 0; k < edges.count; ++k) {
    if (k + kAhead < edges.reach) prefetch_row(a.table + edges.col[k + kAhead] * a.stride + f, Tile * lanes);
    const T* row = a.table + edges.col[k] * a.stride + f;
    const A* weight = a.weight + k * a.heads + f;
    const A* above = a.upper + k * a.heads + f;
#pragma GCC unroll 8
    for (int t = 0; t < Tile; ++t) {
      const vec_t<A> value = load(row + t * lanes);
      sum[t] += value * load(weight + t * lanes);
      if constexpr (Dual) upper[t] += value * load(above + t * lanes);
    }
  }
  for (int t = 0; t < Tile; ++t) {
    store<A>(a.sum + f + t * lanes, sum[t]);
    if constexpr (Dual) store<A>(a.upper_sum + f + t * lanes, upper[t]);
  }
}

template <bool Dual, typename T>
void sum_columns(const Sums<T>& a, const Edges& edges) {
  constexpr int64_t lanes = Lanes<wide_t<T>>::count;
  int64_t f = 0;
  for (; f + 4 * lanes <= a.heads; f += 4 * lanes) sum_columns<4, Dual>(a, edges, f);
  for (; f < a.heads; f += lanes) sum_columns<1, Dual>(a, edges, f);
}

// Vectors `first` .. first + Tile of a row whose vectors may hold several heads: each takes its weights from the vector
// of all heads by a permutation. The last vector of a row ends with the row, and skips columns that are done.
template <int Tile, bool Dual, typename T>
inline void sum_mixed(const Sums<T>& a, const Edges& edges, int64_t first) {
  using A = wide_t<T>;
  constexpr int lanes = Lanes<A>::count;
  typedef typename Exp<A>::whole whole_t __attribute__((vector_size(GNNFLEET_VECTOR_BYTES)));
  const int64_t width = a.heads * a.channels;
  vec_t<A> sum[Tile] = {}, upper[Tile] = {};
  whole_t head[Tile];
  int64_t at[Tile];
  for (int t = 0; t < Tile; ++t) {
    at[t] = (first + t + 1) * lanes <= width ? (first + t) * lanes : width - lanes;
    std::memcpy(&head[t], a.head_of + at[t], sizeof head[t]);
    if (!a.shrink) continue;
    const vec_t<A> shrink = __builtin_shuffle(load(a.shrink), head[t]);
    sum[t] = load(a.sum + at[t]) * shrink;
    if constexpr (Dual) upper[t] = load(a.upper_sum + at[t]) * shrink;
  }
  for (int64_t k = 0; k < edges.count; ++k) {
    if (k + kAhead < edges.reach) prefetch_row(a.table + edges.col[k + kAhead] * a.stride + at[0], Tile * lanes);
    const T* row = a.table + edges.col[k] * a.stride;
    const vec_t<A> weight = load(a.weight + k * a.heads), above = load(a.upper + k * a.heads);
#pragma GCC unroll 4
    for (int t = 0; t < Tile; ++t) {
      const vec_t<A> value = load(row + at[t]);
      sum[t] += value * __builtin_shuffle(weight, head[t]);
      if constexpr (Dual) upper[t] += value * __builtin_shuffle(above, head[t]);
    }
  }
  for (int t = 0; t < Tile; ++t) {
    const int64_t done = (first + t) * lanes - at[t];
    if (done == 0) {
      store<A>(a.sum + at[t], sum[t]);
      if constexpr (Dual) store<A>(a.upper_sum + at[t], upper[t]);
    }
    for (int64_t l = done; done > 0 && l < lanes; ++l) {
      a.sum[at[t] + l] = sum[t][l];
      if constexpr (Dual) a.upper_sum[at[t] + l] = upper[t][l];
    }
  }
}

template <bool Dual, typename T>
void sum_mixed(const Sums<T>& a, const Edges& edges) {
  constexpr int64_t lanes = Lanes<wide_t<T>>::count;
  const int64_t vectors = (a.heads * a.channels + lanes - 1) / lanes;
  int64_t v = 0;
  for (; v + 4 <= vectors; v += 4) sum_mixed<4, Dual>(a, edges, v);
  if (vectors - v == 3) sum_mixed<3, Dual>(a, edges, v);
  else if (vectors - v == 2) sum_mixed<2, Dual>(a, edges, v);
  else if (vectors - v == 1) sum_mixed<1, Dual>(a, edges, v);
}

// Any number of heads and channels: sums in memory, a head at a time.
template <bool Dual, typename T>
inline void sum_any(const Sums<T>& a, const Edges& edges) {
  using A = wide_t<T>;
  const int64_t width = a.heads * a.channels;
  for (int64_t f = 0; f < width; ++f) {
    const A shrink = a.shrink ? a.shrink[f / a.channels] : A(0);
    a.sum[f] = a.shrink ? a.sum[f] * shrink : A(0);
    if constexpr (Dual) a.upper_sum[f] = a.shrink ? a.upper_sum[f] * shrink : A(0);
  }
  for (int64_t k = 0; k < edges.count; ++k) {
    if (k + kAhead < edges.reach) prefetch_row(a.table + edges.col[k + kAhead] * a.stride, width);
    for (int64_t h = 0; h < a.heads; ++h) {
      const T* __restrict row = a.table + edges.col[k] * a.stride + h * a.channels;
      const A weight = a.weight[k * a.heads + h], above = a.upper[k * a.heads + h];
      A* __restrict sum = a.sum + h * a.channels;
      A* __restrict upper = a.upper_sum + h * a.channels;
#pragma omp simd
      for (int64_t c = 0; c < a.channels; ++c) {
        const A value = widen(row[c]);
        sum[c] += weight * value;
        if constexpr (Dual) upper[c] += above * value;
      }
    }
  }
}

template <bool Dual, typename T>
void sum_edges(const Sums<T>& a, const Edges& edges) {
  constexpr int64_t lanes = Lanes<wide_t<T>>::count;
  const int64_t width = a.heads * a.channels;
  if (a.channels == 1 && a.heads % lanes == 0) return sum_columns<Dual>(a, edges);
  if (a.channels % lanes) {
    // Without register permutations, as in the oldest instruction sets, mixed vectors are slower.
    const bool mixed = GNNFLEET_VECTOR_BYTES >= 32 && a.heads <= lanes && width >= lanes;
    return mixed ? sum_mixed<Dual>(a, edges) : sum_any<Dual>(a, edges);
  }
  int64_t f = 0;
  for (; f + kTile * lanes <= width; f += kTile * lanes) sum_tile<kTile, Dual>(a, edges, f);
  if constexpr (kTile > 4) {
    if (f + 4 * lanes <= width) sum_tile<4, Dual>(a, edges, f), f += 4 * lanes;
  }
  if (f + 2 * lanes <= width) sum_tile<2, Dual>(a, edges, f), f += 2 * lanes;
  if (f + lanes <= width) sum_tile<1, Dual>(a, edges, f);
}

template <typename T>
void sum_edges(const Sums<T>& a, const Edges& edges) {
  if (a.upper_sum) sum_edges<true>(a, edges);
  else sum_edges<false>(a, edges);
}

}  // namespace
}  // namespace gnnfleet::GNNFLEET_ISA
