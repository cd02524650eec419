// Norms, gates, rotary positions, and the decoder layer that is made of them.

#pragma once

#include <cmath>

#include "attention.h"
#include "product.h"

namespace {

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
    const long T = a.num_tokens, singles = a.num_singles(), head_dim = a.key_dim, width = (a.num_heads + 2 * a.num_kv_heads) * head_dim;
    float* x = room;  // [T][dim]
    float* qkv = x + T * l.dim;
    float* mixed = qkv + T * width;                     // [T][heads * head dim]
    float* gates = mixed + T * a.num_heads * head_dim;  // [T][2 * inner]
    float* xs = gates + T * 2 * l.inner;                // room for the packed rows of any product
    a.query = qkv;
    a.key = qkv + a.num_heads * head_dim;
    a.value = qkv + (a.num_heads + a.num_kv_heads) * head_dim;
    a.query_head_stride = a.key_head_stride = a.value_head_stride = head_dim;
    a.query_token_stride = a.key_token_stride = a.value_token_stride = width;
    a.out = mixed;
#pragma omp for schedule(static)
    for (long t = 0; t < T; ++t)
        normalize(hidden + t * l.dim, l.input_norm, x + t * l.dim, l.dim, l.norm_epsilon, l.norm_offset);
    multiply_in_team(x, l.dim, l.qkv, l.qkv_bias, qkv, width, singles, T, width, l.dim, xs);
#pragma omp for schedule(static)
    for (long t = 0; t < T; ++t)
        for (long h = 0; h < a.num_heads + a.num_kv_heads; ++h) {
            float* head = qkv + t * width + h * head_dim;
            const float* norm = h < a.num_heads ? l.query_norm : l.key_norm;
            if (norm) normalize(head, norm, head, head_dim, l.head_norm_epsilon, l.head_norm_offset);
            rotate(head, cos + t * l.rotary, sin + t * l.rotary, l.rotary);
        }
    a.cache_is_bf16 ? attend<float, bf16>(a) : attend<float, float>(a);
    multiply_in_team(mixed, a.num_heads * head_dim, l.output, l.output_bias, x, l.dim, singles, T, l.dim,
                     a.num_heads * head_dim, xs);
#pragma omp for schedule(static)
    for (long t = 0; t < T; ++t) {
        for (long d = 0; d < l.dim; ++d) hidden[t * l.dim + d] += x[t * l.dim + d];
        normalize(hidden + t * l.dim, l.middle_norm, x + t * l.dim, l.dim, l.norm_epsilon, l.norm_offset);
    }
    multiply_in_team(x, l.dim, l.gate_up, l.gate_up_bias, gates, 2 * l.inner, singles, T, 2 * l.inner, l.dim, xs);
#pragma omp for schedule(static)
    for (long t = 0; t < T; ++t) gate_row(gates + t * 2 * l.inner, gates + t * 2 * l.inner + l.inner, l.inner);
    multiply_in_team(gates, 2 * l.inner, l.down, l.down_bias, x, l.dim, singles, T, l.dim, l.inner, xs);
#pragma omp for schedule(static)
    for (long t = 0; t < T; ++t)
        for (long d = 0; d < l.dim; ++d) hidden[t * l.dim + d] += x[t * l.dim + d];
}

}  // namespace
