// Shared by forward and backward of attention: blocks of edges of a row, their scores, dropout factors and weighted sums.
// Numbers of edges are flat, [edges, heads], padded to whole vectors, so that any number of heads uses the full width. No
// std templates here: the linker would keep the copy of one instruction set for all.
#pragma once
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <type_traits>

#include "attend.h"
#include "philox_lanes.h"
#include "simd.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

constexpr int64_t kEdges = 64;        // edges of a row per block: their rows stay in the first-level cache
constexpr int64_t kHeads = 16;        // with more heads, blocks have fewer edges: their flat buffers stay in that cache too
constexpr int64_t kFar = 32;          // prefetch distance of per-head data: few bytes, needed at once at the next row
constexpr int64_t kRowsAtOnce = 32;   // rows per task: degrees are skewed

template <typename A> struct Exp;
template <> struct Exp<float> {
  typedef int32_t whole;
  static constexpr float low = -87.33f, high = 88.0f, log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to integers
  static constexpr int mantissa = 23, bias = 127, degree = 7;
};
template <> struct Exp<double> {
  typedef int64_t whole;
  static constexpr double low = -708.39, high = 709.0, log2e = 1.4426950408889634, ln2_high = 6.93147180369123816490e-01,
                          ln2_low = 1.90821492927058770002e-10;
  static constexpr double magic = 6755399441055744.0;
  static constexpr int mantissa = 52, bias = 1023, degree = 13;
};

template <typename A>
struct Taylor {  // 1 / k!
  A at[Exp<A>::degree + 1];
  constexpr Taylor() : at() {
    double factorial = 1;
    for (int k = 0; k <= Exp<A>::degree; ++k) at[k] = A(1.0 / factorial), factorial *= k + 1;
  }
};

// e^x to about an ulp or two; 0 below the normal numbers, NaN stays.
template <typename A>
inline vec_t<A> exp_of(vec_t<A> x) {
  using C = Exp<A>;
  constexpr Taylor<A> terms;
  typedef typename C::whole whole_t __attribute__((vector_size(GNNFLEET_VECTOR_BYTES)));
  const vec_t<A> low = splat<A>(C::low), high = splat<A>(C::high);
  const vec_t<A> bounded = x > high ? high : x;
  const vec_t<A> clamped = bounded < low ? low : bounded;
  const vec_t<A> shifted = clamped * C::log2e + C::magic;
  const vec_t<A> n = shifted - C::magic;
  const vec_t<A> r = (clamped - n * C::ln2_high) - n * C::ln2_low;
  vec_t<A> sum = splat<A>(terms.at[C::degree]);
#pragma GCC unroll 16
  for (int k = C::degree - 1; k >= 0; --k) sum = sum * r + terms.at[k];
  const vec_t<A> magic = splat<A>(C::magic);
  whole_t bits, base;
  std::memcpy(&bits, &shifted, sizeof bits);
  std::memcpy(&base, &magic, sizeof base);
  const whole_t power = (bits - base + C::bias) << C::mantissa;
  vec_t<A> scale;
  std::memcpy(&scale, &power, sizeof scale);
  return x < low ? vec_t<A>{} : sum * scale;
}

template <typename A, int Bytes>
inline A add_lanes(const void* lanes) {
  if constexpr (Bytes > 16) {
    typedef A half __attribute__((vector_size(Bytes / 2)));
    half low, high;
    std::memcpy(&low, lanes, sizeof low);
    std::memcpy(&high, static_cast<const char*>(lanes) + Bytes / 2, sizeof high);
    low += high;
    return add_lanes<A, Bytes / 2>(&low);
  } else {
    A v[16 / sizeof(A)];
    std::memcpy(v, lanes, 16);
    if constexpr (sizeof(A) == 4) return (v[0] + v[2]) + (v[1] + v[3]);
    else return v[0] + v[1];
  }
}
template <typename A>
inline A add_lanes(vec_t<A> v) { return add_lanes<A, GNNFLEET_VECTOR_BYTES>(&v); }

template <typename A>
inline vec_t<A> larger(vec_t<A> a, vec_t<A> b) { return a > b ? a : b; }

template <typename A>
inline vec_t<A> leaky(vec_t<A> x, A slope) { return x > vec_t<A>{} ? x : x * slope; }

// Buffers of a thread. A flat buffer has kEdges * heads numbers and padding; a pattern repeats a row of heads until it
// fills whole vectors.
template <typename A>
struct Scratch {
  static constexpr int64_t lanes = Lanes<A>::count;
  int64_t heads, pattern, flat, row;
  A *score, *weight, *upper, *keep, *lse, *dee, *product;   // flat
  A *own, *top, *sum, *part;                                // patterns
  A *row_sum, *row_upper, *row_own;                         // rows
  typename Exp<A>::whole *head_of_channel, *head_of_depth;  // rows, as large numbers as A
  void* block;

  explicit Scratch(const AttendArgs& a) : heads(a.heads), pattern(a.heads) {
    while (pattern % lanes) pattern += heads;
    flat = kEdges * heads + pattern;
    row = heads * (a.channels > a.depth ? a.channels : a.depth) + lanes;
    const int64_t total = 7 * flat + 4 * pattern + 5 * row;
    block = std::calloc(static_cast<size_t>(total + lanes), sizeof(A));
    A* at = static_cast<A*>(block);
    for (A** buffer : {&score, &weight, &upper, &keep, &lse, &dee, &product}) *buffer = at, at += flat;
    for (A** buffer : {&own, &top, &sum, &part}) *buffer = at, at += pattern;
    for (A** buffer : {&row_sum, &row_upper, &row_own}) *buffer = at, at += row;
    head_of_channel = reinterpret_cast<typename Exp<A>::whole*>(at), head_of_depth = head_of_channel + row;
    for (int64_t f = 0; f < heads * a.channels; ++f) head_of_channel[f] = static_cast<typename Exp<A>::whole>(f / a.channels);
    for (int64_t f = 0; f < heads * a.depth; ++f) head_of_depth[f] = static_cast<typename Exp<A>::whole>(f / a.depth);
  }
  ~Scratch() { std::free(block); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void repeat(const A* values, A* to) const {
    for (int64_t i = 0; i < heads; ++i) to[i] = values[i];
    for (int64_t i = heads; i < pattern; ++i) to[i] = to[i - heads];
  }

  // each(i, p): vectors at i of the flat buffers and at p of the patterns, over `count` edges.
  template <typename Each>
  void over(int64_t count, Each each) const {
    const int64_t total = count * heads;
    for (int64_t i = 0; i < total;) {
      for (int64_t p = 0; p < pattern && i < total; p += lanes, i += lanes) each(i, p);
    }
  }

  // Numbers beyond the last edge, so that whole vectors may be read.
  void pad(A* values, int64_t count, A with) const {
    for (int64_t i = count * heads; i % lanes; ++i) values[i] = with;
  }
};

struct Edges {
  int64_t first, count, reach;  // reach: count, and the edges to prefetch
  int64_t col[kEdges + kFar];
  int64_t at[kEdges];           // place in the edge arrays
};

template <typename Index>
inline void copy_columns(const Index* col, Edges& edges) {
  for (int64_t k = 0; k < edges.reach; ++k) edges.col[k] = static_cast<int64_t>(col[edges.first + k]);
}

inline void take_edges(const AttendArgs& a, int64_t first, int64_t end, Edges& edges) {
  const int64_t left = a.structure.indptr[a.structure.n] - first;
  edges.first = first;
  const int64_t most = a.heads <= kHeads ? kEdges : a.heads < kEdges * kHeads / 8 ? kEdges * kHeads / a.heads : 8;
  edges.count = end - first < most ? end - first : most;
  edges.reach = edges.count + kFar < left ? edges.count + kFar : left;
  if (a.structure.wide) copy_columns(static_cast<const int64_t*>(a.structure.col), edges);
  else copy_columns(static_cast<const int32_t*>(a.structure.col), edges);
  for (int64_t k = 0; k < edges.count; ++k) edges.at[k] = a.positions ? a.positions[first + k] : first + k;
}

template <typename A>
inline void copy_heads(const A* from, A* to, int64_t heads) {
  if (heads == 4) std::memcpy(to, from, 4 * sizeof(A));
  else if (heads == 8) std::memcpy(to, from, 8 * sizeof(A));
  else for (int64_t h = 0; h < heads; ++h) to[h] = from[h];
}

// to[k, h] = table[col[k], offset + h]
template <typename A>
inline void gather_heads(const Matrix& table, int64_t offset, const Edges& edges, int64_t heads, A* to) {
  const A* from = static_cast<const A*>(table.data) + offset;
  for (int64_t k = 0; k < edges.count; ++k) {
    if (k + kFar < edges.reach) __builtin_prefetch(from + edges.col[k + kFar] * table.stride);
    copy_heads(from + edges.col[k] * table.stride, to + k * heads, heads);
  }
}

// Four words for each of kCounters ids: word h of id k to words[h * kEdges + k].
inline void draw_words(const Keep& rule, uint32_t turn, const uint64_t* ids, uint32_t* words) {
  Counters x{};
  for (int v = 0; v < 2; ++v) {
    std::memcpy(&x.word[0][v], ids + v * kWordLanes, sizeof(word_t));
    x.word[1][v] = x.word[0][v] >> 32;
    x.word[2][v] = word_t{} + turn;
    x.word[3][v] = word_t{} + rule.place;
  }
  x.draw(rule.key);
  for (int h = 0; h < 4; ++h) {
    uint64_t found[kCounters];
    std::memcpy(found, x.word[h], sizeof found);
    for (int k = 0; k < kCounters; ++k) words[h * kEdges + k] = static_cast<uint32_t>(found[k]);
  }
}

// keep[k, h]: 0, or the factor.
template <typename A>
void draw_keep(const AttendArgs& a, const Edges& edges, A* keep) {
  static_assert(kEdges % kCounters == 0);
  const Keep& rule = a.keep;
  const A factor = static_cast<A>(rule.factor);
  const uint32_t threshold = rule.threshold;
  uint64_t ids[kEdges] = {};
  uint32_t words[4][kEdges];
  for (int64_t k = 0; k < edges.count; ++k) ids[k] = static_cast<uint64_t>(rule.ids ? rule.ids[edges.at[k]] : edges.at[k]);
  for (int64_t turn = 0; 4 * turn < a.heads; ++turn) {
    for (int64_t k = 0; k < edges.count; k += kCounters) {
      draw_words(rule, static_cast<uint32_t>(turn), ids + k, words[0] + k);
    }
    if (a.heads == 4) {
      for (int64_t k = 0; k < edges.count; ++k) {
        for (int64_t h = 0; h < 4; ++h) keep[4 * k + h] = words[h][k] < threshold ? A(0) : factor;
      }
      continue;
    }
    for (int64_t h = 4 * turn; h < a.heads && h < 4 * turn + 4; ++h) {
      for (int64_t k = 0; k < edges.count; ++k) keep[k * a.heads + h] = words[h % 4][k] < threshold ? A(0) : factor;
    }
  }
}

template <typename A>
inline A v2_score(const A* own, const A* other, const A* edge, const A* vector, A slope, int64_t depth) {
  constexpr int64_t lanes = Lanes<A>::count;
  vec_t<A> sums = {};
  int64_t d = 0;
  for (; d + lanes <= depth; d += lanes) {
    vec_t<A> x = load(own + d) + load(other + d);
    if (edge) x += load(edge + d);
    sums += load(vector + d) * leaky<A>(x, slope);
  }
  A sum = add_lanes<A>(sums);
  for (; d < depth; ++d) {
    const A x = own[d] + other[d] + (edge ? edge[d] : A(0));
    sum += vector[d] * (x > 0 ? x : x * slope);
  }
  return sum;
}

template <typename A, typename T, typename U>
inline A dot(const T* a, const U* b, int64_t width) {
  constexpr int64_t lanes = Lanes<A>::count;
  vec_t<A> sums = {};
  int64_t f = 0;
  for (; f + lanes <= width; f += lanes) sums += load(a + f) * load(b + f);
  A sum = add_lanes<A>(sums);
  for (; f < width; ++f) sum += widen(a[f]) * widen(b[f]);
  return sum;
}

// s.score[k, h] from an own row and the other rows; for additive scores also s.upper = 1 where x > 0, else 0. Additive
// scores take the own row repeated in s.own. Beyond the last edge the score is -inf.
template <typename A>
void score_edges(const AttendArgs& a, const Edges& edges, const A* own, const Matrix& other, const Scratch<A>& s) {
  const int64_t heads = a.heads, depth = a.depth;
  const A* edge = static_cast<const A*>(a.edge.data);
  const A slope = static_cast<A>(a.slope);
  constexpr A least = -std::numeric_limits<A>::infinity();
  if (a.score == Score::add) {
    gather_heads(other, 0, edges, heads, s.score);
    if (edge) {
      for (int64_t k = 0; k < edges.count; ++k) {
        for (int64_t h = 0; h < heads; ++h) s.score[k * heads + h] += edge[edges.at[k] * a.edge.stride + h];
      }
    }
    s.over(edges.count, [&](int64_t i, int64_t p) {
      const vec_t<A> x = load(s.score + i) + load(s.own + p);
      store<A>(s.upper + i, x > vec_t<A>{} ? splat<A>(A(1)) : vec_t<A>{});
      store<A>(s.score + i, leaky<A>(x, slope));
    });
  } else {
    const A* table = static_cast<const A*>(other.data);
    const A* vector = static_cast<const A*>(a.vector);
    for (int64_t k = 0; k < edges.count; ++k) {
      if (k + kAhead < edges.reach) prefetch_row(table + edges.col[k + kAhead] * other.stride, heads * depth);
      const A* row = table + edges.col[k] * other.stride;
      const A* term = edge ? edge + edges.at[k] * a.edge.stride : nullptr;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t d = h * depth;
        s.score[k * heads + h] = a.score == Score::dot
                                     ? static_cast<A>(a.scale) * dot<A>(own + d, row + d, depth)
                                     : v2_score<A>(own + d, row + d, term ? term + d : nullptr, vector + d, slope, depth);
      }
    }
  }
  s.pad(s.score, edges.count, least);
}

}  // namespace
}  // namespace gnnfleet::GNNFLEET_ISA
