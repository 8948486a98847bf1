// A tile of scores: product, cap, bias and mask in registers, stored once.
#pragma once

#include "tiles.h"

namespace relpos {
namespace RELPOS_ISA {

// The soft cap, c · tanh(score / c), in units of log2.
struct Cap {
    float limit;
    float* slopes;  // [key][query]: its derivative; NULL if not needed

    template <int Rows, int Vectors>
    __attribute__((noinline)) void apply(Vec (&scores)[Rows][Vectors], int key, int lane) const {
        for (int m = 0; m < Rows; m++)
            for (int v = 0; v < Vectors; v++) {
                const Tanh capped = tanh(scores[m][v] / limit);
                scores[m][v] = limit * capped.value;
                if (slopes) store(slopes + (key + m) * kTile + lane + v * kLanes, capped.slope);
            }
    }
};

// The inputs of a strip of a tile. `queries` was packed by pack_transposed.
struct ScoreTile {
    const float* keys;
    int64_t key_row;
    const float* queries;
    int depth;  // head_dim
    float* scores;          // [key][query]
    float* maximum;         // one value per query, raised to the largest score (only if Maximum)
    const QueryBlock* rows;
    const KeyBlock* columns;
    const Cap* cap;  // NULL: none
};

template <class Form, bool Masked, bool Maximum, int Rows, int Vectors>
static __attribute__((noinline)) void score_strip(const ScoreTile& t, const Form& form, int key, int lane) {
    Vec scores[Rows][Vectors] = {};
    const float* panel = t.queries + int64_t(lane / kPanel) * t.depth * kPanel + lane % kPanel;
    multiply<Layout::natural>(t.keys + key * t.key_row, t.key_row, panel, kPanel, 0, t.depth, scores);
    if (__builtin_expect(t.cap != nullptr, 0)) {
        // On a copy in memory, so that the scores of calls without a cap stay in registers.
        Vec copy[Rows][Vectors];
        memcpy(copy, scores, sizeof copy);
        t.cap->apply(copy, key, lane);
        memcpy(scores, copy, sizeof copy);
    }
    form.add(scores, key, lane);
    if (Masked) {
        RELPOS_UNROLL
        for (int v = 0; v < Vectors; v++) {
            const VecInt first = load(t.rows->first + lane + v * kLanes), last = load(t.rows->last + lane + v * kLanes);
            RELPOS_UNROLL
            for (int m = 0; m < Rows; m++) {
                const VecInt index = t.columns->index[key + m] - VecInt{};
                scores[m][v] = ((index >= first) & (index < last)) ? scores[m][v] : splat(-kInfinity);
            }
        }
    }
    if (Maximum) {
        RELPOS_UNROLL
        for (int v = 0; v < Vectors; v++) {
            Vec top = load(t.maximum + lane + v * kLanes);
            RELPOS_UNROLL
            for (int m = 0; m < Rows; m++) top = larger(top, scores[m][v]);
            store(t.maximum + lane + v * kLanes, top);
        }
    }
    RELPOS_UNROLL
    for (int m = 0; m < Rows; m++)
        RELPOS_UNROLL
        for (int v = 0; v < Vectors; v++) store(t.scores + (key + m) * kTile + lane + v * kLanes, scores[m][v]);
}

// Computes all strips of a tile. Vectors entirely above the causal diagonal are left unchanged.
template <bool Masked, bool Maximum, class Form>
static void score_tile(const ScoreTile& t, const Form& form) {
    for (int panel = 0; panel < kTile; panel += kPanel) {
        const int from = most(panel, t.rows->from), to = least(panel + kPanel, t.rows->to);
        if (from >= to) continue;
        for (int key = 0; key < t.columns->count;) {
            int lane = from, stop = t.columns->count;
            if (t.columns->diagonal) {
                lane = most(from, round_down(key));
                stop = least(stop, round_down(key) + kLanes);
                if (lane >= to) break;
            }
            key += with_sizes(stop - key, (to - lane) / kLanes, [&]<int Rows, int Vectors>() {
                score_strip<Form, Masked, Maximum, Rows, Vectors>(t, form, key, lane);
            });
        }
    }
}

template <bool Maximum, class Form>
static void score_tile(const ScoreTile& t, const Form& form) {
    if (t.columns->masked)
        score_tile<true, Maximum>(t, form);
    else
        score_tile<false, Maximum>(t, form);
}

}  // namespace RELPOS_ISA
}  // namespace relpos
