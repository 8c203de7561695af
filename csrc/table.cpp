// The kernels of one instruction set, gathered in their table.
#include "kernels.h"

#define GNNFLEET_TEXT_(x) #x
#define GNNFLEET_TEXT(x) GNNFLEET_TEXT_(x)

namespace gnnfleet::GNNFLEET_ISA {

void gather_rows(const uint8_t*, const void*, bool, const int64_t*, int64_t, int64_t, uint8_t*, int64_t, int);
void gather_half(const uint16_t*, const void*, bool, const int64_t*, int64_t, int64_t, float*, int64_t, int);
void gather_bfloat(const uint16_t*, const void*, bool, const int64_t*, int64_t, int64_t, float*, int64_t, int);
void aggregate_sum(const SumArgs&);
void aggregate_max(const MaxArgs&);
void aggregate_max_back(const MaxBackArgs&);
void edge_dot(const DotArgs&);
void dropout_rows(const DropoutArgs&);
void epilogue(const EpilogueArgs&);
void epilogue_back(const EpilogueArgs&);
void attend_forward(const AttendArgs&);
void attend_finish(const AttendArgs&, int64_t n);
void attend_local(const AttendLocalArgs&);
void attend_source(const AttendArgs&);
void attend_edge_source(const AttendArgs&);
void attend_edge_target(const AttendArgs&);
void attend_recent(const RecentArgs&);
void attend_recent_back(const RecentArgs&);
void cosines(const CosineArgs&);
void gates(const GateArgs&);
void gates_back(const GateArgs&);

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
    epilogue,
    epilogue_back,
    attend_forward,
    attend_finish,
    attend_local,
    attend_source,
    attend_edge_source,
    attend_edge_target,
    attend_recent,
    attend_recent_back,
    cosines,
    gates,
    gates_back,
};

}  // namespace gnnfleet::GNNFLEET_ISA
