// The scaled form (FIRE): bias = f_h(x), x = table[i − j] · inverse_i, f_h piecewise linear.
//
// f_h(x) = base + gain · x + Σ_s bend_s · max(x − knot_s, 0). Over a strip of a few keys x changes little: the knots
// below its range are included in base and gain beforehand, the knots above it contribute 0, and only the knots inside
// are evaluated.
//
// Gradients. With g the gradient of a score and p the knots passed by a strip, the sums kept are
//   [0][p] Σ g    [1][p] Σ g·x    [2][s] Σ g·max(x − knot_s, 0)    [3][s] Σ g·[x > knot_s]
// with s only over the knots inside the strip's range. The caller computes the contributions of the knots that were
// passed from the first two sums.
#pragma once

#include "forms.h"

namespace relpos {
namespace RELPOS_ISA {

class Scaled {
public:
    static bool fits(const relpos_problem&) { return true; }
    static const float* factors(const relpos_problem&, int64_t, int64_t) { return nullptr; }

    Scaled(const relpos_problem& p, int64_t b, int64_t h)
        : zero_(p.table + p.zero), inverse_(p.inverse + b * p.inverse_stride), offset_(int(p.start)), knots_(int(p.knots)), knot_(p.knot),
          base_(p.base + h * (p.knots + 1)), gain_(p.gain + h * (p.knots + 1)), bend_(p.bend + h * p.knots) {}

    void enter(const QueryBlock& rows, const KeyBlock& columns, float* tile) {
        tile_ = tile;
        if (query_ != rows.start) see_rows(rows);
        corner_ = zero_ + (rows.start - columns.start);
        if (tile) fill(rows, columns, tile);
    }

    template <int Rows, int Vectors>
    RELPOS_MEMBER void add(Vec (&scores)[Rows][Vectors], int key, int lane) const {
        RELPOS_UNROLL
        for (int m = 0; m < Rows; m++)
            RELPOS_UNROLL
            for (int v = 0; v < Vectors; v++) scores[m][v] += load(tile_ + (key + m) * kTile + lane + v * kLanes);
    }

    class Fold;

private:
    static constexpr int kStrip = 8;  // keys that share a range of x

    struct Inside {
        int begin, end;  // the knots in the range
    };

    void see_rows(const QueryBlock& rows) {
        query_ = rows.start;
        low_ = kInfinity, high_ = -kInfinity;
        memset(lanes_, 0, sizeof lanes_);
        for (int lane = rows.begin; lane < rows.end; lane++) {
            const float x = lanes_[lane] = inverse_[rows.start + lane - offset_];
            low_ = x < low_ ? x : low_, high_ = x > high_ ? x : high_;
        }
    }

    // The knots inside the range of x for keys [key, key + kStrip). Rounding is monotone, so the bounds are exact.
    Inside inside(int key) const {
        Vec low = splat(kInfinity), high = splat(-kInfinity);
        const float* table = corner_ - key - (kStrip - 1);
        for (int i = 0; i < kTile + kStrip; i += kLanes) {
            low = smaller(load(table + i), low), high = larger(load(table + i), high);
        }
        const float least_table = -largest(-low), most_table = largest(high);
        const float corners[4] = {least_table * low_, least_table * high_, most_table * low_, most_table * high_};
        float from = corners[0], to = corners[0];
        for (float x : corners) from = x < from ? x : from, to = x > to ? x : to;
        Inside found{0, 0};
        while (found.begin < knots_ && knot_[found.begin] < from) found.begin++;
        found.end = found.begin;
        while (found.end < knots_ && knot_[found.end] < to) found.end++;
        return found;
    }

    void fill(const QueryBlock& rows, const KeyBlock& columns, float* tile) const {
        for (int key = 0; key < columns.count; key += kStrip) {
            const Inside range = inside(key);
            const float base = base_[range.begin], gain = gain_[range.begin];
            for (int lane = columns.diagonal ? most(rows.from, round_down(key)) : rows.from; lane < rows.to;
                 lane += kLanes) {
                const Vec inverse = load(lanes_ + lane);
                Vec x[kStrip], bias[kStrip];
                RELPOS_UNROLL
                for (int m = 0; m < kStrip; m++) {
                    x[m] = load(corner_ + lane - (key + m)) * inverse;
                    bias[m] = x[m] * gain + base;
                }
                for (int s = range.begin; s < range.end; s++) {
                    const Vec knot = splat(knot_[s]), bend = splat(bend_[s]);
                    RELPOS_UNROLL
                    for (int m = 0; m < kStrip; m++) bias[m] += bend * larger(x[m] - knot, Vec{});
                }
                // The buffer of a tile always holds kTile keys, a multiple of kStrip.
                RELPOS_UNROLL
                for (int m = 0; m < kStrip; m++) store(tile + (key + m) * kTile + lane, bias[m]);
            }
        }
    }

    const float *zero_, *inverse_;
    int offset_, knots_;
    const float *knot_, *base_, *gain_, *bend_;
    int query_ = -1;
    alignas(64) float lanes_[kTile];  // `inverse` of the block of queries
    float low_ = 0, high_ = 0;  // range of `inverse` over the block of queries
    const float* corner_ = nullptr;
    const float* tile_ = nullptr;
};

class Scaled::Fold : public NoFold {
public:
    // Scratch memory of a thread: two sums per knot.
    static int64_t scratch_floats(const relpos_problem& p) { return 2 * p.knots * kLanes; }
    static bool wanted(const relpos_problem& p) { return p.grad_scaled_sums; }

    Fold(const relpos_problem& p, int64_t b, int64_t h, int64_t slot, float* scratch)
        : NoFold(p, b, h, slot, scratch), form_(p, b, h), table_(grad_table_zero(p, h, slot)),
          inverse_(p.grad_inverse + (b * p.heads + h) * p.queries), offset_(int(p.start)),
          sums_(p.grad_scaled_sums + (slot * p.heads + h) * 4 * (p.knots + 1)), above_(scratch),
          passed_(scratch + p.knots * kLanes) {}

    void begin_rows(const QueryBlock&) { memset(lanes_, 0, sizeof lanes_); }
    void begin_tile(const QueryBlock& rows, const KeyBlock& columns) {
        rows_ = &rows, columns_ = &columns;
        form_.enter(rows, columns, nullptr);
    }

    void end_tile(const float* gradients) {
        diagonals_.clear();
        for (int key = 0; key < columns_->count; key += kStrip) strip(gradients, key);
        diagonals_.flush(table_, *rows_, *columns_);
    }

    void end_rows(const QueryBlock& rows) {
        for (int lane = rows.begin; lane < rows.end; lane++)
            inverse_[rows.start + lane - offset_] = lanes_[lane] * kLn2;
    }

private:
    static constexpr int kTogether = 4;

    void strip(const float* gradients, int key) {
        const Inside range = form_.inside(key);
        const int keys = least(kStrip, columns_->count - key);
        for (int s = range.begin; s < range.end; s++)
            store(above_ + s * kLanes, Vec{}), store(passed_ + s * kLanes, Vec{});
        Vec plain = {}, times_x = {};
        for (int lane = columns_->diagonal ? most(rows_->from, round_down(key)) : rows_->from; lane < rows_->to;
             lane += kLanes) {
            const Vec inverse = load(form_.lanes_ + lane);
            for (int at = key; at < key + keys; at += kTogether) {
                Vec table[kTogether], x[kTogether], gradient[kTogether], slope[kTogether];
                RELPOS_UNROLL
                for (int m = 0; m < kTogether; m++) {
                    table[m] = load(form_.corner_ + lane - (at + m));
                    x[m] = table[m] * inverse;
                    gradient[m] = at + m < key + keys ? load(gradients + (at + m) * kTile + lane) : Vec{};
                    slope[m] = splat(form_.gain_[range.begin]);
                    plain += gradient[m];
                    times_x += gradient[m] * x[m];
                }
                for (int s = range.begin; s < range.end; s++) {
                    const Vec knot = splat(form_.knot_[s]), bend = splat(form_.bend_[s]);
                    Vec above = load(above_ + s * kLanes), passed = load(passed_ + s * kLanes);
                    RELPOS_UNROLL
                    for (int m = 0; m < kTogether; m++) {
                        const Vec over = x[m] - knot;
                        const Vec counted = over > 0.0f ? gradient[m] : Vec{};
                        above += counted * over;
                        passed += counted;
                        slope[m] += over > 0.0f ? bend : Vec{};
                    }
                    store(above_ + s * kLanes, above), store(passed_ + s * kLanes, passed);
                }
                Vec to_inverse = load(lanes_ + lane);
                RELPOS_UNROLL
                for (int m = 0; m < kTogether; m++) {
                    const Vec to_x = gradient[m] * slope[m];  // times log2(e), like the coefficients
                    to_inverse += to_x * table[m];
                    diagonals_.add(at + m, lane, to_x * (inverse * kLn2));
                }
                store(lanes_ + lane, to_inverse);
            }
        }
        const int row = form_.knots_ + 1;
        sums_[range.begin] += sum(plain);
        sums_[row + range.begin] += sum(times_x);
        for (int s = range.begin; s < range.end; s++) {
            sums_[2 * row + s] += sum(load(above_ + s * kLanes));
            sums_[3 * row + s] += sum(load(passed_ + s * kLanes));
        }
    }

    Scaled form_;
    float *table_, *inverse_;
    int offset_;
    double* sums_;
    float *above_, *passed_;
    const QueryBlock* rows_ = nullptr;
    const KeyBlock* columns_ = nullptr;
    DiagonalSums diagonals_;
    alignas(64) float lanes_[kTile];
};

}  // namespace RELPOS_ISA
}  // namespace relpos
