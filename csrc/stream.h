// Streaming graph partitioning: kernels that see the edges once, chunk by chunk, and keep O(nodes) state.
//
// Every function reads one chunk of destinations with their in-edges and updates arrays of the caller, so the memory of a
// pass is those arrays plus one chunk. The objective is the communication volume sum_j (lambda_j - 1): net j holds j and
// every i with an edge j -> i, and lambda_j is the number of parts it touches. A visit to destination v shows exactly the nets
// v is a pin of (its in-neighbours' and its own), so the gain of moving v is exact without storing any edge.
//
// Contract for all functions: ids are in [0, num_nodes), array sizes are as stated, nothing is checked here (the Python side
// does). One thread; the result depends on the order of the stream only. Self-loops are ignored.
// Parallel edges next to each other (sources sorted within a destination) count once in the refinement; apart from each other
// they count as often as they appear, which underestimates gains and never overestimates them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "chunk.h"

namespace gnnfleet {

// ---- survey ----------------------------------------------------------------------------------------------------------------

// Sum over edges of an antisymmetric hash of (source, destination), modulo 2^64. Over a whole pass it is zero if every edge
// has its reverse, and for other graphs only by chance: a test of symmetry without state.
template <class Id>
uint64_t asymmetry_chunk(const EdgeChunk<Id>& chunk);

// ---- clustering -----------------------------------------------------------------------------------------------------------

// label: cluster of each node (any numbers below num_nodes); mass: summed weight of each label; weight: of each node, or null
// for 1. vote, vote_count: running majority (Boyer-Moore) of the labels of a node's out-neighbours, which a stream grouped by
// destination never shows together; null if in-neighbours suffice (a symmetric graph).
struct ClusterState {
  int32_t* label;
  int64_t* mass;
  const int32_t* weight;
  int32_t* vote;
  int32_t* vote_count;
  int64_t cap;    // maximum mass of a cluster
  uint64_t seed;  // breaks ties
};

// Each destination joins the cluster most common among its neighbours that has room. Returns the number of moves.
template <class Id>
int64_t cluster_chunk(const EdgeChunk<Id>& chunk, const ClusterState& state);

// ---- quotient -------------------------------------------------------------------------------------------------------------

// Weighted pairs of clusters in an open-addressing table of fixed size (a power of two). A pair is (small << 32 | large) and
// an empty slot has weight 0. When the table is half full the lightest pairs are dropped: the quotient is then a sketch, in
// which heavy connections are exact up to the few occurrences seen before they were first kept.
struct PairTable {
  std::span<uint64_t> key;
  std::span<uint32_t> weight;
};

// Counts the pairs of different clusters in one chunk. `used` is the number of occupied slots before; returns that after.
template <class Id>
int64_t quotient_chunk(const EdgeChunk<Id>& chunk, const int32_t* label, const PairTable& table, int64_t used);

// Symmetric CSR of the table. indptr has clusters + 1 entries; neighbour and weight have 2 * used.
void quotient_csr(const PairTable& table, int64_t clusters, int32_t* indptr, int32_t* neighbour, int32_t* weight);

// ---- refinement -----------------------------------------------------------------------------------------------------------

// Pins of each net in each part as small saturating counters: `words` 64-bit words a node, each of 64 / bits counters, bits is
// 4 or 2. A counter that has reached its maximum stays there until pins are counted again, so a net is never considered
// absent from a part that still has a pin of it.
struct PinCounts {
  uint64_t* word;  // (num_nodes, words)
  int32_t words;
  int32_t bits;
};

struct PartState {
  int32_t* part;
  int64_t* load;            // (parts) summed weight
  int64_t* size;            // (parts) nodes
  const int32_t* weight;    // of each node, or null for 1
  const int32_t* degree;    // in-edges of each node if destinations come in pieces (one per edge type), else null
  int64_t parts;
  int64_t load_cap;
  int64_t size_cap;
};

// Zeroes the counters and puts each node into its own net.
void pins_reset(const PinCounts& pins, const int32_t* part, int64_t num_nodes);

// Adds the pins of one chunk; after reset and one pass the counters are exact (up to saturation).
template <class Id>
void pins_chunk(const EdgeChunk<Id>& chunk, const PinCounts& pins, const int32_t* part);

// sum (lambda - 1) according to the counters: exact after a count.
int64_t pins_volume(const PinCounts& pins, int64_t num_nodes);

// Moves each destination to the part that lowers the volume most and has room; among equals only towards the lighter part.
// A node in a part above its cap may also leave at a loss of at most `max_loss`. Returns the number of moves.
template <class Id>
int64_t refine_chunk(const EdgeChunk<Id>& chunk, const PinCounts& pins, const PartState& state, int64_t max_loss);

// Puts each item whose part is -1, in the given order, into the part with the smallest load.
void fill_lightest(const int64_t* order, int64_t count, const int64_t* mass, int32_t* part, std::span<int64_t> load);

// Moves nodes out of parts above their cap, ignoring edges: a last resort that needs no pass. Returns the moves.
int64_t rebalance(const PartState& state, int64_t num_nodes);

}  // namespace gnnfleet
