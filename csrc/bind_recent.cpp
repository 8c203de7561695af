// Bindings of recent.h.
#include "bind.h"
#include "recent.h"

namespace {

using namespace gnnfleet::bind;
using gnnfleet::RecentArgs;
using gnnfleet::TemporalNeighbors;

void append(TemporalNeighbors& table, In<int64_t> src, In<int64_t> dst) {
  require(size(src) == size(dst), "recent: one source and one destination per event");
  bool known;
  {
    nb::gil_scoped_release free;
    known = table.append(src.data(), dst.data(), size(src));
  }
  if (!known) throw std::out_of_range("recent: an end of an event is no node");
}

void check_nodes(const TemporalNeighbors& table, const int64_t* nodes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (nodes[i] >= table.num_nodes()) throw std::out_of_range("recent: a node is out of range");
  }
}

RecentArgs args_of(const TemporalNeighbors& table, const In<int64_t>& nodes, const In<int64_t>& before, const OutRows<int64_t>& neighbours,
                   const OutRows<int64_t>& events, int threads) {
  require(size(before) == size(nodes) && size(neighbours) == size(nodes) && size(events) == size(nodes) &&
              neighbours.shape(1) == events.shape(1),
          "recent: nodes and before are [n], neighbours and events [n, k]");
  check_nodes(table, nodes.data(), size(nodes));
  return {nodes.data(), before.data(), size(nodes), static_cast<int64_t>(neighbours.shape(1)), threads};
}

void recent(const TemporalNeighbors& table, In<int64_t> nodes, In<int64_t> before, OutRows<int64_t> neighbours, OutRows<int64_t> events,
            int threads) {
  const auto args = args_of(table, nodes, before, neighbours, events, threads);
  nb::gil_scoped_release free;
  table.recent(args, neighbours.data(), events.data());
}

void counts(const TemporalNeighbors& table, In<int64_t> nodes, In<int64_t> before, Out<int64_t> out, int threads) {
  require(size(before) == size(nodes) && size(out) == size(nodes), "recent: nodes, before and counts are [n]");
  check_nodes(table, nodes.data(), size(nodes));
  nb::gil_scoped_release free;
  table.counts({nodes.data(), before.data(), size(nodes), 0, threads}, out.data());
}

void meetings(const TemporalNeighbors& table, In<int64_t> src, In<int64_t> before, InRows<int64_t> dst, int64_t depth, OutRows<int64_t> count,
              OutRows<int64_t> gap, OutRows<int64_t> last, int threads) {
  const int64_t n = size(src), k = static_cast<int64_t>(dst.shape(1));
  require(size(before) == n && size(dst) == n, "meetings: src and before are [n], dst [n, k]");
  for (const auto* out : {&count, &gap, &last}) {
    require(size(*out) == n && static_cast<int64_t>(out->shape(1)) == k, "meetings: results are [n, k]");
  }
  require(depth > 0, "meetings: a depth of at least one event");
  check_nodes(table, src.data(), n);
  for (int64_t i = 0; i < n; ++i) {
    if (src.data()[i] < 0) throw std::out_of_range("meetings: a source is out of range");
  }
  nb::gil_scoped_release free;
  table.meetings({src.data(), before.data(), dst.data(), n, k, depth, threads}, count.data(), gap.data(), last.data());
}

void uniform(const TemporalNeighbors& table, In<int64_t> nodes, In<int64_t> before, uint64_t key, uint32_t place,
             OutRows<int64_t> neighbours, OutRows<int64_t> events, int threads) {
  const auto args = args_of(table, nodes, before, neighbours, events, threads);
  nb::gil_scoped_release free;
  table.uniform(args, {key, place}, neighbours.data(), events.data());
}

}  // namespace

void bind_recent(nb::module_& m) {
  nb::class_<TemporalNeighbors>(m, "TemporalNeighbors")
      .def(nb::init<int64_t>(), "num_nodes"_a)
      .def("append", append, "src"_a.noconvert(), "dst"_a.noconvert())
      .def("recent", recent, "nodes"_a.noconvert(), "before"_a.noconvert(), "neighbours"_a.noconvert(), "events"_a.noconvert(), "threads"_a)
      .def("uniform", uniform, "nodes"_a.noconvert(), "before"_a.noconvert(), "key"_a, "place"_a, "neighbours"_a.noconvert(),
           "events"_a.noconvert(), "threads"_a)
      .def("counts", counts, "nodes"_a.noconvert(), "before"_a.noconvert(), "out"_a.noconvert(), "threads"_a)
      .def("meetings", meetings, "src"_a.noconvert(), "before"_a.noconvert(), "dst"_a.noconvert(), "depth"_a, "count"_a.noconvert(),
           "gap"_a.noconvert(), "last"_a.noconvert(), "threads"_a)
      .def_prop_ro("num_events", &TemporalNeighbors::num_events)
      .def_prop_ro("bytes", &TemporalNeighbors::bytes);
}
