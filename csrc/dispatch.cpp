#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"

namespace gnnfleet {
namespace {

std::vector<const Kernels*> supported() {
  std::vector<const Kernels*> tables;
#if defined(__x86_64__)
  __builtin_cpu_init();
  // x86-64-v4 and -v3 as compiled: the CPU must have every feature that the compiler may use.
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) tables.push_back(&avx512::table);
  if (v3) tables.push_back(&avx2::table);
#endif
  tables.push_back(&baseline::table);
  return tables;
}

const Kernels*& chosen() {
  static const Kernels* current = supported().front();
  return current;
}

}  // namespace

const Kernels& kernels() { return *chosen(); }

bool select_kernels(const char* isa) {
  for (const Kernels* set : supported()) {
    if (std::strcmp(set->isa, isa) == 0) {
      chosen() = set;
      return true;
    }
  }
  return false;
}

const char* supported_kernels() {
  static const std::string names = [] {
    std::string text;
    for (const Kernels* set : supported()) text += (text.empty() ? "" : " ") + std::string(set->isa);
    return text;
  }();
  return names.c_str();
}

}  // namespace gnnfleet
