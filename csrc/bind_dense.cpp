#include "bind.h"
#include "cosines.h"
#include "gates.h"
#include "kernels.h"
#include "product.h"

namespace {

using namespace gnnfleet;
using namespace gnnfleet::bind;

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;

// Rows of a matrix of one row may have any stride, and so may its columns.
bool is_dense(const Matrix& x) { return x.stride(0) == 1 || x.stride(1) == 1 || !x.shape(0) || !x.shape(1); }

void multiply(const Matrix& a, const Matrix& b, const Spread<float>& c, std::optional<In<float>> bias, bool add, int threads) {
  require(a.shape(0) == c.shape(0) && b.shape(1) == c.shape(1) && a.shape(1) == b.shape(0), "product: shapes do not fit");
  require(is_dense(a) && is_dense(b) && (c.stride(1) == 1 || c.shape(1) < 2), "product: rows or columns must be contiguous");
  require(!bias || (!add && size(*bias) == static_cast<int64_t>(c.shape(1))), "product: a bias is one row, of a product alone");
  require(has_product(), "product: this machine does not multiply bfloat16");
  require(threads >= 1, "product: threads must be positive");
  const ProductArgs args{size(a), static_cast<int64_t>(b.shape(1)), static_cast<int64_t>(a.shape(1)),
                         a.data(), a.stride(0), a.stride(1),
                         b.data(), b.stride(0), b.stride(1),
                         c.data(), c.stride(0), data_or_null(bias), add, threads};
  nb::gil_scoped_release free;
  product(args);
}

GateArgs gate_args(const Any& input_gates, const Any& memory_gates, const Any& memory, int threads) {
  require(input_gates.ndim() == 2 && memory_gates.ndim() == 2 && memory.ndim() == 2, "gates: rows have two dimensions");
  const auto type = memory.dtype();
  require(type == nb::dtype<float>() || type == nb::dtype<double>(), "gates: rows must be float32 or float64");
  GateArgs a{};
  a.wide = type == nb::dtype<double>();
  a.n = size(memory);
  a.width = static_cast<int64_t>(memory.shape(1));
  a.threads = threads;
  for (const Any* each : {&input_gates, &memory_gates}) {
    require(each->dtype() == type && size(*each) == a.n && static_cast<int64_t>(each->shape(1)) == 3 * a.width,
            "gates: three columns for one of memory, of its type");
  }
  require(threads >= 1, "gates: threads must be positive");
  a.input_gates = input_gates.data();
  a.memory_gates = memory_gates.data();
  a.memory = memory.data();
  return a;
}

void* like(const Any& x, const Any& other) {
  require(x.dtype() == other.dtype() && x.ndim() == 2 && x.shape(0) == other.shape(0) && x.shape(1) == other.shape(1),
          "gates: a result has another type or shape than expected");
  return x.data();
}

void gates_forward(const Any& input_gates, const Any& memory_gates, const Any& memory, const Any& out, int threads) {
  GateArgs a = gate_args(input_gates, memory_gates, memory, threads);
  a.out = like(out, memory);
  nb::gil_scoped_release free;
  kernels().gates(a);
}

void gates_backward(const Any& input_gates, const Any& memory_gates, const Any& memory, const Any& grad, const Any& grad_input_gates, const Any& grad_memory_gates,
          int threads) {
  GateArgs a = gate_args(input_gates, memory_gates, memory, threads);
  a.grad = like(grad, memory);
  a.grad_input_gates = like(grad_input_gates, input_gates);
  a.grad_memory_gates = like(grad_memory_gates, memory_gates);
  nb::gil_scoped_release free;
  kernels().gates_back(a);
}

void turned(const Any& since, const Any& frequency, const Any& phase, const Any& cosine, const Any& sine, int threads) {
  const auto type = since.dtype();
  require(type == nb::dtype<float>() || type == nb::dtype<double>(), "cosines: times must be float32 or float64");
  require(since.ndim() == 1 && frequency.ndim() == 1 && phase.ndim() == 1 && size(frequency) == size(phase), "cosines: times and frequencies are rows");
  for (const Any* each : {&frequency, &phase, &cosine, &sine}) require(each->dtype() == type, "cosines: all of one type");
  for (const Any* each : {&cosine, &sine}) {
    require(each->ndim() == 2 && size(*each) == size(since) && each->shape(1) == frequency.shape(0), "cosines: a result has another shape than expected");
  }
  require(threads >= 1, "cosines: threads must be positive");
  const CosineArgs a{type == nb::dtype<double>(), size(since), size(frequency), since.data(), frequency.data(), phase.data(),
                     cosine.data(), sine.data(), threads};
  nb::gil_scoped_release free;
  kernels().cosines(a);
}

}  // namespace

void bind_dense(nb::module_& m) {
  m.def("has_product", gnnfleet::has_product);
  m.def("product", multiply, "a"_a.noconvert(), "b"_a.noconvert(), "c"_a.noconvert(), "bias"_a.noconvert().none(), "add"_a, "threads"_a);
  m.def("cosines", turned, "since"_a.noconvert(), "frequency"_a.noconvert(), "phase"_a.noconvert(), "cosine"_a.noconvert(),
        "sine"_a.noconvert(), "threads"_a);
  m.def("gates", gates_forward, "given"_a.noconvert(), "kept"_a.noconvert(), "memory"_a.noconvert(), "out"_a.noconvert(), "threads"_a);
  m.def("gates_back", gates_backward, "given"_a.noconvert(), "kept"_a.noconvert(), "memory"_a.noconvert(), "grad"_a.noconvert(),
        "grad_given"_a.noconvert(), "grad_kept"_a.noconvert(), "threads"_a);
}
