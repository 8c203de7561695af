#include "cosines.h"

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "sincos.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

template <typename T>
void time_features(const CosineArgs& a) {
  const T *since = static_cast<const T*>(a.since), *frequency = static_cast<const T*>(a.frequency), *phase = static_cast<const T*>(a.phase);
  const int64_t padded = padded_count(a.width);
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    std::vector<T> frequencies(padded), phases(padded), cosine(padded), sine(padded);
    std::copy(frequency, frequency + a.width, frequencies.begin());
    std::copy(phase, phase + a.width, phases.begin());
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a.n; ++i) {
      sincos(frequencies.data(), phases.data(), since[i], padded, cosine.data(), sine.data());
      std::copy(cosine.begin(), cosine.begin() + a.width, static_cast<T*>(a.cosine) + i * a.width);
      std::copy(sine.begin(), sine.begin() + a.width, static_cast<T*>(a.sine) + i * a.width);
    }
  }
}

}  // namespace

void cosines(const CosineArgs& a) { a.wide ? time_features<double>(a) : time_features<float>(a); }

}  // namespace gnnfleet::GNNFLEET_ISA
