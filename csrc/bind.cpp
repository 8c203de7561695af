// Bindings only: check shapes at the door, release the GIL, call. Arrays come in as they are (no silent conversion),
// outputs are allocated in Python and filled here, so ownership never crosses.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "csr.h"
#include "kernels.h"

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
}
