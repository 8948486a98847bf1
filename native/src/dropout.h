// Dropout on the weights, from a generator without state: what is dropped depends on the seed, the head and the indices of
// query and key, never on tiles or threads. relpos/attend/reference.py defines it.
#pragma once

#include "tiles.h"

namespace relpos {
namespace RELPOS_ISA {

template <class T>
RELPOS_INLINE T mix(T x) {
    x ^= x >> 16;
    x *= 0x21f0aaadu;
    x ^= x >> 15;
    x *= 0x735a2d97u;
    x ^= x >> 15;
    return x;
}

// The dropout of one head.
class Dropout {
public:
    Dropout(const relpos_problem& p, int64_t b, int64_t h)
        : threshold_(uint32_t(p.dropout * 0x1p24f)), factor_(1.0f / (1.0f - p.dropout)) {
        const uint64_t seed = uint64_t(p.seed);
        head_ = mix(mix(mix(uint32_t(seed)) + uint32_t(seed >> 32)) + uint32_t(b * p.heads + h));
    }

    explicit operator bool() const { return threshold_; }

    // Multiplies each entry of a tile by 0 or 1/(1 − p).
    __attribute__((noinline)) void apply(const QueryBlock& rows, const KeyBlock& columns, float* tile) const {
        alignas(64) uint32_t row[kTile];
        for (int lane = rows.from; lane < rows.to; lane++) row[lane] = mix(head_ + uint32_t(rows.start + lane));
        for (int key = 0; key < columns.count; key++) {
            const uint32_t column = mix(uint32_t(columns.start + key) + 0x9e3779b9u);
            float* at = tile + key * kTile;
            for (int lane = rows.from; lane < rows.to; lane += kLanes) {
                VecBits bits;
                memcpy(&bits, row + lane, sizeof bits);
                const VecBits kept = mix(bits + column) >> 8;
                store(at + lane, kept >= threshold_ ? load(at + lane) * factor_ : Vec{});
            }
        }
    }

private:
    uint32_t threshold_, head_;  // the threshold of 24 bits
    float factor_;
};

}  // namespace RELPOS_ISA
}  // namespace relpos
