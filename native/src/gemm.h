// One micro-kernel for all products of the forward and the backward.
#pragma once

#include "vector.h"

namespace relpos {
namespace RELPOS_ISA {

// Accumulators are kRows × kPanelVectors registers: 12 of AVX2's 16, 24 of AVX-512's 32.
constexpr int kRows = 6;
constexpr int kPanelVectors = kLanes == 16 ? 4 : 2;
constexpr int kPanel = kPanelVectors * kLanes;

enum class Layout { natural, transposed };

// sums[m][v] += Σ_k a(m, k) · b[k][v], k from `begin` to `end`. a is broadcast, so that it may have either layout:
// a(m, k) = a[m · a_row + k], or transposed a[k · a_row + m].
template <Layout layout, int Rows, int Vectors>
RELPOS_INLINE void multiply(const float* __restrict a, int64_t a_row, const float* __restrict b, int64_t b_row,
                            int begin, int end, Vec (&sums)[Rows][Vectors]) {
    constexpr bool natural = layout == Layout::natural;
    a += natural ? begin : begin * a_row;
    b += begin * b_row;
#pragma GCC unroll 2
    for (int k = begin; k < end; k++) {
        Vec column[Vectors];
        RELPOS_UNROLL
        for (int v = 0; v < Vectors; v++) column[v] = load(b + v * kLanes);
        RELPOS_UNROLL
        for (int m = 0; m < Rows; m++) {
            const Vec factor = splat(natural ? a[m * a_row] : a[m]);
            RELPOS_UNROLL
            for (int v = 0; v < Vectors; v++) sums[m][v] += factor * column[v];
        }
        a += natural ? 1 : a_row;
        b += b_row;
    }
}

// How a product is combined with the values at its destination.
enum class Into { overwrite, add, rescale };

struct Product {
    const float* a;
    int64_t a_row;
    const float* b;
    int64_t b_row;
    float* c;
    int64_t c_row;
    Into into;
    const float* factor;  // one value per row, for Into::rescale: c = c · factor + a · b
};

template <Layout layout, int Rows, int Vectors>
static __attribute__((noinline)) void product_block(const Product& p, int row, int column, int begin, int end) {
    Vec sums[Rows][Vectors] = {};
    const float* a = p.a + (layout == Layout::natural ? row * p.a_row : row);
    multiply<layout>(a, p.a_row, p.b + column, p.b_row, begin, end, sums);
    float* c = p.c + row * p.c_row + column;
    // The tile's own sum is completed before it is added to the running sum: adding the terms to a large running sum
    // one by one would round every term of a slowly decaying tail.
    if (p.into != Into::overwrite) {
        RELPOS_UNROLL
        for (int m = 0; m < Rows; m++) {
            const Vec factor = splat(p.into == Into::rescale ? p.factor[row + m] : 1.0f);
            RELPOS_UNROLL
            for (int v = 0; v < Vectors; v++) sums[m][v] += load(c + m * p.c_row + v * kLanes) * factor;
        }
    }
    RELPOS_UNROLL
    for (int m = 0; m < Rows; m++)
        RELPOS_UNROLL
        for (int v = 0; v < Vectors; v++) store(c + m * p.c_row + v * kLanes, sums[m][v]);
}

// Calls work(rows, vectors) with compile-time sizes: rows is the largest of 6, 4, 2, 1 that fits, and is returned.
template <int Vectors, class Work>
RELPOS_INLINE int with_rows(int rows, Work&& work) {
    if (rows >= 6) return work.template operator()<6, Vectors>(), 6;
    if (rows >= 4) return work.template operator()<4, Vectors>(), 4;
    if (rows >= 2) return work.template operator()<2, Vectors>(), 2;
    return work.template operator()<1, Vectors>(), 1;
}
template <class Work>
RELPOS_INLINE int with_sizes(int rows, int vectors, Work&& work) {
    if constexpr (kPanelVectors == 4) {
        if (vectors == 4) return with_rows<4>(rows, work);
        if (vectors == 3) return with_rows<3>(rows, work);
    }
    if (vectors == 2) return with_rows<2>(rows, work);
    return with_rows<1>(rows, work);
}

// Which terms of a product with a tile on the diagonal can be nonzero.
enum class Trim { none, up_to_row, from_row };

// c[row][:columns] from a and b for row_begin ≤ row < row_end, summed over k_begin ≤ k < k_end.
template <Layout layout>
static void product(const Product& p, int row_begin, int row_end, int columns, int k_begin, int k_end, Trim trim) {
    for (int column = 0; column < columns; column += kPanel) {
        const int vectors = least(kPanelVectors, (columns - column) / kLanes);
        for (int row = row_begin; row < row_end;) {
            const int begin = trim == Trim::from_row ? most(k_begin, row) : k_begin;
            const int end = trim == Trim::up_to_row ? least(k_end, row + kRows) : k_end;
            row += with_sizes(row_end - row, vectors, [&]<int Rows, int Vectors>() {
                product_block<layout, Rows, Vectors>(p, row, column, begin, most(begin, end));
            });
        }
    }
}

// The same, for the pairs (row, k) that `seen` accepts: the others have the factor 0, which does not make an infinite
// number or a NaN 0. Slower, so that tiles ask for it only where there are such numbers.
template <Layout layout, class Seen>
static __attribute__((noinline)) void product_of_seen(const Product& p, int row_begin, int row_end, int columns,
                                                      int k_begin, int k_end, const Seen& seen) {
    for (int row = row_begin; row < row_end; row++)
        for (int column = 0; column < columns; column += kLanes) {
            Vec sums = {};
            for (int k = k_begin; k < k_end; k++)
                if (seen(row, k))
                    sums += p.a[layout == Layout::natural ? row * p.a_row + k : k * p.a_row + row] *
                            load(p.b + k * p.b_row + column);
            float* c = p.c + row * p.c_row + column;
            if (p.into != Into::overwrite) sums += load(c) * (p.into == Into::rescale ? p.factor[row] : 1.0f);
            store(c, sums);
        }
}

// Whether rows of at least kLanes columns hold neither an infinite number nor a NaN, whose products with 0 are NaN.
static bool all_finite(const float* rows, int64_t stride, int count, int columns) {
    Vec zeros[4] = {};
    for (int i = 0; i < count; i++, rows += stride) {
        int c = 0;
        for (; c + 4 * kLanes <= columns; c += 4 * kLanes)
            RELPOS_UNROLL
            for (int v = 0; v < 4; v++) zeros[v] += load(rows + c + v * kLanes) * 0.0f;
        for (; c < columns; c += kLanes) zeros[0] += load(rows + least(c, columns - kLanes)) * 0.0f;
    }
    return sum((zeros[0] + zeros[1]) + (zeros[2] + zeros[3])) == 0.0f;
}

}  // namespace RELPOS_ISA
}  // namespace relpos
