// The forward: attention by tiles with a running softmax, nearest keys first.
#pragma once

#include "dropout.h"
#include "scores.h"
#include "skipping.h"

namespace relpos {
namespace RELPOS_ISA {

// What the tasks of one key head share. `decay` belongs to one query head.
template <class Form>
struct ForwardHead {
    int64_t b, h;
    KeyHead keys;
    const KeyStatistics* statistics;  // NULL: nothing is skipped
    const Decay<Form>* decay;
};

// The queries of a block as the scores read them: rotated, scaled, in units of log2. `buffer` has kTile rows of `width`.
static void pack_queries(const relpos_problem& p, const Geometry& g, int64_t b, int64_t h, const QueryBlock& rows,
                         float* buffer, float* packed) {
    const HeadRows queries(p, p.q, b, h);
    const int64_t first = rows.start + rows.begin - g.offset;
    const bool direct = p.dtype == RELPOS_FLOAT32 && !p.q_cos;
    if (!direct)
        read_rows(queries, Rotation::of_queries(p, b), first, rows.end - rows.begin, g.head_dim, g.width, buffer);
    pack_transposed(direct ? queries.floats(first) : buffer, direct ? queries.stride() : g.width, rows.begin, rows.end,
                    g.head_dim, p.scale * kLog2e, packed);
}

// A row's softmax, complete: what its log-sum-exp is stored as, and the factor of its sum of 2^(score − m) · value.
struct RowSum {
    float maximum, log_sum, inverse;
};

// From the maximum m and the sum l of 2^(score − m) over the keys; a sink adds one term.
static RowSum with_sink(const relpos_problem& p, int64_t h, float m, float l) {
    // In units of log2 the largest floats would be infinite; what is left of the keys is 0 long before.
    const float scaled = p.sinks ? p.sinks[h] * kLog2e : -kInfinity, sink = scaled > kLargest ? kLargest : scaled;
    if (l == 0.0f) return {sink == -kInfinity ? kInfinity : sink, 0.0f, 0.0f};
    if (sink == -kInfinity) return {m, __builtin_log2f(l), 1.0f / l};
    const float top = m > sink ? m : sink;
    const float shrink = exp2(splat(m - top))[0], all = l * shrink + exp2(splat(sink - top))[0];
    return {top, __builtin_log2f(all), shrink / all};
}

// One block of queries of one head.
template <class Form>
class ForwardBlock {
public:
    static int64_t floats(const Geometry& g) {
        return Carve::padded(int64_t(kTile) * g.head_dim) + kTile * kTile + Carve::padded(int64_t(kTile) * g.value_width) +
               Carve::padded(KeyHead::tile_floats(g)) + 4 * kTile;
    }

    ForwardBlock(const relpos_problem& p, const Geometry& g, const ForwardHead<Form>& head, int block, float* scratch)
        : p_(p), g_(g), head_(head), block_(block), rows_(p, g, head.b, block), form_(p, head.b, head.h),
          dropout_(p, head.b, head.h), cap_{p.softcap * kLog2e, nullptr} {
        Carve carve(scratch);
        queries_ = carve.take(int64_t(kTile) * g.head_dim);
        scores_ = carve.take(kTile * kTile);
        out_ = carve.take(int64_t(kTile) * g.value_width);
        buffer_ = carve.take(KeyHead::tile_floats(g));
        m_ = carve.take(kTile), l_ = carve.take(kTile), tile_maximum_ = carve.take(kTile), shrink_ = carve.take(kTile);
    }

    void run() {
        pack_queries(p_, g_, head_.b, head_.h, rows_, buffer_, queries_);
        for (int lane = 0; lane < kTile; lane++) m_[lane] = -kInfinity, l_[lane] = 0.0f;
        if (head_.statistics) {
            Skipper<Form> skipper(p_, g_, *head_.statistics, *head_.decay, rows_, queries_);
            walk(&skipper, skip_slack(p_, g_, head_.b * p_.heads + head_.h, block_));
        } else {
            walk(nullptr, nullptr);
        }
        write();
    }

private:
    // Goes outwards from the diagonal, first into the past, then into the future.
    void walk(Skipper<Form>* skipper, uint8_t* slack) {
        SkipCounts counts = {};
        const int lowest = rows_.lowest(), highest = rows_.highest();
        int block = least(block_, highest);
        for (; block >= lowest; block--)
            if (!visit(block, Side::past, skipper, slack, counts)) break;
        leave_rest(block, lowest, -1, slack, counts);
        for (block = most(block_ + 1, lowest); block <= highest; block++)
            if (!visit(block, Side::future, skipper, slack, counts)) break;
        leave_rest(block, highest, 1, slack, counts);
        if (!p_.skipping) return;
        SkipCounts* all = skip_counts(p_, head_.b * p_.heads + head_.h);
        __atomic_fetch_add(&all->visible, counts.visible, __ATOMIC_RELAXED);
        __atomic_fetch_add(&all->scored, counts.scored, __ATOMIC_RELAXED);
        __atomic_fetch_add(&all->kept, counts.kept, __ATOMIC_RELAXED);
    }

    // The tiles beyond the one that ended a walk are visible too, and passed the test by as many bits.
    void leave_rest(int last, int to, int step, uint8_t* slack, SkipCounts& counts) const {
        for (int block = last + step; step * block <= step * to; block += step) {
            counts.visible += KeyBlock(p_, g_, rows_, head_.b, block).visible;
            slack[block] = slack[last];
        }
    }

    // Whether this tile is skipped, given the bits by which it passed its test.
    static bool leave(float bits, uint8_t& slack) {
        if (!(bits > 0.0f)) return false;
        slack = as_slack(bits);
        return true;
    }

    // False if neither this block nor any farther one on that side matters.
    bool visit(int block, Side side, Skipper<Form>* skipper, uint8_t* slack, SkipCounts& counts) {
        const KeyBlock columns(p_, g_, rows_, head_.b, block);
        if (!columns.visible) return true;
        counts.visible++;
        if (skipper && begun_) {
            if (leave(skipper->beyond(block, side), slack[block])) return false;
            if (leave(skipper->tile(block), slack[block])) return true;
        }
        const TileRows keys = head_.keys.keys(columns.start, columns.count, buffer_);
        form_.enter(rows_, columns, scores_);
        for (int lane = 0; lane < kTile; lane += kLanes) store(tile_maximum_ + lane, splat(-kInfinity));
        score_tile<true>(ScoreTile{keys.data, keys.row, queries_, g_.head_dim, scores_, tile_maximum_, &rows_, &columns,
                                   p_.softcap != 0.0f ? &cap_ : nullptr},
                         form_);
        counts.scored++;
        if (skipper && begun_ && leave(skipper->scored(block, tile_maximum_), slack[block])) return true;
        counts.kept++;
        // The sums that the tests compare with grow fast at first: they are updated at tiles 1, 2, 8, 32, …
        const bool measured = skipper && counts.kept == next_measured_;
        if (measured) next_measured_ = next_measured_ == 1 ? 2 : 4 * next_measured_;
        softmax(columns, skipper, measured);
        if (dropout_) dropout_.apply(rows_, columns, scores_);
        const TileRows values = head_.keys.values(columns.start, columns.count, buffer_);
        const Product weighted{scores_, kTile, values.data, values.row, out_, g_.value_width,
                               begun_ ? Into::rescale : Into::overwrite, shrink_};
        if (columns.masked && !all_finite(values.data, values.row, columns.count, g_.value_width))
            product_of_seen<Layout::transposed>(weighted, rows_.begin, rows_.end, g_.value_width, 0, columns.count,
                                                Sight{rows_, columns});
        else
            product<Layout::transposed>(weighted, rows_.begin, rows_.end, g_.value_width, 0, columns.count,
                                        columns.diagonal ? Trim::up_to_row : Trim::none);
        begun_ = true;
        return true;
    }

    // Turns scores into weights 2^(score − m), and updates the running maximum m and sum l.
    void softmax(const KeyBlock& columns, Skipper<Form>* skipper, bool measured) {
        for (int lane = rows_.from; lane < rows_.to; lane += kLanes) {
            const Vec before = load(m_ + lane);
            const Vec m = larger(before, load(tile_maximum_ + lane));
            // A row that has seen no key yet has no maximum to subtract.
            const Vec reference = m == -kInfinity ? Vec{} : m;
            const Vec shrink = exp2(before - reference);
            float* at = scores_ + lane;
            const int stop = columns.diagonal ? least(columns.count, lane + kLanes) : columns.count;
            Vec even = {}, odd = {};
            int key = 0;
            for (; key + 2 <= stop; key += 2) {
                const Vec a = exp2(load(at + key * kTile) - reference), b = exp2(load(at + (key + 1) * kTile) - reference);
                store(at + key * kTile, a), store(at + (key + 1) * kTile, b);
                even += a, odd += b;
            }
            if (key < stop) {
                const Vec a = exp2(load(at + key * kTile) - reference);
                store(at + key * kTile, a);
                even += a;
            }
            for (key = stop; key < columns.count; key++) store(at + key * kTile, Vec{});  // above the diagonal
            const Vec l = load(l_ + lane) * shrink + (even + odd);
            store(m_ + lane, m), store(l_ + lane, l), store(shrink_ + lane, shrink);
            if (skipper) skipper->raise_mass(lane, m, l);
            if (measured) skipper->raise_sums(form_, columns, scores_, lane, stop, m_);
        }
    }

    void write() const {
        const HeadRows rows(p_, p_.out, head_.b, head_.h);
        for (int lane = rows_.begin; lane < rows_.end; lane++) {
            const int64_t query = rows_.start + lane - g_.offset;
            float* out = out_ + int64_t(lane) * g_.value_width;
            float* maximum = p_.lse + (head_.b * p_.heads + head_.h) * g_.queries + query;
            float* log_sum = maximum + p_.batch * p_.heads * g_.queries;
            const RowSum sum = with_sink(p_, head_.h, m_[lane], l_[lane]);
            if (l_[lane] == 0.0f) memset(out, 0, sizeof(float) * g_.value_dim);
            rows.write(query, g_.value_dim, out, sum.inverse);
            *maximum = sum.maximum, *log_sum = sum.log_sum;
        }
    }

    const relpos_problem& p_;
    const Geometry& g_;
    const ForwardHead<Form>& head_;
    const int block_;
    const QueryBlock rows_;
    Form form_;
    const Dropout dropout_;
    const Cap cap_;
    bool begun_ = false;
    int64_t next_measured_ = 1;
    float *queries_, *scores_, *out_, *buffer_, *m_, *l_, *tile_maximum_, *shrink_;
};

// Many heads: each thread computes entire key heads, so that its copies and bounds of a head are still in its cache.
// Few heads: all threads share the blocks of queries, longest first.
template <class Form>
class Forward {
public:
    explicit Forward(const relpos_problem& p)
        : p_(p), g_(p), threads_(p.threads), by_head_(threads_ == 1 || p.batch * p.key_heads >= 8 * threads_),
          pack_(KeyHead::packed_floats(p, g_)), skip_(may_skip<Form>(p) && p.skipping && g_.key_blocks > 1),
          packed_(by_head_ ? threads_ : p.batch * p.key_heads, KeyHead::packed_floats(p, g_)),
          statistics_(by_head_ ? threads_ : p.batch * p.key_heads, skip_ ? KeyStatistics::floats(g_) : 0),
          decays_(by_head_ ? threads_ : p.batch * p.heads, skip_ ? Decay<Form>::floats(p) : 0),
          scratch_(threads_, ForwardBlock<Form>::floats(g_)) {}

    int run() {
        if (!packed_.ok || !statistics_.ok || !decays_.ok || !scratch_.ok) return 1;
        by_head_ ? run_by_head() : run_by_block();
        return 0;
    }

private:
    void run_by_head() {
        parallel_for(threads_, p_.batch * p_.key_heads, [&](int64_t task, int thread) {
            const int64_t b = task / p_.key_heads, kh = task % p_.key_heads;
            const KeyHead keys(p_, g_, b, kh, packed_.of(thread));
            keys.pack(0, g_.keys);
            KeyStatistics statistics;
            bool measured = false;
            for (int64_t h = kh * g_.group; h < (kh + 1) * g_.group; h++) {
                Decay<Form> decay;
                const bool open = prepare(b, h, decay, decays_.of(thread));
                if (open && !measured) {
                    statistics.place(g_, statistics_.of(thread)), statistics.measure(g_, keys);
                    measured = true;
                }
                const ForwardHead<Form> head{b, h, keys, open ? &statistics : nullptr, &decay};
                for (int block = g_.last_block; block >= g_.first_block; block--)
                    ForwardBlock<Form>(p_, g_, head, block, scratch_.of(thread)).run();
            }
        });
    }

    void run_by_block() {
        const int64_t key_heads = p_.batch * p_.key_heads, heads = p_.batch * p_.heads;
        if (pack_)
            parallel_for(threads_, key_heads * g_.key_blocks, [&](int64_t task, int) {
                const int64_t head = task / g_.key_blocks, begin = task % g_.key_blocks * kTile;
                KeyHead(p_, g_, head / p_.key_heads, head % p_.key_heads, packed_.of(head))
                    .pack(begin, least(int64_t(g_.keys), begin + kTile));
            });
        if (skip_)
            parallel_for(threads_, key_heads, [&](int64_t task, int) {
                const int64_t b = task / p_.key_heads, kh = task % p_.key_heads;
                bool any = false;
                for (int64_t h = kh * g_.group; h < (kh + 1) * g_.group; h++) {
                    Decay<Form> decay;
                    any |= prepare(b, h, decay, decays_.of(b * p_.heads + h));
                }
                if (!any) return;
                KeyStatistics statistics;
                statistics.place(g_, statistics_.of(task));
                statistics.measure(g_, KeyHead(p_, g_, b, kh, packed_.of(task)));
            });
        parallel_for(threads_, heads * g_.query_blocks, [&](int64_t task, int thread) {
            const int64_t b = task / g_.query_blocks / p_.heads, h = task / g_.query_blocks % p_.heads;
            const int64_t kh = h / g_.group, shared = b * p_.key_heads + kh;
            const bool open = skip_ && skip_counts(p_, b * p_.heads + h)->open;
            Decay<Form> decay;
            KeyStatistics statistics;
            if (open) decay.place(p_, b, h, decays_.of(b * p_.heads + h)), statistics.place(g_, statistics_.of(shared));
            const ForwardHead<Form> head{b, h, KeyHead(p_, g_, b, kh, packed_.of(shared)),
                                         open ? &statistics : nullptr, &decay};
            const int block = g_.last_block - int(task % g_.query_blocks);
            ForwardBlock<Form>(p_, g_, head, block, scratch_.of(thread)).run();
        });
    }

    // Whether the bias of this head falls far enough for the tests to save time.
    bool prepare(int64_t b, int64_t h, Decay<Form>& decay, float* storage) const {
        if (!skip_) return false;
        decay.place(p_, b, h, storage);
        const bool open = decay.measure() >= kGateBits + __builtin_log2f(float(g_.keys));
        skip_counts(p_, b * p_.heads + h)->open = open;
        return open;
    }

    const relpos_problem& p_;
    const Geometry g_;
    const int threads_;
    const bool by_head_, pack_, skip_;
    const Shared<float> packed_, statistics_, decays_, scratch_;
};

}  // namespace RELPOS_ISA
}  // namespace relpos
