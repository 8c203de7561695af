// Backward of attention for every score, edge terms included, from the inputs, lse and D alone. One pass goes by
// source (d_value, d_src), one by destination (d_dst, d_edge, d_vector); both recompute
//   p = exp(s - lse)     ds = p (k <g_i, z_j> - D_i)
// No two threads write the same number, and sums have a fixed order: results do not depend on the number of threads.
#include <cmath>

#include "attend_sums.h"
#include "kernels.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

constexpr int64_t kVectorParts = 256;  // partial sums of d_vector, independent of the number of threads

// The two sides of a pass. Z is the element type of a source's value row; the other side has its gradient.
template <typename Z, bool BySource>
struct Sides {
  using A = wide_t<Z>;
  using Own = std::conditional_t<BySource, Z, A>;
  using Other = std::conditional_t<BySource, A, Z>;
  const AttendArgs& a;
  const Matrix& own_rows() const { return BySource ? a.value : a.grad; }
  const Matrix& other_rows() const { return BySource ? a.grad : a.value; }
  const Matrix& own_score() const { return BySource ? a.src : a.dst; }
  const Matrix& other_score() const { return BySource ? a.dst : a.src; }
  void* own_gradient() const { return BySource ? a.d_src : a.d_dst; }
};

// s.weight = k p, s.product = ds, for the edges of own row `row`.
template <typename Z, bool BySource>
void differentiate_edges(const Sides<Z, BySource>& sides, int64_t row, const Edges& edges, const Scratch<wide_t<Z>>& s) {
  using A = wide_t<Z>;
  const AttendArgs& a = sides.a;
  const int64_t heads = a.heads;
  const Matrix& score = sides.own_score();
  score_edges(a, edges, static_cast<const A*>(score.data) + row * score.stride, sides.other_score(), s);
  if constexpr (BySource) {
    gather_heads(a.side, 0, edges, heads, s.lse);
    gather_heads(a.side, heads, edges, heads, s.dee);
  } else {
    const A* side = static_cast<const A*>(a.side.data) + row * a.side.stride;
    for (int64_t k = 0; k < edges.count; ++k) {
      copy_heads(side, s.lse + k * heads, heads);
      copy_heads(side + heads, s.dee + k * heads, heads);
    }
  }
  using Own = typename Sides<Z, BySource>::Own;
  using Other = typename Sides<Z, BySource>::Other;
  const Matrix &own = sides.own_rows(), &other = sides.other_rows();
  const Own* mine = static_cast<const Own*>(own.data) + row * own.stride;
  const Other* table = static_cast<const Other*>(other.data);
  for (int64_t k = 0; k < edges.count; ++k) {
    if (k + kAhead < edges.reach) prefetch_row(table + edges.col[k + kAhead] * other.stride, heads * a.channels);
    const Other* theirs = table + edges.col[k] * other.stride;
    for (int64_t h = 0; h < heads; ++h) {
      s.product[k * heads + h] = dot<A>(mine + h * a.channels, theirs + h * a.channels, a.channels);
    }
  }
  if (a.keep.on) draw_keep(a, edges, s.keep);
  s.pad(s.lse, edges.count, A(0)), s.pad(s.dee, edges.count, A(0)), s.pad(s.product, edges.count, A(0)), s.pad(s.keep, edges.count, A(0));
  s.over(edges.count, [&](int64_t e, int64_t) {
    const vec_t<A> p = exp_of<A>(load(s.score + e) - load(s.lse + e));
    const vec_t<A> kept = a.keep.on ? p * load(s.keep + e) : p;
    store<A>(s.weight + e, kept);
    store<A>(s.product + e, kept * load(s.product + e) - p * load(s.dee + e));
  });
}

// Additive: s.product becomes dx; own gradient += dx.
template <typename A>
void add_gradient(const AttendArgs& a, const Edges& edges, const Scratch<A>& s, A* gradient, A* d_edge) {
  const A slope = static_cast<A>(a.slope);
  for (int64_t k = 0; k < edges.count; ++k) {
    for (int64_t h = 0; h < a.heads; ++h) {
      const int64_t e = k * a.heads + h;
      const A dx = s.product[e] * (s.upper[e] * (A(1) - slope) + slope);
      gradient[h] += dx;
      if (d_edge) d_edge[edges.at[k] * a.heads + h] = dx;
    }
  }
}

// One edge and head of v2: own gradient (still without the factor `vector`) += ds phi'; d_vector += ds LeakyReLU(x);
// d_edge = ds phi' vector. The last four may be null.
template <typename A>
struct Strand {
  const A *own, *other, *vector;
  A* gradient;
  const A* term;
  A *d_vector, *d_edge;
};

template <typename A>
inline void v2_strand(const Strand<A>& v, A ds, A slope, int64_t depth) {
  constexpr int64_t lanes = Lanes<A>::count;
  const vec_t<A> rising = splat<A>(ds), falling = splat<A>(ds * slope);
  int64_t d = 0;
  for (; d + lanes <= depth; d += lanes) {
    vec_t<A> x = load(v.own + d) + load(v.other + d);
    if (v.term) x += load(v.term + d);
    const vec_t<A> rise = x > vec_t<A>{} ? rising : falling;
    store<A>(v.gradient + d, load(v.gradient + d) + rise);
    if (v.d_vector) store<A>(v.d_vector + d, load(v.d_vector + d) + rise * x);  // phi' x = LeakyReLU(x)
    if (v.d_edge) store<A>(v.d_edge + d, rise * load(v.vector + d));
  }
  for (; d < depth; ++d) {
    const A x = v.own[d] + v.other[d] + (v.term ? v.term[d] : A(0));
    const A rise = x > 0 ? ds : ds * slope;
    v.gradient[d] += rise;
    if (v.d_vector) v.d_vector[d] += rise * x;
    if (v.d_edge) v.d_edge[d] = rise * v.vector[d];
  }
}

template <typename A>
void v2_gradient(const AttendArgs& a, const Edges& edges, const A* own, const Matrix& other, const Scratch<A>& s, A* d_vector, A* d_edge) {
  const int64_t depth = a.depth, width = a.heads * depth;
  const A* vector = static_cast<const A*>(a.vector);
  for (int64_t k = 0; k < edges.count; ++k) {
    const A* row = static_cast<const A*>(other.data) + edges.col[k] * other.stride;
    const A* term = a.edge.data ? static_cast<const A*>(a.edge.data) + edges.at[k] * a.edge.stride : nullptr;
    A* edge = d_edge ? d_edge + edges.at[k] * width : nullptr;
    for (int64_t h = 0; h < a.heads; ++h) {
      const int64_t d = h * depth;
      const Strand<A> strand{own + d, row + d, vector + d, s.row_own + d, term ? term + d : nullptr, d_vector ? d_vector + d : nullptr,
                             edge ? edge + d : nullptr};
      v2_strand<A>(strand, s.product[k * a.heads + h], static_cast<A>(a.slope), depth);
    }
  }
}

template <typename Z, bool BySource>
void gradient_row(const Sides<Z, BySource>& sides, int64_t r, const Scratch<wide_t<Z>>& s, wide_t<Z>* d_vector) {
  using A = wide_t<Z>;
  const AttendArgs& a = sides.a;
  const int64_t row = a.structure.rows ? a.structure.rows[r] : r;
  const int64_t width = a.heads * a.channels, inner = a.heads * a.depth;
  const int64_t begin = a.structure.indptr[r], end = a.structure.indptr[r + 1];
  const Matrix &score = sides.own_score(), &other = sides.other_score();
  const A* own = static_cast<const A*>(score.data) + row * score.stride;
  if (a.score == Score::add) s.repeat(own, s.own);
  for (int64_t p = 0; p < s.pattern; ++p) s.part[p] = A(1);
  for (int64_t d = 0; d < inner; ++d) s.row_own[d] = A(0);
  if (begin == end) for (int64_t f = 0; f < width; ++f) s.row_sum[f] = A(0);
  Edges edges;
  for (int64_t first = begin; first < end; first += edges.count) {
    take_edges(a, first, end, edges);
    differentiate_edges(sides, row, edges, s);
    const A* shrink = first == begin ? nullptr : s.part;
    if constexpr (BySource) {
      sum_edges(Sums<A>{static_cast<const A*>(a.grad.data), a.grad.stride, a.heads, a.channels, s.weight, s.weight, shrink,
                        s.row_sum, nullptr, s.head_of_channel}, edges);
    }
    if (a.score == Score::dot) {
      sum_edges(Sums<A>{static_cast<const A*>(other.data), other.stride, a.heads, a.depth, s.product, s.product, shrink,
                        s.row_own, nullptr, s.head_of_depth}, edges);
    } else if (a.score == Score::add) {
      add_gradient(a, edges, s, s.row_own, BySource ? nullptr : static_cast<A*>(a.d_edge));
    } else {
      v2_gradient(a, edges, own, other, s, d_vector, BySource ? nullptr : static_cast<A*>(a.d_edge));
    }
  }
  if constexpr (BySource) {
    A* d_value = static_cast<A*>(a.d_value) + row * width;
    for (int64_t f = 0; f < width; ++f) d_value[f] = a.add ? d_value[f] + s.row_sum[f] : s.row_sum[f];
  }
  A* gradient = static_cast<A*>(sides.own_gradient()) + row * inner;
  const A* vector = static_cast<const A*>(a.vector);
  const A scale = a.score == Score::dot ? static_cast<A>(a.scale) : A(1);
  for (int64_t d = 0; d < inner; ++d) {
    const A value = s.row_own[d] * (a.score == Score::v2 ? vector[d] : scale);
    gradient[d] = a.add ? gradient[d] + value : value;
  }
}

// Rows in a fixed number of parts, each with its own sum for d_vector; the parts are added in order at the end.
template <typename Z, bool BySource>
void gradient(const AttendArgs& a) {
  using A = wide_t<Z>;
  const Sides<Z, BySource> sides{a};
  const int64_t inner = a.heads * a.depth, n = a.structure.n;
  const bool vector = !BySource && a.d_vector;
  const int64_t parts = vector ? kVectorParts : (n + kRowsAtOnce - 1) / kRowsAtOnce;
  const int64_t rows = vector ? (n + parts - 1) / parts : kRowsAtOnce;
  A* partial = vector ? static_cast<A*>(std::calloc(static_cast<size_t>(parts * inner), sizeof(A))) : nullptr;
#pragma omp parallel num_threads(a.threads)
  {
    const Scratch<A> s(a);
#pragma omp for schedule(dynamic, 1)
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t end = (part + 1) * rows < n ? (part + 1) * rows : n;
      for (int64_t r = part * rows; r < end; ++r) gradient_row(sides, r, s, vector ? partial + part * inner : nullptr);
    }
  }
  if (!vector) return;
  A* total = static_cast<A*>(a.d_vector);
  for (int64_t d = 0; d < inner; ++d) {
    A sum = a.add ? total[d] : A(0);
    for (int64_t part = 0; part < parts; ++part) sum += partial[part * inner + d];
    total[d] = sum;
  }
  std::free(partial);
}

template <bool BySource>
void gradient_by_element(const AttendArgs& a) {
  if (a.element == Element::float64) gradient<double, BySource>(a);
  else if (a.element == Element::bfloat16) gradient<BFloat, BySource>(a);
  else gradient<float, BySource>(a);
}

}  // namespace

void attend_edge_source(const AttendArgs& a) { gradient_by_element<true>(a); }
void attend_edge_target(const AttendArgs& a) { gradient_by_element<false>(a); }

}  // namespace gnnfleet::GNNFLEET_ISA
