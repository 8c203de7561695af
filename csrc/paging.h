// Tables mapped from files: prefetch the pages of rows, and drop all pages.
#pragma once
#include <cstdint>

namespace gnnfleet {

// Request the pages of rows (ascending) of `width` bytes in runs, so that the disk reads in order. Returns the number of
// runs. Until `let_go` the system reads no other pages.
int64_t read_ahead(const uint8_t* table, int64_t nbytes, int64_t width, const int64_t* rows, int64_t n);

// Drop the pages of a table that was never written to; they are read again on the next access.
void let_go(const uint8_t* table, int64_t nbytes);

}  // namespace gnnfleet
