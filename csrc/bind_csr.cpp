// Bindings of csr.h.
#include "bind.h"

#include <string>

#include "csr.h"

namespace {

using namespace gnnfleet::bind;

template <typename Index>
void counting_sort(In<Index> keys, Out<int64_t> offsets, Out<int64_t> order, int threads) {
  require(size(order) == size(keys), "counting_sort: order must have one entry per key");
  int64_t wrong;
  {
    nb::gil_scoped_release free;
    wrong = gnnfleet::counting_sort(keys.data(), size(keys), size(offsets) - 1, offsets.data(), order.data(), threads);
  }
  if (wrong >= 0) throw std::out_of_range("counting_sort: key out of range at position " + std::to_string(wrong));
}

template <typename Index>
void transpose(In<int64_t> indptr, In<Index> col, Out<int64_t> offsets, Out<Index> row, Out<int64_t> order) {
  require(size(row) == size(col) && size(order) == size(col), "transpose: lengths differ");
  require(size(indptr) >= 1 && size(offsets) >= 1, "transpose: offsets have one entry more than there are rows");
  require(indptr.data()[size(indptr) - 1] == size(col), "transpose: indptr must end at the number of edges");
  int64_t wrong;
  {
    nb::gil_scoped_release free;
    wrong = gnnfleet::transpose(indptr.data(), col.data(), size(indptr) - 1, size(offsets) - 1, offsets.data(), row.data(), order.data());
  }
  if (wrong >= 0) throw std::out_of_range("transpose: column out of range at position " + std::to_string(wrong));
}

template <typename Index>
void count_looped(In<int64_t> indptr, In<Index> col, Out<int64_t> looped, int threads) {
  require(size(looped) == size(indptr) && indptr.data()[size(indptr) - 1] == size(col), "count_looped: lengths differ");
  nb::gil_scoped_release free;
  gnnfleet::count_looped(indptr.data(), col.data(), size(indptr) - 1, looped.data(), threads);
}

template <typename Index>
void fill_looped(In<int64_t> indptr, In<Index> col, In<int64_t> looped, Out<Index> out, Out<int64_t> edge, int threads) {
  require(size(looped) == size(indptr) && size(out) == size(edge), "fill_looped: lengths differ");
  require(looped.data()[size(looped) - 1] == size(out), "fill_looped: room for every edge");
  nb::gil_scoped_release free;
  gnnfleet::fill_looped(indptr.data(), col.data(), size(indptr) - 1, looped.data(), out.data(), edge.data(), threads);
}

template <typename Index>
void bind_rows(nb::module_& m) {
  m.def("count_looped", count_looped<Index>, "indptr"_a.noconvert(), "col"_a.noconvert(), "looped"_a.noconvert(), "threads"_a);
  m.def("fill_looped", fill_looped<Index>, "indptr"_a.noconvert(), "col"_a.noconvert(), "looped"_a.noconvert(), "out"_a.noconvert(),
        "edge"_a.noconvert(), "threads"_a);
  m.def("transpose", transpose<Index>, "indptr"_a.noconvert(), "col"_a.noconvert(), "offsets"_a.noconvert(), "row"_a.noconvert(),
        "order"_a.noconvert());
}

void check_ends(int64_t wrong, const char* verb) {
  if (wrong >= 0) throw std::out_of_range(std::string(verb) + ": edge end out of range at position " + std::to_string(wrong));
}

void sort_edges(In<int32_t> src, In<int32_t> dst, int64_t num_src, Out<int64_t> indptr, Out<int64_t> order,
                Out<int32_t> sorted, int threads) {
  require(size(src) == size(dst) && size(order) == size(src) && size(sorted) == size(src), "sort_edges: lengths differ");
  require(size(src) <= int64_t{0xffffffff}, "sort_edges: at most 2^32 - 1 edges");
  int64_t wrong;
  {
    nb::gil_scoped_release free;
    wrong = gnnfleet::sort_edges(src.data(), dst.data(), size(src), num_src, size(indptr) - 1, indptr.data(), order.data(),
                                 sorted.data(), threads);
  }
  check_ends(wrong, "sort_edges");
}

void sort_rows(In<int32_t> src, In<int32_t> dst, int64_t num_src, Out<int64_t> indptr, Out<int32_t> sorted, int threads) {
  require(size(src) == size(dst) && size(sorted) == size(src), "sort_rows: lengths differ");
  int64_t wrong;
  {
    nb::gil_scoped_release free;
    wrong = gnnfleet::sort_rows(src.data(), dst.data(), size(src), num_src, size(indptr) - 1, indptr.data(), sorted.data(), threads);
  }
  check_ends(wrong, "sort_rows");
}

void count_distinct(In<int64_t> indptr, In<int32_t> sorted, Out<int64_t> distinct, int threads) {
  require(size(distinct) == size(indptr), "count_distinct: one count per row and one more");
  nb::gil_scoped_release free;
  gnnfleet::count_distinct(indptr.data(), sorted.data(), size(indptr) - 1, distinct.data(), threads);
}

void take_distinct(In<int64_t> indptr, In<int32_t> sorted, In<int64_t> distinct, Out<int32_t> out, Out<int32_t> times,
                   int threads) {
  require(size(distinct) == size(indptr) && size(out) == size(times), "take_distinct: lengths differ");
  nb::gil_scoped_release free;
  gnnfleet::take_distinct(indptr.data(), sorted.data(), size(indptr) - 1, distinct.data(), out.data(), times.data(), threads);
}

void put_segments(InRows<uint8_t> values, In<int64_t> from, In<int64_t> rows, In<int64_t> to, OutRows<uint8_t> out, int threads) {
  const int64_t n = size(rows);
  require(size(from) == n + 1 && from.data()[0] == 0 && from.data()[n] == size(values), "put_segments: from must cover the values");
  require(size(to) >= 1 && to.data()[size(to) - 1] == size(out) && out.shape(1) == values.shape(1), "put_segments: to must cover out");
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = rows.data()[i];
    if (row < 0 || row >= size(to) - 1) throw std::out_of_range("put_segments: a row is out of range");
    require(to.data()[row + 1] - to.data()[row] == from.data()[i + 1] - from.data()[i], "put_segments: segments differ in length");
  }
  nb::gil_scoped_release free;
  gnnfleet::put_segments(values.data(), from.data(), rows.data(), n, static_cast<int64_t>(values.shape(1)), to.data(), out.data(), threads);
}

}  // namespace

void bind_csr(nb::module_& m) {
  m.def("put_segments", put_segments, "values"_a.noconvert(), "from"_a.noconvert(), "rows"_a.noconvert(), "to"_a.noconvert(),
        "out"_a.noconvert(), "threads"_a);
  bind_rows<int32_t>(m);
  bind_rows<int64_t>(m);
  m.def("sort_edges", sort_edges, "src"_a.noconvert(), "dst"_a.noconvert(), "num_src"_a, "indptr"_a.noconvert(),
        "order"_a.noconvert(), "sorted"_a.noconvert(), "threads"_a);
  m.def("sort_rows", sort_rows, "src"_a.noconvert(), "dst"_a.noconvert(), "num_src"_a, "indptr"_a.noconvert(),
        "sorted"_a.noconvert(), "threads"_a);
  m.def("count_distinct", count_distinct, "indptr"_a.noconvert(), "sorted"_a.noconvert(), "distinct"_a.noconvert(), "threads"_a);
  m.def("take_distinct", take_distinct, "indptr"_a.noconvert(), "sorted"_a.noconvert(), "distinct"_a.noconvert(),
        "out"_a.noconvert(), "times"_a.noconvert(), "threads"_a);
  m.def("counting_sort", counting_sort<int32_t>, "keys"_a.noconvert(), "offsets"_a.noconvert(), "order"_a.noconvert(), "threads"_a);
  m.def("counting_sort", counting_sort<int64_t>, "keys"_a.noconvert(), "offsets"_a.noconvert(), "order"_a.noconvert(), "threads"_a);
}
