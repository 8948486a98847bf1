// The forms a bias can take: one small type each. The forward and the backward are templates over them.
//
// A form adds the bias to a tile:
//   Form(problem, b, h)               the inputs of one head
//   enter(rows, columns, tile)        moves to this tile; may write a bias into `tile`, which the scores will overwrite
//   add(scores, key, lane)            adds the bias, in units of log2, to a strip of scores in registers
//   Form::fits(problem)               whether the form can be evaluated for these queries
//   Form::factors(problem, b, h)      |factor| by token with which a query enters the gradients of keys; NULL: 1
// and Form::Fold adds the gradient of the scores of a tile to the gradients of those inputs:
//   Fold(problem, b, h, slot, scratch)
//   Fold::scratch_floats(problem)     of the scratch memory
//   Fold::wanted(problem)             whether these gradients are to be computed
//   begin_rows(rows)                  starts a block of queries
//   begin_tile(rows, columns)         starts a tile; then, for every vector of it:
//   add(key, lane, gradient)
//   end_key(key)                      after all vectors of this key
//   end_tile(gradients)               after all vectors of the tile, which is [key][query]
//   commit_keys(columns)              writes the sums per key; blocks of queries take turns here
//   end_rows(rows)                    writes the sums per query
// Where there are few queries, Form::Row gives the bias of one of them:
//   Row(form, index, query)           a query, by its index and its row
//   at(key)                           the bias for kLanes neighbouring keys
// decay.h and skipping.h decide which tiles of a form can be skipped.
#pragma once

#include "tiles.h"

namespace relpos {
namespace RELPOS_ISA {

// Folds nothing: for forms without inputs, and for calls that need no gradient of the bias.
struct NoFold {
    static int64_t scratch_floats(const relpos_problem&) { return 0; }
    static bool wanted(const relpos_problem&) { return false; }
    NoFold(const relpos_problem&, int64_t, int64_t, int64_t, float*) {}
    void begin_rows(const QueryBlock&) {}
    void begin_tile(const QueryBlock&, const KeyBlock&) {}
    RELPOS_MEMBER void add(int, int, Vec) {}
    RELPOS_MEMBER void end_key(int) {}
    void end_tile(const float*) {}
    void commit_keys(const KeyBlock&) {}
    void end_rows(const QueryBlock&) {}
};

struct NoBias {
    using Fold = NoFold;
    static bool fits(const relpos_problem&) { return true; }
    static const float* factors(const relpos_problem&, int64_t, int64_t) { return nullptr; }
    NoBias(const relpos_problem&, int64_t, int64_t) {}
    void enter(const QueryBlock&, const KeyBlock&, float*) {}
    template <int Rows, int Vectors>
    RELPOS_MEMBER void add(Vec (&)[Rows][Vectors], int, int) const {}
    struct Row {
        Row(const NoBias&, int, int) {}
        RELPOS_MEMBER Vec at(int) const { return Vec{}; }
    };
};

// Sums over the diagonals of a tile. Neighbouring keys go to different buffers, so that no vector is read right after
// an overlapping vector was written.
class DiagonalSums {
public:
    void clear() { memset(sums_, 0, sizeof sums_); }

    RELPOS_MEMBER void add(int key, int lane, Vec gradient) {
        float* at = sums_[key % kBuffers] + (kTile - 1 - key) + lane;
        store(at, load(at) + gradient);
    }

    // Adds the sums to a table whose column of distance 0 is `zero`.
    void flush(float* zero, const QueryBlock& rows, const KeyBlock& columns) const {
        float* table = zero + (rows.start - columns.start) - (kTile - 1);
        for (int i = 0; i < 2 * kTile; i += kLanes) {
            Vec all = load(table + i);
            for (int b = 0; b < kBuffers; b++) all += load(sums_[b] + i);
            store(table + i, all);
        }
    }
    void flush(double* zero, const QueryBlock& rows, const KeyBlock& columns) const {
        double* table = zero + (rows.start - columns.start) - (kTile - 1);
        for (int i = 0; i < 2 * kTile; i++)
            for (int b = 0; b < kBuffers; b++) table[i] += double(sums_[b][i]);
    }

private:
    static constexpr int kBuffers = 4;
    alignas(64) float sums_[kBuffers][2 * kTile];
};

// The sums of one slot and head for a table's gradient, at distance 0.
RELPOS_INLINE float* grad_table_zero(const relpos_problem& p, int64_t h, int64_t slot) {
    const int64_t stride = p.distances + 2 * RELPOS_TABLE_PAD;
    return p.grad_table + (slot * p.heads + h) * stride + p.zero;
}

// bias = table[i − j]: neighbouring queries of one key are neighbours in the table.
class Toeplitz {
public:
    static bool fits(const relpos_problem&) { return true; }
    static const float* factors(const relpos_problem&, int64_t, int64_t) { return nullptr; }

    Toeplitz(const relpos_problem& p, int64_t, int64_t h) : zero_(p.table + h * p.table_stride + p.zero) {}

    void enter(const QueryBlock& rows, const KeyBlock& columns, float*) {
        corner_ = zero_ + (rows.start - columns.start);
    }

    template <int Rows, int Vectors>
    RELPOS_MEMBER void add(Vec (&scores)[Rows][Vectors], int key, int lane) const {
        RELPOS_UNROLL
        for (int m = 0; m < Rows; m++)
            RELPOS_UNROLL
            for (int v = 0; v < Vectors; v++) scores[m][v] += load(corner_ + (lane + v * kLanes) - (key + m));
    }

    class Row {
    public:
        Row(const Toeplitz& form, int index, int) : last_(form.zero_ + index - (kLanes - 1)) {}
        RELPOS_MEMBER Vec at(int key) const { return reversed(load(last_ - key)); }

    private:
        const float* last_;  // distance of the vector's last key, for key 0
    };

    class Fold : public NoFold {
    public:
        static bool wanted(const relpos_problem& p) { return p.grad_table; }
        Fold(const relpos_problem& p, int64_t b, int64_t h, int64_t slot, float* scratch)
            : NoFold(p, b, h, slot, scratch), zero_(grad_table_zero(p, h, slot)) {}
        void begin_tile(const QueryBlock& rows, const KeyBlock& columns) {
            rows_ = &rows, columns_ = &columns;
            sums_.clear();
        }
        RELPOS_MEMBER void add(int key, int lane, Vec gradient) { sums_.add(key, lane, gradient); }
        void end_tile(const float*) { sums_.flush(zero_, *rows_, *columns_); }

    private:
        float* zero_;
        const QueryBlock* rows_;
        const KeyBlock* columns_;
        DiagonalSums sums_;
    };

private:
    const float* zero_;
    const float* corner_ = nullptr;
};

// bias = −weight_i · gained_ij, gained_ij = total_i − total_j, or its absolute value. A total is kept as high + low:
// the difference of the high parts is exact where it is small, so that differences of large sums stay exact.
class RankOne {
public:
    static bool fits(const relpos_problem& p) { return p.start + p.queries <= p.total_stride; }  // queries have totals
    static const float* factors(const relpos_problem& p, int64_t b, int64_t h) {
        return p.weight + (b * p.heads + h) * p.total_stride;
    }

    RankOne(const relpos_problem& p, int64_t b, int64_t h) {
        const int64_t head = (b * p.heads + h) * p.total_stride;
        high_ = p.total_high + head, low_ = p.total_low + head, weight_ = p.weight + head;
        mirror_ = splat(p.symmetric ? -1.0f : 1.0f);
    }

    void enter(const QueryBlock& rows, const KeyBlock& columns, float*) {
        query_ = rows.start, key_ = columns.start;
    }

    template <int Rows, int Vectors>
    RELPOS_MEMBER void add(Vec (&scores)[Rows][Vectors], int key, int lane) const {
        RELPOS_UNROLL
        for (int v = 0; v < Vectors; v++) {
            const Vec weight = load(weight_ + query_ + lane + v * kLanes);
            RELPOS_UNROLL
            for (int m = 0; m < Rows; m++) {
                const Vec distance = gained(key + m, lane + v * kLanes);
                scores[m][v] -= weight * larger(distance, mirror_ * distance);
            }
        }
    }

    RELPOS_MEMBER Vec gained(int key, int lane) const {
        return (load(high_ + query_ + lane) - high_[key_ + key]) + (load(low_ + query_ + lane) - low_[key_ + key]);
    }

    class Row {
    public:
        Row(const RankOne& form, int index, int)
            : form_(form), high_(form.high_[index]), low_(form.low_[index]), weight_(form.weight_[index]) {}
        RELPOS_MEMBER Vec at(int key) const {
            const Vec gained = (high_ - load(form_.high_ + key)) + (low_ - load(form_.low_ + key));
            return -weight_ * larger(gained, form_.mirror_ * gained);
        }

    private:
        const RankOne& form_;
        const float high_, low_, weight_;
    };

    class Fold;

private:
    const float *high_, *low_, *weight_;
    Vec mirror_;
    int query_ = 0, key_ = 0;
};

// With s_ij the sign of gained_ij (1 unless symmetric): total_j gains Σ_i weight_i · s_ij · g_ij, total_i loses
// weight_i · Σ_j s_ij · g_ij, and weight_i loses Σ_j gained_ij · g_ij. Without signs, the loss of total_i is 0 except
// for rounding. It is kept nevertheless: the rounding of a g_ij then changes total_i and total_j by opposite amounts,
// and affects only the steps between j and i.
class RankOne::Fold : public NoFold {
public:
    static bool wanted(const relpos_problem& p) { return p.grad_total; }
    Fold(const relpos_problem& p, int64_t b, int64_t h, int64_t slot, float* scratch)
        : NoFold(p, b, h, slot, scratch), form_(p, b, h), symmetric_(p.symmetric), weighted_(p.grad_weight),
          total_(p.grad_total + (b * p.heads + h) * p.keys), offset_(int(p.start)) {
        const int64_t head = (b * p.heads + h) * p.queries;
        total_query_ = p.grad_total_query + head;
        grad_weight_ = p.grad_weight + head;
    }

    void begin_rows(const QueryBlock&) {
        memset(lane_weight_, 0, sizeof lane_weight_);
        memset(lane_sign_, 0, sizeof lane_sign_);
    }
    void begin_tile(const QueryBlock& rows, const KeyBlock& columns) { form_.enter(rows, columns, nullptr); }

    RELPOS_MEMBER void add(int key, int lane, Vec gradient) {
        Vec signed_gradient = gradient;
        if (weighted_ || symmetric_) {
            const Vec gained = form_.gained(key, lane);
            if (symmetric_) signed_gradient = gained > 0.0f ? gradient : (gained < 0.0f ? -gradient : Vec{});
            // gained · sign = |gained| where it is symmetric
            store(lane_weight_ + lane, load(lane_weight_ + lane) + gained * signed_gradient);
        }
        store(lane_sign_ + lane, load(lane_sign_ + lane) + signed_gradient);
        key_sum_ += load(form_.weight_ + form_.query_ + lane) * signed_gradient;
    }
    RELPOS_MEMBER void end_key(int key) {
        keys_[key] = sum(key_sum_);
        key_sum_ = Vec{};
    }
    void commit_keys(const KeyBlock& columns) {
        for (int j = 0; j < columns.count; j++) total_[columns.start + j] += double(keys_[j]) * double(kLn2);
    }
    void end_rows(const QueryBlock& rows) {
        for (int lane = rows.begin; lane < rows.end; lane++) {
            const int query = rows.start + lane - offset_;
            total_query_[query] = -lane_sign_[lane] * form_.weight_[rows.start + lane] * kLn2;
            if (weighted_) grad_weight_[query] = -lane_weight_[lane];
        }
    }

private:
    RankOne form_;
    bool symmetric_, weighted_;
    double* total_;
    float *total_query_, *grad_weight_;
    int offset_;
    Vec key_sum_ = {};
    alignas(64) float keys_[kTile];
    alignas(64) float lane_weight_[kTile];
    alignas(64) float lane_sign_[kTile];
};

// The sum of two forms.
template <class A, class B>
class Sum {
public:
    static bool fits(const relpos_problem& p) { return A::fits(p) && B::fits(p); }
    // At most one of the two has factors.
    static const float* factors(const relpos_problem& p, int64_t b, int64_t h) {
        const float* own = A::factors(p, b, h);
        return own ? own : B::factors(p, b, h);
    }

    Sum(const relpos_problem& p, int64_t b, int64_t h) : a_(p, b, h), b_(p, b, h) {}
    void enter(const QueryBlock& rows, const KeyBlock& columns, float* tile) {
        a_.enter(rows, columns, tile), b_.enter(rows, columns, tile);
    }
    template <int Rows, int Vectors>
    RELPOS_MEMBER void add(Vec (&scores)[Rows][Vectors], int key, int lane) const {
        a_.add(scores, key, lane), b_.add(scores, key, lane);
    }
    RELPOS_MEMBER Vec gained(int key, int lane) const { return b_.gained(key, lane); }

    class Row {
    public:
        Row(const Sum& form, int index, int query) : a_(form.a_, index, query), b_(form.b_, index, query) {}
        RELPOS_MEMBER Vec at(int key) { return a_.at(key) + b_.at(key); }

    private:
        typename A::Row a_;
        typename B::Row b_;
    };

    class Fold {
    public:
        static int64_t scratch_floats(const relpos_problem& p) {
            return most(A::Fold::scratch_floats(p), B::Fold::scratch_floats(p));
        }
        static bool wanted(const relpos_problem& p) { return A::Fold::wanted(p) || B::Fold::wanted(p); }
        Fold(const relpos_problem& p, int64_t b, int64_t h, int64_t slot, float* scratch)
            : a_(p, b, h, slot, scratch), b_(p, b, h, slot, scratch) {}
        void begin_rows(const QueryBlock& rows) { a_.begin_rows(rows), b_.begin_rows(rows); }
        void begin_tile(const QueryBlock& rows, const KeyBlock& columns) {
            a_.begin_tile(rows, columns), b_.begin_tile(rows, columns);
        }
        RELPOS_MEMBER void add(int key, int lane, Vec gradient) { a_.add(key, lane, gradient), b_.add(key, lane, gradient); }
        RELPOS_MEMBER void end_key(int key) { a_.end_key(key), b_.end_key(key); }
        void end_tile(const float* gradients) { a_.end_tile(gradients), b_.end_tile(gradients); }
        void commit_keys(const KeyBlock& columns) { a_.commit_keys(columns), b_.commit_keys(columns); }
        void end_rows(const QueryBlock& rows) { a_.end_rows(rows), b_.end_rows(rows); }

    private:
        typename A::Fold a_;
        typename B::Fold b_;
    };

private:
    A a_;
    B b_;
};

}  // namespace RELPOS_ISA
}  // namespace relpos
