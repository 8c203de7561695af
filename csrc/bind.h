// Shared by the bindings. They check shapes, release the GIL and call the kernels. Arrays are never converted; outputs are
// allocated in Python and filled here.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <stdexcept>

#include "aggregate.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gnnfleet::bind {

template <class T, int Dims = 1>
using In = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
template <class T, int Dims = 1>
using Out = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
template <class T>
using InRows = In<T, 2>;
template <class T>
using OutRows = Out<T, 2>;
template <class T>
using Spread = nb::ndarray<T, nb::ndim<2>, nb::device::cpu>;  // rows may be further apart than their width
using Any = nb::ndarray<nb::c_contig, nb::device::cpu>;  // of any type and number of dimensions

template <class Array>
int64_t size(const Array& array) {
  return static_cast<int64_t>(array.shape(0));
}

template <class Array>
auto data_or_null(const std::optional<Array>& array) -> decltype(array->data()) {
  return array ? array->data() : nullptr;
}

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

inline Element element_of(nb::dlpack::dtype type, const char* message) {
  if (type == nb::dtype<float>()) return Element::float32;
  if (type == nb::dtype<double>()) return Element::float64;
  require(type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && type.bits == 16, message);
  return Element::bfloat16;
}

// The type that an element is computed in.
inline nb::dlpack::dtype wide_of(Element element) {
  return element == Element::float64 ? nb::dtype<double>() : nb::dtype<float>();
}

}  // namespace gnnfleet::bind

void bind_aggregate(nb::module_& m);  // bind_aggregate.cpp
void bind_attend(nb::module_& m);     // bind_attend.cpp
void bind_attend_recent(nb::module_& m);  // bind_attend_recent.cpp
void bind_csr(nb::module_& m);        // bind_csr.cpp
void bind_dense(nb::module_& m);      // bind_dense.cpp
void bind_pool(nb::module_& m);       // bind_pool.cpp
void bind_recent(nb::module_& m);     // bind_recent.cpp
void bind_sample(nb::module_& m);     // bind_sample.cpp
void bind_stream(nb::module_& m);     // bind_stream.cpp
