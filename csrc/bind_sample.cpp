// Bindings of sample.h.
#include "bind.h"

#include "sample.h"

namespace {

using namespace gnnfleet::bind;
using Weight = std::optional<In<float>>;

gnnfleet::SampleArgs args_of(const In<int64_t>& indptr, const Weight& weight, const In<int64_t>& seeds, int64_t fanout, bool replace,
                             uint64_t key, uint32_t place, const Out<int64_t>& offsets, int threads) {
  require(size(offsets) == size(seeds) + 1, "sample: one offset per seed and one more");
  const int64_t rows = size(indptr) - 1;
  for (int64_t i = 0; i < size(seeds); ++i) {
    if (seeds.data()[i] < 0 || seeds.data()[i] >= rows) throw std::out_of_range("sample: a seed is out of range");
  }
  return {indptr.data(), data_or_null(weight), seeds.data(), size(seeds), fanout, replace, {key, place}, threads};
}

void count_samples(In<int64_t> indptr, Weight weight, In<int64_t> seeds, int64_t fanout, bool replace, uint64_t key, uint32_t place,
                   Out<int64_t> offsets, int threads) {
  const auto args = args_of(indptr, weight, seeds, fanout, replace, key, place, offsets, threads);
  nb::gil_scoped_release free;
  gnnfleet::count_samples(args, offsets.data());
}

void draw_samples(In<int64_t> indptr, Weight weight, In<int64_t> seeds, int64_t fanout, bool replace, uint64_t key, uint32_t place,
                  Out<int64_t> offsets, Out<int64_t> edges, int threads) {
  const auto args = args_of(indptr, weight, seeds, fanout, replace, key, place, offsets, threads);
  require(size(edges) == offsets.data()[size(seeds)], "sample: edges must have room for all that are counted");
  nb::gil_scoped_release free;
  gnnfleet::draw_samples(args, offsets.data(), edges.data());
}

int64_t enter(In<int64_t> ids, int64_t first, Out<int32_t> place) {
  nb::gil_scoped_release free;
  return gnnfleet::enter(ids.data(), size(ids), first, size(place), place.data());
}

template <class Index>
void mark_sources(In<Index> col, In<int64_t> edges, In<int32_t> place, Out<uint64_t> marks, Out<Index> sources, int threads) {
  require(size(sources) == size(edges) && size(marks) * 64 >= size(place), "mark_sources: lengths differ");
  nb::gil_scoped_release free;
  gnnfleet::mark_sources(col.data(), edges.data(), size(edges), place.data(), marks.data(), sources.data(), threads);
}

int64_t count_marked(In<uint64_t> marks) {
  nb::gil_scoped_release free;
  return gnnfleet::count_marked(marks.data(), size(marks));
}

void place_marked(Out<uint64_t> marks, int64_t first, Out<int32_t> place, Out<int64_t> ids) {
  nb::gil_scoped_release free;
  gnnfleet::place_marked(marks.data(), size(marks), first, place.data(), ids.data());
}

template <class Index>
void relabel(In<Index> sources, In<int32_t> place, Out<int32_t> rows, int threads) {
  require(size(rows) == size(sources), "relabel: one row per source");
  nb::gil_scoped_release free;
  gnnfleet::relabel(sources.data(), size(sources), place.data(), rows.data(), threads);
}

void leave(In<int64_t> ids, Out<int32_t> place) {
  nb::gil_scoped_release free;
  gnnfleet::leave(ids.data(), size(ids), place.data());
}

template <class Index>
void bind_indexed(nb::module_& m) {
  m.def("mark_sources", mark_sources<Index>, "col"_a.noconvert(), "edges"_a.noconvert(), "place"_a.noconvert(), "marks"_a.noconvert(),
        "sources"_a.noconvert(), "threads"_a);
  m.def("relabel", relabel<Index>, "sources"_a.noconvert(), "place"_a.noconvert(), "rows"_a.noconvert(), "threads"_a);
}

}  // namespace

void bind_sample(nb::module_& m) {
  m.def("count_samples", count_samples, "indptr"_a.noconvert(), "weight"_a.noconvert().none(), "seeds"_a.noconvert(), "fanout"_a,
        "replace"_a, "key"_a, "place"_a, "offsets"_a.noconvert(), "threads"_a);
  m.def("draw_samples", draw_samples, "indptr"_a.noconvert(), "weight"_a.noconvert().none(), "seeds"_a.noconvert(), "fanout"_a,
        "replace"_a, "key"_a, "place"_a, "offsets"_a.noconvert(), "edges"_a.noconvert(), "threads"_a);
  m.def("enter", enter, "ids"_a.noconvert(), "first"_a, "place"_a.noconvert());
  m.def("count_marked", count_marked, "marks"_a.noconvert());
  m.def("place_marked", place_marked, "marks"_a.noconvert(), "first"_a, "place"_a.noconvert(), "ids"_a.noconvert());
  m.def("leave", leave, "ids"_a.noconvert(), "place"_a.noconvert());
  bind_indexed<int32_t>(m);
  bind_indexed<int64_t>(m);
}
