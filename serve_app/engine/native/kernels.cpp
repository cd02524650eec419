// CPU kernels of the engine: matrix products on packed weights, paged attention, norms and gates.
//
// Plain C functions on float32 (the cache may also hold bfloat16), threads by OpenMP, vectors by GCC's portable vector
// types: the compiler maps them to AVX-512, AVX2 or NEON. No torch headers, so that it compiles in seconds.
//
// Every sum runs in one fixed order that does not depend on how many rows share the call: a row's result is the same,
// bit for bit, alone and in any batch.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int VL = 16, MAX_ROWS = 12;  // floats of a vector; rows of a register tile
#elif defined(__AVX2__)
constexpr int VL = 8, MAX_ROWS = 6;
#else
constexpr int VL = 4, MAX_ROWS = 8;
#endif
constexpr int NR = 2 * VL;  // columns of a register tile, and of a packed panel

typedef float vec __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef uint32_t uvec __attribute__((vector_size(VL * 4)));

struct bf16 {
    uint16_t bits;
};

inline vec splat(float x) { return x - vec{}; }
inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline vec load(const bf16* p) {
    return reinterpret_cast<vec>(__builtin_convertvector(*reinterpret_cast<const hvec*>(p), uvec) << 16);
}
inline void store(float* p, vec v) { *reinterpret_cast<vec*>(p) = v; }
inline float as_float(float x) { return x; }
inline float as_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) {  // rounds to nearest even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    p->bits = std::isnan(x) ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename V, typename F>
inline float fold(V v, F combine) {  // halves a vector until one lane is left
    if constexpr (sizeof v == 4 * sizeof(float)) {
        return combine(combine(v[0], v[1]), combine(v[2], v[3]));
    } else {
        typedef float half __attribute__((vector_size(sizeof(V) / 2)));
        half parts[2];
        std::memcpy(parts, &v, sizeof v);
        return fold(combine(parts[0], parts[1]), combine);
    }
}
inline float sum(vec v) {
    return fold(v, [](auto a, auto b) { return a + b; });
}
inline float maximum(vec v) {
    return fold(v, [](auto a, auto b) { return a > b ? a : b; });
}

// exp to about 2 ulp (Cephes' expf); arguments below -87 give 0.
inline vec exponential(vec x) {
    const vec clamped = x < -87.0f ? splat(-87.0f) : (x > 88.0f ? splat(88.0f) : x);
    const vec shifted = clamped * 1.44269504088896341f + 12582912.0f;  // rounds to the nearest integer
    const vec whole = shifted - 12582912.0f;
    vec r = clamped - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const ivec exponent = __builtin_convertvector(whole, ivec) + 127;
    const vec scaled = y * reinterpret_cast<vec>(exponent << 23);
    return x < -87.0f ? vec{} : scaled;
}

inline float exponential(float x) { return exponential(splat(x))[0]; }

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

// y[MR][columns] = x packed [depth][MR] times w [depth][ldw], plus bias, or plus what y holds; columns <= NR.
template <int MR>
void tile(const float* x, const float* w, long ldw, long depth, const float* bias, bool adds, float* y, long ldy,
          int columns, Ahead ahead) {
    vec acc[MR][2];
    float edge[NR];
    const bool whole = columns == NR;
    for (int m = 0; m < MR; ++m) {
        const float* start = bias ? bias : adds ? y + m * ldy : nullptr;
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

constexpr long DEPTH_TILE = 256;  // rows of a panel that stay in the first-level cache while all rows of x pass

using Tile = void (*)(const float*, const float*, long, long, const float*, bool, float*, long, int, Ahead);
template <int... MR>
constexpr Tile pick(int rows, std::integer_sequence<int, MR...>) {
    constexpr Tile tiles[] = {tile<MR + 1>...};
    return tiles[rows - 1];
}
inline Tile tile_of(int rows) { return pick(rows, std::make_integer_sequence<int, MAX_ROWS>{}); }

// Rows cut into tiles of nearly equal height.
struct RowTiles {
    long rows, count;
    explicit RowTiles(long rows) : rows(rows), count((rows + MAX_ROWS - 1) / MAX_ROWS) {}
    long start(long i) const { return rows * i / count; }
    int height(long i) const { return int(start(i + 1) - start(i)); }
};

void pack_rows(const float* x, long ldx, int rows, long depth, float* packed) {
    for (int m = 0; m < rows; ++m)
        for (long k = 0; k < depth; ++k) packed[k * rows + m] = x[m * ldx + k];
}

float* scratch(size_t floats) {  // one growing buffer per thread
    thread_local std::unique_ptr<float[]> buffer;
    thread_local size_t size = 0;
    if (floats > size) {
        buffer.reset(new float[floats]);
        size = floats;
    }
    return buffer.get();
}

// A weight [columns][depth], packed in panels of NR columns. Weights that come from a quantised file are kept as what they
// were there, 4 or 8 bits with a scale per 32 of a column's depth: expanded they are the same floats, bit for bit.
enum Kind : long { FLOATS = 0, FOUR_BITS = 4, EIGHT_BITS = 8 };
constexpr long BLOCK = 32;

struct Weight {
    const void* data;     // [panels][depth][NR] floats; else [panels][depth / n][NR] words of n = 32 / kind values each
    const float* scales;  // 4 bits: [panels][depth / BLOCK][scale, minimum][NR]; 8 bits: [panels][depth / BLOCK][NR]
    Kind kind;
};

// Rows [from, from + count) of a panel as floats [count][NR]; `from` is a multiple of BLOCK unless they are floats already.
const float* expand(const Weight& w, long panel, long depth, long from, long count, float* out) {
    const long row = panel * depth + from, block = row / BLOCK;
    if (w.kind == FLOATS) return static_cast<const float*>(w.data) + row * NR;
    const int32_t* words = static_cast<const int32_t*>(w.data) + row / (32 / w.kind) * NR;
    for (long b = 0; b < count / BLOCK; ++b) {
        float* to = out + b * BLOCK * NR;
        for (int half = 0; half < NR; half += VL) {
            if (w.kind == FOUR_BITS) {
                const float* scale = w.scales + (block + b) * 2 * NR + half;
                const vec m = load(scale + NR);
                // value j of a word is left where it is: as a number it is 16^j times as large, and its scale as much smaller
                vec d[8] = {load(scale)};
                for (int j = 1; j < 8; ++j) d[j] = d[j - 1] * 0.0625f;
                for (long k = 0; k < BLOCK; k += 8, to += 8 * NR) {
                    const ivec word = *reinterpret_cast<const ivec*>(words + (b * BLOCK + k) / 8 * NR + half);
#pragma GCC unroll 7
                    for (int j = 0; j < 7; ++j)
                        store(to + j * NR + half, d[j] * __builtin_convertvector(word & (15 << (4 * j)), vec) + m);
                    store(to + 7 * NR + half, d[0] * __builtin_convertvector((word >> 28) & 15, vec) + m);
                }
                to -= BLOCK * NR;
            } else {
                const vec d = load(w.scales + (block + b) * NR + half);
                for (long k = 0; k < BLOCK; k += 4) {
                    const ivec word = *reinterpret_cast<const ivec*>(words + (b * BLOCK + k) / 4 * NR + half);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; ++j)
                        store(to + (k + j) * NR + half, d * __builtin_convertvector((word << (24 - 8 * j)) >> 24, vec));
                }
            }
        }
    }
    return out;
}

// Writes BLOCK weights as q * scale + minimum (4 bits) or q * scale (8 bits), if that is what they are, exactly.
#ifdef __FLT16_MANT_DIG__
bool compress_block(const float* w, Kind kind, int* q, float& scale, float& minimum) {
    float low = w[0], high = w[0];
    for (long k = 1; k < BLOCK; ++k) low = std::min(low, w[k]), high = std::max(high, w[k]);
    const int most = kind == FOUR_BITS ? 15 : 127;
    minimum = kind == FOUR_BITS ? low : 0.0f;
    const float guess = kind == FOUR_BITS ? (high - low) / 15 : std::max(high, -low) / 127;
    if (!(guess < 65504.0f)) return false;
    for (int step : {0, 1, -1}) {  // files hold the scale in half precision
        _Float16 half = static_cast<_Float16>(guess);
        uint16_t bits;
        std::memcpy(&bits, &half, 2);
        if (step < 0 && bits == 0) continue;
        bits = uint16_t(bits + step);
        std::memcpy(&half, &bits, 2);
        scale = static_cast<float>(half);
        bool same = true;
        for (long k = 0; k < BLOCK && same; ++k) {
            const float x = scale > 0 ? std::nearbyint((w[k] - minimum) / scale) : 0.0f;
            same = std::abs(x) <= most && std::fma(scale, x, minimum) == w[k];
            q[k] = int(x);
        }
        if (same) return true;
    }
    return false;
}
#else
bool compress_block(const float*, Kind, int*, float&, float&) { return false; }
#endif

struct Attention {
    const void *query, *key, *value;  // [heads][tokens][dim] with strides; key and value: this step's
    void *keys, *values, *out;        // caches [kv heads][slots][dim]; out [tokens][heads][value dim]
    const int64_t* rows;              // [num rows][4]: first token, tokens, context length, offset into blocks
    const int64_t* blocks;            // block ids of all rows
    const int64_t* slots;             // [tokens]: where each token's key and value go
    const float* sinks;               // [heads] or null
    long query_head_stride, query_token_stride, key_head_stride, key_token_stride, value_head_stride,
        value_token_stride;
    long num_rows, num_tokens, num_heads, num_kv_heads, key_dim, value_dim, block_size, num_slots, window;
    float scaling, softcap;
    int num_threads, is_bf16;

    long group() const { return num_heads / num_kv_heads; }
};

struct Item {
    long row, head, first, tokens;
};

// The soft cap, where there is one: scores become cap * tanh(scores / cap).
inline void soften(float* scores, long count, float cap) {
    if (cap == 0) return;
    for (long j = 0; j < count; ++j) scores[j] = std::tanh(scores[j] / cap) * cap;
}

// Scores become exp(score - peak); returns their sum.
float exponentials(float* scores, long count, float peak) {
    vec total{};
    long j = 0;
    for (; j + VL <= count; j += VL) {
        const vec e = exponential(load(scores + j) - peak);
        store(scores + j, e);
        total += e;
    }
    float rest = 0;
    for (; j < count; ++j) rest += scores[j] = exponential(scores[j] - peak);
    return sum(total) + rest;
}

inline float largest(const float* scores, long count, float peak) {
    long j = 0;
    vec most = splat(peak);
    for (; j + VL <= count; j += VL) most = load(scores + j) > most ? load(scores + j) : most;
    peak = maximum(most);
    for (; j < count; ++j) peak = std::max(peak, scores[j]);
    return peak;
}

// Calls visit(j, vector of position low + j, vector some way ahead) for `count` positions of a paged cache.
template <typename T, typename F>
inline void walk(const Attention& a, const void* cache, long head, const int64_t* blocks, long low, long count, long dim,
                 F visit) {
    const T* base = static_cast<const T*>(cache) + head * a.num_slots * dim;
    long block = low / a.block_size, place = low % a.block_size;
    for (long j = 0; j < count; ++block, place = 0) {
        const T* here = base + (blocks[block] * a.block_size + place) * dim;
        const long end = std::min(count, j + a.block_size - place);
        const T* next = end < count ? base + blocks[block + 1] * a.block_size * dim : here;
        for (; j < end; ++j, here += dim, next += dim) visit(j, here, next);
    }
}

template <typename T>
inline void prefetch(const T* from, long dim) {
    for (long d = 0; d < dim; d += 64 / long(sizeof(T))) __builtin_prefetch(from + d, 0, 2);
}

// One token, the query heads of one key head: scores over the context, then the weighted sum of the values.
template <typename T>
void decode(const Attention& a, const Item& item) {
    const int64_t* row = a.rows + item.row * 4;
    const int64_t* blocks = a.blocks + row[3];
    const long token = row[0], context = row[2], group = a.group(), dim = a.key_dim, vdim = a.value_dim;
    const long low = a.window ? std::max(0L, context - a.window) : 0, count = context - low;
    float* queries = scratch(group * (dim + count + vdim + NR));
    float* scores = queries + group * dim;
    float* mixed = scores + group * count;
    for (long g = 0; g < group; ++g) {
        const T* q = static_cast<const T*>(a.query) + (item.head * group + g) * a.query_head_stride +
                     token * a.query_token_stride;
        for (long d = 0; d < dim; ++d) queries[g * dim + d] = as_float(q[d]) * a.scaling;
    }
    walk<T>(a, a.keys, item.head, blocks, low, count, dim, [&](long j, const T* key, const T* next) {
        prefetch(next, dim);
        for (long g = 0; g < group; ++g) {
            const float* q = queries + g * dim;
            vec acc{};
            long d = 0;
            for (; d + VL <= dim; d += VL) acc += load(q + d) * load(key + d);
            float score = sum(acc);
            for (; d < dim; ++d) score += q[d] * as_float(key[d]);
            scores[g * count + j] = score;
        }
    });
    for (long g = 0; g < group; ++g) {
        float* s = scores + g * count;
        soften(s, count, a.softcap);
        const float sink = a.sinks ? a.sinks[item.head * group + g] : -INFINITY;
        const float peak = largest(s, count, sink);
        const float total = exponentials(s, count, peak) + (a.sinks ? exponential(sink - peak) : 0.0f);
        for (long j = 0; j < count; ++j) s[j] /= total;
    }
    std::fill_n(mixed, group * vdim, 0.0f);
    for (long g = 0; g < group; g += 4) {  // 4 query heads x 2 vectors of the value in registers
        const int heads = int(std::min(4L, group - g));
        long d = 0;
        for (; d + NR <= vdim; d += NR) {
            vec acc[4][2] = {};
            walk<T>(a, a.values, item.head, blocks, low, count, vdim, [&](long j, const T* value, const T* next) {
                const vec left = load(value + d), right = load(value + d + VL);
                prefetch(next + d, NR);
                for (int h = 0; h < heads; ++h) {
                    const vec w = splat(scores[(g + h) * count + j]);
                    acc[h][0] += w * left;
                    acc[h][1] += w * right;
                }
            });
            for (int h = 0; h < heads; ++h) {
                store(mixed + (g + h) * vdim + d, acc[h][0]);
                store(mixed + (g + h) * vdim + d + VL, acc[h][1]);
            }
        }
        if (d < vdim)
            walk<T>(a, a.values, item.head, blocks, low, count, vdim, [&](long j, const T* value, const T*) {
                for (int h = 0; h < heads; ++h)
                    for (long e = d; e < vdim; ++e)
                        mixed[(g + h) * vdim + e] += scores[(g + h) * count + j] * as_float(value[e]);
            });
    }
    T* out = static_cast<T*>(a.out) + (token * a.num_heads + item.head * group) * vdim;
    for (long i = 0; i < group * vdim; ++i) put(out + i, mixed[i]);
}

constexpr long KEY_TILE = 4 * VL;

// Some tokens of a chunk, the query heads of one key head: tiles of keys with a running softmax.
template <typename T>
void prefill(const Attention& a, const Item& item) {
    const int64_t* row = a.rows + item.row * 4;
    const int64_t* blocks = a.blocks + row[3];
    const long group = a.group(), dim = a.key_dim, vdim = a.value_dim, token = row[0] + item.first;
    const long position = row[2] - row[1] + item.first;  // of the first query token
    const RowTiles tiles(item.tokens * group);           // row r is token r / group, head r % group
    const long padded = (vdim + NR - 1) / NR * NR, panels = KEY_TILE / NR;
    float* queries = scratch(tiles.rows * (dim + 2 * KEY_TILE + padded + 2) + KEY_TILE * (dim + padded));
    float* scores = queries + tiles.rows * dim;
    float* weights = scores + tiles.rows * KEY_TILE;
    float* mixed = weights + tiles.rows * KEY_TILE;
    float* peaks = mixed + tiles.rows * padded;
    float* totals = peaks + tiles.rows;
    float* keys = totals + tiles.rows;       // [panels][dim][NR]
    float* values = keys + KEY_TILE * dim;   // [KEY_TILE][padded]
    for (long t = 0; t < tiles.count; ++t)
        for (int m = 0; m < tiles.height(t); ++m) {
            const long r = tiles.start(t) + m;
            const T* q = static_cast<const T*>(a.query) + (item.head * group + r % group) * a.query_head_stride +
                         (token + r / group) * a.query_token_stride;
            float* to = queries + tiles.start(t) * dim + m;
            for (long d = 0; d < dim; ++d) to[d * tiles.height(t)] = as_float(q[d]) * a.scaling;
        }
    for (long r = 0; r < tiles.rows; ++r) {
        peaks[r] = a.sinks ? a.sinks[item.head * group + r % group] : -INFINITY;
        totals[r] = a.sinks ? 1.0f : 0.0f;
    }
    std::fill_n(mixed, tiles.rows * padded, 0.0f);
    std::fill_n(values, KEY_TILE * padded, 0.0f);
    const long end = position + item.tokens, begin = a.window ? std::max(0L, position + 1 - a.window) : 0;
    for (long base = begin / KEY_TILE * KEY_TILE; base < end; base += KEY_TILE) {
        const long count = std::min(KEY_TILE, end - base);
        walk<T>(a, a.keys, item.head, blocks, base, count, dim, [&](long j, const T* key, const T*) {
            float* to = keys + j / NR * dim * NR + j % NR;
            for (long d = 0; d < dim; ++d) to[d * NR] = as_float(key[d]);
        });
        walk<T>(a, a.values, item.head, blocks, base, count, vdim, [&](long j, const T* value, const T*) {
            for (long d = 0; d < vdim; ++d) values[j * padded + d] = as_float(value[d]);
        });
        for (long t = 0; t < tiles.count; ++t)
            for (long p = 0; p < panels && p * NR < count; ++p)
                tile_of(tiles.height(t))(queries + tiles.start(t) * dim, keys + p * dim * NR, NR, dim, nullptr, false,
                                         scores + tiles.start(t) * KEY_TILE + p * NR, KEY_TILE, NR, Ahead{});
        for (long t = 0; t < tiles.count; ++t)
            for (int m = 0; m < tiles.height(t); ++m) {
                const long r = tiles.start(t) + m, last = position + r / group;
                const long low = std::clamp(a.window ? last + 1 - a.window - base : 0, 0L, count);
                const long high = std::clamp(last + 1 - base, low, count);
                float* s = scores + r * KEY_TILE;
                if (low < high) {
                    soften(s + low, high - low, a.softcap);
                    const float peak = largest(s + low, high - low, peaks[r]);
                    const float shrink = exponential(peaks[r] - peak);
                    totals[r] = totals[r] * shrink + exponentials(s + low, high - low, peak);
                    peaks[r] = peak;
                    for (long d = 0; d < padded; d += VL)
                        store(mixed + r * padded + d, load(mixed + r * padded + d) * shrink);
                }
                std::fill(s, s + low, 0.0f);
                std::fill(s + high, s + KEY_TILE, 0.0f);
                float* to = weights + tiles.start(t) * KEY_TILE + m;
                for (long j = 0; j < count; ++j) to[j * tiles.height(t)] = s[j];
            }
        for (long t = 0; t < tiles.count; ++t)
            for (long d = 0; d < padded; d += NR)
                tile_of(tiles.height(t))(weights + tiles.start(t) * KEY_TILE, values + d, padded, count, nullptr, true,
                                         mixed + tiles.start(t) * padded + d, padded, NR, Ahead{});
    }
    for (long r = 0; r < tiles.rows; ++r) {
        T* out = static_cast<T*>(a.out) +
                 ((token + r / group) * a.num_heads + item.head * group + r % group) * vdim;
        for (long d = 0; d < vdim; ++d) put(out + d, mixed[r * padded + d] / totals[r]);
    }
}

template <typename T>
void write(void* cache, const void* source, long slot, long num_slots, long head, long token, long head_stride,
           long token_stride, long dim) {
    std::memcpy(static_cast<T*>(cache) + (head * num_slots + slot) * dim,
                static_cast<const T*>(source) + head * head_stride + token * token_stride, dim * sizeof(T));
}

constexpr long QUERY_ROWS = 96;  // query rows (tokens x heads of a group) that share the packing of a key tile

template <typename T>
void attend(const Attention& a) {  // called by every thread of a team
    const long most = std::max(1L, QUERY_ROWS / a.group());
    std::vector<Item> items;  // each thread makes the same list
    for (long r = a.num_rows - 1; r >= 0; --r)  // prompt chunks, which come last, are the long pieces of work
        for (long head = 0; head < a.num_kv_heads; ++head)
            for (long first = 0; first < a.rows[r * 4 + 1]; first += most)
                items.push_back({r, head, first, std::min(most, long(a.rows[r * 4 + 1]) - first)});
#pragma omp for schedule(static)
    for (long token = 0; token < a.num_tokens; ++token)
        for (long head = 0; head < a.num_kv_heads; ++head) {
            write<T>(a.keys, a.key, a.slots[token], a.num_slots, head, token, a.key_head_stride, a.key_token_stride,
                     a.key_dim);
            write<T>(a.values, a.value, a.slots[token], a.num_slots, head, token, a.value_head_stride,
                     a.value_token_stride, a.value_dim);
        }
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < items.size(); ++i)
        a.rows[items[i].row * 4 + 1] == 1 ? decode<T>(a, items[i]) : prefill<T>(a, items[i]);
}

// y [rows][ldy] = x [rows][ldx] times a weight [columns][depth], plus bias unless null. For a team; `xs` is room for
// rows * depth floats that it shares.
void multiply_in_team(const float* x, long ldx, const Weight& weight, const float* bias, float* y, long ldy, long rows,
                      long columns, long depth, float* xs) {
    alignas(64) thread_local float expanded[DEPTH_TILE * NR];
    const RowTiles tiles(rows);
    const long panels = (columns + NR - 1) / NR;
    // small enough to share the work evenly when other processes take a core, large enough that the next panel is ours
    const long chunk = std::max(1L, panels / (omp_get_num_threads() * 4));
    const bool asks_ahead = weight.kind == FLOATS && tiles.count > 1;
    const long step = asks_ahead ? (NR + tiles.count - 1) / tiles.count : 0;
    if (rows > 1) {
#pragma omp for schedule(static)
        for (long t = 0; t < tiles.count; ++t)
            pack_rows(x + tiles.start(t) * ldx, ldx, tiles.height(t), depth, xs + tiles.start(t) * depth);
        x = xs;
    }
#pragma omp for schedule(dynamic, chunk)
    for (long p = 0; p < panels; ++p) {
        const int width = int(std::min<long>(NR, columns - p * NR));
        for (long k = 0; k < depth; k += DEPTH_TILE) {
            const long some = std::min(DEPTH_TILE, depth - k);
            const float* w = expand(weight, p, depth, k, some, expanded);
            for (long t = 0; t < tiles.count; ++t) {
                const int height = tiles.height(t);
                tile_of(height)(x + tiles.start(t) * depth + k * height, w, NR, some,
                                k == 0 && bias ? bias + p * NR : nullptr, k > 0, y + tiles.start(t) * ldy + p * NR, ldy,
                                width, Ahead{w + (asks_ahead ? some * NR + t * some * step : 0), step});
            }
        }
    }
}

// out = x / rms(x) * (weight + offset), one row; out may be x.
inline void normalize(const float* x, const float* weight, float* out, long dim, float epsilon, float offset) {
    vec squares{};
    long d = 0;
    for (; d + VL <= dim; d += VL) squares += load(x + d) * load(x + d);
    float total = sum(squares);
    for (; d < dim; ++d) total += x[d] * x[d];
    const float scale = 1.0f / std::sqrt(total / dim + epsilon);
    for (d = 0; d + VL <= dim; d += VL) store(out + d, load(x + d) * scale * (load(weight + d) + offset));
    for (; d < dim; ++d) out[d] = x[d] * scale * (weight[d] + offset);
}

// gate = silu(gate) * up, one row.
inline void gate_row(float* gate, const float* up, long count) {
    long i = 0;
    for (; i + VL <= count; i += VL) {
        const vec g = load(gate + i);
        store(gate + i, g / (1.0f + exponential(-g)) * load(up + i));
    }
    for (; i < count; ++i) gate[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

// Rotates the halves of the first `rotary` values of a head; cos and sin are [rotary].
inline void rotate(float* head, const float* cos, const float* sin, long rotary) {
    const long half = rotary / 2;
    for (long i = 0; i < half; ++i) {
        const float left = head[i], right = head[i + half];
        head[i] = left * cos[i] - right * sin[i];
        head[i + half] = right * cos[i + half] + left * sin[i + half];
    }
}

// A decoder layer of the Llama kind: norm, attention, norm, gated feed-forward, each added to the residual stream.
struct Layer {
    const float *input_norm, *query_norm, *key_norm, *middle_norm;  // query_norm and key_norm: per head, or null
    Weight qkv, output, gate_up, down;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;  // or null
    long dim, inner, rotary;
    float norm_epsilon, norm_offset, head_norm_epsilon, head_norm_offset;
};

// For a team.
void run_layer(const Layer& l, Attention a, float* hidden, const float* cos, const float* sin, float* room) {
    const long T = a.num_tokens, head_dim = a.key_dim, width = (a.num_heads + 2 * a.num_kv_heads) * head_dim;
    float* x = room;  // [T][dim]
    float* qkv = x + T * l.dim;
    float* mixed = qkv + T * width;                     // [T][heads * head dim]
    float* gates = mixed + T * a.num_heads * head_dim;  // [T][2 * inner]
    float* xs = gates + T * 2 * l.inner;                // room for the rows of any product
    a.query = qkv;
    a.key = qkv + a.num_heads * head_dim;
    a.value = qkv + (a.num_heads + a.num_kv_heads) * head_dim;
    a.query_head_stride = a.key_head_stride = a.value_head_stride = head_dim;
    a.query_token_stride = a.key_token_stride = a.value_token_stride = width;
    a.out = mixed;
#pragma omp for schedule(static)
    for (long t = 0; t < T; ++t)
        normalize(hidden + t * l.dim, l.input_norm, x + t * l.dim, l.dim, l.norm_epsilon, l.norm_offset);
    multiply_in_team(x, l.dim, l.qkv, l.qkv_bias, qkv, width, T, width, l.dim, xs);
#pragma omp for schedule(static)
    for (long t = 0; t < T; ++t)
        for (long h = 0; h < a.num_heads + a.num_kv_heads; ++h) {
            float* head = qkv + t * width + h * head_dim;
            const float* norm = h < a.num_heads ? l.query_norm : l.key_norm;
            if (norm) normalize(head, norm, head, head_dim, l.head_norm_epsilon, l.head_norm_offset);
            rotate(head, cos + t * l.rotary, sin + t * l.rotary, l.rotary);
        }
    attend<float>(a);
    multiply_in_team(mixed, a.num_heads * head_dim, l.output, l.output_bias, x, l.dim, T, l.dim,
                     a.num_heads * head_dim, xs);
#pragma omp for schedule(static)
    for (long t = 0; t < T; ++t) {
        for (long d = 0; d < l.dim; ++d) hidden[t * l.dim + d] += x[t * l.dim + d];
        normalize(hidden + t * l.dim, l.middle_norm, x + t * l.dim, l.dim, l.norm_epsilon, l.norm_offset);
    }
    multiply_in_team(x, l.dim, l.gate_up, l.gate_up_bias, gates, 2 * l.inner, T, 2 * l.inner, l.dim, xs);
#pragma omp for schedule(static)
    for (long t = 0; t < T; ++t) gate_row(gates + t * 2 * l.inner, gates + t * 2 * l.inner + l.inner, l.inner);
    multiply_in_team(gates, 2 * l.inner, l.down, l.down_bias, x, l.dim, T, l.dim, l.inner, xs);
#pragma omp for schedule(static)
    for (long t = 0; t < T; ++t)
        for (long d = 0; d < l.dim; ++d) hidden[t * l.dim + d] += x[t * l.dim + d];
}

}  // namespace

extern "C" {

long panel_width() { return NR; }

// weight [columns][depth] -> packed [columns / NR, rounded up][depth][NR], the rest zero.
void pack_weight(const float* weight, long columns, long depth, float* packed, int num_threads) {
#pragma omp parallel for num_threads(num_threads)
    for (long n = 0; n < (columns + NR - 1) / NR * NR; ++n)
        for (long k = 0; k < depth; ++k)
            packed[(n / NR * depth + k) * NR + n % NR] = n < columns ? weight[n * depth + k] : 0.0f;
}

// y [rows][columns] = x [rows][depth] times the packed weight, plus bias [columns] unless null.
void linear(const float* x, const Weight* weight, const float* bias, float* y, long rows, long columns, long depth,
            int num_threads) {
    float* xs = scratch(rows * depth);
#pragma omp parallel num_threads(num_threads)
    multiply_in_team(x, depth, *weight, bias, y, columns, rows, columns, depth, xs);
}

// Packs a weight in 4 or 8 bits, into words that are 0; returns 0 when it has values that these cannot hold. See struct
// Weight for the layouts; depth must be a multiple of BLOCK.
int compress_weight(const float* weight, long columns, long depth, long kind, uint32_t* words, float* scales,
                    int num_threads) {
    bool fits = true;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
    for (long panel = 0; panel < (columns + NR - 1) / NR; ++panel) {
        for (long n = 0; n < NR; ++n) {
            const long column = panel * NR + n;
            for (long b = 0; b < depth / BLOCK; ++b) {
                bool here;
#pragma omp atomic read
                here = fits;
                if (!here) break;
                int q[BLOCK] = {};
                float scale = 0, minimum = 0;
                if (column < columns && !compress_block(weight + column * depth + b * BLOCK, Kind(kind), q, scale, minimum)) {
#pragma omp atomic write
                    fits = false;
                    break;
                }
                const long block = panel * (depth / BLOCK) + b;
                if (kind == FOUR_BITS) {
                    scales[(block * 2) * NR + n] = scale;
                    scales[(block * 2 + 1) * NR + n] = minimum;
                } else {
                    scales[block * NR + n] = scale;
                }
                const long per_word = 32 / kind;
                for (long k = 0; k < BLOCK; ++k)
                    words[(block * BLOCK + k) / per_word * NR + n] |=
                        (uint32_t(q[k]) & ((1u << kind) - 1)) << (k % per_word * kind);
            }
        }
    }
    return fits;
}

// out = x / rms(x) * (weight + offset), per row.
void rms_norm(const float* x, const float* weight, float* out, long rows, long dim, float epsilon, float offset,
              int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * dim > 32768)
    for (long r = 0; r < rows; ++r) normalize(x + r * dim, weight, out + r * dim, dim, epsilon, offset);
}

// gate = silu(gate) * up, in place; both [rows][dim].
void silu_mul(float* gate, const float* up, long rows, long dim, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * dim > 32768)
    for (long r = 0; r < rows; ++r) gate_row(gate + r * dim, up + r * dim, dim);
}

// Writes this step's keys and values into the cache, then attends. See struct Attention.
void paged_attention(const Attention* a) {
#pragma omp parallel num_threads(a->num_threads)
    a->is_bf16 ? attend<bf16>(*a) : attend<float>(*a);
}

// hidden [tokens][dim] goes through `count` layers; cos and sin [tokens][rotary]; room: see decoder_layer_room. Of
// `attentions` the tensors of the step (query to out) and their strides are not read: the layers make them.
void decoder_layers(const Layer* layers, const Attention* attentions, long count, float* hidden, const float* cos,
                    const float* sin, float* room) {
#pragma omp parallel num_threads(attentions->num_threads)
    for (long i = 0; i < count; ++i) run_layer(layers[i], attentions[i], hidden, cos, sin, room);
}

// Floats that decoder_layers wants as room, for layers like this one.
long decoder_layer_room(const Layer* layer, const Attention* a) {
    const long heads = a->num_heads * a->key_dim;
    return a->num_tokens * (layer->dim + heads + 2 * a->num_kv_heads * a->key_dim + heads + 2 * layer->inner +
                            std::max({layer->dim, heads, layer->inner}));
}

}  // extern "C"
