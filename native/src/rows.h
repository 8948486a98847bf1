// Rows of q, k, v and their gradients: in memory in the problem's dtype, here always in float32, rotated where the
// problem rotates.
//
// The conversions are plain integer arithmetic: every build has them, and denormal halves survive a CPU that flushes
// denormal floats.
#pragma once

#include "api.h"
#include "vector.h"

namespace relpos {
namespace RELPOS_ISA {

typedef uint16_t VecHalf __attribute__((vector_size(kLanes * 2)));
typedef uint16_t UnalignedVecHalf __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef uint32_t VecBits __attribute__((vector_size(kLanes * 4)));

RELPOS_INLINE Vec from_bfloat16(VecBits x) { return (Vec)(x << 16); }
// Rounded to nearest, ties to even.
RELPOS_INLINE VecBits to_bfloat16(Vec x) {
    const VecBits bits = (VecBits)x;
    return x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0 - VecBits{};
}

RELPOS_INLINE Vec from_float16(VecBits x) {
    const VecBits exponent = x & 0x7c00;
    VecBits bits = ((x & 0x7fff) << 13) + (112u << 23);
    bits = exponent == 0x7c00 ? bits + (112u << 23) : bits;  // infinite or NaN
    // A denormal half: 2^−14 · (1 + fraction) as a normal float, minus 2^−14.
    const Vec small = (Vec)(bits + (1u << 23)) - 0x1p-14f;
    return (Vec)((exponent == 0 ? (VecBits)small : bits) | ((x & 0x8000) << 16));
}
// Rounded to nearest, ties to even.
RELPOS_INLINE VecBits to_float16(Vec x) {
    const VecBits sign = (VecBits)x & 0x80000000, bits = (VecBits)absolute(x);
    const VecBits normal = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
    // Below 2^−14 the addition of 0.5 rounds to the spacing of denormal halves.
    const VecBits denormal = (VecBits)((Vec)bits + 0.5f) - 0x3f000000;
    VecBits half = bits < (113u << 23) ? denormal : normal;
    half = bits >= (143u << 23) ? 0x7c00 - VecBits{} : half;
    half = bits > (255u << 23) ? 0x7e00 - VecBits{} : half;
    return half | (sign >> 16);
}

template <class Convert>
static void read_halves(const uint16_t* from, int count, float* to, const Convert& convert) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const VecHalf x = *reinterpret_cast<const UnalignedVecHalf*>(from + i);
        store(to + i, convert(__builtin_convertvector(x, VecBits)));
    }
    if (i == count) return;
    VecHalf x = {};
    memcpy(&x, from + i, sizeof(uint16_t) * (count - i));
    const Vec last = convert(__builtin_convertvector(x, VecBits));
    memcpy(to + i, &last, sizeof(float) * (count - i));
}
template <class Convert>
static void write_halves(const float* from, int count, uint16_t* to, const Convert& convert) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes)
        *reinterpret_cast<UnalignedVecHalf*>(to + i) = __builtin_convertvector(convert(load(from + i)), VecHalf);
    if (i == count) return;
    Vec x = {};
    memcpy(&x, from + i, sizeof(float) * (count - i));
    const VecHalf last = __builtin_convertvector(convert(x), VecHalf);
    memcpy(to + i, &last, sizeof(uint16_t) * (count - i));
}

// The rows of one head of an array.
class HeadRows {
public:
    HeadRows(const relpos_problem& p, const relpos_array& x, int64_t b, int64_t h)
        : dtype_(p.dtype), first_(b * x.batch + h * x.head), row_(x.row), data_(x.data) {}

    // Their place in memory, if they are floats.
    float* floats(int64_t row) const { return static_cast<float*>(data_) + first_ + row * row_; }
    int64_t stride() const { return row_; }

    void read(int64_t row, int columns, float* to) const {
        if (dtype_ == RELPOS_FLOAT32)
            copy(floats(row), columns, to);
        else if (dtype_ == RELPOS_BFLOAT16)
            read_halves(halves(row), columns, to, [](VecBits x) { return from_bfloat16(x); });
        else
            read_halves(halves(row), columns, to, [](VecBits x) { return from_float16(x); });
    }
    // `from` may be the row itself.
    void write(int64_t row, int columns, const float* from, float factor = 1.0f) const {
        if (dtype_ == RELPOS_FLOAT32) {
            float* to = floats(row);
            for (int c = 0; c < columns; c++) to[c] = from[c] * factor;
        } else if (dtype_ == RELPOS_BFLOAT16) {
            write_halves(from, columns, halves(row), [=](Vec x) { return to_bfloat16(x * factor); });
        } else {
            write_halves(from, columns, halves(row), [=](Vec x) { return to_float16(x * factor); });
        }
    }

private:
    uint16_t* halves(int64_t row) const { return static_cast<uint16_t*>(data_) + first_ + row * row_; }
    // A row is short: calling memcpy would take longer than copying it.
    static void copy(const float* from, int columns, float* to) {
        int c = 0;
        for (; c + kLanes <= columns; c += kLanes) store(to + c, load(from + c));
        for (; c < columns; c++) to[c] = from[c];
    }

    int dtype_;
    int64_t first_, row_;
    void* data_;
};

// The rotation of the queries or keys of one batch entry.
class Rotation {
public:
    Rotation() {}  // leaves rows as they are
    Rotation(const float* cos, const float* sin, int64_t first, const relpos_problem& p)
        : cos_(cos ? cos + first : nullptr), sin_(cos ? sin + first : nullptr), pairs_(int(p.pairs)),
          interleaved_(p.interleaved) {}
    static Rotation of_queries(const relpos_problem& p, int64_t b) {
        return Rotation(p.q_cos, p.q_sin, b * p.q_rotation_stride, p);
    }
    static Rotation of_keys(const relpos_problem& p, int64_t b) {
        return Rotation(p.k_cos, p.k_sin, b * p.k_rotation_stride, p);
    }

    explicit operator bool() const { return cos_; }
    // The row with this index, in place.
    void turn(int64_t index, float* row) const { apply(index, row, 1.0f); }
    // Its transpose, for gradients.
    void turn_back(int64_t index, float* row) const { apply(index, row, -1.0f); }

private:
    void apply(int64_t index, float* __restrict row, float direction) const {
        if (!cos_) return;
        const float* __restrict cos = cos_ + index * pairs_;
        const float* __restrict sin = sin_ + index * pairs_;
        if (interleaved_) {
            for (int p = 0; p < pairs_; p++) {
                const float a = row[2 * p], b = row[2 * p + 1], s = direction * sin[p];
                row[2 * p] = a * cos[p] - b * s, row[2 * p + 1] = b * cos[p] + a * s;
            }
            return;
        }
        float* __restrict second = row + pairs_;
        for (int p = 0; p < pairs_; p++) {
            const float a = row[p], b = second[p], s = direction * sin[p];
            row[p] = a * cos[p] - b * s, second[p] = b * cos[p] + a * s;
        }
    }

    const float *cos_ = nullptr, *sin_ = nullptr;
    int pairs_ = 0;
    bool interleaved_ = false;
};

// Rows [begin, begin + count) → rows of `width` ≥ columns, rotated, padded with 0.
static void read_rows(const HeadRows& rows, const Rotation& rotation, int64_t begin, int64_t count, int columns, int width,
                      float* out) {
    for (int64_t i = begin; i < begin + count; i++, out += width) {
        rows.read(i, columns, out);
        rotation.turn(i, out);
        for (int c = columns; c < width; c++) out[c] = 0.0f;
    }
}

}  // namespace RELPOS_ISA
}  // namespace relpos
