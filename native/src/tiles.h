// How a call is divided into tiles of 64 queries × 64 keys, and how rows are laid out for the micro-kernel.
//
// Blocks of queries and of keys both start at multiples of 64 tokens, so that the causal diagonal always runs from
// corner to corner of the tile (block, block), wherever the queries stand; their first block may start in the middle,
// and their last block may end there. A tile of scores is stored transposed, [key][query]: a vector holds neighbouring
// queries of one key, so that the softmax needs no horizontal sums, and keys and values are read in their own layout.
#pragma once

#include "api.h"
#include "gemm.h"
#include "rows.h"

namespace relpos {
namespace RELPOS_ISA {

constexpr int kTile = RELPOS_TILE;

struct Geometry {
    int queries, keys, head_dim, value_dim;
    int width, value_width;  // head_dim and value_dim, rounded up to a multiple of the vector size
    int offset;              // index of the first query
    int key_blocks;
    int first_block, last_block;  // of the queries
    int query_blocks;
    int group;  // query heads per key head

    explicit Geometry(const relpos_problem& p)
        : queries(int(p.queries)), keys(int(p.keys)), head_dim(int(p.head_dim)), value_dim(int(p.value_dim)),
          width(round_up(head_dim)), value_width(round_up(value_dim)), offset(int(p.start)),
          key_blocks((keys + kTile - 1) / kTile), first_block(offset / kTile),
          last_block((offset + queries - 1) / kTile), query_blocks(last_block - first_block + 1),
          group(int(p.heads / p.key_heads)) {}
};

// The keys that one query may see, but for padding: first ≤ key < last, both 0 if there are none.
struct KeyRange {
    int32_t first = 0, last = 0;

    KeyRange(const relpos_problem& p, int64_t b, int64_t query) {
        const int64_t index = p.start + query;
        int64_t from = p.first ? p.first[b * p.queries + query] : 0, to = p.end ? p.end[b * p.queries + query] : p.keys;
        if (p.causal) to = least(to, index + 1);
        if (p.window_left >= 0) from = most(from, index - p.window_left);
        if (p.window_right >= 0) to = least(to, index + p.window_right + 1);
        to = least(to, p.keys);
        if (from < to) first = int32_t(from), last = int32_t(to);
    }
};

// A block of queries, and the keys that its lanes may see.
struct QueryBlock {
    int start;               // index of lane 0
    int begin, end;          // lanes that hold a query
    int from, to;            // the same, rounded outwards to vectors
    int low, high;           // the keys seen by any lane: low ≤ key < high
    int all_from, all_to;    // the keys seen by every lane
    alignas(64) int32_t first[kTile];
    alignas(64) int32_t last[kTile];  // one past the last key; lanes that see no key have 0 in both

    QueryBlock(const relpos_problem& p, const Geometry& g, int64_t b, int block) {
        start = block * kTile;
        begin = most(0, g.offset - start);
        end = least(kTile, g.offset + g.queries - start);
        from = round_down(begin);
        to = round_up(end);
        low = g.keys, high = 0, all_from = 0, all_to = g.keys;
        for (int lane = 0; lane < kTile; lane++) {
            first[lane] = last[lane] = 0;
            if (lane < begin || lane >= end) continue;
            const KeyRange seen(p, b, start + lane - g.offset);
            if (seen.first >= seen.last) {
                all_to = 0;
                continue;
            }
            first[lane] = seen.first, last[lane] = seen.last;
            low = least(low, int(first[lane])), high = most(high, int(last[lane]));
            all_from = most(all_from, int(first[lane])), all_to = least(all_to, int(last[lane]));
        }
    }

    // The blocks of keys that any lane may see: from lowest() to highest(), none if lowest() > highest().
    int lowest() const { return low < high ? low / kTile : 0; }
    int highest() const { return low < high ? (high - 1) / kTile : -1; }
};

// The keys of a tile, and whether any of its entries is masked.
struct KeyBlock {
    int start, count;
    bool visible;   // by any query
    bool masked;    // from any query
    bool diagonal;  // nothing above the diagonal needs to be computed
    alignas(64) int32_t index[kTile];  // index of a key, or one that no query sees

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

// Whether a lane sees a key of a masked tile.
struct Sight {
    const QueryBlock& rows;
    const KeyBlock& columns;

    bool operator()(int lane, int key) const {
        return columns.index[key] >= rows.first[lane] && columns.index[key] < rows.last[lane];
    }
    // The same for the lanes of a vector.
    RELPOS_MEMBER VecInt lanes(int lane, int key) const {
        const VecInt index = columns.index[key] - VecInt{};
        return (index >= load(rows.first + lane)) & (index < load(rows.last + lane));
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

RELPOS_INLINE const float* rows_of(const relpos_array& x, int64_t b, int64_t h) {
    return static_cast<const float*>(x.data) + b * x.batch + h * x.head;
}

// How the tiles read keys, or values.
enum class Source {
    direct,  // where they lie
    packed,  // from a copy of the head, made before its many tiles
    by_tile  // converted for each tile from half precision, so that no copy in float32 exists
};

// Rows far apart in memory share few sets of the cache, rows that are no multiple of the vector size cannot be read by
// full vectors, and keys may have to be rotated: these are copied.
RELPOS_INLINE Source key_source(const relpos_problem& p, const Geometry& g) {
    if (p.dtype != RELPOS_FLOAT32) return Source::by_tile;
    return g.width != g.head_dim || p.k.row != g.head_dim || p.k_cos ? Source::packed : Source::direct;
}
RELPOS_INLINE Source value_source(const relpos_problem& p, const Geometry& g) {
    if (p.dtype != RELPOS_FLOAT32) return Source::by_tile;
    return g.value_width != g.value_dim || p.v.row != g.value_dim ? Source::packed : Source::direct;
}

// Where the rows of a tile are.
struct TileRows {
    const float* data;
    int64_t row;
};

// The keys and values of one key head, in rows that are a multiple of the vector size.
class KeyHead {
public:
    // Floats of the copies of one head.
    static int64_t packed_floats(const relpos_problem& p, const Geometry& g) {
        return (key_source(p, g) == Source::packed ? int64_t(g.keys) * g.width : 0) +
               (value_source(p, g) == Source::packed ? int64_t(g.keys) * g.value_width : 0);
    }
    // Floats of the two buffers of a tile.
    static int64_t tile_floats(const Geometry& g) { return int64_t(kTile) * (g.width + g.value_width); }

    KeyHead(const relpos_problem& p, const Geometry& g, int64_t b, int64_t head, float* packed)
        : g_(g), k_(p, p.k, b, head), v_(p, p.v, b, head), rotation_(Rotation::of_keys(p, b)),
          key_source_(key_source(p, g)), value_source_(value_source(p, g)), keys_(packed),
          values_(packed + (key_source_ == Source::packed ? int64_t(g.keys) * g.width : 0)) {}

    // Makes the copies of keys [begin, end).
    void pack(int64_t begin, int64_t end) const {
        if (key_source_ == Source::packed)
            read_rows(k_, rotation_, begin, end - begin, g_.head_dim, g_.width, keys_ + begin * g_.width);
        if (value_source_ == Source::packed)
            read_rows(v_, Rotation(), begin, end - begin, g_.value_dim, g_.value_width,
                      values_ + begin * g_.value_width);
    }

    // `buffer` has tile_floats; keys and values have separate parts of it.
    TileRows keys(int64_t start, int count, float* buffer) const {
        if (key_source_ == Source::direct) return {k_.floats(start), k_.stride()};
        if (key_source_ == Source::packed) return {keys_ + start * g_.width, g_.width};
        read_rows(k_, rotation_, start, count, g_.head_dim, g_.width, buffer);
        return {buffer, g_.width};
    }
    TileRows values(int64_t start, int count, float* buffer) const {
        if (value_source_ == Source::direct) return {v_.floats(start), v_.stride()};
        if (value_source_ == Source::packed) return {values_ + start * g_.value_width, g_.value_width};
        float* own = buffer + int64_t(kTile) * g_.width;
        read_rows(v_, Rotation(), start, count, g_.value_dim, g_.value_width, own);
        return {own, g_.value_width};
    }

private:
    const Geometry& g_;
    HeadRows k_, v_;
    Rotation rotation_;
    Source key_source_, value_source_;
    float *keys_, *values_;
};

}  // namespace RELPOS_ISA
}  // namespace relpos
