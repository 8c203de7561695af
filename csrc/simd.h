// Vectors of one instruction set: GNNFLEET_VECTOR_BYTES wide, loaded and stored unaligned. Included by kernel sources
// only, in their namespace.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace gnnfleet::GNNFLEET_ISA {

struct BFloat {  // bfloat16 in memory; arithmetic is float32
  uint16_t bits;
};

// Distance of row prefetches in edges. They go to the second-level cache: a core has only about two dozen outstanding
// misses in the first level, three rows of 512 bytes, and many more in the second.
constexpr int64_t kAhead = 16;

template <typename T>
inline void prefetch_row(const T* row, int64_t elements) {
  const char* from = reinterpret_cast<const char*>(row);
  for (int64_t byte = 0; byte < elements * static_cast<int64_t>(sizeof(T)); byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

// The type that a stored element is computed in.
template <typename T> struct Wide { using type = T; };
template <> struct Wide<BFloat> { using type = float; };
template <typename T> using wide_t = typename Wide<T>::type;

template <typename A>
struct Lanes {
  static constexpr int count = GNNFLEET_VECTOR_BYTES / static_cast<int>(sizeof(A));
  typedef A type __attribute__((vector_size(GNNFLEET_VECTOR_BYTES)));
};
template <typename A> using vec_t = typename Lanes<A>::type;

template <typename A>
  requires std::is_floating_point_v<A>
inline vec_t<A> load(const A* from) {
  vec_t<A> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline vec_t<float> load(const BFloat* from) {
  constexpr int n = Lanes<float>::count;
  typedef uint16_t narrow __attribute__((vector_size(n * 2)));
  typedef uint32_t wide __attribute__((vector_size(n * 4)));
  narrow raw;
  std::memcpy(&raw, from, sizeof raw);
  const wide shifted = __builtin_convertvector(raw, wide) << 16;
  vec_t<float> v;
  std::memcpy(&v, &shifted, sizeof v);
  return v;
}

template <typename A>
  requires std::is_floating_point_v<A>
inline void store(A* to, vec_t<A> v) {
  std::memcpy(to, &v, sizeof v);
}

// Rounds to the nearest bfloat16, ties to even; NaN stays NaN.
inline void store(BFloat* to, vec_t<float> v) {
  constexpr int n = Lanes<float>::count;
  typedef uint16_t narrow __attribute__((vector_size(n * 2)));
  typedef uint32_t wide __attribute__((vector_size(n * 4)));
  wide bits;
  std::memcpy(&bits, &v, sizeof bits);
  const wide rounded = (bits + ((bits >> 16) & 1) + 0x7fff) >> 16;
  const narrow raw = __builtin_convertvector(v != v ? (bits >> 16) | 0x40 : rounded, narrow);
  std::memcpy(to, &raw, sizeof raw);
}

template <typename A>
inline vec_t<A> splat(A value) {
  return vec_t<A>{} + value;
}

inline float widen(BFloat value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}
inline float widen(float value) { return value; }
inline double widen(double value) { return value; }

inline void set(BFloat* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  to->bits = static_cast<uint16_t>((value != value ? bits | 0x400000 : bits + ((bits >> 16) & 1) + 0x7fff) >> 16);
}
inline void set(float* to, float value) { *to = value; }
inline void set(double* to, double value) { *to = value; }

}  // namespace gnnfleet::GNNFLEET_ISA
