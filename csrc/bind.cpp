// Bindings only: check shapes at the door, release the GIL, call. Arrays come in as they are (no silent conversion),
// outputs are allocated in Python and filled here, so ownership never crosses.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "csr.h"
#include "kernels.h"
#include "quality.h"
#include "shard.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using InRows = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using OutRows = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename A>
int64_t size(const A& array) {
  return static_cast<int64_t>(array.shape(0));
}

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// ---- csr ------------------------------------------------------------------------------------------------------------

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

void bind_csr(nb::module_& m) {
  m.def("counting_sort", counting_sort<int32_t>, "keys"_a.noconvert(), "offsets"_a.noconvert(), "order"_a.noconvert(), "threads"_a);
  m.def("counting_sort", counting_sort<int64_t>, "keys"_a.noconvert(), "offsets"_a.noconvert(), "order"_a.noconvert(), "threads"_a);
}

// ---- gather ---------------------------------------------------------------------------------------------------------

template <typename Index>
void gather_rows(InRows<uint8_t> table, In<Index> rows, OutRows<uint8_t> out, int threads) {
  require(out.shape(0) == rows.shape(0) && out.shape(1) == table.shape(1), "gather_rows: out must be [rows, bytes]");
  nb::gil_scoped_release free;
  gnnfleet::kernels().gather_rows(table.data(), rows.data(), sizeof(Index) == 8, size(rows),
                                  static_cast<int64_t>(table.shape(1)), out.data(), threads);
}

template <typename Index>
void gather_floats(InRows<uint16_t> table, In<Index> rows, OutRows<float> out, bool bfloat, int threads) {
  require(out.shape(0) == rows.shape(0) && out.shape(1) == table.shape(1), "gather_floats: out must be [rows, width]");
  nb::gil_scoped_release free;
  const auto kernel = bfloat ? gnnfleet::kernels().gather_bfloat : gnnfleet::kernels().gather_half;
  kernel(table.data(), rows.data(), sizeof(Index) == 8, size(rows), static_cast<int64_t>(table.shape(1)), out.data(), threads);
}

template <typename Index>
void bind_gather(nb::module_& m) {
  m.def("gather_rows", gather_rows<Index>, "table"_a.noconvert(), "rows"_a.noconvert(), "out"_a.noconvert(), "threads"_a);
  m.def("gather_floats", gather_floats<Index>, "table"_a.noconvert(), "rows"_a.noconvert(), "out"_a.noconvert(), "bfloat"_a, "threads"_a);
}

// ---- partition ------------------------------------------------------------------------------------------------------

template <typename Index>
void count_traffic(int64_t first, In<int64_t> indptr, In<Index> src, In<int32_t> part, int64_t base, Out<uint64_t> seen,
                   OutRows<int64_t> edges, OutRows<int64_t> rows) {
  require(size(seen) == size(part), "count_traffic: seen must have one entry per node");
  require(first >= 0 && first + size(indptr) - 1 <= size(part), "count_traffic: destinations beyond the nodes");
  nb::gil_scoped_release free;
  const gnnfleet::EdgeChunk<Index> chunk{first, size(indptr) - 1, indptr.data(), src.data()};
  gnnfleet::count_traffic(chunk, part.data(), static_cast<int64_t>(edges.shape(0)), base, seen.data(), edges.data(), rows.data());
}

template <typename Index>
gnnfleet::InEdges<Index> in_edges(const In<int64_t>& indptr, const In<Index>& src, const In<int64_t>& dst,
                                  const In<int32_t>& owner, const In<int32_t>& local, int64_t parts) {
  require(size(owner) == size(local), "blocks: owner and local must have one entry per source");
  return {indptr.data(), src.data(), dst.data(), size(dst), owner.data(), local.data(), parts};
}

template <typename Index>
void count_blocks(In<int64_t> indptr, In<Index> src, In<int64_t> dst, In<int32_t> owner, In<int32_t> local,
                  Out<int64_t> edges, Out<int64_t> rows) {
  const auto in = in_edges<Index>(indptr, src, dst, owner, local, size(edges));
  nb::gil_scoped_release free;
  gnnfleet::count_blocks(in, edges.data(), rows.data());
}

template <typename Index>
void fill_blocks(In<int64_t> indptr, In<Index> src, In<int64_t> dst, In<int32_t> owner, In<int32_t> local,
                 Out<int64_t> edge_start, Out<int64_t> row_start, Out<int32_t> row, Out<int64_t> degree,
                 Out<int32_t> col, Out<int64_t> edge_id) {
  const auto in = in_edges<Index>(indptr, src, dst, owner, local, size(edge_start));
  nb::gil_scoped_release free;
  gnnfleet::fill_blocks(in, edge_start.data(), row_start.data(), row.data(), degree.data(), col.data(), edge_id.data());
}

int64_t rank_distinct(In<int32_t> values, Out<int32_t> rank) {
  nb::gil_scoped_release free;
  return gnnfleet::rank_distinct(values.data(), size(values), size(rank), rank.data());
}

template <typename Index>
void bind_partition(nb::module_& m) {
  m.def("count_traffic", count_traffic<Index>, "first"_a, "indptr"_a.noconvert(), "src"_a.noconvert(), "part"_a.noconvert(),
        "base"_a, "seen"_a.noconvert(), "edges"_a.noconvert(), "rows"_a.noconvert());
  m.def("count_blocks", count_blocks<Index>, "indptr"_a.noconvert(), "src"_a.noconvert(), "dst"_a.noconvert(),
        "owner"_a.noconvert(), "local"_a.noconvert(), "edges"_a.noconvert(), "rows"_a.noconvert());
  m.def("fill_blocks", fill_blocks<Index>, "indptr"_a.noconvert(), "src"_a.noconvert(), "dst"_a.noconvert(),
        "owner"_a.noconvert(), "local"_a.noconvert(), "edge_start"_a.noconvert(), "row_start"_a.noconvert(),
        "row"_a.noconvert(), "degree"_a.noconvert(), "col"_a.noconvert(), "edge_id"_a.noconvert());
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Compiled kernels of gnnfleet; the Python faces are in gnnfleet.ops.";
  m.def("isa", [] { return std::string(gnnfleet::kernels().isa); }, "The instruction set in use.");
  m.def("isas", [] { return std::string(gnnfleet::supported_kernels()); }, "The instruction sets this machine can use, best first.");
  m.def("select_isa", [](const std::string& name) { return gnnfleet::select_kernels(name.c_str()); }, "name"_a,
        "Use another instruction set (tests and benchmarks); False when it is not supported.");
  bind_csr(m);
  bind_gather<int32_t>(m);
  bind_gather<int64_t>(m);
  bind_partition<int32_t>(m);
  bind_partition<int64_t>(m);
  m.def("rank_distinct", rank_distinct, "values"_a.noconvert(), "rank"_a.noconvert());
}
