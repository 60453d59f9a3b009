// Matrices of floats, of bf16, and of integers in tiles of 16 rows, times few or many inputs.

#pragma once

#include "vectors.h"

#define TILE 16              // rows of a quantised matrix that lie side by side
#define PARTS (TILE / LANES) // vectors of a tile's rows
#define BLOCK 32             // inputs that are rounded with one scale
#define BAND (2 * LANES)     // rows of plain weights that many inputs meet at once
#define WIDE (LANES == 16 ? 8 : 4) // of those inputs

// native/binding.py has the same structure.
typedef struct {
    const void *weight;             // F32, BF16: (rows, cols); INT8, INT4: tiles of 16 rows
    const uint16_t *scale, *minimum; // fp16 (tiles, cols / group, 16); minimum may be NULL
    const float *bias;              // (rows), may be NULL
    int64_t rows, cols, group;
    int32_t kind, rounded;          // rounded: the inputs are rounded to int8 as well
} Matrix;

// What a matrix multiplies: n rows of floats, and what its kind makes of them.
typedef struct {
    const float *x; // (n, cols)
    // What weights meet lies in their order, for each group of inputs: (…, group).
    int32_t *words; // (cols), floats or pairs of bf16; left over for bf16: see `part`
    int32_t *q;     // (cols / 4), rounded, four in a word
    float *scale;   // (cols / 32), of the rounded ones
    float *total;   // (cols / 32), sums of what is multiplied
    int32_t *start; // (cols / 32): what a block's sum of products q begins with
    int32_t *band;  // (cols, BAND), room for rows of plain weights
} Inputs;

// A vector of words holds two of bf16: the upper halves of the words and the lower ones. A mask and
// a shift take them apart, which is less work than widening, if the inputs lie in that order too.
INLINE vf part(int kind, const void *w, int64_t i, int a) {
    if (kind != BF16)
        return load(kind, w, i + a * LANES);
    const vu words = *(const vu *)((const uint16_t *)w + i + a / 2 * 2 * LANES);
    return a % 2 ? (vf)(words & 0xffff0000) : (vf)(words << 16);
}

static void split(const float *x, float *y, int64_t k) {
    int64_t i = 0;
    for (; i + 2 * LANES <= k; i += 2 * LANES)
        for (int j = 0; j < LANES; j++) {
            y[i + j] = x[i + 2 * j];
            y[i + LANES + j] = x[i + 2 * j + 1];
        }
    memcpy(y + i, x + i, 4 * (size_t)(k - i));
}

// The sum of (x - centre)^power.
INLINE float moment(int power, float centre, const float *x, int64_t k) {
    vf total = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) {
        vf v = load(F32, x, i) - centre;
        if (power == 2)
            v *= v;
        total += v;
    }
    for (; i < k; i++)
        rest += power == 2 ? (x[i] - centre) * (x[i] - centre) : x[i] - centre;
    return sum(total) + rest;
}

// Inputs that weights meet at once: of n as many groups of WIDE as there are, then of 4, then each.
INLINE int group_of(int64_t i, int64_t n) {
    return i < n / WIDE * WIDE ? WIDE : i < n / 4 * 4 ? 4 : 1;
}

// A block of an input, rounded with one scale: number `at` of what has a number for each block, its
// words `group` apart. `shift`: what the weights lie above.
INLINE void round_block(Inputs *in, const float *x, int32_t *words, int64_t at, int group,
                        int32_t shift) {
    vf size = {0}, whole = {0};
    for (int i = 0; i < BLOCK; i += LANES)
        size = largest(size, largest(load(F32, x, i), -load(F32, x, i)));
    const float step = top(size) / 127, by = step > 0 ? step : 1;
    int8_t q[BLOCK];
    for (int i = 0; i < BLOCK; i += LANES) {
        const vf v = nearest(load(F32, x, i) / by);
        *(vb *)(q + i) = __builtin_convertvector(__builtin_convertvector(v, vi), vb);
        whole += v;
    }
    if (group == 1)
        memcpy(words, q, sizeof q);
    for (int i = 0; group > 1 && i < BLOCK / 4; i++)
        memcpy(words + i * group, q + 4 * i, 4);
    const float all = sum(whole), strange = all - all; // NaN, if an input is not finite, else 0
    in->scale[at] = step + strange;
    in->total[at] = in->scale[at] * all;
    in->start[at] = strange == 0 ? -shift * (int32_t)all : 0;
}

// Whether many inputs and a matrix's weights are multiplied in pairs.
INLINE int paired(const Matrix *m) { return PAIRS && m->kind == BF16 && m->cols % 2 == 0; }

INLINE int64_t words_in(const Matrix *m) { return paired(m) ? m->cols / 2 : m->cols; }

// An input of a group, to its place in the group's words.
INLINE void group_words(const Matrix *m, const float *x, int32_t *words) {
    for (int64_t i = 0; i < m->cols; i += LANES) {
        const int64_t count = least(LANES, m->cols - i), per = paired(m) ? 2 : 1;
        float some[LANES] = {0};
        int32_t made[LANES];
        memcpy(some, x + i, 4 * (size_t)count);
        if (paired(m))
            to_pairs(some, made);
        else
            memcpy(made, some, sizeof made);
        for (int64_t j = 0; j < count / per; j++)
            words[(i / per + j) * WIDE] = made[j];
    }
}

// Of n inputs x those from lo to hi.
static void prepare(Inputs *in, const Matrix *m, const float *x, int64_t n, int64_t lo,
                    int64_t hi) {
    const int64_t k = m->cols, blocks = k / BLOCK;
    const int32_t shift = m->kind == INT8 ? EXCESS : m->minimum ? 0 : 8;
    in->x = x;
    for (int64_t i = lo; i < hi; i++) {
        const float *of = x + i * k;
        const int group = group_of(i, n);
        const int64_t first = i / group * group, place = i - first;
        if (m->kind <= BF16 && group == WIDE)
            group_words(m, of, in->words + first * k + place);
        else if (m->kind == BF16)
            split(of, (float *)in->words + i * k, k);
        else if (m->rounded)
            for (int64_t b = 0; b < blocks; b++)
                round_block(in, of + b * BLOCK, in->q + (first * k + b * BLOCK * group) / 4 + place,
                            first * blocks + b * group + place, group, shift);
        else if (m->kind != F32)
            for (int64_t b = 0; b < blocks; b++)
                in->total[first * blocks + b * group + place] = moment(1, 0, of + b * BLOCK, BLOCK);
    }
}

// Whether the same prepared inputs serve both.
static int alike(const Matrix *a, const Matrix *b) {
    return a->kind == b->kind && a->rounded == b->rounded && !a->minimum == !b->minimum;
}

// Memory is read in one stream a thread, and asked for ahead of it: rows are short, and the
// hardware's own prefetching begins anew with each. How far, and into which cache, was measured:
// LOG.md. Past the outer caches (0) where much is computed for each byte, else into the second.
INLINE void ask_ahead(int kind, const void *p, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64)
        if (kind == INT4)
            __builtin_prefetch((const char *)p + 4096 + b, 0, 0);
        else
            __builtin_prefetch((const char *)p + 768 + b, 0, 2);
}

// Adds a row of k numbers, from number i on, times `cols` inputs to total[chain][input]; `chains`
// sums at once hide the additions' latency. Returns the first number left over.
INLINE int64_t products(int kind, int chains, int cols, int64_t i, const void *w, int64_t k,
                        const float *x, int64_t x_stride, vf total[4][4]) {
    const int64_t step = chains * LANES;
    for (; i + step <= k; i += step) {
        ask_ahead(kind, (const char *)w + i * size_of(kind), step * size_of(kind));
        for (int a = 0; a < chains; a++) {
            const vf v = part(kind, w, i, a);
            for (int c = 0; c < cols; c++)
                total[a][c] += v * load(F32, x + c * x_stride, i + a * LANES);
        }
    }
    return i;
}

// y = a row of k numbers times 1 or 4 inputs (split, where the kind is BF16).
INLINE void dense(int kind, int cols, const void *w, int64_t k, const float *x, int64_t x_stride,
                  float *y, int64_t y_stride) {
    vf total[4][4] = {0};
    int64_t i = cols == 1 ? products(kind, 4, 1, 0, w, k, x, x_stride, total) : 0;
    i = products(kind, 2, cols, i, w, k, x, x_stride, total);
    for (int c = 0; c < cols; c++) {
        float rest = 0;
        for (int64_t j = i; j < k; j++)
            rest += load1(kind, w, j) * x[c * x_stride + j];
        y[c * y_stride] = rest + sum((total[0][c] + total[1][c]) + (total[2][c] + total[3][c]));
    }
}

// One block of a tile times `cols` inputs: for each row the sum of 32 products, a part of 16 rows.
INLINE void rounded_block(int kind, int cols, const vi *w, const int32_t *q, vi d[][PARTS]) {
    const int words = kind == INT8 ? 8 : 4;
    for (int i = 0; i < words; i++)
        for (int p = 0; p < PARTS; p++) {
            vi a = w[i * PARTS + p], low = a & 0x0f0f0f0f, high = (a >> 4) & 0x0f0f0f0f;
            for (int c = 0; c < cols; c++) {
                const int32_t *x = q + c;
                if (kind == INT8) {
                    d[c][p] = dot_signed(d[c][p], a, x[i * cols] - (vi){0});
                } else {
                    d[c][p] = dot_nibbles(d[c][p], low, x[2 * i * cols] - (vi){0});
                    d[c][p] = dot_nibbles(d[c][p], high, x[(2 * i + 1) * cols] - (vi){0});
                }
            }
        }
}

// The same with inputs that stay floats.
INLINE void float_block(int kind, int cols, const vi *w, const float *x, int64_t k, vf s[][PARTS]) {
    const int words = kind == INT8 ? 8 : 4, inputs = BLOCK / words;
    for (int i = 0; i < words; i++)
        for (int p = 0; p < PARTS; p++)
            for (int j = 0; j < inputs; j++) {
                vi a = w[i * PARTS + p];
                // int8: byte j; int4: the low half of byte j, or the high one of byte j - 4.
                if (kind == INT8)
                    a = (a << (24 - 8 * j)) >> 24;
                else
                    a = (a >> (j < 4 ? 8 * j : 8 * j - 28)) & 15;
                for (int c = 0; c < cols; c++)
                    s[c][p] += __builtin_convertvector(a, vf) * x[c * k + i * inputs + j];
            }
}

// A tile of 16 rows times `cols` inputs: weight = scale * q + low, a scale for every group.
INLINE void tile(int kind, int rounded, int cols, const Matrix *m, int64_t row, const Inputs *in,
                 int64_t at, float *y, int64_t stride) {
    const int64_t k = m->cols, words = kind == INT8 ? k / 4 : k / 8, groups = k / m->group;
    const vi *w = (const vi *)m->weight + row / TILE * words * PARTS;
    const int64_t per_block = words / (k / BLOCK) * PARTS, in_group = m->group / BLOCK;
    const uint16_t *scale = m->scale + row * groups;
    const uint16_t *minimum = m->minimum ? m->minimum + row * groups : NULL;
    const int lows = minimum || !(rounded || kind == INT8); // else `start` has taken them off
    vf sums[WIDE][PARTS] = {0};
    for (int64_t g = 0; g < groups; g++) {
        vf part[WIDE][PARTS] = {0};
        for (int64_t b = g * in_group; b < (g + 1) * in_group; b++, w += per_block) {
            vi d[WIDE][PARTS] = {0};
            ask_ahead(kind, w, per_block * (int64_t)sizeof(vi));
            if (rounded)
                rounded_block(kind, cols, w, in->q + (at * k + b * BLOCK * cols) / 4, d);
            else
                float_block(kind, cols, w, in->x + at * k + b * BLOCK, k, part);
            for (int c = 0; rounded && c < cols; c++) {
                const int64_t block = at * (k / BLOCK) + b * cols + c;
                for (int p = 0; p < PARTS; p++) {
                    vi whole = kind == INT4 ? nibbles_total(d[c][p]) : d[c][p];
                    whole += in->start[block];
                    part[c][p] += __builtin_convertvector(whole, vf) * in->scale[block];
                }
            }
        }
        float total[WIDE] = {0}; // of what is multiplied
        for (int64_t b = g * in_group; lows && b < (g + 1) * in_group; b++)
            for (int c = 0; c < cols; c++)
                total[c] += in->total[at * (k / BLOCK) + b * cols + c];
        for (int p = 0; p < PARTS; p++) {
            const int64_t from = g * TILE + p * LANES;
            vf s = halves(scale + from);
            for (int c = 0; c < cols; c++)
                sums[c][p] += s * part[c][p];
            if (!lows)
                continue;
            vf low = s * -8.0f;
            if (minimum)
                low = halves(minimum + from);
            for (int c = 0; c < cols; c++)
                sums[c][p] += low * total[c];
        }
    }
    for (int c = 0; c < cols; c++)
        for (int p = 0; p < PARTS; p++)
            put(y + (at + c) * stride + row + p * LANES, sums[c][p], m->rows - row - p * LANES);
}

INLINE void tiles(int kind, int rounded, const Matrix *m, const Inputs *in, int64_t n, int64_t lo,
                  int64_t hi, float *y, int64_t stride) {
    for (int64_t row = lo; row < hi; row += TILE)
        for (int64_t at = 0; at < n; at += group_of(at, n))
            switch (group_of(at, n)) {
            case 1:
                tile(kind, rounded, 1, m, row, in, at, y, stride);
                break;
            case 4:
                tile(kind, rounded, 4, m, row, in, at, y, stride);
                break;
            default:
                tile(kind, rounded, WIDE, m, row, in, at, y, stride);
            }
}

// A row's word i: a float, or two of bf16.
INLINE int32_t word_at(int pairs, int kind, const char *row, int64_t i) {
    const float number = pairs ? 0 : load1(kind, row, i);
    int32_t word;
    memcpy(&word, pairs ? row + 4 * i : (const char *)&number, 4);
    return word;
}

// A band's words in the order of `band`; zeros where there are no more than `count` rows.
INLINE void pack(int pairs, int kind, const char *w, int64_t k, int64_t count, int32_t *to) {
    const int64_t words = pairs ? k / 2 : k, step = k * size_of(kind);
    for (int part = 0; part < BAND; part += LANES, w += LANES * step) {
        int64_t i = 0;
        for (; count - part >= LANES && i + LANES <= words; i += LANES) {
            vi v[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++)
                v[r] = pairs ? (vi) * (const vu *)(w + r * step + 4 * i)
                             : (vi)load(kind, w + r * step, i);
            transpose(v);
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++)
                *(vi *)(to + (i + j) * BAND + part) = v[j];
        }
        for (; i < words; i++)
            for (int r = 0; r < LANES; r++)
                to[i * BAND + part + r] =
                    part + r < count ? word_at(pairs, kind, w + r * step, i) : 0;
    }
}

// WIDE inputs times a band of rows.
INLINE void band(int pairs, const int32_t *w, const int32_t *x, int64_t words, int64_t count,
                 float *y, int64_t stride) {
    vf total[WIDE][2] = {0};
    for (int64_t i = 0; i < words; i++)
        for (int p = 0; p < 2; p++) {
            const vf a = load(F32, w, i * BAND + p * LANES);
            for (int c = 0; c < WIDE; c++) {
                const vf b = (vf)(x[i * WIDE + c] - (vi){0});
                total[c][p] = pairs ? dot_pairs(total[c][p], a, b) : (vf)(total[c][p] + a * b);
            }
        }
    for (int c = 0; c < WIDE; c++)
        for (int p = 0; p < 2; p++)
            put(y + c * stride + p * LANES, total[c][p], count - p * LANES);
}

// Few inputs: a row at a time, as memory streams it. Many: bands that stay in the cache while all
// inputs pass.
INLINE void rows(int kind, int pairs, const Matrix *m, const Inputs *in, int64_t n, int64_t lo,
                 int64_t hi, float *y, int64_t stride) {
    const int64_t k = m->cols, grouped = n / WIDE * WIDE, words = words_in(m);
    for (int64_t row = lo; grouped && row < hi; row += BAND) {
        const int64_t count = least(BAND, hi - row);
        const char *w = (const char *)m->weight + row * k * size_of(kind);
        pack(pairs, kind, w, k, count, in->band);
        for (int64_t at = 0; at < grouped; at += WIDE)
            band(pairs, in->band, in->words + at * k, words, count, y + at * stride + row, stride);
    }
    const float *few = kind == F32 ? in->x : (const float *)in->words;
    for (int64_t row = lo; row < hi; row++) {
        const void *w = (const char *)m->weight + row * k * size_of(kind);
        for (int64_t at = grouped; at < n; at++)
            dense(kind, 1, w, k, few + at * k, k, y + at * stride + row, stride);
    }
}

// y[i][r] = rows lo to hi of the matrix times input i, and the bias. y is (n, stride).
static void multiply(const Matrix *m, const Inputs *in, int64_t n, int64_t lo, int64_t hi, float *y,
                     int64_t stride) {
    switch (m->kind * 2 + m->rounded) {
    case F32 * 2:
        rows(F32, 0, m, in, n, lo, hi, y, stride);
        break;
    case BF16 * 2:
        if (paired(m))
            rows(BF16, 1, m, in, n, lo, hi, y, stride);
        else
            rows(BF16, 0, m, in, n, lo, hi, y, stride);
        break;
    case INT8 * 2:
        tiles(INT8, 0, m, in, n, lo, hi, y, stride);
        break;
    case INT8 * 2 + 1:
        tiles(INT8, 1, m, in, n, lo, hi, y, stride);
        break;
    case INT4 * 2:
        tiles(INT4, 0, m, in, n, lo, hi, y, stride);
        break;
    default:
        tiles(INT4, 1, m, in, n, lo, hi, y, stride);
    }
    for (int64_t i = 0; m->bias && i < n; i++)
        for (int64_t r = lo; r < hi; r++)
            y[i * stride + r] += m->bias[r];
}

// One row of a table, as embeddings are read.
static void table_row(const Matrix *m, int64_t row, float *y) {
    const int64_t k = m->cols, groups = m->group ? k / m->group : 1;
    for (int64_t i = 0; i < k; i++) {
        if (m->kind == F32 || m->kind == BF16) {
            y[i] = load1(m->kind, m->weight, row * k + i);
            continue;
        }
        const int inputs = m->kind == INT8 ? 4 : 8;
        const int64_t word = (row / TILE * (k / inputs) + i / inputs) * TILE + row % TILE;
        const int8_t byte = ((const int8_t *)m->weight)[4 * word + i % 4];
        const int64_t at = (row / TILE * groups + i / m->group) * TILE + row % TILE;
        const int q = m->kind == INT8 ? byte : i % 8 < 4 ? byte & 15 : (byte >> 4) & 15;
        const float s = half(m->scale[at]);
        y[i] = m->minimum ? s * q + half(m->minimum[at]) : s * (m->kind == INT8 ? q : q - 8);
    }
}
