// Which tiles provably do not matter.
//
// With w_ij the weights of row i, a tile is skipped if for each of its entries, and for every X_ij by which a weight is
// multiplied in a sum over the keys,
//
//   w_ij · X_ij < 2^−24 / keys · Σ_j w_ij · X_ij,     X = 1, |v_j|, |k_j|, |k_j|·|v_j|
//                                                   and gained_ij, gained_ij·|v_j| where the bias has a weight_i
//
// so that a row loses less than 2^−24 of what it keeps. X = 1 stands for the softmax itself, |v| for the output,
// |k|·|v| and |k| (times the row's own output) for the gradient of q, gained·|v| and gained for that of weight_i. |v|
// is the largest entry of a value, |k| the length of a key.
//
// The left side is bounded from above: the logits by Cauchy–Schwarz (|q_i| times the radius of the block's keys about a
// common centre, plus q_i·centre) and the bias's own maximum, X by its maximum over the block. The right side is
// bounded from below by the sums so far, which is why near keys come first. Every test reads "all lanes
// pass", so a NaN never skips.
//
// Sums over the queries (gradients of k, v and of running totals) multiply a weight by the gradient of the output,
// which the forward does not know. The forward therefore records by how many bits a tile passed, and the backward
// computes a skipped tile if its queries' factors exceed those of the computed tiles by more bits (Demands, demands.h).
#pragma once

#include "decay.h"
#include "threads.h"

namespace relpos {
namespace RELPOS_ISA {

// The header of relpos_problem::skipping, one per head.
struct SkipCounts {
    int64_t open, visible, scored, kept;
};
static_assert(sizeof(SkipCounts) == RELPOS_SKIP_COUNTS * sizeof(int64_t), "as api.h describes the record");
RELPOS_INLINE SkipCounts* skip_counts(const relpos_problem& p, int64_t head) {
    return reinterpret_cast<SkipCounts*>(p.skipping) + head;
}
// One byte per block of keys: 0 if the tile is computed, otherwise 1 + the integer number of bits by which it passed
// its test.
RELPOS_INLINE uint8_t* skip_slack(const relpos_problem& p, const Geometry& g, int64_t head, int query_block) {
    uint8_t* slack = reinterpret_cast<uint8_t*>(p.skipping + p.batch * p.heads * RELPOS_SKIP_COUNTS);
    return slack + (head * g.query_blocks + query_block - g.first_block) * g.key_blocks;
}
RELPOS_INLINE uint8_t as_slack(float bits) { return bits < 254.0f ? uint8_t(1.0f + bits) : uint8_t(255); }

// Whether tiles of this form may be skipped at all. Neither a capped score nor a weight that dropout multiplies obeys the
// bounds below.
template <class Form>
RELPOS_INLINE bool may_skip(const relpos_problem& p) {
    return p.skip && Decay<Form>::known && p.softcap == 0.0f && p.dropout == 0.0f;
}

// The bounds of a block of keys, or of all blocks on one side: the largest distance of a key from the centre, and the
// logarithms of the largest |v|, |k| and |k|·|v|. −inf for 0; +inf if any is infinite or NaN.
struct KeyBounds {
    float radius, value, key, both;

    void widen(const KeyBounds& other) {
        radius = most(radius, other.radius), value = most(value, other.value);
        key = most(key, other.key), both = most(both, other.both);
    }
};

// The keys and values of one key head: bounds by block, and the sizes of each.
class KeyStatistics {
public:
    static int64_t floats(const Geometry& g) {
        return Carve::padded(g.width) + 3 * Carve::padded(g.keys) + 3 * Carve::padded(4 * g.key_blocks) +
               Carve::padded(KeyHead::tile_floats(g));
    }

    void place(const Geometry& g, float* storage) {
        Carve carve(storage);
        centre_ = carve.take(g.width);
        key_size_ = carve.take(g.keys), value_size_ = carve.take(g.keys), both_sizes_ = carve.take(g.keys);
        KeyBounds** const rows[] = {&own_, &before_, &after_};
        for (KeyBounds** row : rows) *row = reinterpret_cast<KeyBounds*>(carve.take(4 * g.key_blocks));
        buffer_ = carve.take(KeyHead::tile_floats(g));
    }

    void measure(const Geometry& g, const KeyHead& head) {
        const int n = g.key_blocks;
        find_centre(g, head);
        Vec square = {};
        for (int d = 0; d < g.width; d += kLanes) square += load(centre_ + d) * load(centre_ + d);
        const float centre_norm = __builtin_sqrtf(sum(square) + 1e-36f);
        for (int block = 0; block < n; block++) own_[block] = measure_block(g, head, block, centre_norm);
        before_[0] = own_[0], after_[n - 1] = own_[n - 1];
        for (int i = 1; i < n; i++) before_[i] = own_[i], before_[i].widen(before_[i - 1]);
        for (int i = n - 2; i >= 0; i--) after_[i] = own_[i], after_[i].widen(after_[i + 1]);
    }

    const float* centre() const { return centre_; }
    const float* key_sizes() const { return key_size_; }
    const float* value_sizes() const { return value_size_; }
    const float* both_sizes() const { return both_sizes_; }
    const KeyBounds& own(int block) const { return own_[block]; }
    const KeyBounds& beyond(int block, Side side) const { return (side == Side::past ? before_ : after_)[block]; }

private:
    // The mean of some keys. q·centre is the same for all keys of a row, so that a common offset loosens no bound.
    void find_centre(const Geometry& g, const KeyHead& head) {
        const int sampled = least(g.keys, kTile);
        for (int d = 0; d < g.width; d += kLanes) store(centre_ + d, Vec{});
        for (int i = 0; i < sampled; i++) {
            const float* key = head.keys(int64_t(i) * g.keys / sampled, 1, buffer_).data;
            for (int d = 0; d < g.width; d += kLanes) store(centre_ + d, load(centre_ + d) + load(key + d));
        }
        for (int d = 0; d < g.width; d += kLanes) store(centre_ + d, load(centre_ + d) * (1.0f / float(sampled)));
    }

    KeyBounds measure_block(const Geometry& g, const KeyHead& head, int block, float centre_norm) {
        const auto add = [](Quad a, Quad b) { return a + b; };
        const auto larger_of = [](Quad a, Quad b) { return a > b ? a : b; };
        Quad farthest = {}, longest = {}, tallest = {}, largest_product = {};
        IntQuad sound = ~IntQuad{};
        const int64_t start = int64_t(block) * kTile, stop = least(int64_t(g.keys), start + kTile);
        const TileRows keys = head.keys(start, int(stop - start), buffer_);
        const TileRows values = head.values(start, int(stop - start), buffer_);
        for (int64_t first = start; first < stop; first += 4) {
            Quad distances[4], lengths[4], heights[4];
            for (int i = 0; i < 4; i++) {
                const int64_t j = least(first + i, stop - 1) - start;  // past the last key, repeat it
                Vec distance = {}, length = {}, value = {};
                VecInt finite = ~VecInt{};
                for (int d = 0; d < g.width; d += kLanes) {
                    const Vec k = load(keys.data + j * keys.row + d), from_centre = k - load(centre_ + d);
                    distance += from_centre * from_centre, length += k * k;
                }
                for (int d = 0; d < g.value_width; d += kLanes) {
                    const Vec v = absolute(load(values.data + j * values.row + d));
                    value = larger(v, value);
                    finite &= v < kInfinity;
                }
                // An infinite value or a NaN makes the distance infinite, so that the block is never skipped.
                distance = finite ? distance : splat(kInfinity);
                distances[i] = fold(distance, add), lengths[i] = fold(length, add), heights[i] = fold(value, larger_of);
            }
            const Quad apart = fold(distances, add), squared = fold(lengths, add), tall = fold(heights, larger_of);
            sound &= (apart < kInfinity) & (squared < kInfinity);
            farthest = larger_of(apart, farthest), longest = larger_of(squared, longest);
            tallest = larger_of(tall, tallest);
            for (int i = 0; i < 4 && first + i < stop; i++) {
                // 0 if not finite: the sums of rows that do not see this key stay valid.
                const float size = squared[i] < kInfinity ? __builtin_sqrtf(squared[i]) : 0.0f;
                const float value = tall[i] < kInfinity ? tall[i] : 0.0f;
                key_size_[first + i] = size, value_size_[first + i] = value, both_sizes_[first + i] = size * value;
                largest_product[i] = most(largest_product[i], (size + 1e-18f) * value);
            }
        }
        if (!(sound[0] && sound[1] && sound[2] && sound[3])) return {kInfinity, kInfinity, kInfinity, kInfinity};
        // Increased by the largest possible rounding error.
        const float radius = __builtin_sqrtf(top(farthest) + 1e-36f) * (1.0f + 6e-5f) + centre_norm * 3e-5f;
        return {radius, __builtin_log2f(top(tallest)), 0.5f * __builtin_log2f(top(longest) + 1e-36f),
                __builtin_log2f(top(largest_product))};
    }

    typedef int32_t IntQuad __attribute__((vector_size(16)));

    static float top(Quad x) { return most(most(x[0], x[1]), most(x[2], x[3])); }
    // Reduces a vector to four lanes, and four such vectors to one lane each.
    template <class Operation>
    static RELPOS_MEMBER Quad fold(Vec x, const Operation& together) {
        Quad parts[kLanes / 4];
        memcpy(parts, &x, sizeof parts);
        for (int half = kLanes / 8; half; half /= 2)
            for (int i = 0; i < half; i++) parts[i] = together(parts[i], parts[i + half]);
        return parts[0];
    }
    template <class Operation>
    static RELPOS_MEMBER Quad fold(const Quad (&x)[4], const Operation& together) {
        const auto pair = [&](Quad a, Quad b) {
            return together(__builtin_shufflevector(a, b, 0, 4, 1, 5), __builtin_shufflevector(a, b, 2, 6, 3, 7));
        };
        const Quad a = pair(x[0], x[1]), b = pair(x[2], x[3]);
        return together(__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7));
    }

    float *centre_, *key_size_, *value_size_, *both_sizes_;  // sizes of each key, value, and both multiplied
    float* buffer_;  // a tile of keys and values
    KeyBounds *own_, *before_, *after_;
};

// The tests for one block of queries.
template <class Form>
class Skipper {
public:
    // `queries` as packed for the scores: scaled, in units of log2.
    Skipper(const relpos_problem& p, const Geometry& g, const KeyStatistics& keys, const Decay<Form>& decay,
            const QueryBlock& rows, const float* queries)
        : keys_(keys), decay_(decay), rows_(rows), weighted_(Decay<Form>::gains && p.weighted),
          threshold_(-24.02f - __builtin_log2f(float(g.keys))) {
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
            float* const floors[] = {mass_, value_, key_, both_, gained_, gained_value_};
            for (float* floor : floors) store(floor + lane, splat(-kInfinity));
        }
    }

    // The number of bits by which this block and all blocks beyond it pass the test; 0 if they do not pass.
    float beyond(int block, Side side) const {
        const KeyBounds& bounds = keys_.beyond(block, side);
        return least_margin([&](int lane) { return unseen_beyond(lane, block, side); }, [&](int lane) {
            const Vec gained = weighted_ ? decay_.gained_beyond(rows_, block, lane, side) : Vec{};
            return room(lane, bounds, gained) - upper(lane, bounds.radius, decay_.beyond(rows_, block, lane, side));
        });
    }

    // The same for this block.
    float tile(int block) const {
        const KeyBounds& bounds = keys_.own(block);
        return least_margin([&](int lane) { return unseen(lane, block); }, [&](int lane) {
            const Vec gained = weighted_ ? decay_.gained(rows_, block, lane) : Vec{};
            return room(lane, bounds, gained) - upper(lane, bounds.radius, decay_.tile(rows_, block, lane));
        });
    }

    // The same for this block, once its largest scores are known.
    float scored(int block, const float* maximum) const {
        const KeyBounds& bounds = keys_.own(block);
        return least_margin([&](int lane) { return unseen(lane, block); }, [&](int lane) {
            const Vec gained = weighted_ ? decay_.gained(rows_, block, lane) : Vec{};
            return room(lane, bounds, gained) - load(maximum + lane);
        });
    }

    // Raises the lower bound of a row's sum of weights, from the maximum m and the sum l of its softmax so far.
    RELPOS_MEMBER void raise_mass(int lane, Vec m, Vec l) { store(mass_ + lane, m + log2_below(l)); }

    // Raises the lower bounds of the sums Σ w·X by weights 2^(score − m) of a tile, [key][query]. Not inlined: it is
    // rare, and would take registers from the loop around it.
    __attribute__((noinline)) void raise_sums(const Form& form, const KeyBlock& columns, const float* weights, int lane,
                                              int stop, const float* maximum) {
        const Vec m = load(maximum + lane);
        const float *key_size = keys_.key_sizes() + columns.start, *value_size = keys_.value_sizes() + columns.start;
        const float* both_sizes = keys_.both_sizes() + columns.start;
        Vec value = {}, key = {}, both = {}, gained = {}, gained_value = {};
        for (int j = 0; j < stop; j++) {
            const Vec w = load(weights + j * kTile + lane);
            value += w * value_size[j], key += w * key_size[j], both += w * both_sizes[j];
            if constexpr (Decay<Form>::gains) {
                if (weighted_) {
                    const Vec distance = absolute(form.gained(j, lane));
                    gained += w * distance, gained_value += w * distance * value_size[j];
                }
            }
        }
        raise(value_, lane, m, value), raise(key_, lane, m, key), raise(both_, lane, m, both);
        raise(gained_, lane, m, gained), raise(gained_value_, lane, m, gained_value);
    }

private:
    static void raise(float* floor, int lane, Vec m, Vec sum) {
        store(floor + lane, larger(load(floor + lane), m + log2_below(sum)));
    }

    // The bound that the logarithm of a weight must stay below, from all sums of the row.
    RELPOS_MEMBER Vec room(int lane, const KeyBounds& bounds, Vec gained) const {
        Vec room = smaller(load(value_ + lane) - bounds.value, load(mass_ + lane));
        room = smaller(load(key_ + lane) - bounds.key, room);
        room = smaller(load(both_ + lane) - bounds.both, room);
        if (weighted_) {
            const Vec distance = log2_above(gained);
            room = smaller(load(gained_ + lane) - distance, room);
            room = smaller(load(gained_value_ + lane) - distance - bounds.value, room);
        }
        return room + threshold_;
    }
    RELPOS_MEMBER Vec upper(int lane, float radius, Vec bias) const {
        const Vec spread = load(norm_ + lane) * radius, centre = load(centre_ + lane);
        const Vec rounding = (spread + absolute(centre) + absolute(load(mass_ + lane))) * 1e-6f;
        return (spread + centre + rounding) + bias;
    }
    // The smallest margin of all lanes that see a key; 0 if a lane does not pass. A tile that does not pass usually
    // fails in the first vector.
    template <class Hidden, class Margin>
    RELPOS_MEMBER float least_margin(const Hidden& hidden, const Margin& margin) const {
        float low = kInfinity;
        for (int lane = rows_.from; lane < rows_.to; lane += kLanes) {
            const Vec bits = margin(lane), passed = bits > 0.0f ? bits : Vec{};  // a NaN does not pass
            const float least_here = -largest(-(hidden(lane) ? splat(kInfinity) : passed));
            if (!(least_here > 0.0f)) return 0.0f;
            low = least_here < low ? least_here : low;
        }
        return low;
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
    const bool weighted_;
    const float threshold_;
    alignas(64) float norm_[kTile];
    alignas(64) float centre_[kTile];
    // Lower bounds of the logarithms of the rows' sums.
    alignas(64) float mass_[kTile], value_[kTile], key_[kTile], both_[kTile], gained_[kTile], gained_value_[kTile];
};

}  // namespace RELPOS_ISA
}  // namespace relpos
