// Which tiles the backward computes although the forward skipped them.
//
// In a sum over the queries of column j a weight w_ij is multiplied by |g_i| (gradient of v_j), |g_i|·|q_i| or |e_i|·|q_i|
// (of k_j), |g_i|·|weight_i| or |e_i|·|weight_i| (of total_j; Form::factors), where g is the gradient of the output and e
// that of the log-sum-exp. A tile that the forward skipped passed its test by some number of bits. If the factors of its
// queries exceed the largest factors among the computed tiles of these keys by more than that number plus kTolerance
// bits, the backward computes it. So a column loses less than 2^−22 of its largest factor.
#pragma once

#include "skipping.h"

namespace relpos {
namespace RELPOS_ISA {

class Demands {
public:
    static int64_t floats(const Geometry& g) { return kFactors * (Carve::padded(g.query_blocks) + Carve::padded(g.key_blocks)); }

    void place(const Geometry& g, float* storage) {
        Carve carve(storage);
        for (float*& own : own_) own = carve.take(g.query_blocks);
        for (float*& met : met_) met = carve.take(g.key_blocks);
    }

    // Logarithms of the largest factors of each block of queries, and of those in the computed tiles of each key block.
    void measure(const relpos_problem& p, const Geometry& g, int64_t b, int64_t h, const float* weights) {
        for (float* met : met_)
            for (int block = 0; block < g.key_blocks; block++) met[block] = -kInfinity;
        for (int index = 0; index < g.query_blocks; index++) {
            const QueryBlock rows(p, g, b, g.first_block + index);
            measure_rows(p, g, b, h, rows, index, weights);
            const uint8_t* slack = skip_slack(p, g, b * p.heads + h, g.first_block + index);
            for (int block = rows.lowest(); block <= rows.highest(); block++)
                if (!slack[block])
                    for (int f = 0; f < kFactors; f++) met_[f][block] = most(met_[f][block], own_[f][index]);
        }
    }

    // Whether a tile must be computed that passed the forward's test by slack − 1 bits.
    bool needed(const Geometry& g, int query_block, int key_block, uint8_t slack) const {
        for (int f = 0; f < kFactors; f++) {
            const float own = own_[f][query_block - g.first_block];
            // A NaN never skips a tile.
            if (own != -kInfinity && !(own - met_[f][key_block] <= float(slack - 1) + kTolerance)) return true;
        }
        return false;
    }

private:
    static constexpr int kFactors = 5;
    static constexpr float kTolerance = 2.0f;  // similar gradients differ by about this many bits

    void measure_rows(const relpos_problem& p, const Geometry& g, int64_t b, int64_t h, const QueryBlock& rows,
                      int index, const float* weights) {
        const HeadRows gradients(p, p.grad_out, b, h), queries(p, p.q, b, h);
        const Rotation rotation = Rotation::of_queries(p, b);
        alignas(64) float d[RELPOS_MAX_DIM], q[RELPOS_MAX_DIM];
        float largest_factor[kFactors] = {};
        bool sound = true;
        for (int lane = rows.begin; lane < rows.end; lane++) {
            const int64_t query = rows.start + lane - g.offset;
            read_rows(gradients, Rotation(), query, 1, g.value_dim, g.value_width, d);
            read_rows(queries, rotation, query, 1, g.head_dim, g.width, q);
            Vec sizes = {}, squares = {};
            for (int c = 0; c < g.value_width; c += kLanes) sizes += absolute(load(d + c));
            for (int c = 0; c < g.width; c += kLanes) squares += load(q + c) * load(q + c);
            const float gradient = sum(sizes), square = sum(squares);
            const float length = __builtin_sqrtf(square), weight = weights ? __builtin_fabsf(weights[rows.start + lane]) : 0.0f;
            const float from_lse = p.grad_lse ? __builtin_fabsf(p.grad_lse[(b * p.heads + h) * p.queries + query]) : 0.0f;
            const float factors[kFactors] = {gradient, gradient * length, gradient * weight, from_lse * length,
                                             from_lse * weight};
            for (int f = 0; f < kFactors; f++) {
                largest_factor[f] = most(largest_factor[f], factors[f]);
                sound &= factors[f] < kInfinity;
            }
        }
        for (int f = 0; f < kFactors; f++)
            own_[f][index] = sound ? __builtin_log2f(largest_factor[f]) : __builtin_nanf("");
    }

    float *own_[kFactors], *met_[kFactors];
};

}  // namespace RELPOS_ISA
}  // namespace relpos
