// The forward for few queries, as while decoding: one pass over keys and values where they lie, nothing packed. Only rows
// in half precision, and keys that are still to be rotated, are converted, a vector's worth of rows at a time.
//
// The rows of a key head (its query heads × their queries) share the pass. Keys are divided into pieces that are computed
// in parallel, each with its own softmax, and merged in the order of the keys: neither the division nor the order depends
// on the threads. It writes what the tiled forward writes, and leaves the record of skipping as the caller zeroed it:
// nothing is skipped.
//
// A vector holds neighbouring dimensions of a head. If these are no multiple of the vector size, the last vector reads
// the last kLanes dimensions, some of which an earlier vector has read too: the query is 0 there.
#pragma once

#include "forward.h"

namespace relpos {
namespace RELPOS_ISA {

// The vectors of a row of `size` floats.
struct Span {
    int size;     // at least kLanes
    int vectors;  // including one that overlaps the one before, if `size` is no multiple of kLanes

    explicit Span(int64_t floats) : size(most(int(floats), kLanes)), vectors((size + kLanes - 1) / kLanes) {}
    RELPOS_MEMBER int offset(int vector) const { return least(vector * kLanes, size - kLanes); }
};

// Rows of keys or values, as the loops below read them.
struct Rows {
    const float* data;
    int64_t stride;
};

template <class Form>
class FewRows {
public:
    static constexpr int kMost = RELPOS_FEW;  // queries of a head; with more, tiles are faster

    static bool takes(const relpos_problem& p) { return p.queries <= kMost && p.dropout == 0.0f; }

    explicit FewRows(const relpos_problem& p)
        : p_(p), queries_(int(p.queries)), keys_(int(p.keys)), rows_(queries_ * int(p.heads / p.key_heads)),
          pieces_((keys_ + kPiece - 1) / kPiece), key_(p.head_dim), value_(p.value_dim),
          parts_(p.batch * p.key_heads, int64_t(pieces_) * rows_ * part_floats()), done_(1, p.batch * p.key_heads),
          scratch_(p.threads, floats()) {}

    int run() {
        const int64_t heads = p_.batch * p_.key_heads;
        if (!parts_.ok || !done_.ok || !scratch_.ok) return 1;
        memset(done_.of(0), 0, sizeof(int32_t) * heads);
        parallel_for(p_.threads, heads * pieces_, [&](int64_t task, int thread) {
            const int64_t head = task / pieces_;
            Piece(*this, head, int(task % pieces_), scratch_.of(thread)).run();
            // Whoever completes the last piece of a head merges all of them.
            if (__atomic_add_fetch(done_.of(0) + head, 1, __ATOMIC_ACQ_REL) == pieces_) merge(head);
        });
        return 0;
    }

private:
    static constexpr int kPiece = 1024;  // keys
    static constexpr int kChunk = 128;   // keys between two updates of the running maximum

    // The result of a piece for one row: m, l, then the unnormalised output.
    int64_t part_floats() const { return 2 + int64_t(value_.vectors) * kLanes; }
    float* part(int64_t head, int piece, int row) const {
        return parts_.of(head) + (int64_t(piece) * rows_ + row) * part_floats();
    }
    int64_t floats() const {
        return Carve::padded(int64_t(rows_) * key_.vectors * kLanes) + rows_ * kChunk +
               Carve::padded(kLanes * most(key_.size, value_.size)) + Carve::padded(rows_);
    }

    // One piece of the keys of one key head.
    class Piece {
    public:
        Piece(const FewRows& all, int64_t head, int piece, float* scratch)
            : all_(all), p_(all.p_), head_(head), b_(head / p_.key_heads), kh_(head % p_.key_heads), piece_(piece) {
            Carve carve(scratch);
            queries_ = carve.take(int64_t(all.rows_) * all.key_.vectors * kLanes);
            scores_ = carve.take(all.rows_ * kChunk);
            few_ = carve.take(kLanes * most(all.key_.size, all.value_.size));
            shrink_ = carve.take(all.rows_);
        }

        void run() {
            for (int r = 0; r < all_.rows_; r++) part(r)[0] = -kInfinity, part(r)[1] = 0.0f;
            see_rows();
            const int begin = most(low_, piece_ * kPiece), end = least(high_, (piece_ + 1) * kPiece);
            if (begin >= end) return;
            pack_queries();
            for (int key = begin; key < end; key += kChunk) chunk(key, least(kChunk, end - key), key == begin);
        }

    private:
        float* part(int row) const { return all_.part(head_, piece_, row); }
        int64_t query_head(int row) const { return kh_ * (all_.rows_ / all_.queries_) + row / all_.queries_; }

        // The keys that each query may see, and those that any may see.
        void see_rows() {
            low_ = all_.keys_, high_ = 0;
            for (int i = 0; i < all_.queries_; i++) {
                const KeyRange seen(p_, b_, i);
                first_[i] = seen.first, last_[i] = seen.last;
                if (seen.first >= seen.last) continue;
                low_ = least(low_, int(seen.first)), high_ = most(high_, int(seen.last));
            }
        }

        void pack_queries() {
            const Span& span = all_.key_;
            const int columns = int(p_.head_dim), overlap = span.vectors * kLanes - span.size;
            const Rotation rotation = Rotation::of_queries(p_, b_);
            for (int r = 0; r < all_.rows_; r++) {
                float* q = queries_ + int64_t(r) * span.vectors * kLanes;
                read_rows(HeadRows(p_, p_.q, b_, query_head(r)), rotation, r % all_.queries_, 1, columns, span.size, q);
                for (int d = 0; d < columns; d++) q[d] *= p_.scale * kLog2e;
                if (!overlap) continue;
                float* last = q + (span.vectors - 1) * kLanes;
                for (int i = kLanes - overlap - 1; i >= 0; i--) last[overlap + i] = last[i];
                for (int i = 0; i < overlap; i++) last[i] = 0.0f;
            }
        }

        void chunk(int key, int count, bool first) {
            const HeadRows keys(p_, p_.k, b_, kh_), values(p_, p_.v, b_, kh_);
            const Rotation rotation = Rotation::of_keys(p_, b_);
            const bool plain = p_.dtype == RELPOS_FLOAT32;
            const bool readable = plain && !rotation && p_.head_dim >= kLanes;
            for (int at = 0; at < count; at += kLanes) {
                const int some = least(kLanes, count - at);
                const Rows rows = readable && some == kLanes
                                      ? Rows{keys.floats(key + at), keys.stride()}
                                      : copied(keys, rotation, key + at, some, int(p_.head_dim), all_.key_);
                for (int r = 0; r < all_.rows_;)
                    r += with_few(all_.rows_ - r, [&]<int Count>() { score<Count>(rows, r, at); });
            }
            // Lanes beyond the last key have an index that no query sees.
            for (int at = 0; at < kChunk; at++) index_[at] = at < count ? key + at : INT32_MAX;
            masked_ = false;
            if (p_.padding)
                for (int at = 0; at < count; at++)
                    if (!p_.padding[b_ * all_.keys_ + key + at]) index_[at] = INT32_MAX, masked_ = true;
            for (int i = 0; i < all_.queries_; i++) masked_ |= first_[i] > key || last_[i] < key + count;
            for (int r = 0; r < all_.rows_; r++) softmax(r, key, round_up(count));
            if (plain && p_.value_dim >= kLanes) {
                gather({values.floats(key), values.stride()}, 0, count, first);
                return;
            }
            for (int at = 0; at < count; at += kLanes) {
                const int some = least(kLanes, count - at);
                gather(copied(values, Rotation(), key + at, some, int(p_.value_dim), all_.value_), at, some, first && !at);
                for (int r = 0; r < all_.rows_; r++) shrink_[r] = 1.0f;
            }
        }

        // A copy of some rows in float32, with rows of 0 up to kLanes rows.
        Rows copied(const HeadRows& rows, const Rotation& rotation, int begin, int count, int columns,
                    const Span& span) const {
            read_rows(rows, rotation, begin, count, columns, span.size, few_);
            memset(few_ + count * span.size, 0, sizeof(float) * (kLanes - count) * span.size);
            return {few_, span.size};
        }

        // Calls work<rows>() with 4, 2 or 1 rows that share what is read, and returns how many.
        template <class Work>
        static int with_few(int rows, const Work& work) {
            if (rows >= 4) return work.template operator()<4>(), 4;
            if (rows >= 2) return work.template operator()<2>(), 2;
            return work.template operator()<1>(), 1;
        }

        // scores[row][at …] of kLanes keys.
        template <int Count>
        __attribute__((noinline)) void score(const Rows& keys, int row, int at) {
            // One row waits for memory: it is read in order, as the CPU's prefetching wants it (requests of our own made it
            // slower). Several rows share what is read, and keep eight sums at a time.
            constexpr int kTogether = least(kLanes, Count == 1 ? 1 : 8 / Count);
            const int vectors = all_.key_.vectors;
            const float* q = queries_ + int64_t(row) * vectors * kLanes;
            Vec sums[Count][kLanes];
            for (int key = 0; key < kLanes; key += kTogether) {
                const float* k = keys.data + key * keys.stride;
                Vec part[Count][kTogether] = {};
                for (int v = 0; v < vectors; v++) {
                    const float* from = k + all_.key_.offset(v);
                    Vec column[kTogether];
                    RELPOS_UNROLL
                    for (int j = 0; j < kTogether; j++) column[j] = load(from + j * keys.stride);
                    RELPOS_UNROLL
                    for (int r = 0; r < Count; r++) {
                        const Vec factor = load(q + (r * vectors + v) * kLanes);
                        RELPOS_UNROLL
                        for (int j = 0; j < kTogether; j++) part[r][j] += factor * column[j];
                    }
                }
                RELPOS_UNROLL
                for (int r = 0; r < Count; r++)
                    RELPOS_UNROLL
                    for (int j = 0; j < kTogether; j++) sums[r][key + j] = part[r][j];
            }
            for (int r = 0; r < Count; r++) store(scores_ + (row + r) * kChunk + at, sum_each(sums[r]));
        }

        // Turns scores into weights 2^(score − m), and updates the running maximum m and sum l of a row.
        __attribute__((noinline)) void softmax(int row, int key, int count) {
            const int query = row % all_.queries_;
            const Form form(p_, b_, query_head(row));
            typename Form::Row bias(form, int(p_.start) + query, query);
            const float cap = p_.softcap * kLog2e;
            const VecInt first = first_[query] - VecInt{}, last = last_[query] - VecInt{};
            float* scores = scores_ + row * kChunk;
            Vec top = splat(-kInfinity);
            for (int at = 0; at < count; at += kLanes) {
                const VecInt index = load(index_ + at);
                Vec score = load(scores + at);
                if (cap != 0.0f) score = cap * tanh(score / cap).value;
                score += bias.at(key + at);
                const Vec seen = ((index >= first) & (index < last)) ? score : splat(-kInfinity);
                store(scores + at, seen);
                top = larger(top, seen);
            }
            float& m = part(row)[0];
            float& l = part(row)[1];
            const float highest = largest(top), before = m;
            m = before > highest ? before : highest;
            const float reference = m == -kInfinity ? 0.0f : m;  // a row that has seen no key yet has no maximum
            shrink_[row] = exp2(splat(before - reference))[0];
            Vec mass = {};
            for (int at = 0; at < count; at += kLanes) {
                const Vec weight = exp2(load(scores + at) - reference);
                store(scores + at, weight);
                mass += weight;
            }
            l = l * shrink_[row] + sum(mass);
        }

        // Adds the values of keys [at, at + count), by their weights, to the outputs of all rows.
        void gather(const Rows& values, int at, int count, bool first) {
            const int vectors = all_.value_.vectors;
            if (masked_ && !all_finite(values.data, values.stride, count, all_.value_.size)) {
                for (int r = 0; r < all_.rows_; r++)
                    for (int v = 0; v < vectors; v++) weigh_seen(values, r, v, at, count, first);
                return;
            }
            for (int r = 0; r < all_.rows_;)
                r += with_few(all_.rows_ - r, [&]<int Count>() {
                    constexpr int kWide = Count == 1 ? 8 : Count == 2 ? 4 : kPanelVectors;
                    int v = 0;
                    for (; v + kWide <= vectors; v += kWide) weigh<Count, kWide>(values, r, v, at, count, first);
                    if constexpr (kWide > 4)
                        for (; v + 4 <= vectors; v += 4) weigh<Count, 4>(values, r, v, at, count, first);
                    if constexpr (kWide > 2)
                        for (; v + 2 <= vectors; v += 2) weigh<Count, 2>(values, r, v, at, count, first);
                    for (; v < vectors; v++) weigh<Count, 1>(values, r, v, at, count, first);
                });
        }

        template <int Count, int Vectors>
        __attribute__((noinline)) void weigh(const Rows& values, int row, int vector, int at, int count, bool first) {
            const float* from[Vectors];
            for (int v = 0; v < Vectors; v++) from[v] = values.data + all_.value_.offset(vector + v);
            const float* weights = scores_ + row * kChunk + at;
            Vec sums[Count][Vectors] = {};
            for (int64_t j = 0, place = 0; j < count; j++, place += values.stride) {
                Vec column[Vectors];
                RELPOS_UNROLL
                for (int v = 0; v < Vectors; v++) column[v] = load(from[v] + place);
                RELPOS_UNROLL
                for (int r = 0; r < Count; r++)
                    RELPOS_UNROLL
                    for (int v = 0; v < Vectors; v++) sums[r][v] += weights[r * kChunk + j] * column[v];
            }
            for (int r = 0; r < Count; r++)
                for (int v = 0; v < Vectors; v++) {
                    float* to = part(row + r) + 2 + (vector + v) * kLanes;
                    store(to, first ? sums[r][v] : load(to) * shrink_[row + r] + sums[r][v]);
                }
        }

        // The same for one row and vector, without the values that the row does not see: a weight of 0 does not make an
        // infinite number or a NaN 0.
        __attribute__((noinline)) void weigh_seen(const Rows& values, int row, int vector, int at, int count, bool first) {
            const int query = row % all_.queries_;
            Vec sums = {};
            for (int j = 0; j < count; j++)
                if (index_[at + j] >= first_[query] && index_[at + j] < last_[query])
                    sums += scores_[row * kChunk + at + j] * load(values.data + j * values.stride + all_.value_.offset(vector));
            float* to = part(row) + 2 + vector * kLanes;
            store(to, first ? sums : load(to) * shrink_[row] + sums);
        }

        const FewRows& all_;
        const relpos_problem& p_;
        const int64_t head_, b_, kh_;
        const int piece_;
        int low_ = 0, high_ = 0;
        bool masked_ = false;  // whether a query does not see a key of the chunk
        float *queries_, *scores_, *few_, *shrink_;
        int32_t first_[kMost], last_[kMost];
        alignas(64) int32_t index_[kChunk];  // index of a key, or one that no query sees
    };

    void merge(int64_t head) const {
        const int64_t b = head / p_.key_heads, group = rows_ / queries_, h = head % p_.key_heads * group;
        for (int r = 0; r < rows_; r++) write(head, r, b, h + r / queries_, r % queries_);
    }

    void write(int64_t head, int row, int64_t b, int64_t h, int query) const {
        float m = -kInfinity, l = 0.0f;
        for (int piece = 0; piece < pieces_; piece++) {
            const float* own = part(head, piece, row);
            if (own[1] != 0.0f && !(own[0] <= m)) m = own[0];  // also if it is NaN
        }
        float* result = part(head, 0, row) + 2;
        for (int piece = 0; piece < pieces_; piece++) {
            const float* own = part(head, piece, row);
            if (own[1] == 0.0f && piece) continue;  // it saw no key, and holds no output
            const float factor = own[1] == 0.0f ? 0.0f : exp2(splat(own[0] - m))[0];
            l += own[1] * factor;
            for (int i = 0; i < value_.vectors * kLanes; i += kLanes) {
                const Vec term = factor == 0.0f ? Vec{} : load(own + 2 + i) * factor;
                store(result + i, piece ? load(result + i) + term : term);
            }
        }
        const RowSum sum = with_sink(p_, h, m, l);
        const float inverse = l == 0.0f ? 0.0f : sum.inverse;
        for (int v = 0; v < value_.vectors; v++)  // from vectors that overlap to neighbouring columns
            store(result + value_.offset(v), load(result + v * kLanes) * inverse);
        HeadRows(p_, p_.out, b, h).write(query, int(p_.value_dim), result);
        float* maximum = p_.lse + (b * p_.heads + h) * p_.queries + query;
        *maximum = sum.maximum, maximum[p_.batch * p_.heads * p_.queries] = sum.log_sum;
    }

    const relpos_problem& p_;
    const int queries_, keys_, rows_, pieces_;
    const Span key_, value_;
    const Shared<float> parts_;
    const Shared<int32_t> done_;
    const Shared<float> scratch_;
};

}  // namespace RELPOS_ISA
}  // namespace relpos
