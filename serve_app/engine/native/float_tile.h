// Products of float32 in registers: the tile that attention and matrix products share.

#pragma once

#include <cstring>
#include <type_traits>

#include "vector.h"

namespace {

// Memory that will be read next, asked for while a tile computes: `step` floats of it per row of the tile's weights.
struct Ahead {
    const float* from = nullptr;
    long step = 0;
};

// acc[MR][NR] += x packed [depth][MR] times w [depth][ldw], a register tile.
template <int MR>
inline void multiply(const float* x, const float* w, long ldw, long depth, Ahead ahead, vec (&acc)[MR][2]) {
#pragma GCC unroll 4
    for (long k = 0; k < depth; ++k, w += ldw, x += MR, ahead.from += ahead.step) {
        __builtin_prefetch(ahead.from, 0, 2);
        const vec left = load(w), right = load(w + VL);
#pragma GCC unroll 12
        for (int m = 0; m < MR; ++m) {
            const vec a = splat(x[m]);
            acc[m][0] += a * left;
            acc[m][1] += a * right;
        }
    }
}

// y[MR][columns] = x packed [depth][MR] times w [depth][ldw], or added to what y holds; columns <= NR.
template <int MR>
void tile(const float* x, const float* w, long ldw, long depth, bool adds, float* y, long ldy, int columns,
          Ahead ahead) {
    vec acc[MR][2];
    float edge[NR];
    const bool whole = columns == NR;
    for (int m = 0; m < MR; ++m) {
        const float* start = adds ? y + m * ldy : nullptr;
        if (start && !whole) {
            std::memset(edge, 0, sizeof edge);
            std::memcpy(edge, start, columns * sizeof(float));
            start = edge;
        }
        acc[m][0] = start ? load(start) : vec{};
        acc[m][1] = start ? load(start + VL) : vec{};
    }
    multiply<MR>(x, w, ldw, depth, ahead, acc);
    for (int m = 0; m < MR; ++m) {
        float* to = whole ? y + m * ldy : edge;
        store(to, acc[m][0]);
        store(to + VL, acc[m][1]);
        if (!whole) std::memcpy(y + m * ldy, edge, columns * sizeof(float));
    }
}

// Calls with `rows`, from 1 to MOST, as a constant.
template <int MOST, typename F>
inline void with_rows(int rows, F call) {
    if constexpr (MOST > 0) {
        if (rows == MOST) return call(std::integral_constant<int, MOST>{});
        with_rows<MOST - 1>(rows, call);
    }
}

inline void multiply_tile(int rows, const float* x, const float* w, long ldw, long depth, bool adds, float* y, long ldy,
                          int columns, Ahead ahead) {
    with_rows<MAX_ROWS>(rows, [&](auto mr) { tile<mr>(x, w, ldw, depth, adds, y, ldy, columns, ahead); });
}

// Rows cut into tiles of nearly equal height.
struct RowTiles {
    long rows, count;
    explicit RowTiles(long rows, long most = MAX_ROWS) : rows(rows), count((rows + most - 1) / most) {}
    long start(long i) const { return rows * i / count; }
    int height(long i) const { return int(start(i + 1) - start(i)); }
};

void pack_rows(const float* x, long ldx, int rows, long depth, float* packed) {
    for (int m = 0; m < rows; ++m)
        for (long k = 0; k < depth; ++k) packed[k * rows + m] = x[m * ldx + k];
}

}  // namespace
