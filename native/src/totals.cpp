// Running totals of a RankOne bias in the kernel's layout: packed for a whole call, extended by the tokens that a decoder
// adds, and the way back for their gradients. Short loops in double, for which many tensor operations would take longer.
#include <math.h>

#include "api.h"

namespace relpos {

extern bool forked;  // see threads.h

namespace {

constexpr double kLog2e = 1.4426950408889634;
constexpr double kLargestBias = 0x1p126;  // in units of log2: larger ones would overflow
// Exponents of totals and weights: a total spans about 2^kReach units, unless the largest weight would leave the range
// 2^−kHeaviest … 2^kHeaviest; and never more than 2^kLargestReach.
constexpr int kReach = 30, kHeaviest = 60, kLargestReach = 120;
constexpr int64_t kWorthAThread = 1 << 15;  // tokens

int exponent_of(double x) {
    int exponent = 0;
    if (isfinite(x)) frexp(x, &exponent);
    return exponent;
}

int between(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

// The tokens of one head.
struct Head {
    Head(const relpos_totals& t, int64_t b, int64_t h)
        : index(b * t.heads + h), total(t.total ? t.total + index * t.tokens : nullptr),
          step(t.step ? t.step + b * t.step_strides[0] + h * t.step_strides[1] : nullptr),
          weight(t.weight ? t.weight + b * t.weight_strides[0] + h * t.weight_strides[1] : nullptr),
          step_stride(t.step_strides[2]), weight_stride(t.weight_strides[2]) {}

    double weight_at(int64_t i) const { return weight ? double(weight[i * weight_stride]) : 1.0; }
    // The total of token i, from that of the token before; to be asked for in order.
    double next(double before, int64_t i) const { return total ? total[i] : before + double(step[i * step_stride]); }

    const int64_t index;
    const double* total;
    const float *step, *weight;
    const int64_t step_stride, weight_stride;
};

bool pack(const relpos_totals& t, const Head& head) {
    double sum = 0.0, least = INFINITY, largest = -INFINITY, heaviest = 0.0;
    for (int64_t i = 0; i < t.tokens; i++) {
        sum = head.next(sum, i);
        const double weight = fabs(head.weight_at(i));
        least = sum < least ? sum : least, largest = sum > largest ? sum : largest;
        heaviest = weight > heaviest ? weight : heaviest;
    }
    const int spans = exponent_of(largest - least), weighs = exponent_of(heaviest);
    int exponent = between(spans - kReach, -kHeaviest - weighs, kHeaviest - weighs);
    if (exponent < spans - kLargestReach) exponent = spans - kLargestReach;
    const double unit = ldexp(1.0, exponent), per_unit = ldexp(1.0, -exponent), log2_unit = kLog2e * unit;
    t.unit[head.index] = unit;
    float* high = t.rows + head.index * t.row_stride;
    float *low = high + t.plane_stride, *factor = low + t.plane_stride;
    bool finite = true;
    sum = 0.0;
    for (int64_t i = 0; i < t.tokens; i++) {
        sum = head.next(sum, i);
        const double total = (sum - least) * per_unit, weight = head.weight_at(i) * log2_unit;
        high[i] = float(total), low[i] = float(total - double(high[i]));
        factor[i] = float(weight > kLargestBias ? kLargestBias : weight < -kLargestBias ? -kLargestBias : weight);
        finite &= isfinite(high[i]) && isfinite(factor[i]);
    }
    for (int64_t i = t.tokens; i < t.row_stride; i++) high[i] = low[i] = factor[i] = 0.0f;
    return finite;
}

void unpack(const relpos_totals& t, const Head& head) {
    const double unit = t.unit[head.index];
    const double* of_keys = t.grad_keys + head.index * t.keys;
    const float* of_queries = t.grad_queries + head.index * t.queries;
    double later = 0.0;
    for (int64_t i = t.tokens - 1; i >= 0; i--) {
        const int64_t query = i - t.start;
        const bool is_query = query >= 0 && query < t.queries;
        const double gradient = ((i < t.keys ? of_keys[i] : 0.0) + (is_query ? double(of_queries[query]) : 0.0)) / unit;
        later += gradient;
        if (t.grad_total) t.grad_total[head.index * t.tokens + i] = gradient;
        if (t.grad_step) t.grad_step[head.index * t.tokens + i] = float(later);
        if (t.grad_weight)
            t.grad_weight[head.index * t.tokens + i] =
                is_query ? float(double(t.grad_weights[head.index * t.queries + query]) * unit) : 0.0f;
    }
}

template <class Work>
bool for_each_head(const relpos_totals& t, const Work& work) {
    const int64_t count = t.batch * t.heads;
    bool good = true;
    [[maybe_unused]] const bool alone = forked || t.threads == 1 || count * t.tokens < kWorthAThread;
#pragma omp parallel for num_threads(t.threads) if (!alone) reduction(&& : good)
    for (int64_t index = 0; index < count; index++)
        good = work(Head(t, index / t.heads, index % t.heads)) && good;
    return good;
}

}  // namespace
}  // namespace relpos

using namespace relpos;

extern "C" {

int relpos_pack_totals(const relpos_totals* t) {
    return for_each_head(*t, [&](const Head& head) { return pack(*t, head); }) ? RELPOS_OK : RELPOS_INVALID;
}

int relpos_unpack_gradients(const relpos_totals* t) {
    for_each_head(*t, [&](const Head& head) { return unpack(*t, head), true; });
    return RELPOS_OK;
}

int relpos_append_totals(const relpos_totals* t, int64_t first) {
    const float largest = 0x1p100f;  // far from overflow in the kernel
    bool fits = true;
    for (int64_t index = 0; index < t->batch * t->heads; index++) {
        const Head head(*t, index / t->heads, index % t->heads);
        const double unit = t->unit[index], log2_unit = kLog2e * unit;
        float* high = t->rows + index * t->row_stride + first;
        float *low = high + t->plane_stride, *factor = low + t->plane_stride;
        double total = first ? double(high[-1]) + double(low[-1]) : 0.0;
        for (int64_t i = 0; i < t->tokens; i++) {
            total += double(head.step[i * head.step_stride]) / unit;
            high[i] = float(total), low[i] = float(total - double(high[i]));
            factor[i] = float(head.weight_at(i) * log2_unit);
            // Not numbers compare as false.
            fits &= fabsf(high[i]) < largest && fabsf(factor[i]) < largest;
        }
    }
    return fits ? RELPOS_OK : RELPOS_INVALID;
}
}
