// Bindings of aggregation, epilogues and dropout: aggregate.h, epilogue.h, dropout.h.
#include "bind.h"
#include "kernels.h"

namespace {

using namespace gnnfleet::bind;
using gnnfleet::Element;
using Maybe = std::optional<Any>;

Element element_in(const Any& array) { return element_of(array.dtype(), "expected float32, float64 or bfloat16"); }

const void* factor_of(const Maybe& array, Element element, int64_t length, const char* message) {
  if (!array) return nullptr;
  require(array->dtype() == wide_of(element) && static_cast<int64_t>(array->size()) == length, message);
  return array->data();
}

// The rows of the structure are those of `own`, or the ones that `normal_rows` lists.
gnnfleet::Rows rows_of(const In<int64_t>& indptr, const Any& col, const std::optional<In<int32_t>>& rows, const Any& own) {
  const bool wide = col.dtype() == nb::dtype<int64_t>();
  require(wide || col.dtype() == nb::dtype<int32_t>(), "columns must be int32 or int64");
  require(size(indptr) >= 1, "indptr must have at least one entry");
  require((rows ? size(*rows) : size(own)) == size(indptr) - 1, "there must be one row per row of the structure");
  for (int64_t i = 0; rows && i < size(*rows); ++i) {
    require(rows->data()[i] >= 0 && rows->data()[i] < size(own), "rows are out of range");
  }
  return {indptr.data(), col.data(), wide, data_or_null(rows), size(indptr) - 1};
}

void aggregate_sum(In<int64_t> indptr, Any col, std::optional<In<int32_t>> rows, Any x, Maybe weight, Maybe row_scale,
                   Maybe col_scale, Any out, Maybe base, int threads) {
  const auto structure = rows_of(indptr, col, rows, out);
  const auto element = element_in(x);
  const int64_t width = static_cast<int64_t>(x.shape(1));
  require(x.ndim() == 2 && out.ndim() == 2 && out.shape(1) == x.shape(1), "aggregate: x and out must have the same width");
  const bool narrow = element != Element::float64 && element_in(out) == Element::bfloat16;
  require(narrow || out.dtype() == wide_of(element), "aggregate: out must be float32 or bfloat16, or float64 for float64");
  require(!base || (base->dtype() == out.dtype() && base->ndim() == 2 && base->shape(1) == out.shape(1) &&
                    base->shape(0) <= out.shape(0)), "aggregate: base must be the first rows of out");
  const gnnfleet::SumArgs args{
      structure, x.data(), width, element,
      factor_of(weight, element, static_cast<int64_t>(col.size()), "aggregate: one weight per edge, of the sums' dtype"),
      factor_of(row_scale, element, structure.n, "aggregate: one row scale per row, of the sums' dtype"),
      factor_of(col_scale, element, static_cast<int64_t>(x.shape(0)), "aggregate: one column scale per row of x, of the sums' dtype"),
      out.data(), data_or_null(base), base ? size(*base) : 0, narrow, threads};
  nb::gil_scoped_release free;
  gnnfleet::kernels().aggregate_sum(args);
}

void aggregate_max(In<int64_t> indptr, Any col, std::optional<In<int32_t>> rows, std::optional<In<int64_t>> number,
                   Any x, Any out, OutRows<int64_t> winner, bool merge, int threads) {
  const auto element = element_in(x);
  require(x.ndim() == 2 && out.ndim() == 2 && out.dtype() == wide_of(element) && out.shape(1) == x.shape(1) &&
              winner.shape(1) == x.shape(1) && winner.shape(0) == out.shape(0), "aggregate_max: out and winner must fit x");
  require(!number || number->size() == col.size(), "aggregate_max: one number per edge");
  const gnnfleet::MaxArgs args{rows_of(indptr, col, rows, out), data_or_null(number), x.data(),
                               static_cast<int64_t>(x.shape(1)), element, out.data(), winner.data(), merge, threads};
  nb::gil_scoped_release free;
  gnnfleet::kernels().aggregate_max(args);
}

void aggregate_max_back(In<int64_t> indptr, Any col, std::optional<In<int32_t>> rows, std::optional<In<int64_t>> number,
                        std::optional<In<int64_t>> positions, Any grad, InRows<int64_t> winner, Any dx, bool add, int threads) {
  const auto element = element_in(grad);
  require(grad.ndim() == 2 && dx.ndim() == 2 && element != Element::bfloat16 && dx.dtype() == grad.dtype() &&
              dx.shape(1) == grad.shape(1) && winner.shape(0) == grad.shape(0) && winner.shape(1) == grad.shape(1),
          "aggregate_max_back: grad, winner and dx must fit");
  require(!positions || positions->size() == col.size(), "aggregate_max_back: one position per edge");
  require(!number || positions || number->size() == col.size(), "aggregate_max_back: one number per edge");
  const gnnfleet::MaxBackArgs args{rows_of(indptr, col, rows, dx), data_or_null(number),
                                   data_or_null(positions), grad.data(), winner.data(),
                                   static_cast<int64_t>(grad.shape(1)), element, dx.data(), add, threads};
  nb::gil_scoped_release free;
  gnnfleet::kernels().aggregate_max_back(args);
}

void edge_dot(In<int64_t> indptr, Any col, std::optional<In<int32_t>> rows, Any a, Any b, Maybe row_scale, Any out, int threads) {
  const auto structure = rows_of(indptr, col, rows, a);
  const auto element = element_in(a);
  require(a.dtype() == b.dtype() && a.shape(1) == b.shape(1), "edge_dot: both sides must have one dtype and width");
  require(out.dtype() == wide_of(element) && out.size() == col.size(), "edge_dot: one result per edge");
  const gnnfleet::DotArgs args{structure, a.data(), b.data(), static_cast<int64_t>(a.shape(1)), element,
                               factor_of(row_scale, element, structure.n, "edge_dot: one row scale per row"), out.data(), threads};
  nb::gil_scoped_release free;
  gnnfleet::kernels().edge_dot(args);
}

void dropout_rows(Any x, In<int64_t> ids, uint64_t key, uint32_t place, uint32_t threshold, double scale, Any out, int threads) {
  const auto element = element_in(x);
  require(out.dtype() == x.dtype(), "dropout: one dtype, in and out alike");
  require(x.ndim() == 2 && x.shape(0) == ids.shape(0) && out.size() == x.size(), "dropout: one id per row of x");
  const gnnfleet::DropoutArgs args{x.data(), out.data(), element, ids.data(), size(ids),
                                   static_cast<int64_t>(x.shape(1)), key, place, threshold, scale, threads};
  nb::gil_scoped_release free;
  gnnfleet::kernels().dropout_rows(args);
}

bool same_rows(const Any& a, const Any& b) {
  return a.ndim() == 2 && b.ndim() == 2 && a.shape(0) == b.shape(0) && a.shape(1) == b.shape(1) && a.dtype() == b.dtype();
}

bool fits(const Maybe& columns, const Any& rows) {
  return !columns || (columns->ndim() == 1 && columns->shape(0) == rows.shape(1) && columns->dtype() == wide_of(element_in(rows)));
}

void epilogue(Any x, Maybe bias, bool relu, int threads) {
  require(x.ndim() == 2, "epilogue: expected rows");
  require(fits(bias, x), "epilogue: one bias per column, of the same type, float32 for bfloat16");
  gnnfleet::EpilogueArgs args{element_in(x), relu, static_cast<int64_t>(x.shape(0)),
                              static_cast<int64_t>(x.shape(1)), threads};
  args.x = x.data();
  args.bias = data_or_null(bias);
  nb::gil_scoped_release free;
  gnnfleet::kernels().epilogue(args);
}

void epilogue_back(Any grad, Maybe out, Maybe part, Maybe sums, int threads) {
  require(grad.ndim() == 2, "epilogue: expected rows");
  require(out.has_value() == part.has_value(), "epilogue: out and part go together");
  require(!out || (same_rows(grad, *out) && same_rows(grad, *part)), "epilogue: grad, out and part are alike");
  require(fits(sums, grad), "epilogue: one sum per column, of the same type, float32 for bfloat16");
  gnnfleet::EpilogueArgs args{element_in(grad), out.has_value(),
                              static_cast<int64_t>(grad.shape(0)), static_cast<int64_t>(grad.shape(1)), threads};
  args.grad = grad.data();
  args.out = data_or_null(out);
  args.part = data_or_null(part);
  args.sums = data_or_null(sums);
  nb::gil_scoped_release free;
  gnnfleet::kernels().epilogue_back(args);
}

}  // namespace

void bind_aggregate(nb::module_& m) {
  m.def("epilogue", epilogue, "x"_a.noconvert(), "bias"_a.noconvert().none(), "relu"_a, "threads"_a);
  m.def("epilogue_back", epilogue_back, "grad"_a.noconvert(), "out"_a.noconvert().none(), "part"_a.noconvert().none(),
        "sums"_a.noconvert().none(), "threads"_a);
  m.def("dropout_rows", dropout_rows, "x"_a.noconvert(), "ids"_a.noconvert(), "key"_a, "place"_a, "threshold"_a, "scale"_a,
        "out"_a.noconvert(), "threads"_a);
  m.def("aggregate_sum", aggregate_sum, "indptr"_a.noconvert(), "col"_a.noconvert(), "rows"_a.noconvert().none(),
        "x"_a.noconvert(), "weight"_a.noconvert().none(), "row_scale"_a.noconvert().none(),
        "col_scale"_a.noconvert().none(), "out"_a.noconvert(), "base"_a.noconvert().none(), "threads"_a);
  m.def("aggregate_max", aggregate_max, "indptr"_a.noconvert(), "col"_a.noconvert(), "rows"_a.noconvert().none(),
        "number"_a.noconvert().none(), "x"_a.noconvert(), "out"_a.noconvert(), "winner"_a.noconvert(), "merge"_a, "threads"_a);
  m.def("aggregate_max_back", aggregate_max_back, "indptr"_a.noconvert(), "col"_a.noconvert(), "rows"_a.noconvert().none(),
        "number"_a.noconvert().none(), "positions"_a.noconvert().none(), "grad"_a.noconvert(), "winner"_a.noconvert(),
        "dx"_a.noconvert(), "add"_a, "threads"_a);
  m.def("edge_dot", edge_dot, "indptr"_a.noconvert(), "col"_a.noconvert(), "rows"_a.noconvert().none(), "a"_a.noconvert(),
        "b"_a.noconvert(), "row_scale"_a.noconvert().none(), "out"_a.noconvert(), "threads"_a);
}
