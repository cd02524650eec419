// Matrix products of rows with a packed weight, in the arithmetic that the weight asks for.
//
// Each kind of arithmetic says how rows are packed, how a piece of the weight is expanded, and how a tile is computed. The
// loop around them, `multiply_in_team`, is the same for all.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "float_tile.h"
#include "weight.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Rows of x come in two kinds, which a product may treat differently: what one gives must not depend on what is beside it.
enum class Rows { SINGLES, CHUNKS };  // tokens that are drawn one by one; tokens of prompts

// Each thread that takes part in a product has an object of one of the types below:
//   depth_tile   rows of a panel that are open at a time: they stay in the first-level cache while all rows of x pass
//   most_rows    rows of a tile, at most
//   row_bytes    of a packed row of x; a tile's rows lie together
//   pack         packs the rows of a tile
//   open         expands [from, from + count) of a panel's depth
//   multiply     adds to y [height][NR] what the packed rows give with the piece that is open
//   finish       adds what is not yet added
class Float32Product {
   public:
    static constexpr long depth_tile = 256;
    static constexpr bool tells_rows_apart = false;
    static constexpr long most_rows(Rows) { return MAX_ROWS; }
    static long row_bytes(long depth) { return depth * long(sizeof(float)); }
    static void pack(const float* x, long ldx, int rows, long depth, void* packed) {
        pack_rows(x, ldx, rows, depth, static_cast<float*>(packed));
    }

    Float32Product(const Weight& weight, long depth) : weight(weight), depth(depth) {}
    void open(Rows, long panel, long from, long count) {
        this->from = from, this->count = count;
        piece = expand_floats(weight, panel, depth, from, count, room);
    }
    // The tiles of a panel share the work of asking for the next panel's memory.
    void multiply(const void* packed, int height, float* y, long tile, long num_tiles) const {
        const bool asks = weight.bits == 32 && num_tiles > 1;
        const long step = asks ? (NR + num_tiles - 1) / num_tiles : 0;
        const Ahead ahead{piece + (asks ? count * (NR + tile * step) : 0), step};
        multiply_tile(height, static_cast<const float*>(packed) + from * height, piece, NR, count, true, y, NR, NR, ahead);
    }
    void finish() {}

   private:
    const Weight& weight;
    long depth, from = 0, count = 0;
    const float* piece = nullptr;
    alignas(64) float room[depth_tile * NR];
};

#ifdef HAS_BFLOAT16_PRODUCTS

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

// Tiles 0 to 3 += rows x [height][BLOCK] times w [BLOCK / 2][NR][2].
inline void multiply_block(const bf16* x, const bf16* w, int height) {
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

inline void store_tiles(float* y, int height) {
    constexpr long stride = NR * sizeof(float);
    _tile_stored(0, y, stride);
    _tile_stored(1, y + 16, stride);
    if (height > 16) {
        _tile_stored(2, y + 16 * NR, stride);
        _tile_stored(3, y + 16 * NR + 16, stride);
    }
}

// y [height][NR] += x [depth / BLOCK][height][BLOCK] times w [depth / 2][NR][2].
inline void multiply_tiles(const bf16* x, const bf16* w, long depth, int height, float* y) {
    constexpr long stride = NR * sizeof(float);
    asm volatile("" : : : "memory");  // GCC's header does not say that tile loads and stores touch memory
    _tile_loadd(0, y, stride);
    _tile_loadd(1, y + 16, stride);
    if (height > 16) {
        _tile_loadd(2, y + 16 * NR, stride);
        _tile_loadd(3, y + 16 * NR + 16, stride);
    }
    for (long k = 0; k < depth; k += BLOCK, x += height * BLOCK, w += BLOCK * NR) multiply_block(x, w, height);
    store_tiles(y, height);
    asm volatile("" : : : "memory");
}

// The same of `count` blocks, each into a y [height][NR] of its own.
inline void multiply_tiles_apart(const bf16* x, const bf16* w, long count, int height, float* y) {
    asm volatile("" : : : "memory");
    for (long b = 0; b < count; ++b, x += height * BLOCK, w += BLOCK * NR, y += height * NR) {
        _tile_zero(0);
        _tile_zero(1);
        if (height > 16) {
            _tile_zero(2);
            _tile_zero(3);
        }
        multiply_block(x, w, height);
        store_tiles(y, height);
    }
    asm volatile("" : : : "memory");
}

inline void release_tiles() { _tile_release(); }

#else

constexpr bool has_matrix_unit = false;
inline void configure_tiles(int) {}
inline void multiply_tiles(const bf16*, const bf16*, long, int, float*) {}
inline void multiply_tiles_apart(const bf16*, const bf16*, long, int, float*) {}
inline void release_tiles() {}

#endif

// A register tile: y[MR][NR] += x [depth / BLOCK][MR][BLOCK] times w [depth / 2][NR][2].
template <int MR>
void multiply_pairs(const bf16* x, const bf16* w, long depth, float* y) {
    __m512 acc[MR][2];
    for (int m = 0; m < MR; ++m) acc[m][0] = _mm512_loadu_ps(y + m * NR), acc[m][1] = _mm512_loadu_ps(y + m * NR + VL);
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
    for (int m = 0; m < MR; ++m) _mm512_storeu_ps(y + m * NR, acc[m][0]), _mm512_storeu_ps(y + m * NR + VL, acc[m][1]);
}

// x [rows][depth] -> [depth / BLOCK][rows][BLOCK], the rest zero; and, unless null, what each block of a row adds up to.
inline void pack_rounded(const float* x, long ldx, int rows, long depth, bf16* packed, float* sums) {
    for (int m = 0; m < rows; ++m)
        for (long k = 0; k < depth; k += BLOCK) {
            const float* from = x + m * ldx + k;
            const uint32_t some = depth - k >= BLOCK ? ~0u : (1u << (depth - k)) - 1;
            const __m512 left = _mm512_maskz_loadu_ps(__mmask16(some), from);
            const __m512 right = _mm512_maskz_loadu_ps(__mmask16(some >> VL), from + VL);
            const __m512bh rounded = _mm512_cvtne2ps_pbh(right, left);
            bf16* to = packed + k * rows + m * BLOCK;
            std::memcpy(to, &rounded, 64);
            if (sums) sums[k / BLOCK * rows + m] = sum(load(to) + load(to + VL));
        }
}

#endif

#if defined(__AVX512VNNI__)

// How values of a block are multiplied: each step takes a vector of w, and as many bytes of a row.
struct Bytes {
    using Value = int8_t;
    using Code = uint8_t;
    using Sums = __m512i;
    static constexpr long per_step = 4;
    static constexpr float offset = -128;  // of 8-bit weights
    static Sums zero() { return _mm512_setzero_si512(); }
    static Sums add(Sums sums, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sums, w, x); }
    static __m512 floats(Sums sums) { return _mm512_cvtepi32_ps(sums); }
};

#ifdef HAS_BFLOAT16_PRODUCTS
struct Pairs {
    using Value = bf16;
    using Code = bf16;
    using Sums = __m512;
    static constexpr long per_step = 2;
    static constexpr float offset = 0;
    static Sums zero() { return _mm512_setzero_ps(); }
    static Sums add(Sums sums, __m512i w, __m512i x) { return _mm512_dpbf16_ps(sums, (__m512bh)w, (__m512bh)x); }
    static __m512 floats(Sums sums) { return sums; }
};
#endif

constexpr int MOST_QUANTISED_ROWS = 6;  // twice as many sums as tiles that do not end at each block

// y[MR][NR] += rows of blocks x times w [depth / per step][NR][per step], which has a scale per block of a column (and a
// minimum, where it has 4 bits). `sums` [depth / BLOCK][MR] are what the rows' blocks add up to, `scales` theirs, or null.
template <typename Kind, int MR>
void multiply_quantised(const typename Kind::Value* x, long block_stride, long step_stride, long row_stride, const float* sums,
                        const float* scales, const typename Kind::Code* w, const fp16* w_scales, long bits, long depth,
                        float* y) {
    __m512 acc[MR][2];
    for (int m = 0; m < MR; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (long k = 0; k < depth; k += BLOCK, x += block_stride, sums += MR, w_scales += bits == 4 ? 2 * NR : NR) {
        typename Kind::Sums dots[MR][2];
        for (int m = 0; m < MR; ++m) dots[m][0] = dots[m][1] = Kind::zero();
#pragma GCC unroll 4
        for (int step = 0; step < BLOCK / Kind::per_step; ++step, w += Kind::per_step * NR) {
            const __m512i left = _mm512_loadu_si512(w), right = _mm512_loadu_si512(w + Kind::per_step * VL);
#pragma GCC unroll 6
            for (int m = 0; m < MR; ++m) {
                int32_t few;
                std::memcpy(&few, x + step * step_stride + m * row_stride, 4);
                const __m512i values = _mm512_set1_epi32(few);
                dots[m][0] = Kind::add(dots[m][0], left, values);
                dots[m][1] = Kind::add(dots[m][1], right, values);
            }
        }
        ask_ahead(w_scales, SCALES_AHEAD);
        if (bits == 4) ask_ahead(w_scales + NR, SCALES_AHEAD);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m512 d = __m512(load(w_scales + half * VL));
            const __m512 low = bits == 4 ? __m512(load(w_scales + NR + half * VL))
                                         : _mm512_mul_ps(d, _mm512_set1_ps(Kind::offset));
#pragma GCC unroll 6
            for (int m = 0; m < MR; ++m) {
                const __m512 scale = scales ? _mm512_mul_ps(d, _mm512_set1_ps(scales[m])) : d;
                acc[m][half] = _mm512_fmadd_ps(scale, Kind::floats(dots[m][half]), acc[m][half]);
                if (bits == 4 || Kind::offset != 0)
                    acc[m][half] = _mm512_fmadd_ps(low, _mm512_set1_ps(sums[m]), acc[m][half]);
            }
        }
        if (scales) scales += MR;
    }
    for (int m = 0; m < MR; ++m)
        for (int half = 0; half < 2; ++half) {
            float* to = y + m * NR + half * VL;
            _mm512_storeu_ps(to, _mm512_add_ps(acc[m][half], _mm512_loadu_ps(to)));
        }
}

#ifdef HAS_BFLOAT16_PRODUCTS

// Rows in bfloat16. A packed tile: rows as pack_rounded makes them, then what their blocks add up to.
//
// Singles meet few rows, and expanding the weights is most of the work: of weights of 4 or 8 bits, q is multiplied, and the
// sum of each block is scaled. Chunks are many rows, and scaling all those sums would cost more than rounding the weights
// themselves to bfloat16.
class Bfloat16Product {
   public:
    static constexpr long depth_tile = 64;
    static constexpr bool tells_rows_apart = true;
    static long most_rows(Rows rows) {
        return has_matrix_unit ? 32 : rows == Rows::SINGLES ? MOST_QUANTISED_ROWS : MAX_ROWS;
    }
    static long row_bytes(long depth) {
        return round_up(depth, BLOCK) * long(sizeof(bf16)) + round_up(depth, BLOCK) / BLOCK * long(sizeof(float));
    }
    static void pack(const float* x, long ldx, int rows, long depth, void* packed) {
        bf16* values = static_cast<bf16*>(packed);
        pack_rounded(x, ldx, rows, depth, values, reinterpret_cast<float*>(values + round_up(depth, BLOCK) * rows));
    }

    Bfloat16Product(const Weight& weight, long depth) : weight(weight), depth(depth) {}
    ~Bfloat16Product() {
        if (configured) release_tiles();
    }
    void open(Rows rows, long panel, long from, long count) {
        this->from = from, this->count = round_up(count, BLOCK);
        in_blocks = rows == Rows::SINGLES && weight.bits != 16;
        if (in_blocks) {
            bf16* to = room[turn ^= 1];
            expand_codes(weight, panel, depth, from, count, to);
            piece = to;
            scales = weight.scales + (panel * depth + from) / BLOCK * scales_per_block();
        } else {
            piece = expand_pairs(weight, panel, depth, from, this->count, room[0]);
        }
    }
    void multiply(const void* packed, int height, float* y, long, long) {
        const bf16* x = static_cast<const bf16*>(packed);
        const float* sums = reinterpret_cast<const float*>(x + round_up(depth, BLOCK) * height) + from / BLOCK * height;
        x += from * height;
        if (has_matrix_unit && configured != height) configure_tiles(configured = height);
        if (!in_blocks) {
            if (has_matrix_unit)
                multiply_tiles(x, piece, count, height, y);
            else
                with_rows<MAX_ROWS>(height, [&](auto rows) { multiply_pairs<rows>(x, piece, count, y); });
        } else if (has_matrix_unit) {
            finish();
            multiply_tiles_apart(x, piece, count / BLOCK, height, apart);
            unjoined = {scales, sums, height, count / BLOCK, y};
        } else {
            with_rows<MOST_QUANTISED_ROWS>(height, [&](auto rows) {
                multiply_quantised<Pairs, rows>(x, rows * BLOCK, 2, BLOCK, sums, nullptr, piece, scales, weight.bits, count, y);
            });
        }
    }
    // Sums that lie apart are joined as late as possible: what tiles have just stored is slow to load.
    void finish() {
        if (unjoined.blocks == 0) return;
        if (unjoined.blocks == MOST_BLOCKS)
            join<MOST_BLOCKS>();
        else
            join<0>();
        unjoined.blocks = 0;
    }

   private:
    static constexpr long MOST_BLOCKS = depth_tile / BLOCK;

    struct Unjoined {
        const fp16* scales;
        const float* sums;
        int height;
        long blocks;
        float* y;
    };

    long scales_per_block() const { return weight.bits == 4 ? 2 * NR : NR; }

    // y += the sums of blocks, scaled. COUNT: how many, if known.
    template <long COUNT>
    void join() const {
        const auto& [scales, sums, height, blocks, y] = unjoined;
        const long count = COUNT ? COUNT : blocks;
        for (int half = 0; half < 2; ++half) {
            __m512 d[MOST_BLOCKS], low[MOST_BLOCKS];
            for (long b = 0; b < count; ++b) {
                const fp16* here = scales + b * scales_per_block() + half * VL;
                ask_ahead(here, SCALES_AHEAD);
                d[b] = __m512(load(here));
                low[b] = weight.bits == 4 ? __m512(load(here + NR)) : _mm512_setzero_ps();
            }
            for (int m = 0; m < height; ++m) {
                __m512 acc = _mm512_loadu_ps(y + m * NR + half * VL);
                for (long b = 0; b < count; ++b) {
                    acc = _mm512_fmadd_ps(d[b], _mm512_loadu_ps(apart + (b * height + m) * NR + half * VL), acc);
                    acc = _mm512_fmadd_ps(low[b], _mm512_set1_ps(sums[b * height + m]), acc);
                }
                _mm512_storeu_ps(y + m * NR + half * VL, acc);
            }
        }
    }

    const Weight& weight;
    long depth, from = 0, count = 0;
    int configured = 0;
    bool in_blocks = false;
    const bf16* piece = nullptr;
    const fp16* scales = nullptr;
    int turn = 0;
    Unjoined unjoined = {};
    alignas(64) bf16 room[2][depth_tile * NR];
    alignas(64) float apart[MOST_BLOCKS * 32 * NR];
};

#endif

// A packed tile: bytes [depth / 4][rows][4], sums and scales [depth / BLOCK][rows]; depth is a multiple of BLOCK. Scales are
// per block because a few values of a row may be a thousand times as large as the others.
class Int8Product {
   public:
    static constexpr long depth_tile = 256;
    static constexpr bool tells_rows_apart = false;
    static constexpr long most_rows(Rows) { return MOST_QUANTISED_ROWS; }
    static long row_bytes(long depth) { return depth + depth / BLOCK * 2 * long(sizeof(float)); }
    static void pack(const float* x, long ldx, int rows, long depth, void* packed) {
        int8_t* bytes = static_cast<int8_t*>(packed);
        float* sums = reinterpret_cast<float*>(bytes + depth * rows);
        float* scales = sums + depth / BLOCK * rows;
        for (int m = 0; m < rows; ++m)
            for (long k = 0; k < depth; k += BLOCK) {
                const __m512 left = _mm512_loadu_ps(x + m * ldx + k), right = _mm512_loadu_ps(x + m * ldx + k + VL);
                const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(left), _mm512_abs_ps(right)));
                // what is NaN or infinite makes the whole block NaN
                const __mmask16 lost = _mm512_fpclass_ps_mask(left, 0x99) | _mm512_fpclass_ps_mask(right, 0x99);
                const float scale = lost ? NAN : most / 127;
                const __m512 inverse = _mm512_set1_ps(scale > 0 ? 1 / scale : 0.0f);
                const __m512i q[2] = {_mm512_cvtps_epi32(_mm512_mul_ps(left, inverse)),
                                      _mm512_cvtps_epi32(_mm512_mul_ps(right, inverse))};
                for (int half = 0; half < 2; ++half) {
                    alignas(16) int32_t fours[4];
                    _mm_store_si128(reinterpret_cast<__m128i*>(fours), _mm512_cvtsepi32_epi8(q[half]));
                    for (int i = 0; i < 4; ++i)
                        std::memcpy(bytes + (k / 4 + half * 4 + i) * 4 * rows + 4 * m, fours + i, 4);
                }
                scales[k / BLOCK * rows + m] = scale;
                sums[k / BLOCK * rows + m] = scale * float(_mm512_reduce_add_epi32(_mm512_add_epi32(q[0], q[1])));
            }
    }

    Int8Product(const Weight& weight, long depth) : weight(weight), depth(depth) {}
    void open(Rows, long panel, long from, long count) {
        this->from = from, this->count = count;
        piece = expand_bytes(weight, panel, depth, from, count, room);
        w_scales = weight.scales + (panel * depth + from) / BLOCK * NR * (weight.bits == 4 ? 2 : 1);
    }
    void multiply(const void* packed, int height, float* y, long, long) const {
        const int8_t* bytes = static_cast<const int8_t*>(packed);
        const float* sums = reinterpret_cast<const float*>(bytes + depth * height) + from / BLOCK * height;
        const float* scales = sums + depth / BLOCK * height;
        with_rows<MOST_QUANTISED_ROWS>(height, [&](auto rows) {
            multiply_quantised<Bytes, rows>(bytes + from * rows, rows * BLOCK, rows * 4, 4, sums, scales, piece, w_scales,
                                            weight.bits, count, y);
        });
    }
    void finish() {}

   private:
    const Weight& weight;
    long depth, from = 0, count = 0;
    const uint8_t* piece = nullptr;
    const fp16* w_scales = nullptr;
    alignas(64) uint8_t room[depth_tile * NR];
};

#endif

// Floats that packed rows take, whatever the arithmetic.
inline long packed_floats(long rows, long depth) { return rows * (round_up(depth, BLOCK) + depth / BLOCK + 1); }

template <typename Product>
void multiply_in_team(const float* x, long ldx, const Weight& weight, const float* bias, float* y, long ldy, long singles,
                      long rows, long columns, long depth, float* room) {
    const long panels = (columns + NR - 1) / NR, row_bytes = Product::row_bytes(depth);
    // small enough to share the work evenly when other processes take a core, large enough that the next panel is ours
    const long chunk = std::max(1L, panels / (omp_get_num_threads() * 4));
    if (!Product::tells_rows_apart) singles = rows;
    struct Group {
        Rows kind;
        long first;
        RowTiles tiles;
    };
    const Group groups[] = {{Rows::SINGLES, 0, RowTiles(singles, Product::most_rows(Rows::SINGLES))},
                            {Rows::CHUNKS, singles, RowTiles(rows - singles, Product::most_rows(Rows::CHUNKS))}};
    const auto packed = [&](long row) { return reinterpret_cast<char*>(room) + row * row_bytes; };
    thread_local std::vector<float> sums;  // [rows][NR], because rows of y may lie where they push each other out of the cache
    sums.resize(rows * NR);
    Product product(weight, depth);
    for (const Group& group : groups)
#pragma omp for schedule(static) nowait
        for (long t = 0; t < group.tiles.count; ++t) {
            const long row = group.first + group.tiles.start(t);
            Product::pack(x + row * ldx, ldx, group.tiles.height(t), depth, packed(row));
        }
#pragma omp barrier
#pragma omp for schedule(dynamic, chunk)
    for (long p = 0; p < panels; ++p) {
        const size_t bytes = std::min<long>(NR, columns - p * NR) * sizeof(float);
        for (long row = 0; row < rows; ++row)
            if (bias)
                std::memcpy(sums.data() + row * NR, bias + p * NR, bytes);
            else
                std::memset(sums.data() + row * NR, 0, NR * sizeof(float));
        for (const Group& group : groups)
            for (long k = 0; k < depth && group.tiles.count; k += Product::depth_tile) {
                product.open(group.kind, p, k, std::min(Product::depth_tile, depth - k));
                for (long t = 0; t < group.tiles.count; ++t) {
                    const long row = group.first + group.tiles.start(t);
                    product.multiply(packed(row), group.tiles.height(t), sums.data() + row * NR, t, group.tiles.count);
                }
            }
        product.finish();
        for (long row = 0; row < rows; ++row) std::memcpy(y + row * ldy + p * NR, sums.data() + row * NR, bytes);
    }
}

inline bool supports(Arithmetic arithmetic) {
#if defined(__AVX512VNNI__)
#ifdef HAS_BFLOAT16_PRODUCTS
    if (arithmetic == BFLOAT16) return true;
#endif
    if (arithmetic == INT8) return true;
#endif
    return arithmetic == FLOAT32;
}

// y [rows][ldy] = x [rows][ldx] times a weight [columns][depth], plus bias unless null. The first `singles` rows are such
// (see Rows). For a team, which shares `room` (see packed_floats).
inline void multiply_in_team(const float* x, long ldx, const Weight& weight, const float* bias, float* y, long ldy,
                             long singles, long rows, long columns, long depth, float* room) {
#if defined(__AVX512VNNI__)
#ifdef HAS_BFLOAT16_PRODUCTS
    if (weight.arithmetic == BFLOAT16)
        return multiply_in_team<Bfloat16Product>(x, ldx, weight, bias, y, ldy, singles, rows, columns, depth, room);
#endif
    if (weight.arithmetic == INT8)
        return multiply_in_team<Int8Product>(x, ldx, weight, bias, y, ldy, singles, rows, columns, depth, room);
#endif
    multiply_in_team<Float32Product>(x, ldx, weight, bias, y, ldy, singles, rows, columns, depth, room);
}

}  // namespace
