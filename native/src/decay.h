// Upper bounds of a bias over a tile, and over all tiles beyond it, which skipping needs from a form.
//
//   Decay<Form>::known                    whether the form has such bounds
//   floats(problem)                       storage for one head
//   place(problem, b, h, storage)         the inputs of one head, and storage for the results of measure()
//   measure()                             the most bits by which the bias falls; NaN if it must not be trusted.
//                                         The bounds below are valid only if that is kGateBits or more.
//   tile(rows, block, lane)               upper bound of the bias of these queries for any key of the block
//   beyond(rows, block, lane, side)       the same for this block and all blocks farther away on that side
//   gains                                 whether the bias is a weight times |gained|; if so, upper bounds of |gained|:
//   gained, gained_beyond                 (same arguments as tile and beyond)
// No form is assumed to decrease: the bounds are maxima of the values. Units are log2.
#pragma once

#include "forms.h"
#include "scaled.h"
#include "threads.h"

namespace relpos {
namespace RELPOS_ISA {

enum class Side { past, future };

// A bias that falls by less than kGateBits + log2(keys) cannot alone push a weight below 2^−24 / keys: the tests would
// then cost more than they save.
constexpr float kGateBits = 24.0f;

template <class Form>
struct Decay {
    static constexpr bool known = false, gains = false;
    static int64_t floats(const relpos_problem&) { return 0; }
    void place(const relpos_problem&, int64_t, int64_t, float*) {}
    float measure() { return 0.0f; }
    RELPOS_MEMBER Vec tile(const QueryBlock&, int, int) const { return Vec{}; }
    RELPOS_MEMBER Vec beyond(const QueryBlock&, int, int, Side) const { return Vec{}; }
    RELPOS_MEMBER Vec gained(const QueryBlock&, int, int) const { return Vec{}; }
    RELPOS_MEMBER Vec gained_beyond(const QueryBlock&, int, int, Side) const { return Vec{}; }
};

// Maxima of the table: over windows of a tile's keys, from a distance on, and up to a distance.
template <>
struct Decay<Toeplitz> {
    static constexpr bool known = true, gains = false;
    static int64_t floats(const relpos_problem& p) { return 3 * Carve::padded(size(p)); }

    void place(const relpos_problem& p, int64_t, int64_t h, float* storage) {
        size_ = size(p), zero_ = p.zero, distances_ = p.distances, causal_ = p.causal;
        table_ = p.table + h * p.table_stride + RELPOS_TABLE_PAD;
        Carve carve(storage);
        window_ = carve.take(size_), from_ = carve.take(size_), up_to_ = carve.take(size_);
    }

    float measure(bool always = false) {
        float low = kInfinity, high = -kInfinity;
        bool sound = true;
        for (int64_t d = 0; d < distances_; d++) {
            low = table_[d] < low ? table_[d] : low, high = table_[d] > high ? table_[d] : high;
            sound &= table_[d] < kInfinity;
        }
        if (!sound) return __builtin_nanf("");
        const float fall = high > low ? high - low : 0.0f;
        if (!always && !(fall >= kGateBits)) return fall;
        const int64_t n = size_;
        for (int64_t i = 0; i < n; i++) {
            const int64_t d = i - RELPOS_TABLE_PAD;
            window_[i] = d >= 0 && d < distances_ ? table_[d] : -kInfinity;
        }
        float top = -kInfinity;
        for (int64_t i = 0; i < n; i++) up_to_[i] = top = most(top, window_[i]);
        top = -kInfinity;
        for (int64_t i = n - 1; i >= 0; i--) from_[i] = top = most(top, window_[i]);
        for (int64_t step = 1; step < kTile; step *= 2)  // windows of 2, 4, … kTile
            for (int64_t i = 0; i + step < n; i++) window_[i] = most(window_[i], window_[i + step]);
        // Single low entries let no tile be skipped. What counts is how far the maximum of a tile falls below the
        // values at smaller distances, because near keys come first.
        float gap = 0.0f;
        for (int64_t i = RELPOS_TABLE_PAD; i + kTile <= RELPOS_TABLE_PAD + distances_; i++)
            gap = most(gap, (causal_ ? up_to_[i] : high) - window_[i]);
        return gap;
    }

    RELPOS_MEMBER Vec tile(const QueryBlock& rows, int block, int lane) const {
        return load(window_ + zero_ + (rows.start + lane - block * kTile) - (kTile - 1));
    }
    RELPOS_MEMBER Vec beyond(const QueryBlock& rows, int block, int lane, Side side) const {
        const int64_t nearest = zero_ + (rows.start + lane - block * kTile);
        return side == Side::past ? load(from_ + nearest - (kTile - 1)) : load(up_to_ + nearest);
    }
    RELPOS_MEMBER Vec gained(const QueryBlock&, int, int) const { return Vec{}; }
    RELPOS_MEMBER Vec gained_beyond(const QueryBlock&, int, int, Side) const { return Vec{}; }

private:
    static int64_t size(const relpos_problem& p) { return p.distances + 2 * RELPOS_TABLE_PAD; }
    const float* table_;
    float *window_, *from_, *up_to_;
    int64_t size_, zero_, distances_;
    bool causal_;
};

// The range of the total over a block of keys, over it and all earlier blocks, over it and all later blocks.
template <>
struct Decay<RankOne> {
    static constexpr bool known = true, gains = true;
    static int64_t floats(const relpos_problem& p) { return 3 * Carve::padded(4 * blocks(p)); }

    void place(const relpos_problem& p, int64_t b, int64_t h, float* storage) {
        keys_ = p.keys, blocks_ = blocks(p);
        Carve carve(storage);
        own_ = reinterpret_cast<Range*>(carve.take(4 * blocks_));
        before_ = reinterpret_cast<Range*>(carve.take(4 * blocks_));
        after_ = reinterpret_cast<Range*>(carve.take(4 * blocks_));
        const int64_t head = (b * p.heads + h) * p.total_stride;
        high_ = p.total_high + head, low_ = p.total_low + head, weight_ = p.weight + head, symmetric_ = p.symmetric;
    }

    float measure() {
        const int64_t n = blocks_;
        float heaviest = 0.0f;
        bool sound = true;
        for (int64_t block = 0; block < n; block++) {
            int64_t top = block * kTile, bottom = top;
            for (int64_t j = top; j < least(keys_, (block + 1) * kTile); j++) {
                if (above(j, top)) top = j;
                if (above(bottom, j)) bottom = j;
                const float weight = weight_[j] < 0.0f ? -weight_[j] : weight_[j];
                heaviest = most(heaviest, weight);
                sound &= weight < kInfinity && high_[j] - high_[j] == 0.0f;
            }
            own_[block] = {high_[top], low_[top], high_[bottom], low_[bottom]};
        }
        before_[0] = own_[0], after_[n - 1] = own_[n - 1];
        for (int64_t i = 1; i < n; i++) before_[i] = before_[i - 1].with(own_[i]);
        for (int64_t i = n - 2; i >= 0; i--) after_[i] = after_[i + 1].with(own_[i]);
        return sound ? heaviest * (after_[0].top_high - after_[0].bottom_high) : __builtin_nanf("");
    }

    RELPOS_MEMBER Vec tile(const QueryBlock& rows, int block, int lane) const { return upper(rows, own_[block], lane); }
    RELPOS_MEMBER Vec beyond(const QueryBlock& rows, int block, int lane, Side side) const {
        return upper(rows, (side == Side::past ? before_ : after_)[block], lane);
    }
    RELPOS_MEMBER Vec gained(const QueryBlock& rows, int block, int lane) const { return widest(rows, own_[block], lane); }
    RELPOS_MEMBER Vec gained_beyond(const QueryBlock& rows, int block, int lane, Side side) const {
        return widest(rows, (side == Side::past ? before_ : after_)[block], lane);
    }

private:
    struct Range {
        float top_high, top_low, bottom_high, bottom_low;
        Range with(const Range& other) const {
            Range both = *this;
            if (other.top_high > top_high || (other.top_high == top_high && other.top_low > top_low))
                both.top_high = other.top_high, both.top_low = other.top_low;
            if (other.bottom_high < bottom_high || (other.bottom_high == bottom_high && other.bottom_low < bottom_low))
                both.bottom_high = other.bottom_high, both.bottom_low = other.bottom_low;
            return both;
        }
    };

    static int64_t blocks(const relpos_problem& p) { return (p.keys + kTile - 1) / kTile; }
    bool above(int64_t i, int64_t j) const {
        return high_[i] > high_[j] || (high_[i] == high_[j] && low_[i] > low_[j]);
    }

    struct Gained {
        Vec least, most;
    };
    RELPOS_MEMBER Gained between(const QueryBlock& rows, const Range& range, int lane) const {
        const Vec high = load(high_ + rows.start + lane), low = load(low_ + rows.start + lane);
        return {(high - range.top_high) + (low - range.top_low), (high - range.bottom_high) + (low - range.bottom_low)};
    }
    RELPOS_MEMBER Vec widest(const QueryBlock& rows, const Range& range, int lane) const {
        const Gained gained = between(rows, range, lane);
        return larger(absolute(gained.least), absolute(gained.most));
    }
    RELPOS_MEMBER Vec upper(const QueryBlock& rows, const Range& range, int lane) const {
        const Vec weight = load(weight_ + rows.start + lane);
        auto [least_gained, most_gained] = between(rows, range, lane);
        if (symmetric_) {
            const Vec a = least_gained, b = most_gained;
            least_gained = larger(larger(a, -b), Vec{});
            most_gained = larger(absolute(a), absolute(b));
        }
        return larger(-weight * least_gained, -weight * most_gained);
    }

    Range *own_, *before_, *after_;
    const float *high_, *low_, *weight_;
    int64_t keys_, blocks_;
    bool symmetric_;
};

// A is the Toeplitz part.
template <class A, class B>
struct Decay<Sum<A, B>> {
    static constexpr bool known = true, gains = Decay<B>::gains;
    static int64_t floats(const relpos_problem& p) { return Decay<A>::floats(p) + Decay<B>::floats(p); }
    void place(const relpos_problem& p, int64_t b, int64_t h, float* storage) {
        a_.place(p, b, h, storage), b_.place(p, b, h, storage + Decay<A>::floats(p));
    }
    float measure() { return a_.measure(true) + b_.measure(); }  // each alone may fall too little

    RELPOS_MEMBER Vec tile(const QueryBlock& rows, int block, int lane) const {
        return a_.tile(rows, block, lane) + b_.tile(rows, block, lane);
    }
    RELPOS_MEMBER Vec beyond(const QueryBlock& rows, int block, int lane, Side side) const {
        return a_.beyond(rows, block, lane, side) + b_.beyond(rows, block, lane, side);
    }
    RELPOS_MEMBER Vec gained(const QueryBlock& rows, int block, int lane) const { return b_.gained(rows, block, lane); }
    RELPOS_MEMBER Vec gained_beyond(const QueryBlock& rows, int block, int lane, Side side) const {
        return b_.gained_beyond(rows, block, lane, side);
    }

private:
    Decay<A> a_;
    Decay<B> b_;
};

}  // namespace RELPOS_ISA
}  // namespace relpos
