// The kernels of one instruction set, gathered in their table.
#include "kernels.h"

#define GNNFLEET_TEXT_(x) #x
#define GNNFLEET_TEXT(x) GNNFLEET_TEXT_(x)

namespace gnnfleet::GNNFLEET_ISA {

void gather_rows(const uint8_t*, const void*, bool, int64_t, int64_t, uint8_t*, int);
void gather_half(const uint16_t*, const void*, bool, int64_t, int64_t, float*, int);
void gather_bfloat(const uint16_t*, const void*, bool, int64_t, int64_t, float*, int);
void aggregate_sum(const SumArgs&);
void aggregate_max(const MaxArgs&);
void aggregate_max_back(const MaxBackArgs&);
void edge_dot(const DotArgs&);
void dropout_rows(const DropoutArgs&);

extern const Kernels table;
const Kernels table = {
    GNNFLEET_TEXT(GNNFLEET_ISA),
    gather_rows,
    gather_half,
    gather_bfloat,
    aggregate_sum,
    aggregate_max,
    aggregate_max_back,
    edge_dot,
    dropout_rows,
};

}  // namespace gnnfleet::GNNFLEET_ISA
