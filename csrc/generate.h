// Random arrays and edges for the generated datasets. Entry i of an output depends only on the family of draws and on i,
// not on the number of threads. Only IEEE +, -, *, / and sqrt are used, so all machines give the same values.
#pragma once
#include <cstdint>

#include "philox.h"

namespace gnnfleet {

// out[i] = draw number first + i.
void draw_uniforms(Draws draws, int64_t first, int64_t n, double* out, int threads);      // [0, 1)
void draw_exponentials(Draws draws, int64_t first, int64_t n, double* out, int threads);  // mean 1
// The density falls as x^-(shape+1) from 1 to `limit`.
void draw_paretos(Draws draws, int64_t first, int64_t n, double shape, double limit, double* out, int threads);

// out[i] = table[a slot drawn from starts[g] .. starts[g+1]), g = groups[i]; -1 where there is no slot.
// Returns the first position whose group is outside 0..num_groups-1, or -1.
int64_t draw_slots(Draws draws, int64_t first, int64_t n, const int32_t* table, const int64_t* starts, int64_t num_groups,
                   const int32_t* groups, int32_t* out, int threads);

// out[r] = scale * centres[groups[r]] + standard normal noise, in rows of `width`; no centres when groups is null.
void draw_rows(Draws draws, int64_t first, int64_t n, int64_t width, const float* centres, const int32_t* groups, float scale,
               float* out, int threads);

// Edges of a recursive matrix (R-MAT, Kronecker): each of `levels` bits of both ends by the quadrants a, b, c, 1-a-b-c.
// Ends beyond `nodes` are drawn again.
void draw_rmat(Draws draws, int64_t first, int64_t n, int levels, int64_t nodes, const double* quadrants, int32_t* src,
               int32_t* dst, int threads);

// A permutation of 0..n-1: out[i] is the image of i.
void draw_permutation(Draws draws, int64_t n, int32_t* out, int threads);

// A number for a pair of nodes, the same for (a, b) and (b, a) and different for all other pairs.
void draw_pairs(Draws draws, int64_t n, const int32_t* a, const int32_t* b, int64_t* out, int threads);

}  // namespace gnnfleet
