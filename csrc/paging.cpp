#include "paging.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace gnnfleet {
namespace {

constexpr int64_t kGap = 8;  // pages; reading a gap of this size costs less than another request

int64_t page_size() { return static_cast<int64_t>(sysconf(_SC_PAGESIZE)); }

// Advise on the pages that lie entirely within the table.
void advise(const uint8_t* table, int64_t nbytes, int advice) {
  const int64_t page = page_size();
  const int64_t base = static_cast<int64_t>(reinterpret_cast<uintptr_t>(table));
  const int64_t first = (base + page - 1) / page, end = (base + nbytes) / page;
  if (end > first) madvise(reinterpret_cast<void*>(first * page), static_cast<size_t>((end - first) * page), advice);
}

}  // namespace

int64_t read_ahead(const uint8_t* table, int64_t nbytes, int64_t width, const int64_t* rows, int64_t n) {
  const int64_t page = page_size();
  const int64_t base = static_cast<int64_t>(reinterpret_cast<uintptr_t>(table));
  const int64_t last = (base + nbytes - 1) / page;
  // Otherwise a page that was not requested, or was dropped, would be read with 31 neighbours.
  advise(table, nbytes, MADV_RANDOM);
  int64_t runs = 0, begin = -1, end = -1;
  const auto request_run = [&] {
    if (begin < 0) return;
    madvise(reinterpret_cast<void*>(begin * page), static_cast<size_t>((end - begin + 1) * page), MADV_WILLNEED);
    ++runs;
  };
  for (int64_t i = 0; i < n; ++i) {
    const int64_t first = (base + rows[i] * width) / page, final = std::min(last, (base + (rows[i] + 1) * width - 1) / page);
    if (begin >= 0 && first <= end + kGap) {
      end = std::max(end, final);
      continue;
    }
    request_run();
    begin = first;
    end = final;
  }
  request_run();
  return runs;
}

void let_go(const uint8_t* table, int64_t nbytes) {
  advise(table, nbytes, MADV_DONTNEED);
  advise(table, nbytes, MADV_NORMAL);
}

}  // namespace gnnfleet
