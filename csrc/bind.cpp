// The module, and the bindings of draws, gathers and partitions.
#include "bind.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>

#include "generate.h"
#include "kernels.h"
#include "paging.h"
#include "quality.h"
#include "shard.h"

namespace {

using namespace gnnfleet::bind;

// ---- generate: keyed draws and generated datasets --------------------------------------------------------------------

using gnnfleet::Draws;

void philox(uint64_t key, InRows<uint32_t> counters, OutRows<uint32_t> out) {
  require(counters.shape(1) == 4 && out.shape(1) == 4 && out.shape(0) == counters.shape(0), "philox: counters and out are [n, 4]");
  for (int64_t i = 0; i < size(counters); ++i) {
    const uint32_t* c = counters.data() + 4 * i;
    const gnnfleet::Words words = gnnfleet::philox({c[0], c[1], c[2], c[3]}, key);
    for (int64_t k = 0; k < 4; ++k) out.data()[4 * i + k] = words[k];
  }
}

void draw_uniforms(uint64_t key, uint32_t place, int64_t first, Out<double> out, int threads) {
  nb::gil_scoped_release free;
  gnnfleet::draw_uniforms(Draws{key, place}, first, size(out), out.data(), threads);
}

void draw_exponentials(uint64_t key, uint32_t place, int64_t first, Out<double> out, int threads) {
  nb::gil_scoped_release free;
  gnnfleet::draw_exponentials(Draws{key, place}, first, size(out), out.data(), threads);
}

void draw_paretos(uint64_t key, uint32_t place, int64_t first, double shape, double limit, Out<double> out, int threads) {
  require(shape > 0 && limit >= 1, "draw_paretos: shape must be positive, limit at least 1");
  nb::gil_scoped_release free;
  gnnfleet::draw_paretos(Draws{key, place}, first, size(out), shape, limit, out.data(), threads);
}

void draw_slots(uint64_t key, uint32_t place, int64_t first, In<int32_t> table, In<int64_t> starts, In<int32_t> groups,
                Out<int32_t> out, int threads) {
  require(size(out) == size(groups), "draw_slots: one output per group");
  require(size(starts) >= 1 && starts.data()[size(starts) - 1] <= size(table), "draw_slots: starts reach past the table");
  int64_t wrong;
  {
    nb::gil_scoped_release free;
    wrong = gnnfleet::draw_slots(Draws{key, place}, first, size(out), table.data(), starts.data(), size(starts) - 1,
                                 groups.data(), out.data(), threads);
  }
  if (wrong >= 0) throw std::out_of_range("draw_slots: group out of range at position " + std::to_string(wrong));
}

void draw_rows(uint64_t key, uint32_t place, int64_t first, OutRows<float> out, int threads) {
  nb::gil_scoped_release free;
  gnnfleet::draw_rows(Draws{key, place}, first, size(out), static_cast<int64_t>(out.shape(1)), nullptr, nullptr, 0, out.data(), threads);
}

void draw_rows_around(uint64_t key, uint32_t place, int64_t first, InRows<float> centres, In<int32_t> groups, float scale,
                      OutRows<float> out, int threads) {
  require(size(groups) == size(out) && centres.shape(1) == out.shape(1), "draw_rows: shapes differ");
  nb::gil_scoped_release free;
  gnnfleet::draw_rows(Draws{key, place}, first, size(out), static_cast<int64_t>(out.shape(1)), centres.data(), groups.data(),
                      scale, out.data(), threads);
}

void draw_rmat(uint64_t key, uint32_t place, int64_t first, int levels, int64_t nodes, In<double> quadrants, Out<int32_t> src,
               Out<int32_t> dst, int threads) {
  require(size(quadrants) == 4 && size(src) == size(dst), "draw_rmat: four quadrants, as many sources as destinations");
  require(levels >= 0 && levels <= 31 && nodes >= 1 && nodes <= (int64_t{1} << levels), "draw_rmat: nodes must fit the levels");
  nb::gil_scoped_release free;
  gnnfleet::draw_rmat(Draws{key, place}, first, size(src), levels, nodes, quadrants.data(), src.data(), dst.data(), threads);
}

void draw_permutation(uint64_t key, uint32_t place, Out<int32_t> out, int threads) {
  nb::gil_scoped_release free;
  gnnfleet::draw_permutation(Draws{key, place}, size(out), out.data(), threads);
}

void draw_pairs(uint64_t key, uint32_t place, In<int32_t> a, In<int32_t> b, Out<int64_t> out, int threads) {
  require(size(a) == size(b) && size(a) == size(out), "draw_pairs: lengths differ");
  nb::gil_scoped_release free;
  gnnfleet::draw_pairs(Draws{key, place}, size(a), a.data(), b.data(), out.data(), threads);
}

void bind_generate(nb::module_& m) {
  m.def("philox", philox, "key"_a, "counters"_a.noconvert(), "out"_a.noconvert());
  m.def("draw_key", gnnfleet::draw_key, "seed"_a, "epoch"_a, "step"_a);
  m.def("draw_place", Draws::place_of, "purpose"_a, "layer"_a, "relation"_a);
  m.def("draw_uniforms", draw_uniforms, "key"_a, "place"_a, "first"_a, "out"_a.noconvert(), "threads"_a);
  m.def("draw_exponentials", draw_exponentials, "key"_a, "place"_a, "first"_a, "out"_a.noconvert(), "threads"_a);
  m.def("draw_paretos", draw_paretos, "key"_a, "place"_a, "first"_a, "shape"_a, "limit"_a, "out"_a.noconvert(), "threads"_a);
  m.def("draw_slots", draw_slots, "key"_a, "place"_a, "first"_a, "table"_a.noconvert(), "starts"_a.noconvert(),
        "groups"_a.noconvert(), "out"_a.noconvert(), "threads"_a);
  m.def("draw_rows", draw_rows, "key"_a, "place"_a, "first"_a, "out"_a.noconvert(), "threads"_a);
  m.def("draw_rows_around", draw_rows_around, "key"_a, "place"_a, "first"_a, "centres"_a.noconvert(), "groups"_a.noconvert(),
        "scale"_a, "out"_a.noconvert(), "threads"_a);
  m.def("draw_rmat", draw_rmat, "key"_a, "place"_a, "first"_a, "levels"_a, "nodes"_a, "quadrants"_a.noconvert(),
        "src"_a.noconvert(), "dst"_a.noconvert(), "threads"_a);
  m.def("draw_permutation", draw_permutation, "key"_a, "place"_a, "out"_a.noconvert(), "threads"_a);
  m.def("draw_pairs", draw_pairs, "key"_a, "place"_a, "a"_a.noconvert(), "b"_a.noconvert(), "out"_a.noconvert(), "threads"_a);
}

// ---- gather ---------------------------------------------------------------------------------------------------------

template <typename Index>
void check_rows(const In<Index>& rows, int64_t count) {
  uint64_t highest = 0;  // as unsigned, negative numbers are the largest
  for (int64_t i = 0; i < size(rows); ++i) highest = std::max(highest, static_cast<uint64_t>(static_cast<int64_t>(rows.data()[i])));
  if (size(rows) && highest >= static_cast<uint64_t>(count)) throw std::out_of_range("rows must be in 0.." + std::to_string(count - 1));
}

using At = std::optional<In<int64_t>>;

template <typename Index, typename Table, typename Out>
void check_gather(const Table& table, const In<Index>& rows, const At& at, const Out& out) {
  require(out.shape(1) == table.shape(1) && out.stride(1) == 1, "gather: out must have rows as wide as the table's, each in one piece");
  check_rows(rows, size(table));
  if (!at) return require(size(out) == size(rows), "gather: out must have as many rows as are picked");
  require(size(*at) == size(rows), "gather: one place for every row");
  check_rows(*at, size(out));
}

template <typename Index>
void gather_rows(InRows<uint8_t> table, In<Index> rows, At at, Spread<uint8_t> out, int threads) {
  check_gather(table, rows, at, out);
  nb::gil_scoped_release free;
  gnnfleet::kernels().gather_rows(table.data(), rows.data(), sizeof(Index) == 8, data_or_null(at), size(rows),
                                  static_cast<int64_t>(table.shape(1)), out.data(), out.stride(0), threads);
}

template <typename Index>
void gather_floats(InRows<uint16_t> table, In<Index> rows, At at, Spread<float> out, bool bfloat, int threads) {
  check_gather(table, rows, at, out);
  nb::gil_scoped_release free;
  const auto kernel = bfloat ? gnnfleet::kernels().gather_bfloat : gnnfleet::kernels().gather_half;
  kernel(table.data(), rows.data(), sizeof(Index) == 8, data_or_null(at), size(rows), static_cast<int64_t>(table.shape(1)),
         out.data(), out.stride(0), threads);
}

template <typename Index>
void bind_gather(nb::module_& m) {
  m.def("gather_rows", gather_rows<Index>, "table"_a.noconvert(), "rows"_a.noconvert(), "at"_a.noconvert().none(), "out"_a.noconvert(), "threads"_a);
  m.def("gather_floats", gather_floats<Index>, "table"_a.noconvert(), "rows"_a.noconvert(), "at"_a.noconvert().none(), "out"_a.noconvert(), "bfloat"_a,
        "threads"_a);
}

int64_t read_ahead(InRows<uint8_t> table, In<int64_t> rows) {
  check_rows(rows, size(table));
  nb::gil_scoped_release free;
  const int64_t width = static_cast<int64_t>(table.shape(1));
  return gnnfleet::read_ahead(table.data(), size(table) * width, width, rows.data(), size(rows));
}

void let_go(InRows<uint8_t> table) {
  gnnfleet::let_go(table.data(), size(table) * static_cast<int64_t>(table.shape(1)));
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
  bind_generate(m);
  m.def("read_ahead", read_ahead, "table"_a.noconvert(), "rows"_a.noconvert());
  m.def("let_go", let_go, "table"_a.noconvert());
  bind_gather<int32_t>(m);
  bind_gather<int64_t>(m);
  bind_partition<int32_t>(m);
  bind_partition<int64_t>(m);
  bind_aggregate(m);
  bind_attend(m);
  bind_attend_recent(m);
  bind_csr(m);
  bind_dense(m);
  bind_pool(m);
  bind_recent(m);
  bind_sample(m);
  bind_stream(m);
  m.def("rank_distinct", rank_distinct, "values"_a.noconvert(), "rank"_a.noconvert());
}
