// The C interface of the kernel: one plain struct, so that any language with a foreign-function interface can call it
// and the build needs no torch. Sizes and strides count elements, never bytes.
#pragma once

#include <stdint.h>

#ifdef _WIN32
#define RELPOS_EXPORT __declspec(dllexport)
#else
#define RELPOS_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// A (batch, heads, rows, head_dim or value_dim) array whose last dimension is contiguous.
typedef struct {
    void* data;
    int64_t batch, head, row;  // strides
} relpos_array;

// Constants, as CONSTANT(name, value). The interface's number is incremented with every change that a caller must know
// about and cannot see in the description, such as the meaning of a buffer.
#define RELPOS_CONSTANTS(CONSTANT)                                                      \
    CONSTANT(INTERFACE, 5)                                                              \
    /* Forms of the bias. */                                                            \
    CONSTANT(NONE, 0)                                                                   \
    CONSTANT(TOEPLITZ, 1)                                                               \
    CONSTANT(RANK_ONE, 2)                                                               \
    CONSTANT(SUM, 3)                                                                    \
    CONSTANT(SCALED, 4)                                                                 \
    /* Types of q, k, v, out and their gradients. */                                    \
    CONSTANT(FLOAT32, 0)                                                                \
    CONSTANT(BFLOAT16, 1)                                                               \
    CONSTANT(FLOAT16, 2)                                                                \
    /* Values before and after every table over distances: a tile may read past its ends. */ \
    CONSTANT(TABLE_PAD, 128)                                                            \
    /* Values after every array over positions, for the same reason. */                 \
    CONSTANT(ROW_PAD, 64)                                                               \
    /* Queries and keys of a tile. */                                                   \
    CONSTANT(TILE, 64)                                                                  \
    /* Numbers per head at the start of the record of skipping. */                      \
    CONSTANT(SKIP_COUNTS, 4)                                                            \
    /* The largest head_dim and value_dim. */                                           \
    CONSTANT(MAX_DIM, 512)                                                              \
    /* Queries up to which a forward reads keys and values where they lie, faster than it computes with them. */ \
    CONSTANT(FEW, 8)                                                                    \
    /* What the functions return. */                                                    \
    CONSTANT(OK, 0)                                                                     \
    CONSTANT(OUT_OF_MEMORY, 1)                                                          \
    CONSTANT(INVALID, 2)

enum {
#define CONSTANT(name, value) RELPOS_##name = value,
    RELPOS_CONSTANTS(CONSTANT)
#undef CONSTANT
};

typedef struct {
#define FIELD(type, name) type name;
#include "problem.inc"
#undef FIELD
} relpos_problem;

// Return RELPOS_OK, RELPOS_OUT_OF_MEMORY, or RELPOS_INVALID for a problem that no call can have (an unknown form or dtype).
RELPOS_EXPORT int relpos_forward(const relpos_problem*);
RELPOS_EXPORT int relpos_backward(const relpos_problem*);
RELPOS_EXPORT int relpos_mass(const relpos_problem*);

// Running totals of a RankOne bias, (batch, heads, tokens), and their place in the layout of total_high, total_low and
// weight. Strides are those of batch, heads and tokens.
typedef struct {
    int64_t batch, heads, tokens;
    int32_t threads;               // at most this many
    const double* total;           // contiguous; NULL: the running sum of `step`
    const float *step, *weight;    // a weight of NULL is 1
    int64_t step_strides[3], weight_strides[3];
    float* rows;                   // (3, batch, heads, room): high and low part of the total, and weight times log2(e)
    int64_t plane_stride, row_stride;
    double* unit;                  // (batch, heads): a power of two, in which the totals are counted
    // Gradients: the kernel's sums for keys, queries and weights, and those of the inputs; contiguous, NULL if not wanted.
    int64_t keys, queries, start;
    const double* grad_keys;       // (batch, heads, keys): grad_total of relpos_problem
    const float *grad_queries, *grad_weights;  // (batch, heads, queries): its grad_total_query and grad_weight
    double* grad_total;
    float *grad_step, *grad_weight;
} relpos_totals;
// Writes rows and unit: the totals minus their minimum, split into two floats, and the weights. Both are scaled per head by
// the unit, so that neither overflows and small differences do not become denormal, which the kernel treats as 0.
// Returns RELPOS_INVALID if a number is not finite.
RELPOS_EXPORT int relpos_pack_totals(const relpos_totals*);
// Writes the gradients of total or step, and of weight.
RELPOS_EXPORT int relpos_unpack_gradients(const relpos_totals*);
// Adds tokens after the `first` ones that rows hold, by their steps. Returns RELPOS_INVALID if a number has left the range
// of its unit: then the totals must be packed again.
RELPOS_EXPORT int relpos_append_totals(const relpos_totals*, int64_t first);

// Number of partial sums of the bias's gradient that the backward writes; the caller adds them up.
RELPOS_EXPORT int64_t relpos_slots(const relpos_problem*);

// Instruction sets, by name: "portable", "avx2", "avx512".
RELPOS_EXPORT int relpos_has(const char* isa);    // 1: usable; 0: this CPU lacks it; −1: not in this build
RELPOS_EXPORT int relpos_use(const char* isa);    // returns as relpos_has; if 1, later calls use it
RELPOS_EXPORT const char* relpos_isa(void);       // the instruction set in use
RELPOS_EXPORT const char* relpos_isas(void);      // the instruction sets in this build, comma-separated

// The description of this file, from which a caller builds its own struct: entries up to one whose kind is NULL. The kind
// is "constant" (value: its value), "size" (value: bytes of the struct `name`), or the C type of a field of
// relpos_problem (value: its offset in bytes).
typedef struct {
    const char* kind;
    const char* name;
    int64_t value;
} relpos_entry;
RELPOS_EXPORT const relpos_entry* relpos_describe(void);

#ifdef __cplusplus
}
#endif
