// How much attention each head pays at each distance: the weights, summed over the diagonals.
//
// A block of queries goes over its keys twice: for the maxima and sums of its softmax, then for the weights. The first
// token of each query's document, on which attention often rests, is counted apart.
#pragma once

#include "forward.h"

namespace relpos {
namespace RELPOS_ISA {

// What one thread sums up.
struct MassSums {
    double* zero;  // at distance 0
    double first;
    int64_t rows;
};

template <class Form>
class MassBlock {
public:
    static int64_t floats(const Geometry& g) {
        return Carve::padded(int64_t(kTile) * g.head_dim) + kTile * kTile + Carve::padded(KeyHead::tile_floats(g)) +
               4 * kTile;
    }

    MassBlock(const relpos_problem& p, const Geometry& g, int64_t b, int64_t h, int block, const KeyHead& keys,
              float* scratch)
        : p_(p), g_(g), b_(b), h_(h), keys_(keys), rows_(p, g, b, block), form_(p, b, h),
          cap_{p.softcap * kLog2e, nullptr} {
        Carve carve(scratch);
        queries_ = carve.take(int64_t(kTile) * g.head_dim);
        scores_ = carve.take(kTile * kTile);
        buffer_ = carve.take(KeyHead::tile_floats(g));
        m_ = carve.take(kTile), l_ = carve.take(kTile), tile_maximum_ = carve.take(kTile);
    }

    void run(MassSums& sums) {
        pack_queries(p_, g_, b_, h_, rows_, buffer_, queries_);
        for (int lane = 0; lane < kTile; lane++) m_[lane] = -kInfinity, l_[lane] = 0.0f;
        each_tile([&](const KeyBlock& columns) { add_to_softmax(columns); });
        for (int lane = 0; lane < kTile; lane++) {
            const bool there = lane >= rows_.begin && lane < rows_.end;
            const RowSum row = with_sink(p_, h_, m_[lane], l_[lane]);
            sums.rows += there && l_[lane] != 0.0f;
            // A lane without a query, or that sees no key, has weights 2^(score − inf) = 0.
            m_[lane] = there && l_[lane] != 0.0f ? row.maximum : kInfinity, l_[lane] = row.log_sum;
            const int64_t query = b_ * g_.queries + rows_.start + lane - g_.offset;
            first_[lane] = there && p_.first ? p_.first[query] : 0;
        }
        each_tile([&](const KeyBlock& columns) { add_weights(columns, sums); });
    }

private:
    template <class Work>
    void each_tile(const Work& work) {
        for (int block = rows_.lowest(); block <= rows_.highest(); block++) {
            const KeyBlock columns(p_, g_, rows_, b_, block);
            if (!columns.visible) continue;
            const TileRows keys = keys_.keys(columns.start, columns.count, buffer_);
            form_.enter(rows_, columns, scores_);
            for (int lane = 0; lane < kTile; lane += kLanes) store(tile_maximum_ + lane, splat(-kInfinity));
            score_tile<true>(ScoreTile{keys.data, keys.row, queries_, g_.head_dim, scores_, tile_maximum_, &rows_,
                                       &columns, p_.softcap != 0.0f ? &cap_ : nullptr},
                             form_);
            work(columns);
        }
    }

    void add_to_softmax(const KeyBlock& columns) const {
        for (int lane = rows_.from; lane < rows_.to; lane += kLanes) {
            const Vec before = load(m_ + lane), m = larger(before, load(tile_maximum_ + lane));
            const Vec reference = m == -kInfinity ? Vec{} : m;
            Vec sum = load(l_ + lane) * exp2(before - reference);
            const int stop = columns.diagonal ? least(columns.count, lane + kLanes) : columns.count;
            for (int key = 0; key < stop; key++) sum += exp2(load(scores_ + key * kTile + lane) - reference);
            store(m_ + lane, m), store(l_ + lane, sum);
        }
    }

    void add_weights(const KeyBlock& columns, MassSums& sums) {
        diagonals_.clear();
        Vec on_first = {};
        for (int lane = rows_.from; lane < rows_.to; lane += kLanes) {
            const Vec m = load(m_ + lane), log_sum = load(l_ + lane);
            const VecInt first = load(first_ + lane);
            const int stop = columns.diagonal ? least(columns.count, lane + kLanes) : columns.count;
            for (int key = 0; key < stop; key++) {
                const Vec weight = exp2((load(scores_ + key * kTile + lane) - m) - log_sum);
                const VecInt is_first = first == columns.start + key;
                on_first += is_first ? weight : Vec{};
                diagonals_.add(key, lane, is_first ? Vec{} : weight);
            }
        }
        sums.first += double(sum(on_first));
        diagonals_.flush(sums.zero, rows_, columns);
    }

    const relpos_problem& p_;
    const Geometry& g_;
    const int64_t b_, h_;
    const KeyHead& keys_;
    const QueryBlock rows_;
    Form form_;
    const Cap cap_;
    DiagonalSums diagonals_;
    float *queries_, *scores_, *buffer_, *m_, *l_, *tile_maximum_;
    alignas(64) int32_t first_[kTile];
};

// The threads share the blocks of queries of one head after the other, each always the same blocks: the sums do not depend
// on their timing. Memory is one table over distances per thread.
template <class Form>
class Mass {
public:
    explicit Mass(const relpos_problem& p)
        : p_(p), g_(p), columns_(p.distances + 2 * RELPOS_TABLE_PAD), packed_(1, KeyHead::packed_floats(p, g_)),
          tables_(p.threads, columns_), sums_(p.threads, 1), scratch_(p.threads, MassBlock<Form>::floats(g_)) {}

    int run() {
        if (!packed_.ok || !tables_.ok || !sums_.ok || !scratch_.ok) return RELPOS_OUT_OF_MEMORY;
        for (int64_t head = 0; head < p_.batch * p_.heads; head++) {
            const int64_t b = head / p_.heads, h = head % p_.heads;
            const KeyHead keys(p_, g_, b, h / g_.group, packed_.of(0));
            if (h % g_.group == 0)
                parallel_for(p_.threads, g_.key_blocks, [&](int64_t block, int) {
                    keys.pack(block * kTile, least(int64_t(g_.keys), (block + 1) * kTile));
                });
            int team = 1;
            parallel(p_.threads, [&](int thread, int threads) {
                if (thread == 0) team = threads;
                memset(tables_.of(thread), 0, sizeof(double) * columns_);
                MassSums sums{tables_.of(thread) + p_.zero, 0.0, 0};
                for (int block = g_.first_block + thread; block <= g_.last_block; block += threads)
                    MassBlock<Form>(p_, g_, b, h, block, keys, scratch_.of(thread)).run(sums);
                *sums_.of(thread) = sums;
            });
            double* all = p_.mass + head * columns_;
            memset(all, 0, sizeof(double) * columns_);
            p_.mass_first[head] = 0.0, p_.mass_rows[head] = 0;
            for (int thread = 0; thread < team; thread++) {
                for (int64_t i = 0; i < columns_; i++) all[i] += tables_.of(thread)[i];
                p_.mass_first[head] += sums_.of(thread)->first, p_.mass_rows[head] += sums_.of(thread)->rows;
            }
        }
        return RELPOS_OK;
    }

private:
    const relpos_problem& p_;
    const Geometry g_;
    const int64_t columns_;
    const Shared<float> packed_;
    const Shared<double> tables_;
    const Shared<MassSums> sums_;
    const Shared<float> scratch_;
};

}  // namespace RELPOS_ISA
}  // namespace relpos
