// Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011, Random123): a random number is a function of a key
// and a counter, so a draw depends neither on its thread nor on earlier draws.
#pragma once
#include <array>
#include <cstdint>

namespace gnnfleet {

using Words = std::array<uint32_t, 4>;

inline Words philox(Words counter, uint64_t key) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = kMultiplier0 * counter[0], p1 = kMultiplier1 * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(p0)};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

// The key of all draws of one step. Different (seed, epoch, step) share a key only by chance.
inline uint64_t draw_key(uint64_t seed, uint32_t epoch, uint64_t step) {
  // Place 0xffffffff is used here only, so that no draw below meets these counters.
  const Words words = philox({static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32), epoch, 0xffffffffu}, seed);
  return (static_cast<uint64_t>(words[1]) << 32) | words[0];
}

// A family of draws: purpose (below 255), layer or hop, relation. One call gives the four words of store id `id`; higher
// values of `turn` give further words.
struct Draws {
  uint64_t key;
  uint32_t place;

  static constexpr uint32_t place_of(uint32_t purpose, uint32_t layer, uint32_t relation) {
    return (purpose & 0xffu) << 24 | (layer & 0xffu) << 16 | (relation & 0xffffu);
  }

  Words operator()(uint64_t id, uint32_t turn = 0) const {
    return philox({static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32), turn, place}, key);
  }
};

inline uint64_t join(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }

// 53 bits in [0, 1).
inline double unit(uint64_t word) { return static_cast<double>(word >> 11) * 0x1.0p-53; }

// 0 .. n-1; the bias, below n / 2^64, is negligible.
inline uint64_t below(uint64_t word, uint64_t n) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(word) * n) >> 64);
}

}  // namespace gnnfleet
