// Binding of attention over latest events. Called by keyword, because it has many arrays. Shapes and types are checked
// here; the caller guarantees the range of `near` and `edge`.
#include <initializer_list>
#include <string>

#include "bind.h"
#include "kernels.h"

namespace {

using namespace gnnfleet::bind;
using gnnfleet::RecentArgs;

class Words {
 public:
  explicit Words(const nb::kwargs& words) : words_(words) {}

  template <typename T>
  T number(const char* name) const {
    return nb::cast<T>(words_[name]);
  }

  // A contiguous array of exactly this shape; null if it is None or absent.
  void* array(const char* name, nb::dlpack::dtype type, std::initializer_list<int64_t> shape) const {
    if (!words_.contains(name) || words_[name].is_none()) return nullptr;
    const Any found = nb::cast<Any>(words_[name]);
    bool fits = found.dtype() == type && found.ndim() == shape.size();
    size_t axis = 0;
    for (const int64_t size : shape) {
      fits = fits && (size < 0 || static_cast<int64_t>(found.shape(axis)) == size);
      ++axis;
    }
    if (!fits) throw std::invalid_argument(std::string("attend_recent: ") + name + " has another type or shape than expected");
    return found.data();
  }

  Any any(const char* name) const { return nb::cast<Any>(words_[name]); }

 private:
  const nb::kwargs& words_;
};

RecentArgs read(const Words& words) {
  RecentArgs a{};
  const Any query = words.any("query"), near = words.any("near"), row = words.any("row"), frequency = words.any("frequency");
  require(query.ndim() == 3 && near.ndim() == 2 && row.ndim() == 2, "attend_recent: query, near or row of another dimension");
  const auto type = query.dtype();
  require(type == nb::dtype<float>() || type == nb::dtype<double>(), "attend_recent: rows must be float32 or float64");
  a.wide = type == nb::dtype<double>();
  a.n = size(query);
  a.heads = static_cast<int64_t>(query.shape(1));
  a.places = static_cast<int64_t>(near.shape(1));
  a.rows = size(row);
  a.row_width = static_cast<int64_t>(row.shape(1));
  a.time_width = size(frequency);
  const int64_t width = static_cast<int64_t>(query.shape(2));
  a.feature_width = width - a.row_width - a.time_width;
  require(a.feature_width >= 0, "attend_recent: query is too narrow");
  a.query = query.data();
  a.offset = words.array("offset", type, {a.n, a.heads});
  a.row = words.array("row", type, {a.rows, a.row_width});
  a.near = static_cast<const int64_t*>(words.array("near", nb::dtype<int64_t>(), {a.n, a.places}));
  a.feature = words.array("feature", type, {-1, a.feature_width});
  require(a.feature != nullptr || !a.feature_width, "attend_recent: feature is missing");
  a.edge = static_cast<const int64_t*>(words.array("edge", nb::dtype<int64_t>(), {a.n, a.places}));
  a.since = words.array("since", type, {a.n, a.places});
  a.frequency = words.array("frequency", type, {a.time_width});
  a.phase = words.array("phase", type, {a.time_width});
  a.slope = words.number<double>("slope");
  a.ids = static_cast<const int64_t*>(words.array("ids", nb::dtype<int64_t>(), {a.n}));
  a.key = words.number<uint64_t>("key");
  a.place = words.number<uint32_t>("place");
  a.threshold = words.number<uint32_t>("threshold");
  a.scale = words.number<double>("scale");
  a.threads = words.number<int>("threads");
  a.score = words.array("score", type, {a.n, a.heads, a.places});
  require(a.threads >= 1 && a.offset && a.edge && a.since && a.score, "attend_recent: something is missing");
  require(a.ids || !a.threshold, "attend_recent: dropout needs ids");
  return a;
}

void forward(const nb::kwargs& given) {
  const Words words(given);
  RecentArgs a = read(words);
  const int64_t width = a.row_width + a.feature_width + a.time_width;
  const auto type = words.any("query").dtype();
  a.out = words.array("out", type, {a.n, a.heads, width});
  a.weight = words.array("weight", type, {a.n, a.heads});
  require(a.out && a.weight, "attend_recent: out or weight is missing");
  nb::gil_scoped_release free;
  gnnfleet::kernels().attend_recent(a);
}

void backward(const nb::kwargs& given) {
  const Words words(given);
  RecentArgs a = read(words);
  const int64_t width = a.row_width + a.feature_width + a.time_width;
  const auto type = words.any("query").dtype();
  a.grad_out = words.array("grad_out", type, {a.n, a.heads, width});
  a.grad_weight = words.array("grad_weight", type, {a.n, a.heads});
  a.grad_query = words.array("grad_query", type, {a.n, a.heads, width});
  a.grad_offset = words.array("grad_offset", type, {a.n, a.heads});
  a.grad_row = words.array("grad_row", type, {a.rows, a.row_width});
  a.grad_frequency = words.array("grad_frequency", type, {a.time_width});
  a.grad_phase = words.array("grad_phase", type, {a.time_width});
  require(a.grad_out && a.grad_weight && a.grad_query && a.grad_offset && a.grad_frequency && a.grad_phase,
          "attend_recent: a gradient is missing");
  nb::gil_scoped_release free;
  gnnfleet::kernels().attend_recent_back(a);
}

}  // namespace

void bind_attend_recent(nb::module_& m) {
  m.def("attend_recent", [](nb::kwargs words) { forward(words); });
  m.def("attend_recent_back", [](nb::kwargs words) { backward(words); });
}
