// Matrix products of rows with a packed weight, in the arithmetic that the weight asks for.
//
// Each kind of arithmetic says how rows are packed, how a piece of the weight is expanded, and how a tile is computed. The
// loop around them, `multiply_in_team`, is the same for all.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "float_tile.h"
#include "weight.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr long DEPTH_TILE = 256;  // rows of a panel that stay in the first-level cache while all rows of x pass

// Where a tile's result is added: rows [height] of y, of which `width` columns are ours.
struct Target {
    float* y;
    long ldy;
    int height, width;
};

// Lets `compute(y, ldy)` add NR columns to a target that may have fewer.
template <typename F>
inline void add_to(const Target& to, F compute) {
    if (to.width == NR) return compute(to.y, to.ldy);
    alignas(64) float edge[32 * NR] = {};
    for (int m = 0; m < to.height; ++m) std::memcpy(edge + m * NR, to.y + m * to.ldy, to.width * sizeof(float));
    compute(edge, NR);
    for (int m = 0; m < to.height; ++m) std::memcpy(to.y + m * to.ldy, edge + m * NR, to.width * sizeof(float));
}

// Calls the instance of `tiles` for so many rows.
template <typename F, int... MR>
inline void with_rows(int rows, F call, std::integer_sequence<int, MR...>) {
    ((rows == MR + 1 ? call(std::integral_constant<int, MR + 1>{}) : void()), ...);
}

// Each thread that takes part in a product has an object of one of the following types:
//   most_rows    rows of a tile, at most
//   row_bytes    of a packed row of x; a tile's rows lie together
//   pack         packs the rows of a tile
//   open         expands [from, from + count) of a panel's depth
//   multiply     adds to y what the packed rows give with the piece that is open
class Float32Product {
   public:
    static constexpr long most_rows() { return MAX_ROWS; }
    static long row_bytes(long depth) { return depth * long(sizeof(float)); }
    static void pack(const float* x, long ldx, int rows, long depth, void* packed) {
        pack_rows(x, ldx, rows, depth, static_cast<float*>(packed));
    }

    explicit Float32Product(const Weight& weight, long depth) : weight(weight), depth(depth) {}
    void open(long panel, long from, long count) {
        piece = expand_floats(weight, panel, depth, this->from = from, this->count = count, room);
    }
    // The tiles of a panel share the work of asking for the next panel's memory.
    void multiply(const void* packed, const Target& to, long tile, const RowTiles& tiles) const {
        const bool asks = weight.bits == 32 && tiles.count > 1;
        const long step = asks ? (NR + tiles.count - 1) / tiles.count : 0;
        const Ahead ahead{piece + (asks ? count * (NR + tile * step) : 0), step};
        tile_of(to.height)(static_cast<const float*>(packed) + from * to.height, piece, NR, count, true, to.y, to.ldy,
                           to.width, ahead);
    }

   private:
    const Weight& weight;
    long depth, from = 0, count = 0;
    const float* piece = nullptr;
    alignas(64) float room[DEPTH_TILE * NR];
};

#if defined(__AVX512BF16__)

#if defined(__AMX_BF16__) && defined(__linux__)

struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// The matrix unit, which the kernel lends to processes that ask.
inline bool ask_for_matrix_unit() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
const bool has_matrix_unit = ask_for_matrix_unit();

// Registers 0 to 3: sums [upper and lower 16 rows][left and right 16 columns]; 4, 5: rows of x; 6, 7: columns of w.
inline void configure_tiles(int height) {
    TileConfig config;
    const int upper = std::min(height, 16), lower = std::max(height - 16, 0);
    const int rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int i = 0; i < 8; ++i) config.rows[i] = uint8_t(rows[i]), config.bytes_per_row[i] = rows[i] ? 64 : 0;
    asm volatile("" : : "r"(&config) : "memory");  // GCC's header does not say that all of it is read
    _tile_loadconfig(&config);
}

inline void multiply_tiles(const bf16* x, const bf16* w, long depth, int height, float* y, long ldy) {
    const long stride = ldy * long(sizeof(float));
    asm volatile("" : : : "memory");  // GCC's header does not say that tile loads and stores touch memory
    _tile_loadd(0, y, stride);
    _tile_loadd(1, y + 16, stride);
    if (height > 16) {
        _tile_loadd(2, y + 16 * ldy, stride);
        _tile_loadd(3, y + 16 * ldy + 16, stride);
    }
    for (long k = 0; k < depth; k += BLOCK, x += height * BLOCK, w += BLOCK * NR) {
        _tile_loadd(6, w, 128);
        _tile_loadd(7, w + 32, 128);
        _tile_loadd(4, x, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (height > 16) {
            _tile_loadd(5, x + 16 * BLOCK, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, y, stride);
    _tile_stored(1, y + 16, stride);
    if (height > 16) {
        _tile_stored(2, y + 16 * ldy, stride);
        _tile_stored(3, y + 16 * ldy + 16, stride);
    }
    asm volatile("" : : : "memory");
}

inline void release_tiles() { _tile_release(); }

#else

constexpr bool has_matrix_unit = false;
inline void configure_tiles(int) {}
inline void multiply_tiles(const bf16*, const bf16*, long, int, float*, long) {}
inline void release_tiles() {}

#endif

// A register tile: y[MR][NR] += x [depth / BLOCK][MR][BLOCK] times w [depth / 2][NR][2].
template <int MR>
void multiply_pairs(const bf16* x, const bf16* w, long depth, float* y, long ldy) {
    __m512 acc[MR][2];
    for (int m = 0; m < MR; ++m) acc[m][0] = _mm512_loadu_ps(y + m * ldy), acc[m][1] = _mm512_loadu_ps(y + m * ldy + VL);
    for (long k = 0; k < depth; k += BLOCK, x += MR * BLOCK)
        for (long p = 0; p < BLOCK; p += 2, w += 2 * NR) {
            const __m512bh left = (__m512bh)_mm512_loadu_si512(w), right = (__m512bh)_mm512_loadu_si512(w + NR);
#pragma GCC unroll 12
            for (int m = 0; m < MR; ++m) {
                int32_t two;
                std::memcpy(&two, x + m * BLOCK + p, 4);
                const __m512bh a = (__m512bh)_mm512_set1_epi32(two);
                acc[m][0] = _mm512_dpbf16_ps(acc[m][0], left, a);
                acc[m][1] = _mm512_dpbf16_ps(acc[m][1], right, a);
            }
        }
    for (int m = 0; m < MR; ++m) _mm512_storeu_ps(y + m * ldy, acc[m][0]), _mm512_storeu_ps(y + m * ldy + VL, acc[m][1]);
}

class Bfloat16Product {
   public:
    static long most_rows() { return has_matrix_unit ? 32 : MAX_ROWS; }
    static long row_bytes(long depth) { return round_up(depth, BLOCK) * long(sizeof(bf16)); }
    // x [rows][depth] -> [depth / BLOCK][rows][BLOCK], the rest zero
    static void pack(const float* x, long ldx, int rows, long depth, void* packed) {
        for (int m = 0; m < rows; ++m)
            for (long k = 0; k < depth; k += BLOCK) {
                const float* from = x + m * ldx + k;
                const uint32_t some = depth - k >= BLOCK ? ~0u : (1u << (depth - k)) - 1;
                const __m512 left = _mm512_maskz_loadu_ps(__mmask16(some), from);
                const __m512 right = _mm512_maskz_loadu_ps(__mmask16(some >> VL), from + VL);
                const __m512bh rounded = _mm512_cvtne2ps_pbh(right, left);
                std::memcpy(static_cast<bf16*>(packed) + k * rows + m * BLOCK, &rounded, 64);
            }
    }

    explicit Bfloat16Product(const Weight& weight, long depth) : weight(weight), depth(depth) {}
    ~Bfloat16Product() {
        if (configured) release_tiles();
    }
    void open(long panel, long from, long count) {
        this->from = from, this->count = round_up(count, BLOCK);
        piece = expand_pairs(weight, panel, depth, from, this->count, room);
    }
    void multiply(const void* packed, const Target& to, long, const RowTiles&) {
        const bf16* x = static_cast<const bf16*>(packed) + from * to.height;
        add_to(to, [&](float* y, long ldy) {
            if (has_matrix_unit) {
                if (configured != to.height) configure_tiles(configured = to.height);
                multiply_tiles(x, piece, count, to.height, y, ldy);
            } else {
                with_rows(to.height, [&](auto rows) { multiply_pairs<rows>(x, piece, count, y, ldy); },
                          std::make_integer_sequence<int, MAX_ROWS>{});
            }
        });
    }

   private:
    const Weight& weight;
    long depth, from = 0, count = 0;
    int configured = 0;
    const bf16* piece = nullptr;
    alignas(64) bf16 room[DEPTH_TILE * NR];
};

#endif

#if defined(__AVX512VNNI__)

// y[MR][NR] += rows of bytes [depth / 4][MR][4], of which `sums` [depth / BLOCK][MR] are the sums of each block and `scales`
// the scales, times w [depth / 4][NR][4] with its own scales.
template <int MR>
void multiply_bytes(const int8_t* x, const float* sums, const float* scales, const uint8_t* w, const float* w_scales,
                    long bits, long depth, float* y, long ldy) {
    __m512 acc[MR][2];
    for (int m = 0; m < MR; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (long k = 0; k < depth; k += BLOCK, sums += MR, w_scales += bits == 4 ? 2 * NR : NR) {
        __m512i dots[MR][2];
        for (int m = 0; m < MR; ++m) dots[m][0] = dots[m][1] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int four = 0; four < BLOCK / 4; ++four, w += 4 * NR, x += 4 * MR) {
            const __m512i left = _mm512_loadu_si512(w), right = _mm512_loadu_si512(w + 4 * VL);
#pragma GCC unroll 6
            for (int m = 0; m < MR; ++m) {
                int32_t bytes;
                std::memcpy(&bytes, x + 4 * m, 4);
                dots[m][0] = _mm512_dpbusd_epi32(dots[m][0], left, _mm512_set1_epi32(bytes));
                dots[m][1] = _mm512_dpbusd_epi32(dots[m][1], right, _mm512_set1_epi32(bytes));
            }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m512 d = _mm512_loadu_ps(w_scales + half * VL);
            const __m512 low = bits == 4 ? _mm512_loadu_ps(w_scales + NR + half * VL) : _mm512_mul_ps(d, _mm512_set1_ps(-128.0f));
#pragma GCC unroll 6
            for (int m = 0; m < MR; ++m) {
                acc[m][half] = _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(dots[m][half]), acc[m][half]);
                acc[m][half] = _mm512_fmadd_ps(low, _mm512_set1_ps(sums[m]), acc[m][half]);
            }
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int half = 0; half < 2; ++half) {
            float* to = y + m * ldy + half * VL;
            _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_set1_ps(scales[m]), acc[m][half], _mm512_loadu_ps(to)));
        }
}

// A packed tile: bytes [depth / 4][rows][4], sums [depth / BLOCK][rows], scales [rows]; depth is a multiple of BLOCK.
class Int8Product {
   public:
    static constexpr long most_rows() { return 6; }
    static long row_bytes(long depth) { return depth + depth / BLOCK * long(sizeof(float)) + long(sizeof(float)); }
    static void pack(const float* x, long ldx, int rows, long depth, void* packed) {
        int8_t* bytes = static_cast<int8_t*>(packed);
        float* sums = reinterpret_cast<float*>(bytes + depth * rows);
        float* scales = sums + depth / BLOCK * rows;
        for (int m = 0; m < rows; ++m) {
            const float* row = x + m * ldx;
            __m512 most = _mm512_setzero_ps(), spoiled = _mm512_setzero_ps();  // NaN once a value is NaN or infinite
            for (long k = 0; k < depth; k += VL) {
                const __m512 v = _mm512_loadu_ps(row + k);
                most = _mm512_max_ps(most, _mm512_abs_ps(v));
                spoiled = _mm512_fmadd_ps(v, _mm512_setzero_ps(), spoiled);
            }
            const float largest = _mm512_reduce_max_ps(most);
            scales[m] = largest / 127 + _mm512_reduce_add_ps(spoiled);
            const __m512 inverse = _mm512_set1_ps(largest > 0 ? 127 / largest : 0.0f);
            for (long k = 0; k < depth; k += BLOCK) {
                __m512i total = _mm512_setzero_si512();
                for (long half = 0; half < BLOCK; half += VL) {
                    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(row + k + half), inverse));
                    total = _mm512_add_epi32(total, q);
                    alignas(16) int32_t fours[4];
                    _mm_store_si128(reinterpret_cast<__m128i*>(fours), _mm512_cvtsepi32_epi8(q));
                    for (int i = 0; i < 4; ++i) std::memcpy(bytes + ((k + half) / 4 + i) * 4 * rows + 4 * m, fours + i, 4);
                }
                sums[k / BLOCK * rows + m] = float(_mm512_reduce_add_epi32(total));
            }
        }
    }

    explicit Int8Product(const Weight& weight, long depth) : weight(weight), depth(depth) {}
    void open(long panel, long from, long count) {
        this->from = from, this->count = count;
        piece = expand_bytes(weight, panel, depth, from, count, room);
        piece_scales = weight.scales + (panel * depth + from) / BLOCK * NR * (weight.bits == 4 ? 2 : 1);
    }
    void multiply(const void* packed, const Target& to, long, const RowTiles&) const {
        const int8_t* bytes = static_cast<const int8_t*>(packed);
        const float* sums = reinterpret_cast<const float*>(bytes + depth * to.height);
        const float* scales = sums + depth / BLOCK * to.height;
        add_to(to, [&](float* y, long ldy) {
            with_rows(to.height, [&](auto rows) {
                multiply_bytes<rows>(bytes + from * to.height, sums + from / BLOCK * to.height, scales, piece, piece_scales,
                                     weight.bits, count, y, ldy);
            }, std::make_integer_sequence<int, 6>{});
        });
    }

   private:
    const Weight& weight;
    long depth, from = 0, count = 0;
    const uint8_t* piece = nullptr;
    const float* piece_scales = nullptr;
    alignas(64) uint8_t room[DEPTH_TILE * NR];
};

#endif

// Floats that packed rows take, whatever the arithmetic.
inline long packed_floats(long rows, long depth) { return rows * (round_up(depth, BLOCK) + depth / BLOCK + 1); }

template <typename Product>
void multiply_in_team(const float* x, long ldx, const Weight& weight, const float* bias, float* y, long ldy, long rows,
                      long columns, long depth, float* room) {
    const RowTiles tiles(rows, Product::most_rows());
    const long panels = (columns + NR - 1) / NR, row_bytes = Product::row_bytes(depth);
    char* packed = reinterpret_cast<char*>(room);
    // small enough to share the work evenly when other processes take a core, large enough that the next panel is ours
    const long chunk = std::max(1L, panels / (omp_get_num_threads() * 4));
    Product product(weight, depth);
#pragma omp for schedule(static)
    for (long t = 0; t < tiles.count; ++t)
        Product::pack(x + tiles.start(t) * ldx, ldx, tiles.height(t), depth, packed + tiles.start(t) * row_bytes);
#pragma omp for schedule(dynamic, chunk)
    for (long p = 0; p < panels; ++p) {
        const int width = int(std::min<long>(NR, columns - p * NR));
        for (long k = 0; k < depth; k += DEPTH_TILE) {
            product.open(p, k, std::min(DEPTH_TILE, depth - k));
            for (long t = 0; t < tiles.count; ++t) {
                const Target to{y + tiles.start(t) * ldy + p * NR, ldy, tiles.height(t), width};
                for (int m = 0; k == 0 && m < to.height; ++m)
                    if (bias)
                        std::memcpy(to.y + m * ldy, bias + p * NR, width * sizeof(float));
                    else
                        std::memset(to.y + m * ldy, 0, width * sizeof(float));
                product.multiply(packed + tiles.start(t) * row_bytes, to, t, tiles);
            }
        }
    }
}

inline bool supports(Arithmetic arithmetic) {
#if defined(__AVX512BF16__)
    if (arithmetic == BFLOAT16) return true;
#endif
#if defined(__AVX512VNNI__)
    if (arithmetic == INT8) return true;
#endif
    return arithmetic == FLOAT32;
}

// y [rows][ldy] = x [rows][ldx] times a weight [columns][depth], plus bias unless null. For a team, which shares `room`
// (see packed_floats).
inline void multiply_in_team(const float* x, long ldx, const Weight& weight, const float* bias, float* y, long ldy,
                             long rows, long columns, long depth, float* room) {
#if defined(__AVX512BF16__)
    if (weight.arithmetic == BFLOAT16)
        return multiply_in_team<Bfloat16Product>(x, ldx, weight, bias, y, ldy, rows, columns, depth, room);
#endif
#if defined(__AVX512VNNI__)
    if (weight.arithmetic == INT8)
        return multiply_in_team<Int8Product>(x, ldx, weight, bias, y, ldy, rows, columns, depth, room);
#endif
    multiply_in_team<Float32Product>(x, ldx, weight, bias, y, ldy, rows, columns, depth, room);
}

}  // namespace
