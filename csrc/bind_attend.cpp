// Bindings of attention. The kernels share one struct of many optional arrays, so they are called by keyword. Shapes and
// types of every array are checked here; the caller guarantees the range of columns.
#include "bind.h"

#include <cmath>
#include <string>

#include "kernels.h"

namespace {

using namespace gnnfleet::bind;

using gnnfleet::AttendArgs;
using gnnfleet::AttendLocalArgs;
using gnnfleet::Element;
using gnnfleet::Matrix;
using Array = nb::ndarray<nb::device::cpu>;

// The arrays and numbers of one call.
class Call {
 public:
  explicit Call(const nb::kwargs& words) : words_(words) {}

  bool has(const char* name) const { return words_.contains(name) && !words_[name].is_none(); }

  template <typename T>
  T number(const char* name) const {
    need(has(name), name, "is missing");
    return nb::cast<T>(words_[name]);
  }

  // Dense [rows, width] of `type` with any distance between rows; null when absent. rows < 0: any number.
  Matrix matrix(const char* name, nb::dlpack::dtype type, int64_t rows, int64_t width) const {
    if (!has(name)) return {};
    const Array array = nb::cast<Array>(words_[name]);
    need(array.dtype() == type, name, "has another dtype than expected");
    need(array.ndim() == 2 && static_cast<int64_t>(array.shape(1)) == width, name, "has another width than expected");
    need(rows < 0 || static_cast<int64_t>(array.shape(0)) == rows, name, "has another number of rows than expected");
    need(array.stride(1) == 1 || width <= 1 || array.shape(0) == 0, name, "must have its columns side by side");
    return {array.data(), array.stride(0)};
  }

  void* dense(const char* name, nb::dlpack::dtype type, int64_t rows, int64_t width) const {
    const Matrix found = matrix(name, type, rows, width);
    need(!found.data || found.stride == width || rows <= 1, name, "must be contiguous");
    return const_cast<void*>(found.data);
  }

  template <typename T>
  const T* line(const char* name, int64_t length) const {
    if (!has(name)) return nullptr;
    const Array array = nb::cast<Array>(words_[name]);
    need(array.dtype() == nb::dtype<T>(), name, "has another dtype than expected");
    need(array.ndim() == 1 && (array.shape(0) <= 1 || array.stride(0) == 1), name, "must be contiguous, of one dimension");
    need(length < 0 || static_cast<int64_t>(array.shape(0)) == length, name, "has another length than expected");
    return static_cast<const T*>(array.data());
  }

  int64_t length(const char* name) const { return has(name) ? static_cast<int64_t>(nb::cast<Array>(words_[name]).shape(0)) : 0; }
  nb::dlpack::dtype type(const char* name) const { return nb::cast<Array>(words_[name]).dtype(); }

  static void need(bool condition, const char* name, const char* message) {
    if (condition) return;
    std::string text = "attend: ";
    throw std::invalid_argument(text.append(name).append(" ").append(message));
  }

 private:
  const nb::kwargs& words_;
};

Element element_of(const Call& call, const char* name) {
  Call::need(call.has(name), name, "is missing");
  return gnnfleet::bind::element_of(call.type(name), "attend: rows must be float32, float64 or bfloat16");
}

void read_structure(const Call& call, int64_t own_rows, AttendArgs& a) {
  const int64_t n = call.length("indptr") - 1;
  Call::need(n >= 0, "indptr", "must have at least one entry");
  a.structure.n = n;
  a.structure.indptr = call.line<int64_t>("indptr", -1);
  const int64_t edges = call.length("col");
  Call::need(call.has("col") && a.structure.indptr[n] == edges, "indptr", "must end at the number of edges");
  a.structure.wide = call.type("col") == nb::dtype<int64_t>();
  a.structure.col = a.structure.wide ? static_cast<const void*>(call.line<int64_t>("col", -1)) : call.line<int32_t>("col", -1);
  a.structure.rows = call.line<int32_t>("rows", n);
  if (!a.structure.rows) Call::need(n == own_rows, "indptr", "must have one entry more than there are rows");
  else for (int64_t i = 0; i < n; ++i) Call::need(a.structure.rows[i] >= 0 && a.structure.rows[i] < own_rows, "rows", "are out of range");
  a.positions = call.line<int64_t>("positions", edges);
}

void read_keep(const Call& call, int64_t places, AttendArgs& a) {
  const double rate = call.number<double>("dropout");
  Call::need(rate >= 0 && rate < 1, "dropout", "must be in [0, 1)");
  a.keep.on = rate > 0;
  if (!a.keep.on) return;
  a.keep.key = call.number<uint64_t>("key");
  a.keep.place = call.number<uint32_t>("place");
  const double threshold = std::nearbyint(rate * 4294967296.0);
  a.keep.threshold = threshold >= 4294967295.0 ? 0xffffffffu : static_cast<uint32_t>(threshold);
  a.keep.factor = 1 / (1 - rate);
  a.keep.ids = call.line<int64_t>("edge_ids", places);
}

// Arguments of forward and both halves of backward; own rows are destinations unless by_source.
AttendArgs read(const Call& call, bool by_source) {
  AttendArgs a;
  a.element = element_of(call, "value");
  const auto type = wide_of(a.element);
  a.score = static_cast<gnnfleet::Score>(call.number<int>("score"));
  a.heads = call.number<int64_t>("heads");
  a.channels = call.number<int64_t>("channels");
  a.depth = call.number<int64_t>("depth");
  a.slope = call.number<double>("slope");
  a.scale = call.number<double>("scale");
  a.threads = call.number<int>("threads");
  Call::need(a.heads >= 1 && a.channels >= 1 && a.depth >= 1 && a.threads >= 1, "heads, channels, depth", "must be positive");
  const int64_t sources = call.length("value"), targets = call.length("dst"), inner = a.heads * a.depth;
  a.value = call.matrix("value", call.type("value"), sources, a.heads * a.channels);
  a.src = call.matrix("src", type, sources, inner);
  a.dst = call.matrix("dst", type, targets, inner);
  Call::need(call.has("src") && call.has("dst"), "src, dst", "are missing");
  read_structure(call, by_source ? sources : targets, a);
  const int64_t places = call.has("edge") ? call.length("edge") : call.has("edge_ids") ? call.length("edge_ids") : call.length("col");
  a.edge = call.matrix("edge", type, places, inner);
  if (!a.positions) Call::need(places == call.length("col"), "edge or edge_ids", "must have one row per edge");
  if (a.score == gnnfleet::Score::v2) {
    Call::need(call.has("vector"), "vector", "is missing");
    a.vector = call.dense("vector", type, 1, inner);
  }
  read_keep(call, places, a);
  return a;
}

void read_state(const Call& call, int64_t rows, AttendArgs& a) {
  const auto type = wide_of(a.element);
  a.num = call.dense("num", type, rows, a.heads * a.channels);
  a.max = call.dense("max", type, rows, a.heads);
  a.den = call.dense("den", type, rows, a.heads);
  a.pos = call.dense("pos", type, rows, a.heads * a.channels);
  a.mass = call.dense("mass", type, rows, a.heads);
  Call::need(call.has("num") && call.has("max") && call.has("den"), "num, max, den", "are missing");
  Call::need(call.has("pos") == call.has("mass"), "pos and mass", "come together");
}

void forward(const nb::kwargs& words) {
  const Call call(words);
  AttendArgs a = read(call, false);
  read_state(call, call.length("dst"), a);
  a.fresh = call.number<bool>("fresh");
  a.finish = call.number<bool>("finish");
  Call::need(!a.pos || a.score == gnnfleet::Score::add, "pos", "is for additive scores");
  Call::need(!(a.fresh || a.finish) || !a.structure.rows, "rows", "do not go with fresh and finish");
  nb::gil_scoped_release free;
  gnnfleet::kernels().attend_forward(a);
}

void finish(const nb::kwargs& words) {
  const Call call(words);
  AttendArgs a;
  a.element = element_of(call, "num");
  a.heads = call.number<int64_t>("heads");
  a.channels = call.number<int64_t>("channels");
  a.threads = call.number<int>("threads");
  const int64_t n = call.length("num");
  read_state(call, n, a);
  nb::gil_scoped_release free;
  gnnfleet::kernels().attend_finish(a, n);
}

void local(const nb::kwargs& words) {
  const Call call(words);
  AttendLocalArgs a;
  a.element = element_of(call, "grad");
  const auto type = wide_of(a.element);
  a.heads = call.number<int64_t>("heads");
  a.channels = call.number<int64_t>("channels");
  a.slope = call.number<double>("slope");
  a.threads = call.number<int>("threads");
  a.n = call.length("grad");
  a.grad = call.dense("grad", type, a.n, a.heads * a.channels);
  a.out = call.dense("out", type, a.n, a.heads * a.channels);
  a.lse = call.dense("lse", type, a.n, a.heads);
  a.dst = call.dense("dst", type, a.n, a.heads);
  a.pos = call.dense("pos", type, a.n, a.heads * a.channels);
  a.mass = call.dense("mass", type, a.n, a.heads);
  a.side = call.dense("side", type, a.n, (call.has("dst") ? 3 : 2) * a.heads);
  a.d_dst = call.dense("d_dst", type, a.n, a.heads);
  Call::need(call.has("out") && call.has("lse") && call.has("side"), "out, lse, side", "are missing");
  Call::need(!call.has("d_dst") || (call.has("pos") && call.has("mass")), "d_dst", "needs pos and mass");
  nb::gil_scoped_release free;
  gnnfleet::kernels().attend_local(a);
}

// by_source: d_value and d_src; otherwise d_dst, and d_edge and d_vector if present.
template <bool BySource>
void backward(const nb::kwargs& words) {
  const Call call(words);
  AttendArgs a = read(call, BySource);
  const auto type = wide_of(a.element);
  const int64_t sources = call.length("value"), targets = call.length("dst"), inner = a.heads * a.depth;
  a.grad = call.matrix("grad", type, targets, a.heads * a.channels);
  a.side = call.matrix("side", type, targets, 2 * a.heads);
  a.add = call.number<bool>("add");
  Call::need(call.has("grad") && call.has("side"), "grad, side", "are missing");
  if (BySource) {
    a.d_value = call.dense("d_value", type, sources, a.heads * a.channels);
    a.d_src = call.dense("d_src", type, sources, inner);
    Call::need(call.has("d_value") && call.has("d_src"), "d_value, d_src", "are missing");
  } else {
    a.d_dst = call.dense("d_dst", type, targets, inner);
    a.d_edge = call.dense("d_edge", type, call.length("edge"), inner);
    a.d_vector = call.dense("d_vector", type, 1, inner);
    Call::need(call.has("d_dst"), "d_dst", "is missing");
    Call::need(!a.d_vector || a.score == gnnfleet::Score::v2, "d_vector", "is for v2 scores");
  }
  const bool additive = BySource && a.score == gnnfleet::Score::add && !call.has("edge");
  nb::gil_scoped_release free;
  const gnnfleet::Kernels& kernels = gnnfleet::kernels();
  (additive ? kernels.attend_source : BySource ? kernels.attend_edge_source : kernels.attend_edge_target)(a);
}

}  // namespace

void bind_attend(nb::module_& m) {
  m.def("attend_forward", [](nb::kwargs words) { forward(words); });
  m.def("attend_finish", [](nb::kwargs words) { finish(words); });
  m.def("attend_local", [](nb::kwargs words) { local(words); });
  m.def("attend_by_source", [](nb::kwargs words) { backward<true>(words); });
  m.def("attend_by_target", [](nb::kwargs words) { backward<false>(words); });
}
