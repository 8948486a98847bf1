// How a call is divided into tiles of 64 queries × 64 keys, and how rows are laid out for the micro-kernel.
//
// Blocks of queries and of keys both start at multiples of 64 positions, so that the causal diagonal always runs from
// corner to corner of the tile (block, block), also if there are fewer queries than keys; the first block of queries
// may then start in the middle. A tile of scores is stored transposed, [key][query]: a vector holds neighbouring
// queries of one key, so that the softmax needs no horizontal sums, and keys and values are read in their own layout.
#pragma once

#include "api.h"
#include "gemm.h"

namespace relpos {
namespace RELPOS_ISA {

constexpr int kTile = RELPOS_TILE;

struct Geometry {
    int queries, keys, head_dim;
    int width;        // head_dim, rounded up to a multiple of the vector size
    int offset;       // position of the first query
    int key_blocks;
    int first_block;  // of the queries
    int query_blocks;
    int group;        // query heads per key head

    explicit Geometry(const relpos_problem& p)
        : queries(int(p.queries)), keys(int(p.keys)), head_dim(int(p.head_dim)), width(round_up(head_dim)),
          offset(keys - queries), key_blocks((keys + kTile - 1) / kTile), first_block(offset / kTile),
          query_blocks(key_blocks - first_block), group(int(p.heads / p.key_heads)) {}
};

// A block of queries, and the keys that its lanes may see.
struct QueryBlock {
    int start;               // position of lane 0
    int begin, end;          // lanes that hold a query
    int from, to;            // the same, rounded outwards to vectors
    int low, high;           // the keys seen by any lane: low ≤ key < high
    int all_from, all_to;    // the keys seen by every lane
    alignas(64) int32_t first[kTile];
    alignas(64) int32_t last[kTile];  // one past the last key; lanes without a query see no key

    QueryBlock(const relpos_problem& p, const Geometry& g, int64_t b, int block) {
        start = block * kTile;
        begin = most(0, g.offset - start);
        end = least(kTile, g.keys - start);
        from = round_down(begin);
        to = round_up(end);
        low = g.keys, high = 0, all_from = 0, all_to = g.keys;
        for (int lane = 0; lane < kTile; lane++) {
            const int position = start + lane;
            first[lane] = last[lane] = 0;
            if (lane < begin || lane >= end) continue;
            first[lane] = p.first ? p.first[b * g.keys + position] : 0;
            last[lane] = p.end ? p.end[b * g.keys + position] : g.keys;
            if (p.causal) last[lane] = least(last[lane], int32_t(position + 1));
            low = least(low, int(first[lane])), high = most(high, int(last[lane]));
            all_from = most(all_from, int(first[lane])), all_to = least(all_to, int(last[lane]));
        }
    }
};

// The keys of a tile, and whether any of its entries is masked.
struct KeyBlock {
    int start, count;
    bool visible;   // by any query
    bool masked;    // from any query
    bool diagonal;  // nothing above the diagonal needs to be computed
    alignas(64) int32_t index[kTile];  // position of a key, or a position that no query sees

    KeyBlock(const relpos_problem& p, const Geometry& g, const QueryBlock& rows, int64_t b, int block) {
        start = block * kTile;
        count = least(kTile, g.keys - start);
        diagonal = p.causal && start == rows.start;
        visible = start < rows.high && start + count > rows.low;
        masked = start < rows.all_from || start + count > rows.all_to;
        if (!visible) return;
        const uint8_t* padding = p.padding ? p.padding + b * g.keys + start : nullptr;
        bool any = !padding;
        if (padding)
            for (int j = 0; j < count; j++) padding[j] ? any = true : masked = true;
        visible = any;
        if (masked)
            for (int j = 0; j < count; j++) index[j] = !padding || padding[j] ? start + j : INT32_MAX;
    }
};

typedef float Quad __attribute__((vector_size(16)));
typedef float UnalignedQuad __attribute__((vector_size(16), aligned(4), may_alias));

// Rows [begin, end) × columns → panels [panel][column][lane], times `scale`; lanes without a row are 0.
static void pack_transposed(const float* rows, int64_t stride, int begin, int end, int columns, float scale,
                            float* out) {
    const auto place = [&](int lane, int column) {
        return out + (int64_t(lane / kPanel) * columns + column) * kPanel + lane % kPanel;
    };
    if (end - begin < kTile) memset(out, 0, sizeof(float) * kTile * columns);
    int lane = begin;
    // Four by four where the numbers of lanes and columns allow it.
    for (; lane % 4 && lane < end; lane++)
        for (int c = 0; c < columns; c++) *place(lane, c) = rows[(lane - begin) * stride + c] * scale;
    for (; lane + 4 <= end; lane += 4) {
        const float* source = rows + (lane - begin) * stride;
        int c = 0;
        for (; c + 4 <= columns; c += 4) {
            const auto quad = [&](int i) -> Quad {
                return *reinterpret_cast<const UnalignedQuad*>(source + i * stride + c) * scale;
            };
            const Quad r0 = quad(0), r1 = quad(1), r2 = quad(2), r3 = quad(3);
            const Quad a = __builtin_shufflevector(r0, r1, 0, 4, 1, 5), b = __builtin_shufflevector(r2, r3, 0, 4, 1, 5);
            const Quad d = __builtin_shufflevector(r0, r1, 2, 6, 3, 7), e = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
            float* to = place(lane, c);
            *reinterpret_cast<UnalignedQuad*>(to) = __builtin_shufflevector(a, b, 0, 1, 4, 5);
            *reinterpret_cast<UnalignedQuad*>(to + kPanel) = __builtin_shufflevector(a, b, 2, 3, 6, 7);
            *reinterpret_cast<UnalignedQuad*>(to + 2 * kPanel) = __builtin_shufflevector(d, e, 0, 1, 4, 5);
            *reinterpret_cast<UnalignedQuad*>(to + 3 * kPanel) = __builtin_shufflevector(d, e, 2, 3, 6, 7);
        }
        for (; c < columns; c++)
            for (int i = 0; i < 4; i++) *place(lane + i, c) = source[i * stride + c] * scale;
    }
    for (; lane < end; lane++)
        for (int c = 0; c < columns; c++) *place(lane, c) = rows[(lane - begin) * stride + c] * scale;
}

// Rows → contiguous rows of `width` ≥ columns, padded with 0.
static void pack_rows(const float* rows, int64_t stride, int64_t count, int columns, int width, float* out) {
    for (int64_t i = 0; i < count; i++, rows += stride, out += width) {
        memcpy(out, rows, sizeof(float) * columns);
        for (int c = columns; c < width; c++) out[c] = 0.0f;
    }
}

RELPOS_INLINE const float* rows_of(const relpos_array& x, int64_t b, int64_t h) {
    return x.data + b * x.batch + h * x.head;
}

// The keys and values of one key head, in rows that are a multiple of the vector size.
struct KeyHead {
    const float* keys;
    int64_t key_row;
    const float* values;
    int64_t value_row;
};

// Rows far apart in memory share few sets of the cache, and rows that are no multiple of the vector size cannot be read
// by full vectors: both are copied once, before the many tiles that read them.
RELPOS_INLINE bool needs_packing(const relpos_problem& p, const Geometry& g) {
    return g.width != g.head_dim || p.k.row != g.head_dim || p.v.row != g.head_dim;
}
RELPOS_INLINE int64_t packed_floats(const Geometry& g) { return int64_t(2) * g.keys * g.width; }

// Copies keys [begin, end) of the head into `packed`.
static void pack_keys(const relpos_problem& p, const Geometry& g, int64_t b, int64_t key_head, int64_t begin,
                      int64_t end, float* packed) {
    const float* k = rows_of(p.k, b, key_head);
    const float* v = rows_of(p.v, b, key_head);
    pack_rows(k + begin * p.k.row, p.k.row, end - begin, g.head_dim, g.width, packed + begin * g.width);
    pack_rows(v + begin * p.v.row, p.v.row, end - begin, g.head_dim, g.width, packed + (g.keys + begin) * g.width);
}
RELPOS_INLINE KeyHead key_head(const relpos_problem& p, const Geometry& g, int64_t b, int64_t head,
                               const float* packed) {
    if (packed) return {packed, g.width, packed + int64_t(g.keys) * g.width, g.width};
    return {rows_of(p.k, b, head), p.k.row, rows_of(p.v, b, head), p.v.row};
}

}  // namespace RELPOS_ISA
}  // namespace relpos
