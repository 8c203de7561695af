// Philox4x32-10 (philox.h) of several counters at once. A word is the low half of a 64-bit lane: multiplying low halves is
// one instruction, and the high halves are ignored. Included by kernel sources only.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gnnfleet::GNNFLEET_ISA {

typedef uint64_t word_t __attribute__((vector_size(GNNFLEET_VECTOR_BYTES)));
constexpr int kWordLanes = GNNFLEET_VECTOR_BYTES / 8;
constexpr int kCounters = 2 * kWordLanes;

inline word_t multiply_low(word_t a, word_t b) {
#if !defined(__x86_64__)
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#elif GNNFLEET_VECTOR_BYTES == 64
  return (word_t)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b);
#elif GNNFLEET_VECTOR_BYTES == 32
  return (word_t)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
  static_assert(GNNFLEET_VECTOR_BYTES == 16);
  return (word_t)_mm_mul_epu32((__m128i)a, (__m128i)b);
#endif
}

// kCounters counters of four words each; `draw` replaces them by their outputs.
struct Counters {
  word_t word[4][2];

  void draw(uint64_t key) {
    uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
    const word_t multiplier0 = word_t{} + 0xD2511F53u, multiplier1 = word_t{} + 0xCD9E8D57u;
    for (int round = 0; round < 10; ++round) {
      for (int v = 0; v < 2; ++v) {
        const word_t p0 = multiply_low(word[0][v], multiplier0), p1 = multiply_low(word[2][v], multiplier1);
        word[0][v] = (p1 >> 32) ^ word[1][v] ^ key0;
        word[2][v] = (p0 >> 32) ^ word[3][v] ^ key1;
        word[1][v] = p1;
        word[3][v] = p0;
      }
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
  }
};

}  // namespace gnnfleet::GNNFLEET_ISA
