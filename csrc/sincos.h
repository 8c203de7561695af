// Sines and cosines of times at many frequencies. Included by kernel sources only.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace gnnfleet::GNNFLEET_ISA {

// Sine and cosine of arguments far above 2 pi: reduced modulo pi / 2 in double, then polynomials. Times are long and
// frequencies up to 1, so the argument is computed in double too. Written with vector types, because compilers do not
// vectorize this loop. `count` is a multiple of the lanes.
inline constexpr int64_t kSincosLanes = Lanes<double>::count;

inline void sincos(const float* frequency, const float* phase, float since, int64_t count, float* cosine, float* sine) {
  typedef double wide __attribute__((vector_size(GNNFLEET_VECTOR_BYTES)));
  typedef int64_t integers __attribute__((vector_size(GNNFLEET_VECTOR_BYTES)));
  typedef float narrow __attribute__((vector_size(GNNFLEET_VECTOR_BYTES / 2)));
  constexpr double kTwoOverPi = 0.63661977236758134, kQuarter = 1.5707963267948966, kMagic = 6755399441055744.0;
  const wide time = wide{} + static_cast<double>(since);
  for (int64_t t = 0; t < count; t += kSincosLanes) {
    narrow f, p;
    std::memcpy(&f, frequency + t, sizeof f);
    std::memcpy(&p, phase + t, sizeof p);
    const wide x = time * __builtin_convertvector(f, wide) + __builtin_convertvector(p, wide);
    const wide shifted = x * kTwoOverPi + kMagic;  // its last bits are the multiple of pi / 2
    integers quarter;
    std::memcpy(&quarter, &shifted, sizeof quarter);
    const wide r = x - (shifted - kMagic) * kQuarter, z = r * r;
    const wide s = r + r * z * (-1.6666666664e-1 + z * (8.3333315e-3 + z * (-1.98409e-4 + z * 2.7526e-6)));
    const wide c = 1.0 - 0.5 * z + z * z * (4.16666664e-2 + z * (-1.38888839e-3 + z * (2.4801e-5 - z * 2.7e-7)));
    const integers odd = (quarter & 1) != 0, second = (quarter & 2) != 0;
    const wide cc = odd ? s : c, ss = odd ? c : s;
    const narrow co = __builtin_convertvector((odd ^ second) ? -cc : cc, narrow);
    const narrow si = __builtin_convertvector(second ? -ss : ss, narrow);
    std::memcpy(cosine + t, &co, sizeof co);
    std::memcpy(sine + t, &si, sizeof si);
  }
}

inline void sincos(const double* frequency, const double* phase, double since, int64_t count, double* cosine, double* sine) {
  for (int64_t t = 0; t < count; ++t) {
    const double x = since * frequency[t] + phase[t];
    cosine[t] = std::cos(x);
    sine[t] = std::sin(x);
  }
}

// `count` rounded up to whole vectors.
inline int64_t padded_count(int64_t count) { return (count + kSincosLanes - 1) / kSincosLanes * kSincosLanes; }

}  // namespace gnnfleet::GNNFLEET_ISA
