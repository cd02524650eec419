// CPU kernels of the engine: matrix products on packed weights, paged attention, norms, gates, and whole decoder layers.
//
// Plain C functions, threads by OpenMP, vectors by GCC's portable vector types (the compiler maps them to AVX-512, AVX2 or
// NEON) and by intrinsics where a processor has instructions of its own for a product. No torch headers, so that it
// compiles in seconds.
//
// Every sum runs in one fixed order that does not depend on how many rows share the call: a row's result is the same,
// bit for bit, alone and in any batch.

#include "attention.h"
#include "courtesy.h"
#include "layer.h"
#include "product.h"
#include "vector.h"
#include "weight.h"

extern "C" {

long panel_width() { return NR; }

// Whether this processor multiplies in an arithmetic.
int supports_arithmetic(long arithmetic) { return supports(Arithmetic(arithmetic)); }

// weight [columns][depth] -> packed whole, as `struct Weight` says for 32 or 16 bits; what is beyond it is zero.
void pack_weight(const float* weight, long columns, long depth, long bits, void* packed, int num_threads) {
    const long deep = bits == 16 ? round_up(depth, BLOCK) : depth;
#pragma omp parallel for num_threads(num_threads)
    for (long n = 0; n < round_up(columns, NR); ++n)
        for (long k = 0; k < deep; ++k) {
            const float value = n < columns && k < depth ? weight[n * depth + k] : 0.0f;
            if (bits == 16)
                put(static_cast<bf16*>(packed) + (n / NR * deep + k / 2 * 2) * NR + n % NR * 2 + k % 2, value);
            else
                static_cast<float*>(packed)[(n / NR * deep + k) * NR + n % NR] = value;
        }
}

// y [rows][columns] = x [rows][depth] times the packed weight, plus bias [columns] unless null.
void linear(const float* x, const Weight* weight, const float* bias, float* y, long rows, long columns, long depth,
            int num_threads) {
    float* room = scratch(packed_floats(rows, depth));
#pragma omp parallel num_threads(num_threads)
    multiply_in_team(x, depth, *weight, bias, y, columns, rows, rows, columns, depth, room);
}

// Packs a weight in 4 or 8 bits, into words that are 0; returns 0 when it has values that these cannot hold: any but
// those of a quantised file, or, if `rounds` (8 bits only), NaN and infinity. See struct Weight for the layouts; depth must
// be a multiple of BLOCK.
int compress_weight(const float* weight, long columns, long depth, long arithmetic, long bits, int rounds, uint32_t* words,
                    fp16* scales, int num_threads) {
    bool fits = true;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
    for (long panel = 0; panel < round_up(columns, NR) / NR; ++panel) {
        uint32_t* here = words + panel * depth / (32 / bits) * NR;
        for (long n = 0; n < NR; ++n) {
            const long column = panel * NR + n;
            for (long b = 0; b < depth / BLOCK; ++b) {
                bool goes_on;
#pragma omp atomic read
                goes_on = fits;
                if (!goes_on) break;
                int q[BLOCK] = {};
                fp16 scale = {}, minimum = {};
                const float* from = weight + column * depth + b * BLOCK;
                if (column < columns && !(rounds ? round_block(from, q, scale) : compress_block(from, bits, q, scale, minimum))) {
#pragma omp atomic write
                    fits = false;
                    break;
                }
                const long block = panel * (depth / BLOCK) + b;
                if (bits == 4) {
                    scales[block * 2 * NR + n] = scale;
                    scales[(block * 2 + 1) * NR + n] = minimum;
                } else {
                    scales[block * NR + n] = scale;
                }
                for (long k = 0; k < BLOCK; ++k) {
                    const Place at = place(Arithmetic(arithmetic), bits, b * BLOCK + k, n);
                    here[at.word] |= (bits == 8 ? byte_of(Arithmetic(arithmetic), q[k]) : uint32_t(q[k])) << at.bit;
                }
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
void paged_attention(const Attention* arguments) {
    Attention a = *arguments;
    std::vector<float> partials(partial_floats(a));
    a.partials = partials.data();
#pragma omp parallel num_threads(a.num_threads)
    if (a.is_bf16)
        attend<bf16, bf16>(a);
    else if (a.cache_is_bf16)
        attend<float, bf16>(a);
    else
        attend<float, float>(a);
}

// hidden [tokens][dim] goes through `count` layers; cos and sin [tokens][rotary]; room: see decoder_layer_room. Of
// `attentions` the tensors of the step (query to out) and their strides are not read: the layers make them. The step's rows,
// blocks and slots, and how many there are, are read of the first only. When another thread sets `stop`, the layer that runs
// is the last; `hidden` is of no use then.
void decoder_layers(const Layer* layers, const Attention* attentions, long count, float* hidden, const float* cos,
                    const float* sin, float* room, const volatile int* stop) {
    const auto attention = [&](long i) {
        Attention a = attentions[i];
        a.rows = attentions->rows, a.blocks = attentions->blocks, a.slots = attentions->slots;
        a.num_rows = attentions->num_rows, a.num_tokens = attentions->num_tokens;
        return a;
    };
    long most = 0;
    for (long i = 0; i < count; ++i) most = std::max(most, partial_floats(attention(i)));
    std::vector<float> partials(most);
    const auto run = [&](long i) {
        Attention a = attention(i);
        a.partials = partials.data();
        run_layer(layers[i], a, hidden, cos, sin, room);
    };
    const bool is_pair = fills_two_cores(attentions->num_threads);
    long first = 0;      // layer that all threads run together
    long last = count;  // all must see the same end: thread 0 lowers it before a layer, whose barriers tell the others
    Gate gate;
#pragma omp parallel num_threads(attentions->num_threads)
    {
        if (is_pair && omp_get_thread_num() == 0) {
            for (; first < count && !*stop && others_want_a_core(); ++first) {
#pragma omp parallel num_threads(1)
                run(first);
            }
            gate.let_in();
        } else if (is_pair) {
            gate.wait();
        }
        for (long i = first; i < last; ++i) {
            if (*stop && omp_get_thread_num() == 0) last = i + 1;
            run(i);
        }
    }
}

// Floats that decoder_layers wants as room, for layers like this one.
long decoder_layer_room(const Layer* layer, const Attention* a) {
    const long heads = a->num_heads * a->key_dim;
    return a->num_tokens * (layer->dim + heads + 2 * a->num_kv_heads * a->key_dim + heads + 2 * layer->inner +
                            packed_floats(1, std::max({layer->dim, heads, layer->inner})));
}

}  // extern "C"