// Attention over a paged cache of keys and values. T is the type of the step's tensors, C that of the caches.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "float_tile.h"

namespace {

struct Attention {
    const void *query, *key, *value;  // [heads][tokens][dim] with strides; key and value: this step's
    void *keys, *values, *out;        // caches [kv heads][slots][dim]; out [tokens][heads][value dim]
    const int64_t* rows;              // [num rows][4]: first token, tokens, context length, offset into blocks
    const int64_t* blocks;            // block ids of all rows
    const int64_t* slots;             // [tokens]: where each token's key and value go
    const float* sinks;               // [heads] or null
    float* partials;                  // see partial_floats
    long query_head_stride, query_token_stride, key_head_stride, key_token_stride, value_head_stride,
        value_token_stride;
    long num_rows, num_tokens, num_heads, num_kv_heads, key_dim, value_dim, block_size, num_slots, window;
    float scaling, softcap;
    int num_threads, is_bf16, cache_is_bf16;  // whether the tensors of the step, and the caches, are bfloat16

    long group() const { return num_heads / num_kv_heads; }
    long num_singles() const {  // rows of one token, which come first
        long count = 0;
        while (count < num_rows && rows[count * 4 + 1] == 1) ++count;
        return count;
    }
};

struct Item {
    long row, head, first, tokens;  // of a row of one token: which span of its context, and 1
};

// A long context of one token is cut into spans, so that a few rows keep all threads busy. Where it is cut depends on the
// context alone: the result does not depend on who shares the step.
constexpr long SPAN = 512;

struct Context {
    long low, count;  // first position that is seen, and how many are
    long spans() const { return (count + SPAN - 1) / SPAN; }
};
inline Context context_of(const Attention& a, long row) {
    const long length = a.rows[row * 4 + 2], low = a.window ? std::max(0L, length - a.window) : 0;
    return {low, length - low};
}
inline long most_spans(const Attention& a) {
    long most = 1;
    for (long row = 0; row < a.num_singles(); ++row) most = std::max(most, context_of(a, row).spans());
    return most;
}
// Floats of `Attention::partials`: per row of one token, head and span the mixed values, their peak and their total.
inline long partial_floats(const Attention& a) {
    const long spans = most_spans(a);
    return spans == 1 ? 0 : a.num_singles() * a.num_heads * spans * (a.value_dim + 2);
}

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

// Calls visit(j, slot of position low + j, slot some way ahead) for `count` positions of a row.
template <typename F>
inline void walk(const Attention& a, const int64_t* blocks, long low, long count, F visit) {
    long block = low / a.block_size, place = low % a.block_size;
    for (long j = 0; j < count; ++block, place = 0) {
        long slot = blocks[block] * a.block_size + place;
        const long end = std::min(count, j + a.block_size - place);
        long ahead = end < count ? blocks[block + 1] * a.block_size : slot;
        for (; j < end; ++j, ++slot, ++ahead) visit(j, slot, ahead);
    }
}

// The slots of a key head in a cache [kv heads][slots][dim].
template <typename C>
inline const C* slots_of(const Attention& a, const void* cache, long head, long dim) {
    return static_cast<const C*>(cache) + head * a.num_slots * dim;
}

template <typename T>
inline void prefetch(const T* from, long dim) {
    for (long d = 0; d < dim; d += 64 / long(sizeof(T))) __builtin_prefetch(from + d, 0, 2);
}

constexpr int MOST_HEADS = 4;  // query heads that share the reading of a key or value

// Calls visit(g, how many, as a constant) for the query heads of a group, some at a time.
template <typename F>
inline void by_heads(long group, F visit) {
    for (long g = 0; g < group; g += MOST_HEADS)
        with_rows<MOST_HEADS>(int(std::min<long>(MOST_HEADS, group - g)), [&](auto heads) { visit(g, heads); });
}

// Scores of HEADS query heads [HEADS][dim] with four keys.
template <int HEADS, typename C>
inline void score_four(const float* queries, const C* const* keys, long dim, float* scores, long stride) {
    vec acc[HEADS][4] = {};
    long d = 0;
    for (; d + VL <= dim; d += VL)
        for (int i = 0; i < 4; ++i) {
            const vec key = load(keys[i] + d);
            for (int h = 0; h < HEADS; ++h) acc[h][i] += load(queries + h * dim + d) * key;
        }
    for (int h = 0; h < HEADS; ++h) {
        float* four = scores + h * stride;
        sums_of_four(acc[h], four);
        for (long e = d; e < dim; ++e)
            for (int i = 0; i < 4; ++i) four[i] += queries[h * dim + e] * as_float(keys[i][e]);
    }
}

// mixed [HEADS][value dim] = weights [HEADS][stride] times the values of `count` positions.
template <int HEADS, typename C>
void mix_values(const Attention& a, long head, const int64_t* blocks, long low, long count, const float* weights,
                long stride, float* mixed) {
    const long vdim = a.value_dim;
    const C* values = slots_of<C>(a, a.values, head, vdim);
    long d = 0;
    for (; d + NR <= vdim; d += NR) {
        vec acc[HEADS][2] = {};
        walk(a, blocks, low, count, [&](long j, long slot, long) {
            const vec left = load(values + slot * vdim + d), right = load(values + slot * vdim + d + VL);
            for (int h = 0; h < HEADS; ++h) {
                const vec w = splat(weights[h * stride + j]);
                acc[h][0] += w * left;
                acc[h][1] += w * right;
            }
        });
        for (int h = 0; h < HEADS; ++h) {
            store(mixed + h * vdim + d, acc[h][0]);
            store(mixed + h * vdim + d + VL, acc[h][1]);
        }
    }
    if (d == vdim) return;
    for (int h = 0; h < HEADS; ++h) std::fill(mixed + h * vdim + d, mixed + (h + 1) * vdim, 0.0f);
    walk(a, blocks, low, count, [&](long j, long slot, long) {
        for (int h = 0; h < HEADS; ++h)
            for (long e = d; e < vdim; ++e) mixed[h * vdim + e] += weights[h * stride + j] * as_float(values[slot * vdim + e]);
    });
}

// One token, the query heads of one key head: scores over a span of the context, then the weighted sum of the values. The
// only span of a context is written out; one of several goes to `partials` ([query head] `partials_stride` floats apart).
template <typename T, typename C>
void decode(const Attention& a, const Item& item, float* partials, long partials_stride) {
    const int64_t* row = a.rows + item.row * 4;
    const int64_t* blocks = a.blocks + row[3];
    const long token = row[0], group = a.group(), dim = a.key_dim, vdim = a.value_dim;
    const Context context = context_of(a, item.row);
    const long low = context.low + item.first * SPAN, count = std::min(SPAN, context.low + context.count - low);
    const long stride = (count + 3) / 4 * 4;
    float* queries = scratch(group * (dim + stride + vdim + NR));
    float* scores = queries + group * dim;  // [group][stride]
    float* mixed = scores + group * stride;
    for (long g = 0; g < group; ++g) {
        const T* q = static_cast<const T*>(a.query) + (item.head * group + g) * a.query_head_stride +
                     token * a.query_token_stride;
        for (long d = 0; d < dim; ++d) queries[g * dim + d] = as_float(q[d]) * a.scaling;
    }
    const C *keys = slots_of<C>(a, a.keys, item.head, dim), *values = slots_of<C>(a, a.values, item.head, vdim);
    const C* four[4];
    walk(a, blocks, low, count, [&](long j, long slot, long ahead) {
        prefetch(keys + ahead * dim, dim);
        prefetch(values + ahead * vdim, vdim);  // when they are wanted there is too little to compute to hide the wait
        four[j % 4] = keys + slot * dim;
        if (j % 4 < 3 && j + 1 < count) return;
        for (long i = j % 4 + 1; i < 4; ++i) four[i] = four[j % 4];  // the last few: what is beyond them is not read
        by_heads(group, [&](long g, auto heads) {
            score_four<heads>(queries + g * dim, four, dim, scores + g * stride + j / 4 * 4, stride);
        });
    });
    for (long g = 0; g < group; ++g) {
        float* s = scores + g * stride;
        soften(s, count, a.softcap);
        const bool sinks = a.sinks && !partials;
        const float sink = sinks ? a.sinks[item.head * group + g] : -INFINITY;
        const float peak = largest(s, count, sink);
        const float total = exponentials(s, count, peak) + (sinks ? exponential(sink - peak) : 0.0f);
        if (partials) partials[g * partials_stride + vdim] = peak, partials[g * partials_stride + vdim + 1] = total;
        for (long j = 0; j < count; ++j) s[j] /= total;
    }
    by_heads(group, [&](long g, auto heads) {
        mix_values<heads, C>(a, item.head, blocks, low, count, scores + g * stride, stride, mixed + g * vdim);
    });
    if (partials) {
        for (long g = 0; g < group; ++g) std::memcpy(partials + g * partials_stride, mixed + g * vdim, vdim * sizeof(float));
        return;
    }
    T* out = static_cast<T*>(a.out) + (token * a.num_heads + item.head * group) * vdim;
    for (long i = 0; i < group * vdim; ++i) put(out + i, mixed[i]);
}

// Asks for the first keys of a row of one token, for which it would else have to wait.
template <typename C>
inline void ask_for_first_keys(const Attention& a, const Item& item) {
    const C* keys = slots_of<C>(a, a.keys, item.head, a.key_dim);
    const long low = context_of(a, item.row).low + item.first * SPAN, length = a.rows[item.row * 4 + 2];
    walk(a, a.blocks + a.rows[item.row * 4 + 3], low, std::min(a.block_size, length - low),
         [&](long, long slot, long) { prefetch(keys + slot * a.key_dim, a.key_dim); });
}

// A token's query head from its spans, [spans][mixed, peak, total].
template <typename T>
void join_spans(const Attention& a, long token, long head, const float* partials, long spans) {
    const long vdim = a.value_dim, step = vdim + 2;
    float peak = a.sinks ? a.sinks[head] : -INFINITY;
    for (long s = 0; s < spans; ++s) peak = std::max(peak, partials[s * step + vdim]);
    float total = a.sinks ? exponential(a.sinks[head] - peak) : 0.0f;
    float* mixed = scratch(vdim);
    std::fill_n(mixed, vdim, 0.0f);
    for (long s = 0; s < spans; ++s) {
        const float weight = partials[s * step + vdim + 1] * exponential(partials[s * step + vdim] - peak);
        total += weight;
        for (long d = 0; d < vdim; ++d) mixed[d] += weight * partials[s * step + d];
    }
    T* out = static_cast<T*>(a.out) + (token * a.num_heads + head) * vdim;
    for (long d = 0; d < vdim; ++d) put(out + d, mixed[d] / total);
}

constexpr long KEY_TILE = 4 * VL;

// Some tokens of a chunk, the query heads of one key head: tiles of keys with a running softmax.
template <typename T, typename C>
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
        walk(a, blocks, base, count, [&](long j, long slot, long) {
            const C *key = slots_of<C>(a, a.keys, item.head, dim) + slot * dim;
            const C *value = slots_of<C>(a, a.values, item.head, vdim) + slot * vdim;
            float* to = keys + j / NR * dim * NR + j % NR;
            for (long d = 0; d < dim; ++d) to[d * NR] = as_float(key[d]);
            for (long d = 0; d < vdim; ++d) values[j * padded + d] = as_float(value[d]);
        });
        for (long t = 0; t < tiles.count; ++t)
            for (long p = 0; p < panels && p * NR < count; ++p)
                multiply_tile(tiles.height(t), queries + tiles.start(t) * dim, keys + p * dim * NR, NR, dim, false,
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
                multiply_tile(tiles.height(t), weights + tiles.start(t) * KEY_TILE, values + d, padded, count, true,
                              mixed + tiles.start(t) * padded + d, padded, NR, Ahead{});
    }
    for (long r = 0; r < tiles.rows; ++r) {
        T* out = static_cast<T*>(a.out) +
                 ((token + r / group) * a.num_heads + item.head * group + r % group) * vdim;
        for (long d = 0; d < vdim; ++d) put(out + d, mixed[r * padded + d] / totals[r]);
    }
}

// Puts a token's key or value [dim] of every key head into its slot of the cache.
template <typename T, typename C>
void write(void* cache, const void* source, long slot, long num_slots, long head, long token, long head_stride,
           long token_stride, long dim) {
    C* to = static_cast<C*>(cache) + (head * num_slots + slot) * dim;
    const T* from = static_cast<const T*>(source) + head * head_stride + token * token_stride;
    for (long d = 0; d < dim; ++d) put(to + d, as_float(from[d]));
}

constexpr long QUERY_ROWS = 96;  // query rows (tokens x heads of a group) that share the packing of a key tile

template <typename T, typename C>
void attend(const Attention& a) {  // called by every thread of a team
    const long most = std::max(1L, QUERY_ROWS / a.group());
    const long singles = a.num_singles(), spans = most_spans(a);
    std::vector<Item> items;  // each thread makes the same list
    for (long r = a.num_rows - 1; r >= 0; --r)  // prompt chunks, which come last, are the long pieces of work
        for (long head = 0; head < a.num_kv_heads; ++head)
            if (r < singles)
                for (long span = 0; span < context_of(a, r).spans(); ++span) items.push_back({r, head, span, 1});
            else
                for (long first = 0; first < a.rows[r * 4 + 1]; first += most)
                    items.push_back({r, head, first, std::min(most, long(a.rows[r * 4 + 1]) - first)});
    const auto partials = [&](long row, long head) { return a.partials + (row * a.num_heads + head) * spans * (a.value_dim + 2); };
#pragma omp for schedule(static)
    for (long token = 0; token < a.num_tokens; ++token)
        for (long head = 0; head < a.num_kv_heads; ++head) {
            write<T, C>(a.keys, a.key, a.slots[token], a.num_slots, head, token, a.key_head_stride, a.key_token_stride,
                     a.key_dim);
            write<T, C>(a.values, a.value, a.slots[token], a.num_slots, head, token, a.value_head_stride,
                     a.value_token_stride, a.value_dim);
        }
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < items.size(); ++i) {
        const Item& item = items[i];
        if (const size_t next = i + omp_get_num_threads(); next < items.size() && items[next].row < singles)
            ask_for_first_keys<C>(a, items[next]);
        if (item.row >= singles)
            prefill<T, C>(a, item);
        else if (context_of(a, item.row).spans() == 1)
            decode<T, C>(a, item, nullptr, 0);
        else
            decode<T, C>(a, item, partials(item.row, item.head * a.group()) + item.first * (a.value_dim + 2),
                         spans * (a.value_dim + 2));
    }
    if (spans == 1) return;
#pragma omp for schedule(static)
    for (long row = 0; row < singles; ++row)
        for (long head = 0; head < a.num_heads && context_of(a, row).spans() > 1; ++head)
            join_spans<T>(a, a.rows[row * 4], head, partials(row, head), context_of(a, row).spans());
}

}  // namespace
