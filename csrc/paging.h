// Tables mapped from files: asking the system for the pages of some rows, and giving all pages back.
#pragma once
#include <cstdint>

namespace gnnfleet {

// Pages of rows (ascending) of `width` bytes are asked for in runs, so that the disk reads ahead in order. Returns how
// many runs there were. Until the table is let go no other pages are read along.
int64_t read_ahead(const uint8_t* table, int64_t nbytes, int64_t width, const int64_t* rows, int64_t n);

// Pages of a table that was never written to leave this process; they are read again when they are touched.
void let_go(const uint8_t* table, int64_t nbytes);

}  // namespace gnnfleet
