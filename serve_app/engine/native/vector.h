// Vectors of floats, bfloat16, and what is computed on them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

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
struct fp16 {  // IEEE half precision
    uint16_t bits;
};
#if defined(__F16C__) || defined(__FLT16_MANT_DIG__)
#define HAS_HALF_PRECISION
#endif

inline float as_float(float x) { return x; }
inline float as_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float as_float(fp16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#elif defined(__FLT16_MANT_DIG__)
    _Float16 value;
    std::memcpy(&value, &x, 2);
    return value;
#else
    return x.bits;  // there are none
#endif
}

inline vec splat(float x) { return x - vec{}; }
inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline vec load(const bf16* p) {
#if defined(__AVX512F__)  // GCC 12 makes four instructions of the conversion below, which is one
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return reinterpret_cast<vec>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#else
    return reinterpret_cast<vec>(__builtin_convertvector(*reinterpret_cast<const hvec*>(p), uvec) << 16);
#endif
}
inline vec load(const fp16* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__) && defined(__AVX2__)
    return reinterpret_cast<vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    float values[VL];
    for (int i = 0; i < VL; ++i) values[i] = as_float(p[i]);
    return *reinterpret_cast<const vec*>(values);
#endif
}
inline void store(float* p, vec v) { *reinterpret_cast<vec*>(p) = v; }
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) {  // rounds to nearest even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    p->bits = std::isnan(x) ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void put(fp16* p, float x) {  // rounds to nearest even
#if defined(__F16C__)
    p->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__FLT16_MANT_DIG__)
    const _Float16 value = static_cast<_Float16>(x);
    std::memcpy(p, &value, 2);
#endif
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

// The sum of each of four vectors: one tree of additions for all four is a third of four trees.
inline void sums_of_four(const vec* v, float* out) {
#if defined(__AVX512F__)
    const auto pairs = [](vec a, vec b) {
        const __m512 x = reinterpret_cast<__m512>(a), y = reinterpret_cast<__m512>(b);
        return _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    };
    const __m512d left = _mm512_castps_pd(pairs(v[0], v[1])), right = _mm512_castps_pd(pairs(v[2], v[3]));
    const __m512 quarters = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)),
                                          _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters),
                                        _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(quarters), 1)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
#else
    for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
#endif
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

float* scratch(size_t floats) {  // one growing buffer per thread
    thread_local std::unique_ptr<float[]> buffer;
    thread_local size_t size = 0;
    if (floats > size) {
        buffer.reset(new float[floats]);
        size = floats;
    }
    return buffer.get();
}

}  // namespace
