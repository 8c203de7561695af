#include "gates.h"

#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

// A few elements at a time: how they are read, written and squashed. `live` of them count.
struct Double {
  using type = double;
  using element = double;
  static constexpr int64_t count = 1;
  static double from(const double* x, int64_t) { return *x; }
  static void to(double* x, double v, int64_t) { *x = v; }
  static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
  static double tanh(double x) { return std::tanh(x); }
};

struct Floats {
  using type = vec_t<float>;
  using element = float;
  static constexpr int64_t count = Lanes<float>::count;
  static type from(const float* x, int64_t live) {
    type v{};
    std::memcpy(&v, x, static_cast<size_t>(live) * sizeof(float));
    return v;
  }
  static void to(float* x, type v, int64_t live) { std::memcpy(x, &v, static_cast<size_t>(live) * sizeof(float)); }

  // 2^n e^r with |r| up to ln 2 / 2, a polynomial; NaN stays NaN.
  static type exp(type x) {
    typedef int32_t whole __attribute__((vector_size(GNNFLEET_VECTOR_BYTES)));
    x = x < -87.0f ? splat(-87.0f) : x;
    x = x > 88.0f ? splat(88.0f) : x;
    const type shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    const type r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    type p = r * 1.98756915e-4f + 1.39819995e-3f;
    p = p * r + 8.33345191e-3f;
    p = p * r + 4.16657959e-2f;
    p = p * r + 1.66666655e-1f;
    p = p * r + 5.00000012e-1f;
    p = p * r * r + r + 1.0f;
    whole bits, power;
    std::memcpy(&power, &shifted, sizeof power);  // its last bits are n
    std::memcpy(&bits, &p, sizeof bits);
    bits += power << 23;
    std::memcpy(&p, &bits, sizeof p);
    return p;
  }
  static type sigmoid(type x) { return 1.0f / (1.0f + exp(-x)); }
  static type tanh(type x) { return 1.0f - 2.0f / (1.0f + exp(x + x)); }
};

template <class V, class T = typename V::element>
inline void ahead(T* given, const T* kept, const T* memory, T* out, int64_t width, int64_t live) {
  const auto read = [&](const T* x) { return V::from(x, live); };
  const auto reset = V::sigmoid(read(given) + read(kept));
  const auto keep = V::sigmoid(read(given + width) + read(kept + width));
  const auto fresh = V::tanh(read(given + 2 * width) + reset * read(kept + 2 * width));
  V::to(given, reset, live);
  V::to(given + width, keep, live);
  V::to(given + 2 * width, fresh, live);
  V::to(out, fresh + keep * (read(memory) - fresh), live);
}

template <class V, class T = typename V::element>
inline void back(const T* given, const T* kept, const T* memory, const T* grad, T* grad_given, T* grad_kept, int64_t width,
                 int64_t live) {
  const auto read = [&](const T* x) { return V::from(x, live); };
  const auto reset = read(given), keep = read(given + width), fresh = read(given + 2 * width), g = read(grad);
  const auto by_fresh = g * (1 - keep) * (1 - fresh * fresh);
  const auto by_reset = by_fresh * read(kept + 2 * width) * reset * (1 - reset);
  const auto by_keep = g * (read(memory) - fresh) * keep * (1 - keep);
  V::to(grad_given, by_reset, live);
  V::to(grad_kept, by_reset, live);
  V::to(grad_given + width, by_keep, live);
  V::to(grad_kept + width, by_keep, live);
  V::to(grad_given + 2 * width, by_fresh, live);
  V::to(grad_kept + 2 * width, by_fresh * reset, live);
}

template <class V, class T = typename V::element>
void forward(const GateArgs& a) {
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.threads > 1)
  for (int64_t row = 0; row < a.n; ++row) {
    T* given = static_cast<T*>(a.given) + row * 3 * a.width;
    const T* kept = static_cast<const T*>(a.kept) + row * 3 * a.width;
    const T* memory = static_cast<const T*>(a.memory) + row * a.width;
    T* out = static_cast<T*>(a.out) + row * a.width;
    int64_t c = 0;
    for (; c + V::count <= a.width; c += V::count) ahead<V>(given + c, kept + c, memory + c, out + c, a.width, V::count);
    if (c < a.width) ahead<V>(given + c, kept + c, memory + c, out + c, a.width, a.width - c);
  }
}

template <class V, class T = typename V::element>
void backward(const GateArgs& a) {
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.threads > 1)
  for (int64_t row = 0; row < a.n; ++row) {
    const T* given = static_cast<const T*>(a.given) + row * 3 * a.width;
    const T* kept = static_cast<const T*>(a.kept) + row * 3 * a.width;
    const T* memory = static_cast<const T*>(a.memory) + row * a.width;
    const T* grad = static_cast<const T*>(a.grad) + row * a.width;
    T* grad_given = static_cast<T*>(a.grad_given) + row * 3 * a.width;
    T* grad_kept = static_cast<T*>(a.grad_kept) + row * 3 * a.width;
    const auto some = [&](int64_t c, int64_t live) {
      back<V>(given + c, kept + c, memory + c, grad + c, grad_given + c, grad_kept + c, a.width, live);
    };
    int64_t c = 0;
    for (; c + V::count <= a.width; c += V::count) some(c, V::count);
    if (c < a.width) some(c, a.width - c);
  }
}

}  // namespace

void gates(const GateArgs& a) { a.wide ? forward<Double>(a) : forward<Floats>(a); }

void gates_back(const GateArgs& a) { a.wide ? backward<Double>(a) : backward<Floats>(a); }

}  // namespace gnnfleet::GNNFLEET_ISA
