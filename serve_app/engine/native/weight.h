// Packed weights: what they are multiplied in, how they are kept, and how a piece of one is expanded.
//
// A weight [columns][depth] lies in panels of NR columns. Weights that come from a quantised file are kept as what they
// were there: 4 or 8 bits, with a scale (4 bits: and a minimum) in half precision per 32 of a column's depth (BLOCK).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vector.h"

namespace {

// What a product multiplies in. Sums are float32 (INT8: exact within a block of 32).
enum Arithmetic : long {
    FLOAT32 = 0,
    BFLOAT16 = 1,  // rows are rounded to bfloat16, and weights, unless a file had them in 4 or 8 bits
    INT8 = 2,      // rows are rounded to 8 bits with a scale per BLOCK of a row; weights to 8 bits, unless a file had them in 4
};

constexpr long BLOCK = 32;

struct Weight {
    const void* data;     // whole: [panels][depth][NR] floats, or [panels][depth / 2, padded][NR][2] bfloat16 (`bits` 16);
                          // 4 or 8 bits: [panels][depth / n][NR] words of n = 32 / bits values each, see `place`
    const fp16* scales;  // 4 bits: [panels][depth / BLOCK][scale, minimum][NR]; 8 bits: [panels][depth / BLOCK][NR]
    long bits;           // 32, 16, 8 or 4
    Arithmetic arithmetic;
};

// How far ahead the memory of a compressed weight is asked for: 4 blocks of 4 bits. Weights are read in order, each once a
// step, but the processor's own asking begins anew on every page.
constexpr long DATA_AHEAD = 2048, SCALES_AHEAD = 512;  // bytes
inline void ask_ahead(const void* at, long bytes) { __builtin_prefetch(static_cast<const char*>(at) + bytes, 0, 3); }

inline long round_up(long x, long unit) { return (x + unit - 1) / unit * unit; }

struct Place {
    long word;
    int bit;
};

// Where value (k, n) of a panel lies among its words, such that vectors of words expand without moving values between lanes.
inline Place place(Arithmetic arithmetic, long bits, long k, long n) {
    const long many = 32 / bits, word = k / many * NR + n;
    if (arithmetic == BFLOAT16 && bits == 4) return {word, int(k % 2 * 16 + k % 8 / 2 * 4)};  // half a word: even k; half: odd
    if (arithmetic == BFLOAT16) {  // as unpacking takes bytes apart: eight of each 16 for one pair of k, eight for the next
        const long byte = n % VL / 4 * 16 + k % 4 / 2 * 8 + n % 4 * 2 + k % 2;
        return {k / 4 * NR + n / VL * VL + byte / 4, int(byte % 4 * 8)};
    }
    if (arithmetic == INT8 && bits == 4)  // the low halves of four bytes are four values of the depth, the high ones the next
        return {word, int(k % 4 * 8 + k / 4 % 2 * 4)};
    return {word, int(k % many * bits)};
}

// Rows [from, from + count) of a panel as floats [count][NR]; `from` is a multiple of BLOCK unless they are floats already.
inline const float* expand_floats(const Weight& w, long panel, long depth, long from, long count, float* out) {
    const long row = panel * depth + from, block = row / BLOCK;
    if (w.bits == 32) return static_cast<const float*>(w.data) + row * NR;
    const int32_t* words = static_cast<const int32_t*>(w.data) + row / (32 / w.bits) * NR;
    for (long b = 0; b < count / BLOCK; ++b) {
        float* to = out + b * BLOCK * NR;
        for (int half = 0; half < NR; half += VL) {
            if (w.bits == 4) {
                const fp16* scale = w.scales + (block + b) * 2 * NR + half;
                ask_ahead(scale, SCALES_AHEAD);
                ask_ahead(scale + NR, SCALES_AHEAD);
                const vec m = load(scale + NR);
                // value j of a word is left where it is: as a number it is 16^j times as large, and its scale as much smaller
                vec d[8] = {load(scale)};
                for (int j = 1; j < 8; ++j) d[j] = d[j - 1] * 0.0625f;
                for (long k = 0; k < BLOCK; k += 8, to += 8 * NR) {
                    const ivec word = *reinterpret_cast<const ivec*>(words + (b * BLOCK + k) / 8 * NR + half);
                    ask_ahead(words + (b * BLOCK + k) / 8 * NR + half, DATA_AHEAD);
#pragma GCC unroll 7
                    for (int j = 0; j < 7; ++j)
                        store(to + j * NR + half, d[j] * __builtin_convertvector(word & (15 << (4 * j)), vec) + m);
                    store(to + 7 * NR + half, d[0] * __builtin_convertvector((word >> 28) & 15, vec) + m);
                }
                to -= BLOCK * NR;
            } else {
                const vec d = load(w.scales + (block + b) * NR + half);
                ask_ahead(w.scales + (block + b) * NR + half, SCALES_AHEAD);
                for (long k = 0; k < BLOCK; k += 4) {
                    const ivec word = *reinterpret_cast<const ivec*>(words + (b * BLOCK + k) / 4 * NR + half);
                    ask_ahead(words + (b * BLOCK + k) / 4 * NR + half, DATA_AHEAD);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; ++j)
                        store(to + (k + j) * NR + half, d * __builtin_convertvector((word << (24 - 8 * j)) >> 24, vec));
                }
            }
        }
    }
    return out;
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define HAS_BFLOAT16_PRODUCTS

// Values of a quantised weight as bfloat16, which holds q exactly: calls visit(pair, half, vector) for each pair of rows of
// [from, from + count) and each half of a panel's columns; the vector has [VL columns][2].
template <typename F>
inline void visit_pairs(const Weight& w, long panel, long depth, long from, long count, F visit) {
    const long row = panel * depth + from;
    const __m512i* words = reinterpret_cast<const __m512i*>(static_cast<const int32_t*>(w.data) + row / (32 / w.bits) * NR);
    if (w.bits == 4) {
        alignas(64) bf16 levels[32];
        for (int i = 0; i < 32; ++i) put(levels + i, float(i % 16));  // a look-up minds five bits, of which four are ours
        const __m512i table = _mm512_load_si512(levels);
        for (long pair = 0; pair < count / 2; pair += 4, words += 2)
            for (int half = 0; half < 2; ++half) {
                const __m512i word = _mm512_loadu_si512(words + half);
                ask_ahead(words + half, DATA_AHEAD);
                visit(pair, half, _mm512_permutexvar_epi16(word, table));
                visit(pair + 1, half, _mm512_permutexvar_epi16(_mm512_srli_epi16(word, 4), table));
                visit(pair + 2, half, _mm512_permutexvar_epi16(_mm512_srli_epi16(word, 8), table));
                visit(pair + 3, half, _mm512_permutexvar_epi16(_mm512_srli_epi16(word, 12), table));
            }
    } else {  // sign and magnitude: the halves of a magnitude's bfloat16 are looked up
        alignas(64) uint8_t low[128], high[128];
        for (int i = 0; i < 128; ++i) {
            bf16 value;
            put(&value, float(i));
            low[i] = uint8_t(value.bits), high[i] = uint8_t(value.bits >> 8);
        }
        const __m512i low0 = _mm512_load_si512(low), low1 = _mm512_load_si512(low + 64);
        const __m512i high0 = _mm512_load_si512(high), high1 = _mm512_load_si512(high + 64);
        const __m512i sign = _mm512_set1_epi8(char(0x80));
        for (long pair = 0; pair < count / 2; pair += 2, words += 2)
            for (int half = 0; half < 2; ++half) {
                const __m512i q = _mm512_loadu_si512(words + half);
                ask_ahead(words + half, DATA_AHEAD);
                const __m512i lower = _mm512_permutex2var_epi8(low0, q, low1);
                const __m512i upper = _mm512_or_si512(_mm512_permutex2var_epi8(high0, q, high1), _mm512_and_si512(q, sign));
                visit(pair, half, _mm512_unpacklo_epi8(lower, upper));
                visit(pair + 1, half, _mm512_unpackhi_epi8(lower, upper));
            }
    }
}

// Rows [from, from + count) of a panel as pairs [count / 2][NR][2] of q, without its scale; `from` is a multiple of BLOCK.
inline void expand_codes(const Weight& w, long panel, long depth, long from, long count, bf16* out) {
    visit_pairs(w, panel, depth, from, count, [&](long pair, int half, __m512i q) {
        _mm512_store_si512(out + (pair * 2 + half) * NR, q);
    });
}

// The same of the weights themselves, rounded. Weights that are whole bfloat16 are where they are.
inline const bf16* expand_pairs(const Weight& w, long panel, long depth, long from, long count, bf16* out) {
    if (w.bits == 16) return static_cast<const bf16*>(w.data) + (panel * round_up(depth, BLOCK) + from) * NR;
    alignas(64) int16_t turns[32];
    for (int i = 0; i < 32; ++i) turns[i] = int16_t(i / 2 + i % 2 * VL);
    const __m512i by_turns = _mm512_load_si512(turns), odd = _mm512_set1_epi32(int(0xffff0000));
    const long per_block = w.bits == 4 ? 2 * NR : NR;
    const fp16* scales = w.scales + (panel * depth + from) / BLOCK * per_block;
    for (long k = 0; k < count; k += BLOCK, scales += per_block, out += BLOCK * NR) {
        __m512 d[2], low[2];
        for (int half = 0; half < 2; ++half) {
            d[half] = __m512(load(scales + half * VL));
            low[half] = w.bits == 4 ? __m512(load(scales + NR + half * VL)) : _mm512_setzero_ps();
        }
        visit_pairs(w, panel, depth, from + k, BLOCK, [&](long pair, int half, __m512i q) {
            const __m512 first = _mm512_fmadd_ps(d[half], (__m512)_mm512_slli_epi32(q, 16), low[half]);
            const __m512 second = _mm512_fmadd_ps(d[half], (__m512)_mm512_and_si512(q, odd), low[half]);
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
            _mm512_store_si512(out + (pair * 2 + half) * NR, _mm512_permutexvar_epi16(by_turns, both));
        });
    }
    return out - count * NR;
}

#endif

// Rows [from, from + count) of a panel as bytes 0 ... 255 [count / 4][NR][4]; 8 bits are kept as such, with 128 added.
inline const uint8_t* expand_bytes(const Weight& w, long panel, long depth, long from, long count, uint8_t* out) {
    const long row = panel * depth + from;
    if (w.bits == 8) {
        const uint8_t* bytes = static_cast<const uint8_t*>(w.data) + row * NR;
        for (long i = 0; i < count * NR; i += 64) ask_ahead(bytes + i, DATA_AHEAD);
        return bytes;
    }
    const ivec* words = reinterpret_cast<const ivec*>(static_cast<const int32_t*>(w.data) + row / 8 * NR);
    ivec* to = reinterpret_cast<ivec*>(out);
    for (long eight = 0; eight < count / 8; ++eight, to += 4, words += 2) {
        ask_ahead(words, DATA_AHEAD);
        ask_ahead(words + 1, DATA_AHEAD);
        to[0] = words[0] & 0x0f0f0f0f;
        to[1] = words[1] & 0x0f0f0f0f;
        to[2] = (words[0] >> 4) & 0x0f0f0f0f;
        to[3] = (words[1] >> 4) & 0x0f0f0f0f;
    }
    return out;
}

#ifdef HAS_HALF_PRECISION

// Writes BLOCK weights as q * scale + minimum (4 bits) or q * scale (8 bits), if that is what they are, exactly.
inline bool compress_block(const float* w, long bits, int* q, fp16& scale, fp16& minimum) {
    float low = w[0], high = w[0];
    for (long k = 1; k < BLOCK; ++k) low = std::min(low, w[k]), high = std::max(high, w[k]);
    const int most = bits == 4 ? 15 : 127;
    put(&minimum, bits == 4 ? low : 0.0f);
    const float guess = bits == 4 ? (high - low) / 15 : std::max(high, -low) / 127;
    if (!(guess < 65504.0f)) return false;
    fp16 nearest;
    put(&nearest, guess);
    for (int step : {0, 1, -1}) {
        if (step < 0 && nearest.bits == 0) continue;
        scale.bits = uint16_t(nearest.bits + step);
        const float d = as_float(scale), m = as_float(minimum);
        bool same = true;
        for (long k = 0; k < BLOCK && same; ++k) {
            const float x = d > 0 ? std::nearbyint((w[k] - m) / d) : 0.0f;
            same = std::abs(x) <= most && std::fma(d, x, m) == w[k];
            q[k] = int(x);
        }
        if (same) return true;
    }
    return false;
}

// The nearest 8-bit values of BLOCK weights, with the smallest scale that reaches all of them. NaN, infinity and what is out
// of half precision's reach fail.
inline bool round_block(const float* w, int* q, fp16& scale) {
    float most = 0;
    for (long k = 0; k < BLOCK; ++k) {
        if (!(std::abs(w[k]) < 127 * 65504.0f)) return false;
        most = std::max(most, std::abs(w[k]));
    }
    put(&scale, most / 127);
    if (as_float(scale) * 127 < most) ++scale.bits;  // the next larger
    const float d = as_float(scale);
    for (long k = 0; k < BLOCK; ++k) q[k] = d > 0 ? int(std::nearbyint(w[k] / d)) : 0;
    return true;
}

#else
inline bool compress_block(const float*, long, int*, fp16&, fp16&) { return false; }
inline bool round_block(const float*, int*, fp16&) { return false; }
#endif

// How an 8-bit value lies in its byte.
inline uint32_t byte_of(Arithmetic arithmetic, int q) {
    if (arithmetic == BFLOAT16) return uint32_t(std::abs(q)) | (q < 0 ? 0x80 : 0);
    return uint32_t(arithmetic == INT8 ? q + 128 : q) & 0xff;
}

}  // namespace
