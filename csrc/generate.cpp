#include "generate.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "logarithm.h"

namespace gnnfleet {
namespace {

// As in logarithm.h, from basic arithmetic.
double exponential(double x) {
  const double k = std::floor(x * 1.4426950408889634 + 0.5), r = x - k * 0.69314718055994531;
  double sum = 1;
  for (int i = 16; i >= 1; --i) sum = 1 + sum * r / i;
  return std::ldexp(sum, static_cast<int>(k));
}

// Acklam's rational approximation of the normal quantile, for p <= 1/2.
double lower_quantile(double p) {
  if (p < 0.02425) {
    const double q = std::sqrt(-2 * logarithm(p));
    return (((((-7.784894002430293e-03 * q - 3.223964580411365e-01) * q - 2.400758277161838e+00) * q - 2.549732539343734e+00) * q +
             4.374664141464968e+00) * q + 2.938163982698783e+00) /
           ((((7.784695709041462e-03 * q + 3.224671290700398e-01) * q + 2.445134137142996e+00) * q + 3.754408661907416e+00) * q + 1);
  }
  const double q = p - 0.5, r = q * q;
  return (((((-3.969683028665376e+01 * r + 2.209460984245205e+02) * r - 2.759285104469687e+02) * r + 1.383577518672690e+02) * r -
           3.066479806614716e+01) * r + 2.506628277459239e+00) * q /
         (((((-5.447609879822406e+01 * r + 1.615858368580409e+02) * r - 1.556989798598866e+02) * r + 6.680131188771972e+01) * r -
           1.328068155288572e+01) * r + 1);
}

// A normal number is the sum of two of these, each drawn by 12 bits: 2^24 levels up to five standard deviations, from one
// table that stays in the first-level cache. Several times faster than transforming uniforms.
constexpr int kQuantiles = 4096;

const std::array<float, kQuantiles>& quantiles() {
  static const std::array<float, kQuantiles> table = [] {
    std::array<double, kQuantiles> exact;
    double square = 0;
    for (int i = 0; i < kQuantiles / 2; ++i) {
      exact[i] = lower_quantile((i + 0.5) / kQuantiles);
      exact[kQuantiles - 1 - i] = -exact[i];
      square += 2 * exact[i] * exact[i];
    }
    const double scale = std::sqrt(0.5 / (square / kQuantiles));
    std::array<float, kQuantiles> scaled;
    for (int i = 0; i < kQuantiles; ++i) scaled[i] = static_cast<float>(exact[i] * scale);
    return scaled;
  }();
  return table;
}

inline uint64_t mix(uint64_t x) {  // the finaliser of splitmix64: a bijection
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A Feistel network permutes 0..4^half-1; repeating it while the result is too large gives a permutation of 0..n-1.
class Shuffle {
 public:
  Shuffle(Draws draws, uint64_t n) : n_(n) {
    while ((uint64_t{1} << (2 * half_)) < n) ++half_;
    for (uint32_t round = 0; round < kRounds; ++round) {
      const Words words = draws(round);
      keys_[round] = join(words[0], words[1]);
    }
  }

  uint64_t operator()(uint64_t i) const {
    const uint64_t mask = (uint64_t{1} << half_) - 1;
    do {
      uint64_t left = i >> half_, right = i & mask;
      for (const uint64_t key : keys_) {
        const uint64_t next = left ^ (mix(right + key) & mask);
        left = right;
        right = next;
      }
      i = left << half_ | right;
    } while (i >= n_);
    return i;
  }

 private:
  static constexpr uint32_t kRounds = 6;
  uint64_t n_;
  int half_ = 1;
  std::array<uint64_t, kRounds> keys_;
};

constexpr int64_t kGrain = 1 << 14;  // with less work, starting threads costs more than they save

template <typename Entry>
void parallel_for(int64_t n, int threads, Entry entry, int64_t size = 1) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n * size >= kGrain)
  for (int64_t i = 0; i < n; ++i) entry(i);
}

inline uint64_t word(const Draws& draws, int64_t id) {
  const Words words = draws(static_cast<uint64_t>(id));
  return join(words[0], words[1]);
}

}  // namespace

void draw_uniforms(Draws draws, int64_t first, int64_t n, double* out, int threads) {
  parallel_for(n, threads, [=](int64_t i) { out[i] = unit(word(draws, first + i)); });
}

void draw_exponentials(Draws draws, int64_t first, int64_t n, double* out, int threads) {
  parallel_for(n, threads, [=](int64_t i) { out[i] = -logarithm(1 - unit(word(draws, first + i))); });
}

void draw_paretos(Draws draws, int64_t first, int64_t n, double shape, double limit, double* out, int threads) {
  const double cut = 1 - exponential(-shape * logarithm(limit));
  parallel_for(n, threads, [=](int64_t i) {
    const double u = unit(word(draws, first + i));
    out[i] = std::min(limit, exponential(-logarithm(1 - u * cut) / shape));
  });
}

int64_t draw_slots(Draws draws, int64_t first, int64_t n, const int32_t* table, const int64_t* starts, int64_t num_groups,
                   const int32_t* groups, int32_t* out, int threads) {
  // All slots of a batch before its look-ups: the table is larger than the caches, so many misses overlap.
  constexpr int64_t kBatch = 64;
  int64_t wrong = n;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(min : wrong) if (n >= kGrain)
  for (int64_t start = 0; start < n; start += kBatch) {
    const int64_t end = std::min(n, start + kBatch);
    std::array<int64_t, kBatch> slots;
    for (int64_t i = start; i < end; ++i) {
      const int64_t group = groups[i];
      int64_t& slot = slots[i - start] = -1;
      if (group < 0 || group >= num_groups) {
        wrong = std::min(wrong, i);
      } else if (const int64_t low = starts[group], count = starts[group + 1] - low; count > 0) {
        slot = low + static_cast<int64_t>(below(word(draws, first + i), static_cast<uint64_t>(count)));
        __builtin_prefetch(table + slot);
      }
    }
    for (int64_t i = start; i < end; ++i) out[i] = slots[i - start] < 0 ? -1 : table[slots[i - start]];
  }
  return wrong == n ? -1 : wrong;
}

void draw_rows(Draws draws, int64_t first, int64_t n, int64_t width, const float* centres, const int32_t* groups, float scale,
               float* out, int threads) {
  const float* table = quantiles().data();
  parallel_for(n, threads, [=](int64_t row) {
    float* target = out + row * width;
    const float* centre = groups ? centres + static_cast<int64_t>(groups[row]) * width : nullptr;
    for (int64_t start = 0; start < width; start += 4) {
      const Words words = draws(static_cast<uint64_t>(first + row), static_cast<uint32_t>(start / 4));
      const int64_t count = std::min<int64_t>(4, width - start);
      for (int64_t f = 0; f < count; ++f) {
        const float noise = table[words[f] & 0xfff] + table[words[f] >> 20];
        target[start + f] = centre ? scale * centre[start + f] + noise : noise;
      }
    }
  }, width);
}

void draw_rmat(Draws draws, int64_t first, int64_t n, int levels, int64_t nodes, const double* quadrants, int32_t* src,
               int32_t* dst, int threads) {
  // Sixteen bits per level, eight levels per block: probabilities are exact to 2^-17.
  constexpr uint32_t kTurns = 256;  // limit of repeated draws, for quadrants that give only ends beyond `nodes`
  const auto bound = [](double share) { return static_cast<uint32_t>(share * 65536 + 0.5); };
  const uint32_t a = bound(quadrants[0]), b = bound(quadrants[0] + quadrants[1]);
  const uint32_t c = bound(quadrants[0] + quadrants[1] + quadrants[2]);
  parallel_for(n, threads, [=](int64_t i) {
    uint32_t turn = 0;
    int64_t row, column;
    do {
      row = column = 0;
      Words words{};
      for (int level = 0; level < levels; ++level) {
        if (level % 8 == 0) words = draws(static_cast<uint64_t>(first + i), turn++);
        const uint32_t u = words[level % 8 / 2] >> (level % 2 * 16) & 0xffff;
        // Without branches: they would be mispredicted at every other level.
        row = row << 1 | static_cast<int64_t>(u >= b);
        column = column << 1 | static_cast<int64_t>((u >= a) ^ (u >= b) ^ (u >= c));
      }
    } while ((row >= nodes || column >= nodes) && turn < kTurns);
    src[i] = static_cast<int32_t>(row % nodes);
    dst[i] = static_cast<int32_t>(column % nodes);
  });
}

void draw_permutation(Draws draws, int64_t n, int32_t* out, int threads) {
  const Shuffle shuffle(draws, static_cast<uint64_t>(n));
  parallel_for(n, threads, [=, &shuffle](int64_t i) { out[i] = static_cast<int32_t>(shuffle(static_cast<uint64_t>(i))); });
}

void draw_pairs(Draws draws, int64_t n, const int32_t* a, const int32_t* b, int64_t* out, int threads) {
  const uint64_t key = word(draws, 0);
  parallel_for(n, threads, [=](int64_t i) {
    const uint64_t low = static_cast<uint32_t>(std::min(a[i], b[i])), high = static_cast<uint32_t>(std::max(a[i], b[i]));
    out[i] = static_cast<int64_t>(mix((high << 32 | low) ^ key));
  });
}

}  // namespace gnnfleet
