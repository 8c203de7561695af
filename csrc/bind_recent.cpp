// Bindings of recent.h.
#include "bind.h"
#include "recent.h"

namespace {

using namespace gnnfleet::bind;
using gnnfleet::RecentArgs;
using gnnfleet::RecentNeighbours;

void append(RecentNeighbours& table, In<int64_t> src, In<int64_t> dst) {
  require(size(src) == size(dst), "recent: one source and one destination per event");
  bool known;
  {
    nb::gil_scoped_release free;
    known = table.append(src.data(), dst.data(), size(src));
  }
  if (!known) throw std::out_of_range("recent: an end of an event is no node");
}

RecentArgs args_of(const RecentNeighbours& table, const In<int64_t>& nodes, const In<int64_t>& before, const OutRows<int64_t>& neighbours,
                   const OutRows<int64_t>& events, int threads) {
  require(size(before) == size(nodes) && size(neighbours) == size(nodes) && size(events) == size(nodes) &&
              neighbours.shape(1) == events.shape(1),
          "recent: nodes and before are [n], neighbours and events [n, k]");
  for (int64_t i = 0; i < size(nodes); ++i) {
    if (nodes.data()[i] >= table.num_nodes()) throw std::out_of_range("recent: a node is out of range");
  }
  return {nodes.data(), before.data(), size(nodes), static_cast<int64_t>(neighbours.shape(1)), threads};
}

void recent(const RecentNeighbours& table, In<int64_t> nodes, In<int64_t> before, OutRows<int64_t> neighbours, OutRows<int64_t> events,
            int threads) {
  const auto args = args_of(table, nodes, before, neighbours, events, threads);
  nb::gil_scoped_release free;
  table.recent(args, neighbours.data(), events.data());
}

void uniform(const RecentNeighbours& table, In<int64_t> nodes, In<int64_t> before, uint64_t key, uint32_t place,
             OutRows<int64_t> neighbours, OutRows<int64_t> events, int threads) {
  const auto args = args_of(table, nodes, before, neighbours, events, threads);
  nb::gil_scoped_release free;
  table.uniform(args, {key, place}, neighbours.data(), events.data());
}

}  // namespace

void bind_recent(nb::module_& m) {
  nb::class_<RecentNeighbours>(m, "RecentNeighbours")
      .def(nb::init<int64_t>(), "num_nodes"_a)
      .def("append", append, "src"_a.noconvert(), "dst"_a.noconvert())
      .def("recent", recent, "nodes"_a.noconvert(), "before"_a.noconvert(), "neighbours"_a.noconvert(), "events"_a.noconvert(), "threads"_a)
      .def("uniform", uniform, "nodes"_a.noconvert(), "before"_a.noconvert(), "key"_a, "place"_a, "neighbours"_a.noconvert(),
           "events"_a.noconvert(), "threads"_a)
      .def_prop_ro("num_events", &RecentNeighbours::num_events)
      .def_prop_ro("bytes", &RecentNeighbours::bytes);
}
