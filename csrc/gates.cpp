#include "gates.h"

#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

// A vector of elements: load, store and activations. The first `live` elements are valid.
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

  // 2^n e^r with |r| <= ln 2 / 2, by a polynomial; NaN stays NaN.
  static type exp(type x) {
    typedef int32_t integers __attribute__((vector_size(GNNFLEET_VECTOR_BYTES)));
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
    integers bits, power;
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
inline void gate_forward(T* input_gates, const T* memory_gates, const T* memory, T* out, int64_t width, int64_t live) {
  const auto read = [&](const T* x) { return V::from(x, live); };
  const auto reset = V::sigmoid(read(input_gates) + read(memory_gates));
  const auto update = V::sigmoid(read(input_gates + width) + read(memory_gates + width));
  const auto candidate = V::tanh(read(input_gates + 2 * width) + reset * read(memory_gates + 2 * width));
  V::to(input_gates, reset, live);
  V::to(input_gates + width, update, live);
  V::to(input_gates + 2 * width, candidate, live);
  V::to(out, candidate + update * (read(memory) - candidate), live);
}

template <class V, class T = typename V::element>
inline void gate_backward(const T* input_gates, const T* memory_gates, const T* memory, const T* grad, T* grad_input_gates, T* grad_memory_gates, int64_t width,
                 int64_t live) {
  const auto read = [&](const T* x) { return V::from(x, live); };
  const auto reset = read(input_gates), update = read(input_gates + width), candidate = read(input_gates + 2 * width), g = read(grad);
  const auto d_candidate = g * (1 - update) * (1 - candidate * candidate);
  const auto d_reset = d_candidate * read(memory_gates + 2 * width) * reset * (1 - reset);
  const auto d_update = g * (read(memory) - candidate) * update * (1 - update);
  V::to(grad_input_gates, d_reset, live);
  V::to(grad_memory_gates, d_reset, live);
  V::to(grad_input_gates + width, d_update, live);
  V::to(grad_memory_gates + width, d_update, live);
  V::to(grad_input_gates + 2 * width, d_candidate, live);
  V::to(grad_memory_gates + 2 * width, d_candidate * reset, live);
}

template <class V, class T = typename V::element>
void forward(const GateArgs& a) {
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.threads > 1)
  for (int64_t row = 0; row < a.n; ++row) {
    T* input_gates = static_cast<T*>(a.input_gates) + row * 3 * a.width;
    const T* memory_gates = static_cast<const T*>(a.memory_gates) + row * 3 * a.width;
    const T* memory = static_cast<const T*>(a.memory) + row * a.width;
    T* out = static_cast<T*>(a.out) + row * a.width;
    int64_t c = 0;
    for (; c + V::count <= a.width; c += V::count) gate_forward<V>(input_gates + c, memory_gates + c, memory + c, out + c, a.width, V::count);
    if (c < a.width) gate_forward<V>(input_gates + c, memory_gates + c, memory + c, out + c, a.width, a.width - c);
  }
}

template <class V, class T = typename V::element>
void backward(const GateArgs& a) {
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.threads > 1)
  for (int64_t row = 0; row < a.n; ++row) {
    const T* input_gates = static_cast<const T*>(a.input_gates) + row * 3 * a.width;
    const T* memory_gates = static_cast<const T*>(a.memory_gates) + row * 3 * a.width;
    const T* memory = static_cast<const T*>(a.memory) + row * a.width;
    const T* grad = static_cast<const T*>(a.grad) + row * a.width;
    T* grad_input_gates = static_cast<T*>(a.grad_input_gates) + row * 3 * a.width;
    T* grad_memory_gates = static_cast<T*>(a.grad_memory_gates) + row * 3 * a.width;
    const auto process = [&](int64_t c, int64_t live) {
      gate_backward<V>(input_gates + c, memory_gates + c, memory + c, grad + c, grad_input_gates + c, grad_memory_gates + c, a.width, live);
    };
    int64_t c = 0;
    for (; c + V::count <= a.width; c += V::count) process(c, V::count);
    if (c < a.width) process(c, a.width - c);
  }
}

}  // namespace

void gates(const GateArgs& a) { a.wide ? forward<Double>(a) : forward<Floats>(a); }

void gates_back(const GateArgs& a) { a.wide ? backward<Double>(a) : backward<Floats>(a); }

}  // namespace gnnfleet::GNNFLEET_ISA
