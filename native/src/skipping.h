// Which tiles provably cannot matter.
//
// A weight below 2^−24 / keys may be dropped: all that is dropped from a row, and from a column, then stays below
// 2^−24. For a tile the logits are bounded from above by Cauchy–Schwarz (|q_i| times the radius of the block's keys
// about a common centre, plus q_i·centre) and the bias's own maximum; the row's log-sum-exp is bounded from below by
// what is summed already, which is why near keys come first. Large keys or values demand a proportionally smaller
// weight. Every test reads "all lanes are below", so a NaN never skips.
#pragma once

#include "decay.h"
#include "threads.h"

namespace relpos {
namespace RELPOS_ISA {

// The header of relpos_problem::skipping, a head.
struct SkipCounts {
    int64_t open, visible, scored, kept;
};
RELPOS_INLINE SkipCounts* skip_counts(const relpos_problem& p, int64_t head) {
    return reinterpret_cast<SkipCounts*>(p.skipping) + head;
}
RELPOS_INLINE uint64_t* skip_bits(const relpos_problem& p, const Geometry& g, int64_t head, int query_block) {
    uint64_t* bits = reinterpret_cast<uint64_t*>(p.skipping) + p.batch * p.heads * 4;
    return bits + (head * g.query_blocks + query_block - g.first_block) * g.words();
}

// Of the keys and values of one key head, block by block: how far keys lie from the head's centre, and how many bits
// a block's keys and values are larger than the median block's. Prefix and suffix maxima serve whole sides.
class KeyStatistics {
public:
    static int64_t floats(const Geometry& g) { return Carve::padded(g.width) + 7 * Carve::padded(g.key_blocks); }

    void place(const Geometry& g, float* storage) {
        Carve carve(storage);
        centre_ = carve.take(g.width);
        float** const rows[] = {&radius_, &radius_before_, &radius_after_, &excess_, &excess_before_, &excess_after_, &work_};
        for (float** row : rows) *row = carve.take(g.key_blocks);
    }

    void measure(const Geometry& g, const KeyHead& head) {
        const int vectors = g.width / kLanes, n = g.key_blocks;
        const int sampled = least(g.keys, kTile);
        for (int v = 0; v < vectors; v++) {
            Vec mean = {};
            for (int i = 0; i < sampled; i++)
                mean += load(head.keys + int64_t(i) * g.keys / sampled * head.key_row + v * kLanes);
            store(centre_ + v * kLanes, mean * (1.0f / float(sampled)));
        }
        Vec square = splat(0.0f);
        for (int v = 0; v < vectors; v++) square += load(centre_ + v * kLanes) * load(centre_ + v * kLanes);
        const float centre_norm = __builtin_sqrtf(sum(square) + 1e-36f);
        for (int block = 0; block < n; block++) {
            const int start = block * kTile, stop = least(g.keys, start + kTile);
            float farthest = 0.0f;
            VecInt value = {};
            for (int j = start; j < stop; j++) {
                Vec distance = {};
                for (int v = 0; v < vectors; v++) {
                    const Vec from_centre = load(head.keys + j * head.key_row + v * kLanes) - load(centre_ + v * kLanes);
                    distance += from_centre * from_centre;
                    const VecInt bits = (VecInt)absolute(load(head.values + j * head.value_row + v * kLanes));
                    value = bits > value ? bits : value;  // as integers, so that NaN counts as larger than all
                }
                const float d = sum(distance);
                farthest = d <= farthest ? farthest : d;
                if (d != d) farthest = kInfinity;
            }
            // Inflated by what rounding can have taken away.
            const float radius = __builtin_sqrtf(farthest + 1e-36f) * (1.0f + 6e-5f) + centre_norm * 3e-5f;
            radius_[block] = radius < kInfinity ? radius : kInfinity;
            float tallest = largest_bits(value);
            excess_[block] = tallest < kInfinity ? tallest : kInfinity;
        }
        const float usual_value = median(excess_, n);
        const float usual_key = median(radius_, n) + centre_norm;
        for (int i = 0; i < n; i++)
            excess_[i] = bits_over(excess_[i], usual_value) + bits_over(radius_[i] + centre_norm, usual_key);
        running_maxima(radius_, radius_before_, radius_after_, n);
        running_maxima(excess_, excess_before_, excess_after_, n);
    }

    const float* centre() const { return centre_; }
    float radius(int block) const { return radius_[block]; }
    float excess(int block) const { return excess_[block]; }
    float radius_beyond(int block, Side s) const { return (s == Side::past ? radius_before_ : radius_after_)[block]; }
    float excess_beyond(int block, Side s) const { return (s == Side::past ? excess_before_ : excess_after_)[block]; }

private:
    static float largest_bits(VecInt bits) {
        int32_t top = 0;
        for (int i = 0; i < kLanes; i++) top = most(top, bits[i]);
        float x;
        memcpy(&x, &top, sizeof x);
        return x;
    }
    static float bits_over(float x, float usual) {
        if (x == 0.0f) return 0.0f;
        const float ratio = x / usual;
        if (!(ratio >= 0.0f && ratio < kInfinity)) return kInfinity;
        return ratio > 1.0f ? __builtin_log2f(ratio) : 0.0f;
    }
    static int ascending(const void* a, const void* b) {
        const float x = *static_cast<const float*>(a), y = *static_cast<const float*>(b);
        return x < y ? -1 : x > y;
    }
    float median(const float* x, int n) {
        memcpy(work_, x, sizeof(float) * n);
        qsort(work_, n, sizeof(float), ascending);
        return work_[n / 2];
    }
    static void running_maxima(const float* x, float* before, float* after, int n) {
        before[0] = x[0], after[n - 1] = x[n - 1];
        for (int i = 1; i < n; i++) before[i] = most(before[i - 1], x[i]);
        for (int i = n - 2; i >= 0; i--) after[i] = most(after[i + 1], x[i]);
    }

    float *centre_, *radius_, *radius_before_, *radius_after_, *excess_, *excess_before_, *excess_after_, *work_;
};

// The tests for one block of queries.
template <class Form>
class Skipper {
public:
    // `queries` as packed for the scores: scaled, in units of log2.
    Skipper(const Geometry& g, const KeyStatistics& keys, const Decay<Form>& decay, const QueryBlock& rows,
            const float* queries)
        : keys_(keys), decay_(decay), rows_(rows), threshold_(-24.02f - __builtin_log2f(float(g.keys))) {
        for (int lane = rows.from; lane < rows.to; lane += kLanes) {
            const float* panel = queries + int64_t(lane / kPanel) * g.head_dim * kPanel + lane % kPanel;
            Vec square = splat(1e-36f), centre = {};
            for (int d = 0; d < g.head_dim; d++) {
                const Vec q = load(panel + d * kPanel);
                square += q * q;
                centre += q * keys.centre()[d];
            }
            for (int i = 0; i < kLanes; i++) norm_[lane + i] = __builtin_sqrtf(square[i]) * 1.00001f;
            store(centre_ + lane, centre);
            store(floor_ + lane, splat(-kInfinity));
        }
    }

    // Nothing from this block on outwards matters.
    bool beyond(int block, Side side) const {
        const float radius = keys_.radius_beyond(block, side), limit = threshold_ - keys_.excess_beyond(block, side);
        VecInt below = ~VecInt{};
        for (int lane = rows_.from; lane < rows_.to; lane += kLanes)
            below &= (bound(lane, radius, decay_.beyond(rows_, block, lane, side)) < limit) |
                     unseen_beyond(lane, block, side);
        return all(below);
    }

    // Nothing in this block matters.
    bool tile(int block) const {
        const float radius = keys_.radius(block), limit = threshold_ - keys_.excess(block);
        VecInt below = ~VecInt{};
        for (int lane = rows_.from; lane < rows_.to; lane += kLanes)
            below &= (bound(lane, radius, decay_.tile(rows_, block, lane)) < limit) | unseen(lane, block);
        return all(below);
    }

    // Nothing in this block matters, now that its largest scores are known.
    bool scored(int block, const float* maximum) const {
        const float limit = threshold_ - keys_.excess(block);
        VecInt below = ~VecInt{};
        for (int lane = rows_.from; lane < rows_.to; lane += kLanes)
            below &= (load(maximum + lane) - load(floor_ + lane) < limit) | unseen(lane, block);
        return all(below);
    }

    // A row's log-sum-exp is at least m + log2(l), and log2(l) at least what its bits say read as a number.
    RELPOS_MEMBER void raise(int lane, Vec m, Vec l) {
        store(floor_ + lane, m + (__builtin_convertvector((VecInt)l, Vec) * 0x1p-23f - 127.0f));
    }

private:
    RELPOS_MEMBER Vec bound(int lane, float radius, Vec bias) const {
        const Vec spread = load(norm_ + lane) * radius, centre = load(centre_ + lane), floor = load(floor_ + lane);
        const Vec rounding = (spread + absolute(centre) + absolute(floor)) * 1e-6f;
        return (spread + centre + rounding) + (bias - floor);
    }
    RELPOS_MEMBER VecInt unseen(int lane, int block) const {
        const VecInt first = load(rows_.first + lane), last = load(rows_.last + lane);
        return (first >= (block + 1) * kTile) | (last <= block * kTile);
    }
    RELPOS_MEMBER VecInt unseen_beyond(int lane, int block, Side side) const {
        const VecInt first = load(rows_.first + lane), last = load(rows_.last + lane);
        return (first >= last) | (side == Side::past ? first >= (block + 1) * kTile : last <= block * kTile);
    }

    const KeyStatistics& keys_;
    const Decay<Form>& decay_;
    const QueryBlock& rows_;
    float threshold_;
    alignas(64) float norm_[kTile];
    alignas(64) float centre_[kTile];
    alignas(64) float floor_[kTile];
};

}  // namespace RELPOS_ISA
}  // namespace relpos
