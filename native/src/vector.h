// Vectors of floats, as wide as the build's registers, on the compiler's vector extensions: the same source serves
// SSE, AVX2, AVX-512 and NEON.
//
// Everything below lives in a namespace of its build (RELPOS_ISA). The same templates are compiled several times with
// different instruction sets into one library; sharing a symbol would let the linker give an old CPU the newest code.
// For that reason the kernel's headers also keep away from std:: templates.
#pragma once

#include <stdint.h>
#include <string.h>

#define RELPOS_INLINE static inline __attribute__((always_inline))
#define RELPOS_MEMBER inline __attribute__((always_inline))
#define RELPOS_UNROLL _Pragma("GCC unroll 8")

namespace relpos {
namespace RELPOS_ISA {

constexpr int kLanes = RELPOS_LANES;
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecInt __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t UnalignedVecInt __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_inff();
constexpr float kLargest = __FLT_MAX__;

RELPOS_INLINE Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
RELPOS_INLINE VecInt load(const int32_t* p) { return *reinterpret_cast<const UnalignedVecInt*>(p); }
RELPOS_INLINE void store(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }
RELPOS_INLINE Vec splat(float x) { return x - Vec{}; }

// The second if either is NaN, like the hardware's instruction.
RELPOS_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }
RELPOS_INLINE Vec smaller(Vec a, Vec b) { return a < b ? a : b; }
RELPOS_INLINE Vec absolute(Vec a) { return (Vec)((VecInt)a & 0x7fffffff); }

RELPOS_INLINE float sum(Vec x) {
    float part[kLanes];
    memcpy(part, &x, sizeof part);
    RELPOS_UNROLL
    for (int half = kLanes / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}
RELPOS_INLINE float largest(Vec x) {
    float part[kLanes];
    memcpy(part, &x, sizeof part);
    RELPOS_UNROLL
    for (int half = kLanes / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] = part[i] > part[i + half] ? part[i] : part[i + half];
    return part[0];
}
// The lanes in reverse order.
template <class V>
RELPOS_INLINE V reversed(V x) {
    if constexpr (sizeof(V) == 16)
        return __builtin_shufflevector(x, x, 3, 2, 1, 0);
    else if constexpr (sizeof(V) == 32)
        return __builtin_shufflevector(x, x, 7, 6, 5, 4, 3, 2, 1, 0);
    else
        return __builtin_shufflevector(x, x, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

// Lane i of the result is the sum of all lanes of x[i]. At every step pairs of vectors become one: within each 2·Half
// lanes of it, the first half is a sum of halves of the first, the second half of the second.
template <int... I>
struct Lanes {};
template <int Count, int... I>
struct CountLanes : CountLanes<Count - 1, Count - 1, I...> {};
template <int... I>
struct CountLanes<0, I...> {
    typedef Lanes<I...> type;
};
template <int Half, int... I>
RELPOS_INLINE Vec join_sums(Vec a, Vec b, Lanes<I...>) {
    return __builtin_shufflevector(a, b, (I % (2 * Half) < Half ? I : I - Half + kLanes)...) +
           __builtin_shufflevector(a, b, (I % (2 * Half) < Half ? I + Half : I + kLanes)...);
}
template <int Half = kLanes / 2>
RELPOS_INLINE Vec sum_each(Vec (&x)[kLanes]) {
    RELPOS_UNROLL
    for (int i = 0; i < Half; i++) x[i] = join_sums<Half>(x[i], x[i + Half], typename CountLanes<kLanes>::type{});
    if constexpr (Half > 1)
        return sum_each<Half / 2>(x);
    else
        return x[0];
}
// Between log2(x) − 0.0861 and log2(x) for a normal x > 0: its bits, read as a number. −127 for 0.
RELPOS_INLINE Vec log2_below(Vec x) { return __builtin_convertvector((VecInt)x, Vec) * 0x1p-23f - 127.0f; }
// Between log2(x) and log2(x) + 0.0861.
RELPOS_INLINE Vec log2_above(Vec x) { return log2_below(x) + 0.0861f; }

// 2^x for x ≤ 127 to about one unit in the last place; 0 below −126, NaN for NaN. Adding `magic` leaves the rounded
// x + 127 in the low bits of t, which shifted into the exponent's place are the float 2^round(x).
RELPOS_INLINE Vec exp2(Vec x) {
    const float magic = 12582912.0f + 127.0f;
    const Vec t = x + magic;
    const Vec f = x - (t - magic);
    Vec p = splat(1.339887440266574e-3f);
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    const Vec power = p * (Vec)((VecInt)t << 23);
    return x < -126.0f ? Vec{} : power;
}

// tanh(x) and 1 − tanh(x)², both to a few units in the last place; NaN for NaN.
struct Tanh {
    Vec value, slope;
};
RELPOS_INLINE Tanh tanh(Vec x) {
    const Vec size = absolute(x), square = x * x;
    Vec p = splat(-5.70498872745e-3f);  // an odd polynomial where 1 − … would cancel
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const Vec small = x + x * square * p;
    const Vec rest = 2.0f / (exp2(smaller(splat(126.0f), size * (2.0f * kLog2e))) + 1.0f);  // 1 − tanh|x|
    const Vec large = (Vec)((VecInt)(1.0f - rest) | ((VecInt)x & INT32_MIN));
    const VecInt is_small = size < 0.625f;
    return {is_small ? small : large, is_small ? 1.0f - small * small : rest * (2.0f - rest)};
}

template <class T>
RELPOS_INLINE constexpr T least(T a, T b) { return a < b ? a : b; }
template <class T>
RELPOS_INLINE constexpr T most(T a, T b) { return a > b ? a : b; }

RELPOS_INLINE constexpr int round_down(int n) { return n / kLanes * kLanes; }
RELPOS_INLINE constexpr int round_up(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

}  // namespace RELPOS_ISA
}  // namespace relpos
