// Bindings of stream.h.
#include "bind.h"
#include "stream.h"

namespace {

using namespace gnnfleet;
using namespace gnnfleet::bind;

template <class Id>
EdgeChunk<Id> as_chunk(int64_t first, const In<int64_t>& indptr, const In<Id>& src) {
  return {first, static_cast<int64_t>(indptr.shape(0)) - 1, indptr.data(), src.data()};
}

PinCounts as_pins(const Out<uint64_t, 2>& pins, int bits) {
  return {pins.data(), static_cast<int32_t>(pins.shape(1)), bits};
}

PairTable as_table(const Out<uint64_t>& key, const Out<uint32_t>& weight) {
  return {{key.data(), key.shape(0)}, {weight.data(), weight.shape(0)}};
}

template <class Id>
void bind_chunked(nb::module_& m) {
  m.def(
      "stream_asymmetry",
      [](int64_t first, In<int64_t> indptr, In<Id> src) {
        nb::gil_scoped_release unlocked;
        return asymmetry_chunk(as_chunk(first, indptr, src));
      },
      "first"_a, "indptr"_a.noconvert(), "src"_a.noconvert());
  m.def(
      "stream_cluster",
      [](int64_t first, In<int64_t> indptr, In<Id> src, Out<int32_t> label, Out<int64_t> mass,
         std::optional<In<int32_t>> weight, std::optional<Out<int32_t, 1>> vote, std::optional<Out<int32_t, 1>> vote_count,
         int64_t cap, uint64_t seed) {
        const ClusterState state{label.data(),       mass.data(),               data_or_null(weight),
                                 data_or_null(vote), data_or_null(vote_count), cap,
                                 seed};
        nb::gil_scoped_release unlocked;
        return cluster_chunk(as_chunk(first, indptr, src), state);
      },
      "first"_a, "indptr"_a.noconvert(), "src"_a.noconvert(), "label"_a.noconvert(), "mass"_a.noconvert(),
      "weight"_a.noconvert().none(), "vote"_a.noconvert().none(), "vote_count"_a.noconvert().none(), "cap"_a, "seed"_a);
  m.def(
      "stream_quotient",
      [](int64_t first, In<int64_t> indptr, In<Id> src, In<int32_t> label, Out<uint64_t> key, Out<uint32_t> weight,
         int64_t used) {
        nb::gil_scoped_release unlocked;
        return quotient_chunk(as_chunk(first, indptr, src), label.data(), as_table(key, weight), used);
      },
      "first"_a, "indptr"_a.noconvert(), "src"_a.noconvert(), "label"_a.noconvert(), "key"_a.noconvert(),
      "weight"_a.noconvert(), "used"_a);
  m.def(
      "stream_pins",
      [](int64_t first, In<int64_t> indptr, In<Id> src, Out<uint64_t, 2> pins, int bits, In<int32_t> part) {
        nb::gil_scoped_release unlocked;
        pins_chunk(as_chunk(first, indptr, src), as_pins(pins, bits), part.data());
      },
      "first"_a, "indptr"_a.noconvert(), "src"_a.noconvert(), "pins"_a.noconvert(), "bits"_a, "part"_a.noconvert());
  m.def(
      "stream_refine",
      [](int64_t first, In<int64_t> indptr, In<Id> src, Out<uint64_t, 2> pins, int bits, Out<int32_t> part,
         Out<int64_t> load, Out<int64_t> size, std::optional<In<int32_t>> weight, std::optional<In<int32_t>> degree,
         int64_t load_cap, int64_t size_cap, int64_t max_loss) {
        const PartState state{part.data(), load.data(), size.data(), data_or_null(weight), data_or_null(degree),
                              static_cast<int64_t>(load.shape(0)), load_cap, size_cap};
        nb::gil_scoped_release unlocked;
        return refine_chunk(as_chunk(first, indptr, src), as_pins(pins, bits), state, max_loss);
      },
      "first"_a, "indptr"_a.noconvert(), "src"_a.noconvert(), "pins"_a.noconvert(), "bits"_a, "part"_a.noconvert(),
      "load"_a.noconvert(), "size"_a.noconvert(), "weight"_a.noconvert().none(), "degree"_a.noconvert().none(),
      "load_cap"_a, "size_cap"_a, "max_loss"_a);
}

void bind_whole(nb::module_& m) {
  m.def(
      "stream_quotient_csr",
      [](Out<uint64_t> key, Out<uint32_t> weight, Out<int32_t> indptr, Out<int32_t> neighbour, Out<int32_t> edge_weight) {
        nb::gil_scoped_release unlocked;
        quotient_csr(as_table(key, weight), static_cast<int64_t>(indptr.shape(0)) - 1, indptr.data(), neighbour.data(),
                     edge_weight.data());
      },
      "key"_a.noconvert(), "weight"_a.noconvert(), "indptr"_a.noconvert(), "neighbour"_a.noconvert(),
      "edge_weight"_a.noconvert());
  m.def(
      "stream_pins_reset",
      [](Out<uint64_t, 2> pins, int bits, In<int32_t> part) {
        nb::gil_scoped_release unlocked;
        pins_reset(as_pins(pins, bits), part.data(), static_cast<int64_t>(part.shape(0)));
      },
      "pins"_a.noconvert(), "bits"_a, "part"_a.noconvert());
  m.def(
      "stream_pins_volume",
      [](Out<uint64_t, 2> pins, int bits) {
        nb::gil_scoped_release unlocked;
        return pins_volume(as_pins(pins, bits), static_cast<int64_t>(pins.shape(0)));
      },
      "pins"_a.noconvert(), "bits"_a);
  m.def(
      "stream_fill_lightest",
      [](In<int64_t> order, In<int64_t> mass, Out<int32_t> part, Out<int64_t> load) {
        nb::gil_scoped_release unlocked;
        fill_lightest(order.data(), static_cast<int64_t>(order.shape(0)), mass.data(), part.data(),
                      {load.data(), load.shape(0)});
      },
      "order"_a.noconvert(), "mass"_a.noconvert(), "part"_a.noconvert(), "load"_a.noconvert());
  m.def(
      "stream_rebalance",
      [](Out<int32_t> part, Out<int64_t> load, Out<int64_t> size, std::optional<In<int32_t>> weight, int64_t load_cap,
         int64_t size_cap) {
        const PartState state{part.data(), load.data(), size.data(), data_or_null(weight), nullptr,
                              static_cast<int64_t>(load.shape(0)), load_cap, size_cap};
        nb::gil_scoped_release unlocked;
        return rebalance(state, static_cast<int64_t>(part.shape(0)));
      },
      "part"_a.noconvert(), "load"_a.noconvert(), "size"_a.noconvert(), "weight"_a.noconvert().none(), "load_cap"_a,
      "size_cap"_a);
}

}  // namespace

void bind_stream(nb::module_& m) {
  bind_chunked<int32_t>(m);
  bind_chunked<int64_t>(m);
  bind_whole(m);
}
