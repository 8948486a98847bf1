// The C interface of the kernel: one plain struct, so that any language with a foreign-function interface can call it
// and the build needs no torch. Sizes and strides count elements, never bytes.
#pragma once

#include <stdint.h>

#define RELPOS_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// A (batch, heads, rows, head_dim) array whose last dimension is contiguous.
typedef struct {
    float* data;
    int64_t batch, head, row;  // strides
} relpos_array;

// Incremented with every change in this file that a caller must know about, including the meaning of buffers.
enum { RELPOS_INTERFACE = 2 };

enum { RELPOS_NONE = 0, RELPOS_TOEPLITZ = 1, RELPOS_RANK_ONE = 2, RELPOS_SUM = 3, RELPOS_SCALED = 4 };

// Floats before and after every table over distances, so that a tile may read past its ends.
enum { RELPOS_TABLE_PAD = 128 };
// Floats after every array over positions, for the same reason.
enum { RELPOS_ROW_PAD = 64 };
// Queries and keys of a tile.
enum { RELPOS_TILE = 64 };

typedef struct {
    // Sizes. Positions are counted along the keys; the queries stand at the last positions.
    int64_t batch, heads, key_heads, queries, keys, head_dim;
    int32_t causal;
    int32_t form;     // RELPOS_NONE, …
    int32_t threads;  // at most this many; only the gradient of a table depends on it, by rounding
    int32_t skip;     // whether tiles that provably do not matter may be left out
    float scale;
    const int32_t* first;    // (batch, keys): the first key that a query at this position may see; NULL: 0
    const int32_t* end;      // (batch, keys): one past the last such key; NULL: all keys. `causal` limits it further.
    const uint8_t* padding;  // (batch, keys): 0 for keys that must not be seen; NULL: none

    relpos_array q, k, v, out;
    // (2, batch, heads, queries): the largest score m of a row, then log2 of its sum of 2^(score − m). They are stored
    // separately, because one float for their sum would lose the second where m is large. For a query that sees no key
    // they are +inf and 0.
    float* lse;

    // Toeplitz and scaled. Tables are padded by RELPOS_TABLE_PAD on both sides.
    const float* table;    // (heads or 1, pad + distances + pad); Toeplitz: times log2(e)
    int64_t table_stride;  // between heads; 0 if all heads share one table
    int64_t zero;          // column of distance 0, counting the pad
    int64_t distances;

    // Rank one: bias = −weight_i · (total_i − total_j), the total as a sum of two floats. Padded by RELPOS_ROW_PAD.
    const float* total_high;  // (batch, heads, keys + pad)
    const float* total_low;
    const float* weight;  // times log2(e)
    int32_t symmetric;    // |total_i − total_j|
    int32_t weighted;     // whether `weight` is an input; if not, it is log2(e) everywhere

    // Scaled: bias = f_h(x), x = table[i − j] · inverse_i, f_h(x) = base + gain·x + Σ bend_s · max(x − knot_s, 0).
    // base and gain have one entry for each number of knots already passed. base, gain and bend are times log2(e).
    const float* inverse;    // (batch or 1, keys + pad)
    int64_t inverse_stride;  // between batch entries; 0 if all share one row
    int64_t knots;
    const float* knot;  // (knots), ascending
    const float* base;  // (heads, knots + 1)
    const float* gain;  // (heads, knots + 1)
    const float* bend;  // (heads, knots)

    // The record of skipped tiles, written by the forward and read by the backward (NULL: nothing is skipped):
    // (batch·heads) × 4 counts {open, visible, scored, kept}, then one byte per tile, (batch·heads, query blocks,
    // key blocks): 0 if the tile was computed, otherwise 1 + the integer number of bits by which it passed its test.
    int64_t* skipping;

    // Backward only. The pointers to gradients of the bias are either all set or all NULL (no gradient of the bias).
    // grad_weight alone may be NULL if the weight is not learned.
    relpos_array grad_out, grad_q, grad_k, grad_v;
    float* grad_table;         // (slots, heads, pad + distances + pad), zeroed; see relpos_slots
    double* grad_total;        // (batch, heads, keys), zeroed: the keys' contributions
    float* grad_total_query;   // (batch, heads, queries): the queries' contributions
    float* grad_weight;        // (batch, heads, queries)
    float* grad_inverse;       // (batch, heads, queries)
    double* grad_scaled_sums;  // (slots, heads, 4, knots + 1), zeroed; see scaled.h
} relpos_problem;

// Return 0 on success, 1 if out of memory.
RELPOS_EXPORT int relpos_forward(const relpos_problem*);
RELPOS_EXPORT int relpos_backward(const relpos_problem*);

// Number of partial sums of the bias's gradient that the backward writes; the caller adds them up.
RELPOS_EXPORT int64_t relpos_slots(const relpos_problem*);

// Instruction sets, by name: "portable", "avx2", "avx512".
RELPOS_EXPORT int relpos_has(const char* isa);    // 1: usable; 0: this CPU lacks it; −1: not in this build
RELPOS_EXPORT int relpos_use(const char* isa);    // returns as relpos_has; if 1, later calls use it
RELPOS_EXPORT const char* relpos_isa(void);       // the instruction set in use
RELPOS_EXPORT const char* relpos_isas(void);      // the instruction sets in this build, comma-separated
RELPOS_EXPORT int64_t relpos_interface(void);     // RELPOS_INTERFACE of this build; the caller compares it with its own

#ifdef __cplusplus
}
#endif
