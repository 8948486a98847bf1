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

// Changes with anything in this file that a caller must know of, the meaning of buffers included.
enum { RELPOS_INTERFACE = 2 };

enum { RELPOS_NONE = 0, RELPOS_TOEPLITZ = 1, RELPOS_RANK_ONE = 2, RELPOS_SUM = 3, RELPOS_SCALED = 4 };

// Floats that stand before and behind every table over distances, so that a tile may read past its ends.
enum { RELPOS_TABLE_PAD = 128 };
// Floats behind every array over positions, for the same reason.
enum { RELPOS_ROW_PAD = 64 };
// Queries and keys of a tile.
enum { RELPOS_TILE = 64 };

typedef struct {
    // Who attends to whom. Positions are counted along the keys; the queries are the last of them.
    int64_t batch, heads, key_heads, queries, keys, head_dim;
    int32_t causal;
    int32_t form;     // RELPOS_NONE, …
    int32_t threads;  // at most; the result's bits depend on it only through the gradient of a table
    int32_t skip;     // whether tiles that provably cannot matter may be left out
    float scale;
    const int32_t* first;    // (batch, keys): the first key a query at this position may see; NULL: 0
    const int32_t* end;      // (batch, keys): one past the last; NULL: all keys. Causality is applied on top.
    const uint8_t* padding;  // (batch, keys): 0 where a key is not seen; NULL: all are

    relpos_array q, k, v, out;
    // (2, batch, heads, queries): the largest score m of a row, then log2 of its sum of 2^(score − m). Apart, because
    // their sum in one float would lose the second where the first is large. +inf and 0 for a query that sees nothing.
    float* lse;

    // Toeplitz and scaled. Tables are padded by RELPOS_TABLE_PAD on both sides.
    const float* table;    // (heads or 1, pad + distances + pad); Toeplitz: times log2(e)
    int64_t table_stride;  // between heads; 0 if they share it
    int64_t zero;          // column of distance 0, the pad counted
    int64_t distances;

    // Rank one: bias = −weight_i · (total_i − total_j), the total as a sum of two floats. Padded by RELPOS_ROW_PAD.
    const float* total_high;  // (batch, heads, keys + pad)
    const float* total_low;
    const float* weight;  // times log2(e)
    int32_t symmetric;    // |total_i − total_j|
    int32_t weighted;     // whether `weight` is an input, and not log2(e) everywhere

    // Scaled: bias = f_h(x), x = table[i − j] · inverse_i, f_h(x) = base + gain·x + Σ bend_s · max(x − knot_s, 0).
    // base and gain are given for each number s of knots already passed; all three times log2(e).
    const float* inverse;    // (batch or 1, keys + pad)
    int64_t inverse_stride;  // between batches; 0 if they share it
    int64_t knots;
    const float* knot;  // (knots), ascending
    const float* base;  // (heads, knots + 1)
    const float* gain;  // (heads, knots + 1)
    const float* bend;  // (heads, knots)

    // What the forward passes to the backward about skipping (NULL: nothing is skipped):
    // (batch·heads) × 4 counts {open, visible, scored, kept}, then one byte per tile, (batch·heads, query blocks,
    // key blocks): 0 if it was computed, else 1 + the whole bits by which it passed its test.
    int64_t* skipping;

    // Backward only. Either every number of the bias gets its gradient or none does; all pointers are then NULL.
    // The pointer of a weight that is not learned may be NULL by itself.
    relpos_array grad_out, grad_q, grad_k, grad_v;
    float* grad_table;         // (slots, heads, pad + distances + pad), zeroed; see relpos_slots
    double* grad_total;        // (batch, heads, keys), zeroed: what keys contribute
    float* grad_total_query;   // (batch, heads, queries): what queries contribute
    float* grad_weight;        // (batch, heads, queries)
    float* grad_inverse;       // (batch, heads, queries)
    double* grad_scaled_sums;  // (slots, heads, 4, knots + 1), zeroed; see scaled.h
} relpos_problem;

// 0: done; 1: out of memory.
RELPOS_EXPORT int relpos_forward(const relpos_problem*);
RELPOS_EXPORT int relpos_backward(const relpos_problem*);

// How many independent sums of a bias's gradient the backward keeps; the caller adds them up.
RELPOS_EXPORT int64_t relpos_slots(const relpos_problem*);

// Instruction sets, by name: "portable", "avx2", "avx512".
RELPOS_EXPORT int relpos_has(const char* isa);    // 1: built and on this CPU; 0: not on this CPU; −1: not in this build
RELPOS_EXPORT int relpos_use(const char* isa);    // as relpos_has; from now on calls use it if 1
RELPOS_EXPORT const char* relpos_isa(void);       // the one in use
RELPOS_EXPORT const char* relpos_isas(void);      // those in this build, comma-separated
RELPOS_EXPORT int64_t relpos_interface(void);     // RELPOS_INTERFACE as built, to check the caller's against

#ifdef __cplusplus
}
#endif
