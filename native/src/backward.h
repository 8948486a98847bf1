// The backward: tiles are computed again from the saved log-sum-exp, and five products give all gradients.
//
// A block of queries owns its dQ; all blocks of one key head add to the same dK and dV. Either one thread computes a
// key head, or, if there are few heads, the threads take its blocks of queries in turn: a block may add to a block of keys
// only after the last block before it that sees these keys has. All blocks go over the keys in the same direction, so that each follows one step
// behind the previous, and the order of the sums does not depend on the threads.
#pragma once

#include "demands.h"
#include "dropout.h"
#include "scores.h"


namespace relpos {
namespace RELPOS_ISA {

// The blocks of keys that a block of queries may see.
struct Reach {
    int lowest, highest;
    bool covers(int block) const { return lowest <= block && block <= highest; }
};

// Where the gradients of one key head are summed, and which block of queries may add next.
struct KeyGradients {
    float* keys;    // rows of `width`
    float* values;  // rows of `value_width`
    int64_t key_row, value_row;
    uint8_t* touched;    // one flag per block of keys: the first contribution overwrites, later ones add
    int64_t* turn;       // one past the block of queries that has added last; NULL: one thread computes all blocks
    const Reach* reach;  // of the blocks of queries in their order, which repeats for each query head
    int query_blocks;

    void wait(int block, int64_t sequence) const {
        if (!turn) return;
        int64_t before = sequence - 1;
        while (before >= 0 && !reach[before % query_blocks].covers(block)) before--;
        for (int spins = 0; __atomic_load_n(&turn[block], __ATOMIC_ACQUIRE) != before + 1; spins++)
            spins < 2000 ? pause_briefly() : let_others_run();
    }
    void pass(int block, int64_t sequence) const {
        if (turn) __atomic_store_n(&turn[block], sequence + 1, __ATOMIC_RELEASE);
    }
};

template <class Form, class Fold>
class BackwardBlock {
public:
    static int64_t floats(const Geometry& g) {
        return Carve::padded(int64_t(kTile) * g.head_dim) + 2 * Carve::padded(int64_t(kTile) * g.value_dim) +
               3 * kTile * kTile + 2 * Carve::padded(int64_t(kTile) * g.width) +
               Carve::padded(int64_t(kTile) * g.value_width) + Carve::padded(KeyHead::tile_floats(g)) + 3 * kTile;
    }

    // `demands` of the head, or NULL if the forward skipped none of its tiles.
    BackwardBlock(const relpos_problem& p, const Geometry& g, int64_t b, int64_t h, int block, const KeyHead& keys,
                  const KeyGradients& gradients, int64_t sequence, const Demands* demands, float* scratch)
        : p_(p), g_(g), b_(b), h_(h), block_(block), keys_(keys), gradients_(gradients), sequence_(sequence),
          demands_(demands), rows_(p, g, b, block), form_(p, b, h), dropout_(p, b, h) {
        Carve carve(scratch);
        q_transposed_ = carve.take(int64_t(kTile) * g.head_dim);
        d_transposed_ = carve.take(int64_t(kTile) * g.value_dim);
        weights_ = carve.take(kTile * kTile);
        d_scores_ = carve.take(kTile * kTile);
        q_ = carve.take(int64_t(kTile) * g.width);
        d_out_ = carve.take(int64_t(kTile) * g.value_width);
        dq_ = carve.take(int64_t(kTile) * g.width);
        maximum_ = carve.take(kTile), log_sum_ = carve.take(kTile), delta_ = carve.take(kTile);
        out_transposed_ = carve.take(int64_t(kTile) * g.value_dim);
        buffer_ = carve.take(KeyHead::tile_floats(g));
        cap_ = {p.softcap * kLog2e, carve.take(kTile * kTile)};
    }

    void run(Fold& fold) {
        pack();
        fold.begin_rows(rows_);
        const uint8_t* slack = demands_ ? skip_slack(p_, g_, b_ * p_.heads + h_, block_) : nullptr;
        for (int block = rows_.highest(); block >= rows_.lowest(); block--) {
            if (!slack || !slack[block] || demands_->needed(g_, block_, block, slack[block])) {
                const KeyBlock columns(p_, g_, rows_, b_, block);
                if (columns.visible) {
                    tile(columns, block, fold);
                    continue;
                }
            }
            gradients_.wait(block, sequence_);
            gradients_.pass(block, sequence_);
        }
        fold.end_rows(rows_);
        write();
    }

private:
    void pack() {
        const int64_t query = rows_.start + rows_.begin - g_.offset;
        const int count = rows_.end - rows_.begin;
        const HeadRows q(p_, p_.q, b_, h_), d(p_, p_.grad_out, b_, h_), out(p_, p_.out, b_, h_);
        float *q_rows = q_ + rows_.begin * g_.width, *d_rows = d_out_ + rows_.begin * g_.value_width;
        read_rows(q, Rotation::of_queries(p_, b_), query, count, g_.head_dim, g_.width, q_rows);
        read_rows(d, Rotation(), query, count, g_.value_dim, g_.value_width, d_rows);
        pack_transposed(q_rows, g_.width, rows_.begin, rows_.end, g_.head_dim, p_.scale * kLog2e, q_transposed_);
        pack_transposed(d_rows, g_.value_width, rows_.begin, rows_.end, g_.value_dim, 1.0f, d_transposed_);
        const int64_t first_lane = (b_ * p_.heads + h_) * g_.queries + query - rows_.begin;
        const float* maximum = p_.lse + first_lane;
        const float* log_sum = maximum + p_.batch * p_.heads * g_.queries;
        for (int lane = 0; lane < kTile; lane++) {
            // A lane without a query has weights 2^(score − inf) = 0.
            const bool there = lane >= rows_.begin && lane < rows_.end;
            maximum_[lane] = there ? maximum[lane] : kInfinity, log_sum_[lane] = there ? log_sum[lane] : 0.0f;
        }
        // Summed in the same order as d·v in the tiles, so that both cancel where a row's output is a single value.
        const bool direct = p_.dtype == RELPOS_FLOAT32;
        if (!direct) read_rows(out, Rotation(), query, count, g_.value_dim, g_.value_width, value_buffer());
        pack_transposed(direct ? out.floats(query) : value_buffer(), direct ? out.stride() : g_.value_width, rows_.begin,
                        rows_.end, g_.value_dim, 1.0f, out_transposed_);
        for (int lane = 0; lane < kTile; lane += kLanes) {
            const int64_t panel = int64_t(lane / kPanel) * g_.value_dim * kPanel + lane % kPanel;
            Vec delta = {};
            for (int c = 0; c < g_.value_dim; c++)
                delta += load(out_transposed_ + panel + c * kPanel) * load(d_transposed_ + panel + c * kPanel);
            store(delta_ + lane, delta);
        }
        if (p_.grad_lse)
            for (int lane = rows_.begin; lane < rows_.end; lane++) delta_[lane] -= p_.grad_lse[first_lane + lane];
        // An infinite number or a NaN in the output, or in its gradients, is one in delta.
        finite_ = all_finite(q_rows, g_.width, count, g_.width) && all_finite(delta_, kTile, 1, kTile);
    }

    float* value_buffer() const { return buffer_ + int64_t(kTile) * g_.width; }

    void tile(const KeyBlock& columns, int block, Fold& fold) {
        const TileRows keys = keys_.keys(columns.start, columns.count, buffer_);
        const TileRows values = keys_.values(columns.start, columns.count, buffer_);
        const bool capped = p_.softcap != 0.0f;
        form_.enter(rows_, columns, weights_);
        score_tile<false>(ScoreTile{keys.data, keys.row, q_transposed_, g_.head_dim, weights_, nullptr, &rows_, &columns,
                                    capped ? &cap_ : nullptr},
                          form_);
        score_tile<false, false>(ScoreTile{values.data, values.row, d_transposed_, g_.value_dim, d_scores_, nullptr,
                                           &rows_, &columns, nullptr},
                                 NoBias(p_, b_, h_));
        if (dropout_) dropout_.apply(rows_, columns, d_scores_);
        // What a query does not see has the weight 0, which does not make an infinite number or a NaN 0.
        const bool careful = columns.masked && !(finite_ && all_finite(keys.data, keys.row, columns.count, g_.width) &&
                                                 all_finite(values.data, values.row, columns.count, g_.value_width));
        fold.begin_tile(rows_, columns);
        careful ? differentiate<true>(columns, fold) : differentiate<false>(columns, fold);
        fold.end_tile(d_scores_);
        if (dropout_) dropout_.apply(rows_, columns, weights_);
        if (capped) differentiate_cap(columns);

        const Product to_queries{d_scores_, kTile, keys.data, keys.row, dq_, g_.width,
                                 begun_ ? Into::add : Into::overwrite, nullptr};
        const Sight sight{rows_, columns};
        const auto sees = [&](int key, int lane) { return sight(lane, key); };
        if (careful)
            product_of_seen<Layout::transposed>(to_queries, rows_.begin, rows_.end, g_.width, 0, columns.count, sight);
        else
            product<Layout::transposed>(to_queries, rows_.begin, rows_.end, g_.width, 0, columns.count,
                                        columns.diagonal ? Trim::up_to_row : Trim::none);
        begun_ = true;

        gradients_.wait(block, sequence_);
        const Into into = gradients_.touched[block] ? Into::add : Into::overwrite;
        gradients_.touched[block] = 1;
        const Trim trim = columns.diagonal ? Trim::from_row : Trim::none;
        const Product to_values{weights_, kTile, d_out_, g_.value_width,
                                gradients_.values + columns.start * gradients_.value_row, gradients_.value_row, into,
                                nullptr};
        if (careful)
            product_of_seen<Layout::natural>(to_values, 0, columns.count, g_.value_width, rows_.begin, rows_.end, sees);
        else
            product<Layout::natural>(to_values, 0, columns.count, g_.value_width, rows_.begin, rows_.end, trim);
        const Product to_keys{d_scores_, kTile, q_, g_.width, gradients_.keys + columns.start * gradients_.key_row,
                              gradients_.key_row, into, nullptr};
        if (careful)
            product_of_seen<Layout::natural>(to_keys, 0, columns.count, g_.width, rows_.begin, rows_.end, sees);
        else
            product<Layout::natural>(to_keys, 0, columns.count, g_.width, rows_.begin, rows_.end, trim);
        fold.commit_keys(columns);
        gradients_.pass(block, sequence_);
    }

    // Turns scores into weights, and the gradient of the weights into that of the scores. Careful: what is not seen is 0,
    // whatever it is computed from.
    template <bool Careful>
    void differentiate(const KeyBlock& columns, Fold& fold) {
        for (int key = 0; key < columns.count; key++) {
            float* weight = weights_ + key * kTile;
            float* d_score = d_scores_ + key * kTile;
            int lane = rows_.from;
            if (columns.diagonal)
                for (; lane < round_down(key) && lane < rows_.to; lane += kLanes)
                    store(weight + lane, Vec{}), store(d_score + lane, Vec{});
            for (; lane < rows_.to; lane += kLanes) {
                Vec w = exp2((load(weight + lane) - load(maximum_ + lane)) - load(log_sum_ + lane));
                Vec d = w * (load(d_score + lane) - load(delta_ + lane));
                if constexpr (Careful) {
                    const VecInt seen = Sight{rows_, columns}.lanes(lane, key);
                    w = seen ? w : Vec{}, d = seen ? d : Vec{};
                }
                store(weight + lane, w), store(d_score + lane, d);
                fold.add(key, lane, d);
            }
            fold.end_key(key);
        }
    }

    // From the gradient of the capped scores, which the bias has too, to that of the products.
    void differentiate_cap(const KeyBlock& columns) const {
        for (int key = 0; key < columns.count; key++)
            for (int lane = columns.diagonal ? most(rows_.from, round_down(key)) : rows_.from; lane < rows_.to;
                 lane += kLanes) {
                float* d_score = d_scores_ + key * kTile + lane;
                store(d_score, load(d_score) * load(cap_.slopes + key * kTile + lane));
            }
    }

    void write() const {
        const HeadRows rows(p_, p_.grad_q, b_, h_);
        const Rotation rotation = Rotation::of_queries(p_, b_);
        for (int lane = rows_.begin; lane < rows_.end; lane++) {
            const int64_t query = rows_.start + lane - g_.offset;
            float* row = dq_ + lane * g_.width;
            if (!begun_) memset(row, 0, sizeof(float) * g_.head_dim);
            rotation.turn_back(query, row);
            rows.write(query, g_.head_dim, row, p_.scale);
        }
    }

    const relpos_problem& p_;
    const Geometry& g_;
    const int64_t b_, h_;
    const int block_;
    const KeyHead& keys_;
    const KeyGradients& gradients_;
    const int64_t sequence_;
    const Demands* demands_;
    const QueryBlock rows_;
    Form form_;
    const Dropout dropout_;
    Cap cap_;
    bool begun_ = false;
    bool finite_ = true;  // the queries and their gradients
    float *q_transposed_, *d_transposed_, *weights_, *d_scores_, *q_, *d_out_, *dq_, *maximum_, *log_sum_, *delta_;
    float *out_transposed_, *buffer_;
};

// Whether each thread computes entire key heads in the backward, or all threads share each key head.
RELPOS_INLINE bool backward_by_head(const relpos_problem& p) {
    return p.threads == 1 || p.batch * p.key_heads >= 4 * p.threads;
}
// Number of partial sums of a bias's gradient: one per batch entry, or one per thread.
RELPOS_INLINE int64_t backward_slots(const relpos_problem& p) { return backward_by_head(p) ? p.batch : p.threads; }

template <class Form, class Fold>
class Backward {
public:
    explicit Backward(const relpos_problem& p)
        : p_(p), g_(p), threads_(p.threads), by_head_(backward_by_head(p)), pack_(KeyHead::packed_floats(p, g_)),
          widen_(p.dtype != RELPOS_FLOAT32 || g_.width != g_.head_dim || g_.value_width != g_.value_dim),
          users_(by_head_ ? threads_ : p.batch * p.key_heads), packed_(users_, KeyHead::packed_floats(p, g_)),
          widened_(users_, widen_ ? int64_t(g_.keys) * (g_.width + g_.value_width) : 0), touched_(users_, g_.key_blocks),
          turns_(by_head_ ? 0 : users_, g_.key_blocks), reach_(by_head_ ? 0 : p.batch, g_.query_blocks),
          order_(1, by_head_ ? p.batch * p.key_heads : 0),
          demands_(p.skipping ? (by_head_ ? threads_ : p.batch * p.heads) : 0, Demands::floats(g_)),
          scratch_(threads_, BackwardBlock<Form, Fold>::floats(g_)), fold_scratch_(threads_, Fold::scratch_floats(p)) {}

    int run() {
        if (!packed_.ok || !widened_.ok || !touched_.ok || !turns_.ok || !reach_.ok || !order_.ok || !demands_.ok ||
            !scratch_.ok || !fold_scratch_.ok)
            return 1;
        by_head_ ? run_by_head() : run_in_turn();
        return 0;
    }

private:
    void run_by_head() {
        const int64_t key_heads = p_.batch * p_.key_heads;
        sort_heaviest_first();
        parallel_for(threads_, key_heads, [&](int64_t task, int thread) {
            const int64_t head = order_.of(0)[task].head, b = head / p_.key_heads, kh = head % p_.key_heads;
            const KeyHead keys(p_, g_, b, kh, packed_.of(thread));
            keys.pack(0, g_.keys);
            const KeyGradients gradients = key_gradients(b, kh, thread, nullptr);
            memset(gradients.touched, 0, g_.key_blocks);
            for (int64_t i = 0; i < g_.group * g_.query_blocks; i++) {
                const int64_t h = kh * g_.group + i / g_.query_blocks;
                Demands demands;
                const bool skips = skips_any(b, h);
                if (skips) demands.place(g_, demands_.of(thread));
                if (skips && i % g_.query_blocks == 0) demands.measure(p_, g_, b, h, Form::factors(p_, b, h));
                block(b, kh, i, keys, gradients, skips ? &demands : nullptr, thread, b);
            }
            for (int block = 0; block < g_.key_blocks; block++) finish(b, kh, gradients, block);
        });
    }

    void run_in_turn() {
        const int64_t key_heads = p_.batch * p_.key_heads, each = int64_t(g_.group) * g_.query_blocks;
        const int team = int(least(int64_t(threads_), key_heads * each));
        parallel_for(threads_, key_heads * g_.key_blocks, [&](int64_t task, int) {
            const int64_t head = task / g_.key_blocks, block = task % g_.key_blocks;
            touched_.of(head)[block] = 0, turns_.of(head)[block] = 0;
            if (pack_)
                KeyHead(p_, g_, head / p_.key_heads, head % p_.key_heads, packed_.of(head))
                    .pack(block * kTile, least(int64_t(g_.keys), (block + 1) * kTile));
        });
        parallel_for(threads_, p_.batch * g_.query_blocks, [&](int64_t task, int) {
            const int64_t b = task / g_.query_blocks, index = task % g_.query_blocks;
            const QueryBlock rows(p_, g_, b, g_.last_block - int(index));
            reach_.of(b)[index] = {rows.lowest(), rows.highest()};
        });
        parallel_for(threads_, p_.batch * p_.heads, [&](int64_t head, int) {
            const int64_t b = head / p_.heads, h = head % p_.heads;
            if (!skips_any(b, h)) return;
            Demands demands;
            demands.place(g_, demands_.of(head)), demands.measure(p_, g_, b, h, Form::factors(p_, b, h));
        });
        // Blocks are assigned to threads in a fixed way, so that the order of the sums in each slot is fixed.
        parallel(team, [&](int thread, int threads) {
            for (int64_t task = thread; task < key_heads * each; task += threads) {
                const int64_t head = task / each, b = head / p_.key_heads, kh = head % p_.key_heads;
                const KeyHead keys(p_, g_, b, kh, packed_.of(head));
                const KeyGradients gradients = key_gradients(b, kh, head, turns_.of(head));
                const int64_t h = kh * g_.group + task % each / g_.query_blocks;
                Demands demands;
                const bool skips = skips_any(b, h);
                if (skips) demands.place(g_, demands_.of(b * p_.heads + h));
                block(b, kh, task % each, keys, gradients, skips ? &demands : nullptr, thread, thread);
            }
        });
        parallel_for(threads_, key_heads * g_.key_blocks, [&](int64_t task, int) {
            const int64_t head = task / g_.key_blocks, b = head / p_.key_heads, kh = head % p_.key_heads;
            finish(b, kh, key_gradients(b, kh, head, nullptr), int(task % g_.key_blocks));
        });
    }

    // The block of queries number `index` of a key head, over all query heads that it serves, last positions first.
    void block(int64_t b, int64_t kh, int64_t index, const KeyHead& keys, const KeyGradients& gradients,
               const Demands* demands, int thread, int64_t slot) {
        const int64_t h = kh * g_.group + index / g_.query_blocks;
        const int block = g_.last_block - int(index % g_.query_blocks);
        Fold fold(p_, b, h, slot, fold_scratch_.of(thread));
        BackwardBlock<Form, Fold>(p_, g_, b, h, block, keys, gradients, index, demands, scratch_.of(thread)).run(fold);
    }

    // Whether the forward skipped tiles of this head.
    bool skips_any(int64_t b, int64_t h) const {
        if (!p_.skipping) return false;
        const SkipCounts* counts = skip_counts(p_, b * p_.heads + h);
        return counts->open && counts->kept < counts->visible;
    }

    KeyGradients key_gradients(int64_t b, int64_t kh, int64_t user, int64_t* turn) const {
        float *keys, *values;
        int64_t key_row = g_.width, value_row = g_.value_width;
        if (widen_) {
            keys = widened_.of(user), values = keys + int64_t(g_.keys) * g_.width;
        } else {
            keys = HeadRows(p_, p_.grad_k, b, kh).floats(0), values = HeadRows(p_, p_.grad_v, b, kh).floats(0);
            key_row = p_.grad_k.row, value_row = p_.grad_v.row;
        }
        return {keys, values, key_row, value_row, touched_.of(user), turn, turn ? reach_.of(b) : nullptr, g_.query_blocks};
    }

    // Finishes the sums of a block of keys: scales, rotates back and converts them, and writes 0 for keys that no query
    // sees.
    void finish(int64_t b, int64_t kh, const KeyGradients& sums, int block) const {
        const HeadRows keys(p_, p_.grad_k, b, kh), values(p_, p_.grad_v, b, kh);
        const Rotation rotation = Rotation::of_keys(p_, b);
        const int start = block * kTile, stop = least(g_.keys, start + kTile);
        const bool touched = sums.touched[block];
        for (int64_t j = start; j < stop; j++) {
            float *dk = sums.keys + j * sums.key_row, *dv = sums.values + j * sums.value_row;
            if (!touched) memset(dk, 0, sizeof(float) * g_.head_dim), memset(dv, 0, sizeof(float) * g_.value_dim);
            rotation.turn_back(j, dk);
            keys.write(j, g_.head_dim, dk, p_.scale);
            if (widen_) values.write(j, g_.value_dim, dv);
        }
    }

    struct Load {
        int64_t head, tiles;
    };
    static int heavier(const void* a, const void* b) {
        const Load *x = static_cast<const Load*>(a), *y = static_cast<const Load*>(b);
        if (x->tiles != y->tiles) return x->tiles > y->tiles ? -1 : 1;
        return x->head < y->head ? -1 : 1;
    }
    void sort_heaviest_first() {
        Load* order = order_.of(0);
        const int64_t key_heads = p_.batch * p_.key_heads;
        for (int64_t i = 0; i < key_heads; i++) {
            order[i] = {i, 0};
            for (int64_t h = 0; p_.skipping && h < g_.group; h++)
                order[i].tiles += skip_counts(p_, i * g_.group + h)->kept;
        }
        qsort(order, key_heads, sizeof(Load), heavier);
    }

    const relpos_problem& p_;
    const Geometry g_;
    const int threads_;
    const bool by_head_, pack_, widen_;
    const int64_t users_;
    const Shared<float> packed_, widened_;
    const Shared<uint8_t> touched_;
    const Shared<int64_t> turns_;
    const Shared<Reach> reach_;
    const Shared<Load> order_;
    const Shared<float> demands_, scratch_, fold_scratch_;
};

}  // namespace RELPOS_ISA
}  // namespace relpos
