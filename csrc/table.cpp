// The functions of this instruction set, in the order of struct Kernels.
#include "kernels.h"

#define GNNFLEET_TEXT_(x) #x
#define GNNFLEET_TEXT(x) GNNFLEET_TEXT_(x)

namespace gnnfleet::GNNFLEET_ISA {

void gather_rows(const uint8_t* table, const void* rows, bool wide, int64_t n, int64_t width, uint8_t* out, int threads);
void gather_half(const uint16_t* table, const void* rows, bool wide, int64_t n, int64_t width, float* out, int threads);
void gather_bfloat(const uint16_t* table, const void* rows, bool wide, int64_t n, int64_t width, float* out, int threads);
void attend_forward(const AttendArgs& a);
void attend_finish(const AttendArgs& a, int64_t n);
void attend_local(const AttendLocalArgs& a);
void attend_source(const AttendArgs& a);
void attend_edge_source(const AttendArgs& a);
void attend_edge_target(const AttendArgs& a);

extern const Kernels table;
const Kernels table = {
    .isa = GNNFLEET_TEXT(GNNFLEET_ISA),
    .gather_rows = gather_rows,
    .gather_half = gather_half,
    .gather_bfloat = gather_bfloat,
    .attend_forward = attend_forward,
    .attend_finish = attend_finish,
    .attend_local = attend_local,
    .attend_source = attend_source,
    .attend_edge_source = attend_edge_source,
    .attend_edge_target = attend_edge_target,
};

}  // namespace gnnfleet::GNNFLEET_ISA
