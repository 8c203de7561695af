// Bindings of sample.h and frontier.h.
#include "bind.h"
#include "frontier.h"
#include "sample.h"

namespace {

using namespace gnnfleet::bind;
using gnnfleet::Frontier;
using Weight = std::optional<In<float>>;
using Ids = std::optional<In<int64_t>>;

gnnfleet::SampleArgs args_of(const In<int64_t>& indptr, const Weight& weight, const In<int64_t>& seeds, const Ids& ids,
                             int64_t fanout, bool replace, uint64_t key, uint32_t place, const Out<int64_t>& offsets, int threads) {
  require(size(offsets) == size(seeds) + 1, "sample: one offset per seed and one more");
  require(!ids || size(*ids) == size(seeds), "sample: one id per seed");
  const int64_t rows = size(indptr) - 1;
  for (int64_t i = 0; i < size(seeds); ++i) {
    if (seeds.data()[i] < 0 || seeds.data()[i] >= rows) throw std::out_of_range("sample: a seed is out of range");
  }
  return {indptr.data(), data_or_null(weight), seeds.data(), ids ? ids->data() : seeds.data(), size(seeds), fanout, replace,
          {key, place}, threads};
}

void count_samples(In<int64_t> indptr, Weight weight, In<int64_t> seeds, Ids ids, int64_t fanout, bool replace, uint64_t key,
                   uint32_t place, Out<int64_t> offsets, int threads) {
  const auto args = args_of(indptr, weight, seeds, ids, fanout, replace, key, place, offsets, threads);
  nb::gil_scoped_release free;
  gnnfleet::count_samples(args, offsets.data());
}

void draw_samples(In<int64_t> indptr, Weight weight, In<int64_t> seeds, Ids ids, int64_t fanout, bool replace, uint64_t key,
                  uint32_t place, Out<int64_t> offsets, Out<int64_t> edges, int threads) {
  const auto args = args_of(indptr, weight, seeds, ids, fanout, replace, key, place, offsets, threads);
  require(size(edges) == offsets.data()[size(seeds)], "sample: edges must have room for all that are counted");
  nb::gil_scoped_release free;
  gnnfleet::draw_samples(args, offsets.data(), edges.data());
}

template <class Index>
void pick(In<Index> col, In<int64_t> edges, Out<Index> sources, int threads) {
  require(size(sources) == size(edges), "pick: one source per edge");
  nb::gil_scoped_release free;
  gnnfleet::gather_sources(col.data(), edges.data(), size(edges), sources.data(), threads);
}

int64_t start(Frontier& frontier, In<int64_t> ids) {
  nb::gil_scoped_release free;
  return frontier.start(ids.data(), size(ids));
}

template <class Index>
void meet(Frontier& frontier, In<Index> sources, Out<int32_t> places, int threads) {
  require(size(places) == size(sources), "meet: one place per source");
  nb::gil_scoped_release free;
  frontier.add(sources.data(), size(sources), places.data(), threads);
}

// Lets Python allocate the ids that `place` writes.
int64_t grow(Frontier& frontier) {
  nb::gil_scoped_release free;
  return frontier.count_new();
}

void place(Frontier& frontier, Out<int64_t> ids) {
  require(size(ids) == frontier.num_new(), "place: one id per row that `grow` counted");
  nb::gil_scoped_release free;
  frontier.assign_rows(ids.data());
}

template <class Index>
void rows(const Frontier& frontier, In<Index> sources, bool noted, Out<int32_t> out, int threads) {
  require(size(out) == size(sources), "rows: one row per source");
  require(frontier.all_have_rows(), "rows: what was met has no rows before it is grown");
  nb::gil_scoped_release free;
  if (noted) frontier.rows_at(size(out), out.data(), threads);
  else frontier.rows(sources.data(), size(sources), out.data(), threads);
}

void clear(Frontier& frontier) {
  nb::gil_scoped_release free;
  frontier.clear();
}

template <class Index>
void bind_indexed(nb::module_& m, nb::class_<Frontier>& frontier) {
  m.def("pick", pick<Index>, "col"_a.noconvert(), "edges"_a.noconvert(), "sources"_a.noconvert(), "threads"_a);
  frontier.def("meet", meet<Index>, "sources"_a.noconvert(), "places"_a.noconvert(), "threads"_a);
  frontier.def("rows", rows<Index>, "sources"_a.noconvert(), "noted"_a, "out"_a.noconvert(), "threads"_a);
}

}  // namespace

void bind_sample(nb::module_& m) {
  m.def("count_samples", count_samples, "indptr"_a.noconvert(), "weight"_a.noconvert().none(), "seeds"_a.noconvert(),
        "ids"_a.noconvert().none(), "fanout"_a, "replace"_a, "key"_a, "place"_a, "offsets"_a.noconvert(), "threads"_a);
  m.def("draw_samples", draw_samples, "indptr"_a.noconvert(), "weight"_a.noconvert().none(), "seeds"_a.noconvert(),
        "ids"_a.noconvert().none(), "fanout"_a, "replace"_a, "key"_a, "place"_a, "offsets"_a.noconvert(), "edges"_a.noconvert(),
        "threads"_a);
  nb::class_<Frontier> frontier(m, "Frontier");
  frontier.def(nb::init<int64_t>(), "count"_a)
      .def("start", start, "ids"_a.noconvert())
      .def("grow", grow)
      .def("place", place, "ids"_a.noconvert())
      .def("clear", clear)
      .def_prop_ro("bytes", &Frontier::bytes);
  bind_indexed<int32_t>(m, frontier);
  bind_indexed<int64_t>(m, frontier);
}
