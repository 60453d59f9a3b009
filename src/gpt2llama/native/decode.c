// One call a step: a few tokens through the whole Transformer, by one team of threads.
//
// PyTorch runs some 400 operators a token, each of which wakes and joins its threads; a small
// model's weights are read in less time than that takes. Here a team walks through the layers
// together and meets only where one thread needs what another has made (`meet`, six times a layer).
//
// Read from the bottom: `decode` -> `run` -> attention and matrix products -> vectors. Vectors are
// GCC's and clang's own (`vector_size`), so that one source serves every instruction set; only the
// sum of four products of bytes (`dot4`) is written for each.
//
// Shapes: n tokens of any rows, D d_model, H heads, K key/value heads, E head_dim, F d_ff, V vocab.

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef LANES // floats in a vector
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#endif
#define INLINE static inline __attribute__((always_inline))
#define TILE 16           // rows of a quantised matrix that lie side by side
#define PARTS (TILE / LANES)
#define BLOCK 32          // inputs that are rounded with one scale
#define SPAN 128          // keys that one piece of attention reads
#define AHEAD 2048        // bytes

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t vb __attribute__((vector_size(LANES), aligned(1), may_alias));

// ---- what Python hands over (native/binding.py has the same structures) ----

enum Kind { F32, BF16, INT8, INT4 };
enum Activation { RELU, RELU2, GELU, GELU_TANH, SILU };

typedef struct {
    const void *weight;             // F32, BF16: (rows, cols); INT8, INT4: tiles of 16 rows
    const uint16_t *scale, *minimum; // fp16 (tiles, cols / group, 16); minimum may be NULL
    const float *bias;              // (rows), may be NULL
    int64_t rows, cols, group;
    int32_t kind, rounded;          // rounded: the inputs are rounded to int8 as well
} Matrix;

typedef struct {
    const float *weight, *bias; // bias may be NULL; weight NULL: no norm
} Norm;

typedef struct {
    Norm attn_norm, mlp_norm, q_norm, k_norm;
    Matrix q, k, v, o, gate, up, down; // gate.weight NULL: a plain MLP
} Layer;

typedef struct {
    int64_t layers, heads, kv_heads, head_dim, d_model, d_ff, vocab;
    int64_t window; // keys that a query sees, itself among them
    int32_t layernorm, post, activation;
    float eps, embed_scale, softcap; // softcap 0: none
    Matrix embed, head;
    const float *positions; // (contexts, D), may be NULL
    const float *cos, *sin; // (contexts, E/2), may be NULL
    Norm norm;
    const Layer *layer;
} Model;

typedef struct {
    void *keys, *values;              // (layers, rows, K, slots, E)
    float *key_scales, *value_scales; // INT8: (layers, rows, K, slots)
    int64_t rows, slots;
    int32_t kind;
} Cache;

typedef struct {
    const int64_t *ids, *row, *slot; // (n): the token, its row of the cache, its slot and position
    const int64_t *wanted;           // (m): of which tokens the logits are wanted
    float *logits;                   // (m, V)
    int64_t n, m;
} Tokens;

// ---- vectors ----

// 16-bit and signed 8-bit numbers in memory, widened to 32 bits: compilers take these apart, so the
// instructions are named.
#if defined(__AVX512F__) && LANES == 16
INLINE vu widen16(const void *p) { return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)); }
INLINE vi widen8(const void *p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }
#elif defined(__AVX2__) && LANES == 8
INLINE vu widen16(const void *p) { return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128(p)); }
INLINE vi widen8(const void *p) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)); }
#else
INLINE vu widen16(const void *p) { return __builtin_convertvector(*(const vh *)p, vu); }
INLINE vi widen8(const void *p) { return __builtin_convertvector(*(const vb *)p, vi); }
#endif

INLINE vf load(int kind, const void *p, int64_t i) {
    if (kind == F32)
        return *(const vf *)((const float *)p + i);
    if (kind == BF16)
        return (vf)(widen16((const uint16_t *)p + i) << 16);
    return __builtin_convertvector(widen8((const int8_t *)p + i), vf);
}

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t size_of(int kind) { return kind == F32 ? 4 : kind == BF16 ? 2 : 1; }

INLINE float load1(int kind, const void *p, int64_t i) {
    if (kind == F32)
        return ((const float *)p)[i];
    if (kind == INT8)
        return ((const int8_t *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE void store(float *p, vf x) { *(vf *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf choose(vi yes, vf a, vf b) { return (vf)((yes & (vi)a) | (~yes & (vi)b)); }
INLINE vf largest(vf a, vf b) { return choose(a > b, a, b); }

INLINE float sum(vf x) {
    float a[LANES];
    memcpy(a, &x, sizeof a);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            a[i] += a[i + half];
    return a[0];
}

INLINE vf nearest(vf x) { // to an integer, halves to even, |x| < 2^22
    return (x + 0x1.8p23f) - 0x1.8p23f;
}

INLINE float half(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    float size;
    memcpy(&size, &bits, 4);
    return (h & 0x8000 ? -0x1p112f : 0x1p112f) * size;
}

// fp16, infinities and NaN apart: the exponent is moved by a product, which mends subnormals too.
INLINE vf halves(const uint16_t *p) {
    vu h = widen16(p);
    vf size = (vf)((h & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)size | ((h & 0x8000) << 16));
}

INLINE vf vexp(vf x) { // Cephes' expf: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]
    x = largest(x, splat(-87.0f));
    x = -largest(-x, splat(-88.0f));
    vf n = nearest(x * 1.44269504088896341f);
    vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (vf)((vi)p + (__builtin_convertvector(n, vi) << 23));
}

INLINE vf vtanh(vf x) { return 1.0f - 2.0f / (vexp(2.0f * x) + 1.0f); }

INLINE vf activate(int kind, vf x) {
    vf positive = largest(x, splat(0));
    switch (kind) {
    case RELU:
        return positive;
    case RELU2:
        return positive * positive;
    case GELU:
        for (int i = 0; i < LANES; i++)
            x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
        return x;
    case GELU_TANH:
        return 0.5f * x * (1.0f + vtanh(0.79788456f * (x + 0.044715f * x * x * x)));
    default:
        return x / (1.0f + vexp(-x));
    }
}

// ---- sums of four products of bytes in every 32-bit lane: w of the weights, x of the inputs ----

#if defined(__AVX512VNNI__) && LANES == 16
// The instruction multiplies unsigned by signed bytes: w + 128 is unsigned; 128 times the sum of x
// is taken off again (EXCESS).
#define EXCESS 128
INLINE vi dot_signed(vi d, vi w, vi x) {
    vi shifted = w ^ (int32_t)0x80808080;
    return (vi)_mm512_dpbusd_epi32((__m512i)d, (__m512i)shifted, (__m512i)x);
}
INLINE vi dot_nibbles(vi d, vi w, vi x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)d, (__m512i)w, (__m512i)x);
}
INLINE vi nibbles_total(vi d) { return d; }
#elif defined(__AVX2__) && LANES == 8
// Sums of two products fit 16 bits: one of signed bytes (2 * 128 * 127 at most), eight of nibbles
// (8 * 2 * 15 * 127): those of a block are widened together.
#define EXCESS 0
INLINE vi widen(vi d) { return (vi)_mm256_madd_epi16((__m256i)d, _mm256_set1_epi16(1)); }
INLINE vi dot_signed(vi d, vi w, vi x) {
    __m256i size = _mm256_abs_epi8((__m256i)w), turned = _mm256_sign_epi8((__m256i)x, (__m256i)w);
    return d + widen((vi)_mm256_maddubs_epi16(size, turned));
}
INLINE vi dot_nibbles(vi d, vi w, vi x) {
    return (vi)_mm256_add_epi16((__m256i)d, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
}
INLINE vi nibbles_total(vi d) { return widen(d); }
#else
#define EXCESS 0
INLINE vi dot_signed(vi d, vi w, vi x) {
    for (int up = 0; up < 32; up += 8)
        d += ((vi)((vu)w << up) >> 24) * ((vi)((vu)x << up) >> 24);
    return d;
}
INLINE vi dot_nibbles(vi d, vi w, vi x) { return dot_signed(d, w, x); }
INLINE vi nibbles_total(vi d) { return d; }
#endif

// ---- matrix products ----

// What a matrix multiplies: n rows of floats and, for tiles, their blocks of 32.
typedef struct {
    const float *x; // (n, cols)
    int8_t *q;      // (n, cols), rounded
    float *scale;   // (n, cols / 32), of the rounded ones
    float *total;   // (n, cols / 32), sums of what is multiplied
    int32_t *sum;   // (n, cols / 32), sums of q
    float *wide;    // (16, cols), room for rows of bf16 weights
} Inputs;

static void prepare(Inputs *in, const Matrix *m, const float *x, int64_t n) {
    in->x = x;
    const int tiled = m->kind == INT8 || m->kind == INT4;
    for (int64_t b = 0; tiled && b < n * m->cols / BLOCK; b++) {
        vf size = {0}, total = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            vf v = load(F32, x, b * BLOCK + i);
            size = largest(size, largest(v, -v));
            total += v;
        }
        in->total[b] = sum(total);
        if (!m->rounded)
            continue;
        float amax = 0;
        for (int i = 0; i < LANES; i++)
            amax = size[i] > amax ? size[i] : amax;
        vi whole = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            vf v = load(F32, x, b * BLOCK + i);
            vi q = __builtin_convertvector(nearest(v / (amax > 0 ? amax / 127 : 1)), vi);
            *(vb *)(in->q + b * BLOCK + i) = __builtin_convertvector(q, vb);
            whole += q;
        }
        in->sum[b] = 0;
        for (int i = 0; i < LANES; i++)
            in->sum[b] += whole[i];
        in->scale[b] = amax / 127;
        in->total[b] = in->scale[b] * (float)in->sum[b];
    }
}

// Whether the same prepared inputs serve both.
static int alike(const Matrix *a, const Matrix *b) {
    return a->kind == b->kind && a->rounded == b->rounded;
}

// Memory is read in one stream a thread, and asked for ahead of it: rows are short, and the
// hardware's own prefetching begins anew with each.
INLINE void ask_ahead(const void *p, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64)
        __builtin_prefetch((const char *)p + AHEAD + b);
}

// `count` rows of k numbers times `cols` inputs; `chains` sums at once hide the additions' latency.
INLINE void dense(int kind, int count, int chains, int cols, const void *w, int64_t k,
                  const float *x, int64_t x_stride, float *y, int64_t y_stride) {
    const int64_t row = k * size_of(kind);
    vf total[4][4] = {0};
    int64_t i = 0;
    for (; i + chains * LANES <= k; i += chains * LANES) {
        if (count == 1)
            ask_ahead((const char *)w + i * size_of(kind), chains * LANES * size_of(kind));
        for (int a = 0; a < chains; a++) {
            vf v[4];
            for (int c = 0; c < cols; c++)
                v[c] = load(F32, x + c * x_stride, i + a * LANES);
            for (int r = 0; r < count; r++)
                for (int c = 0; c < cols; c++)
                    total[r * chains + a][c] += load(kind, (const char *)w + r * row, i + a * LANES) * v[c];
        }
    }
    for (int r = 0; r < count; r++)
        for (int c = 0; c < cols; c++) {
            float rest = 0;
            for (int64_t j = i; j < k; j++)
                rest += load1(kind, (const char *)w + r * row, j) * x[c * x_stride + j];
            for (int a = 0; a < chains; a++)
                rest += sum(total[r * chains + a][c]);
            y[c * y_stride + r] = rest;
        }
}

// One block of a tile times one input: for each row the sum of 32 products, a part of 16 rows.
INLINE void rounded_block(int kind, int cols, const vi *w, const int8_t *q, int64_t k, vi d[][PARTS]) {
    const int words = kind == INT8 ? 8 : 4;
    for (int i = 0; i < words; i++)
        for (int p = 0; p < PARTS; p++) {
            vi a = w[i * PARTS + p], low = a & 0x0f0f0f0f, high = (a >> 4) & 0x0f0f0f0f;
            for (int c = 0; c < cols; c++) {
                const int32_t *x = (const int32_t *)(q + c * k);
                if (kind == INT8) {
                    d[c][p] = dot_signed(d[c][p], a, x[i] - (vi){0});
                } else {
                    d[c][p] = dot_nibbles(d[c][p], low, x[2 * i] - (vi){0});
                    d[c][p] = dot_nibbles(d[c][p], high, x[2 * i + 1] - (vi){0});
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
    vf y16[4][PARTS] = {0};
    for (int64_t g = 0; g < groups; g++) {
        vf part[4][PARTS] = {0};
        float total[4] = {0};
        for (int64_t b = g * in_group; b < (g + 1) * in_group; b++, w += per_block) {
            vi d[4][PARTS] = {0};
            ask_ahead(w, per_block * (int64_t)sizeof(vi));
            if (rounded)
                rounded_block(kind, cols, w, in->q + at * k + b * BLOCK, k, d);
            else
                float_block(kind, cols, w, in->x + at * k + b * BLOCK, k, part);
            for (int c = 0; c < cols; c++) {
                const int64_t block = (at + c) * (k / BLOCK) + b;
                total[c] += in->total[block];
                for (int p = 0; rounded && p < PARTS; p++) {
                    vi whole = kind == INT4 ? nibbles_total(d[c][p]) : d[c][p];
                    whole -= kind == INT8 ? EXCESS * in->sum[block] : 0;
                    part[c][p] += __builtin_convertvector(whole, vf) * in->scale[block];
                }
            }
        }
        for (int p = 0; p < PARTS; p++) {
            vf s = halves(scale + g * TILE + p * LANES);
            vf low = s * (kind == INT8 ? 0.0f : -8.0f);
            if (minimum)
                low = halves(minimum + g * TILE + p * LANES);
            for (int c = 0; c < cols; c++)
                y16[c][p] += s * part[c][p] + low * total[c];
        }
    }
    for (int c = 0; c < cols; c++)
        for (int r = 0; r < TILE && row + r < m->rows; r++)
            y[(at + c) * stride + row + r] = y16[c][r / LANES][r % LANES];
}

INLINE void tiles(int kind, int rounded, const Matrix *m, const Inputs *in, int64_t n, int64_t lo,
                  int64_t hi, float *y, int64_t stride) {
    for (int64_t row = lo; row < hi; row += TILE) {
        int64_t at = 0;
        for (; at + 4 <= n; at += 4)
            tile(kind, rounded, 4, m, row, in, at, y, stride);
        for (; at < n; at++)
            tile(kind, rounded, 1, m, row, in, at, y, stride);
    }
}

// Few inputs: a row at a time, as memory streams it. Many: two rows (widened to floats) by four
// inputs, of 16 rows that stay in the cache while all inputs pass.
INLINE void rows(int kind, const Matrix *m, const Inputs *in, int64_t n, int64_t lo, int64_t hi,
                 float *y, int64_t stride) {
    const int64_t k = m->cols, many = n >= 8 ? n / 4 * 4 : 0;
    for (int64_t row = lo; row < hi; row += TILE) {
        const int64_t count = least(TILE, hi - row);
        const char *w = (const char *)m->weight + row * k * size_of(kind);
        for (int64_t i = 0; kind != F32 && many && i < count * k; i++)
            in->wide[i] = load1(kind, w, i);
        const float *wide = kind == F32 ? (const float *)w : in->wide;
        for (int64_t at = 0; at < many; at += 4) {
            const float *x = in->x + at * k;
            float *to = y + at * stride + row;
            for (int64_t r = 0; r + 2 <= count; r += 2)
                dense(F32, 2, 1, 4, wide + r * k, k, x, k, to + r, stride);
            if (count % 2)
                dense(F32, 1, 2, 4, wide + (count - 1) * k, k, x, k, to + count - 1, stride);
        }
        for (int64_t r = 0; r < count; r++) {
            int64_t at = many;
            for (; at + 4 <= n; at += 4)
                dense(kind, 1, 2, 4, w + r * k * size_of(kind), k, in->x + at * k, k,
                      y + at * stride + row + r, stride);
            for (; at < n; at++)
                dense(kind, 1, 4, 1, w + r * k * size_of(kind), k, in->x + at * k, k,
                      y + at * stride + row + r, stride);
        }
    }
}

// y[i][r] = rows lo to hi of the matrix times input i, and the bias. y is (n, stride).
static void multiply(const Matrix *m, const Inputs *in, int64_t n, int64_t lo, int64_t hi, float *y,
                     int64_t stride) {
    switch (m->kind * 2 + m->rounded) {
    case F32 * 2:
        rows(F32, m, in, n, lo, hi, y, stride);
        break;
    case BF16 * 2:
        rows(BF16, m, in, n, lo, hi, y, stride);
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

// ---- the team ----

typedef struct {
    int threads;
    atomic_uint arrived, phase;       // at the meeting that comes next
    atomic_uint call, asleep, leave;  // a call for everybody; who is not looking; the last call
    pthread_mutex_t lock;
    pthread_cond_t wake;
    void (*job)(void *, int);
    void *argument;
    pthread_t thread[];
} Team;

// Spins while the wait should be short; then lets others have this core, on which perhaps the one
// that is waited for wants to run.
static void relax(int tries) {
    if (tries > 4000)
        sched_yield();
#if defined(__x86_64__)
    else
        __builtin_ia32_pause();
#endif
}

// Everybody waits for everybody; what was written before is seen by all after it.
static void meet(Team *t) {
    const unsigned phase = atomic_load(&t->phase);
    if (atomic_fetch_add(&t->arrived, 1) + 1 == (unsigned)t->threads) {
        atomic_store(&t->arrived, 0);
        atomic_store(&t->phase, phase + 1);
        return;
    }
    for (int tries = 0; atomic_load_explicit(&t->phase, memory_order_acquire) == phase; tries++)
        relax(tries);
}

typedef struct {
    Team *team;
    int me;
} Member;

static void *member(void *argument) {
    Member who = *(Member *)argument;
    Team *t = who.team;
    free(argument);
    for (unsigned seen = 0;; seen++) {
        for (int tries = 0; atomic_load(&t->call) == seen && tries < 40000; tries++)
            relax(tries);
        pthread_mutex_lock(&t->lock);
        atomic_fetch_add(&t->asleep, 1);
        while (atomic_load(&t->call) == seen)
            pthread_cond_wait(&t->wake, &t->lock);
        atomic_fetch_sub(&t->asleep, 1);
        pthread_mutex_unlock(&t->lock);
        if (atomic_load(&t->leave))
            return NULL;
        t->job(t->argument, who.me);
    }
}

static void together(Team *t, void (*job)(void *, int), void *argument) {
    t->job = job, t->argument = argument;
    atomic_fetch_add(&t->call, 1);
    if (atomic_load(&t->asleep)) {
        pthread_mutex_lock(&t->lock);
        pthread_cond_broadcast(&t->wake);
        pthread_mutex_unlock(&t->lock);
    }
    if (job)
        job(argument, 0);
}

void team_free(Team *t) {
    atomic_store(&t->leave, 1);
    together(t, NULL, NULL);
    for (int i = 1; i < t->threads; i++)
        pthread_join(t->thread[i], NULL);
    free(t);
}

// The caller is the first of the threads. NULL: the system gives no more.
Team *team_new(int threads) {
    Team *t = calloc(1, sizeof *t + (size_t)threads * sizeof(pthread_t));
    if (!t)
        return NULL;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->wake, NULL);
    for (t->threads = 1; t->threads < threads; t->threads++) {
        Member *who = malloc(sizeof *who);
        if (who)
            *who = (Member){t, t->threads};
        if (!who || pthread_create(&t->thread[t->threads], NULL, member, who)) {
            free(who);
            team_free(t);
            return NULL;
        }
    }
    return t;
}

// ---- a step ----

typedef struct {
    Team *team;
    const Model *model;
    const Cache *cache;
    const Tokens *tokens;
    float *x, *qkv, *inner, *gate, *piece; // shared: see `scratch`
    int64_t pieces;                        // of SPAN keys, in the longest row
    char *own;                             // each thread's, own_size bytes
    int64_t own_size;
} Step;

// A thread's own buffers.
typedef struct {
    float *hidden, *mixed; // (n, D): what the blocks read; (n, H E): attention's answer
    Inputs in;
} Own;

// Cuts memory into buffers, each on a cache line of its own; with NULL it only counts.
static char *cut(char **at, int64_t bytes) {
    char *here = *at;
    *at += (bytes + 63) / 64 * 64;
    return here;
}

static Own own_buffers(const Model *m, char *memory, int64_t n, int64_t *bytes) {
    char *at = memory;
    const int64_t wide = m->heads * m->head_dim, widest = most(most(m->d_model, wide), m->d_ff);
    Own own;
    own.hidden = (float *)cut(&at, 4 * n * m->d_model);
    own.mixed = (float *)cut(&at, 4 * n * wide);
    own.in.q = (int8_t *)cut(&at, n * widest);
    own.in.scale = (float *)cut(&at, 4 * n * (widest / BLOCK + 1));
    own.in.total = (float *)cut(&at, 4 * n * (widest / BLOCK + 1));
    own.in.sum = (int32_t *)cut(&at, 4 * n * (widest / BLOCK + 1));
    own.in.wide = (float *)cut(&at, 4 * TILE * widest);
    if (bytes)
        *bytes = at - memory;
    return own;
}

static int64_t qkv_width(const Model *m) { return (m->heads + 2 * m->kv_heads) * m->head_dim; }

static char *scratch(Step *s, const Model *m, char *memory, int threads, int64_t n, int64_t slots) {
    char *at = memory;
    s->pieces = (slots + SPAN - 1) / SPAN;
    s->x = (float *)cut(&at, 4 * n * m->d_model);
    s->qkv = (float *)cut(&at, 4 * n * most(qkv_width(m), m->d_model));
    s->inner = (float *)cut(&at, 4 * n * m->d_ff);
    s->gate = (float *)cut(&at, 4 * n * m->d_ff);
    s->piece = (float *)cut(&at, 4 * n * s->pieces * m->heads * (m->head_dim + 2));
    own_buffers(m, NULL, n, &s->own_size);
    s->own = cut(&at, threads * s->own_size);
    return at;
}

int64_t scratch_bytes(const Model *m, int threads, int64_t n, int64_t slots) {
    Step s;
    return scratch(&s, m, NULL, threads, n, slots) - (char *)NULL;
}

// This thread's rows of a matrix.
static void share(const Step *s, int me, int64_t rows, int64_t *lo, int64_t *hi) {
    const int64_t tiles = (rows + TILE - 1) / TILE, threads = s->team->threads;
    *lo = least(rows, tiles * me / threads * TILE);
    *hi = least(rows, tiles * (me + 1) / threads * TILE);
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

static void normalise(const Norm *norm, int layernorm, float eps, const float *x, float *y,
                      int64_t k) {
    const float mean = layernorm ? moment(1, 0, x, k) / (float)k : 0;
    const float by = 1 / sqrtf(moment(2, mean, x, k) / (float)k + eps);
    for (int64_t i = 0; i < k; i++)
        y[i] = (x[i] - mean) * by * norm->weight[i] + (norm->bias ? norm->bias[i] : 0);
}

static void norm_all(const Model *m, const Norm *norm, const float *x, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        normalise(norm, m->layernorm, m->eps, x + i * m->d_model, y + i * m->d_model, m->d_model);
}

// One head's norm and rotation, in place (Su et al. 2021, half-split as in HF).
static void place(const Model *m, const Norm *norm, float *x, int64_t position) {
    const int64_t half_size = m->head_dim / 2;
    if (norm->weight)
        normalise(norm, 0, m->eps, x, x, m->head_dim);
    if (!m->cos)
        return;
    const float *cosines = m->cos + position * half_size, *sines = m->sin + position * half_size;
    for (int64_t i = 0; i < half_size; i++) {
        const float a = x[i], b = x[i + half_size];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half_size] = b * cosines[i] + a * sines[i];
    }
}

// A key or a value into its slot; int8 with a scale of its own.
static void keep(const Cache *c, void *cells, float *scales, int64_t slot, const float *x, int64_t k) {
    if (c->kind == F32) {
        memcpy((float *)cells + slot * k, x, 4 * (size_t)k);
        return;
    }
    float size = 0;
    for (int64_t i = 0; i < k; i++)
        size = fabsf(x[i]) > size ? fabsf(x[i]) : size;
    const float by = size > 0 ? size / 127 : 1;
    for (int64_t i = 0; i < k; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        if (c->kind == BF16) // to nearest, halves to even
            ((uint16_t *)cells)[slot * k + i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        else
            ((int8_t *)cells)[slot * k + i] = (int8_t)((x[i] / by + 0x1.8p23f) - 0x1.8p23f);
    }
    if (c->kind == INT8)
        scales[slot] = size / 127;
}

// Where one layer's keys and values of one row and key head begin, counted in slots.
static int64_t cells(const Model *m, const Cache *c, int64_t layer, int64_t row, int64_t head) {
    return ((layer * c->rows + row) * m->kv_heads + head) * c->slots;
}

// For each of `cols`: y = sum of p[j] times row j of the values, `wide` vectors of it at once.
INLINE int64_t mix(int kind, int cols, int wide, int64_t i, const float *p, const char *values,
                   int64_t keys, int64_t k, float *y, int64_t stride) {
    for (; i + wide * LANES <= k; i += wide * LANES) {
        vf total[4][4] = {0};
        for (int64_t j = 0; j < keys; j++)
            for (int a = 0; a < wide; a++) {
                vf v = load(kind, values, j * k + i + a * LANES);
                for (int c = 0; c < cols; c++)
                    total[a][c] += p[c * (SPAN + LANES) + j] * v;
            }
        for (int a = 0; a < wide; a++)
            for (int c = 0; c < cols; c++)
                store(y + c * stride + i + a * LANES, total[a][c]);
    }
    return i;
}

// One query head of `cols` tokens in a row over one span of keys: the largest score, the sum of
// exponentials, and E mixed values (Dao et al. 2023's split; `gather` puts the pieces together).
INLINE void piece(int kind, int cols, const Step *s, int64_t layer, int64_t i, int64_t h, int64_t span) {
    const Model *m = s->model;
    const Cache *cache = s->cache;
    const int64_t k = m->head_dim, width = qkv_width(m), stride = s->pieces * m->heads * (k + 2);
    int64_t first[4], end[4], lo = INT64_MAX, hi = 0;
    for (int c = 0; c < cols; c++) {
        first[c] = most(span * SPAN, s->tokens->slot[i + c] + 1 - m->window);
        end[c] = least((span + 1) * SPAN, s->tokens->slot[i + c] + 1);
        lo = least(lo, first[c]), hi = most(hi, end[c]);
    }
    if (lo >= hi)
        return;
    const int64_t at = cells(m, cache, layer, s->tokens->row[i], h / (m->heads / m->kv_heads)) + lo;
    const char *keys = (const char *)cache->keys + at * k * size_of(kind);
    const char *values = (const char *)cache->values + at * k * size_of(kind);
    float p[4][SPAN + LANES], *y = s->piece + ((i * s->pieces + span) * m->heads + h) * (k + 2);
    for (int64_t j = 0; j < hi - lo; j++)
        dense(kind, 1, cols == 1 ? 4 : 2, cols, keys + j * k * size_of(kind), k,
              s->qkv + i * width + h * k, width, p[0] + j, SPAN + LANES);
    for (int c = 0; c < cols; c++) {
        float size = -INFINITY, total = 0;
        for (int64_t j = 0; j < hi - lo; j++) {
            p[c][j] = lo + j < first[c] || lo + j >= end[c] ? -INFINITY
                      : kind == INT8                        ? p[c][j] * cache->key_scales[at + j]
                                                            : p[c][j];
            size = p[c][j] > size ? p[c][j] : size;
        }
        for (int64_t j = 0; j < hi - lo; j += LANES) // past the last key: not read again
            store(p[c] + j, vexp(load(F32, p[c], j) - size));
        for (int64_t j = 0; j < hi - lo; j++) {
            total += p[c][j];
            p[c][j] *= kind == INT8 ? cache->value_scales[at + j] : 1;
        }
        y[c * stride] = size, y[c * stride + 1] = total;
    }
    int64_t e = mix(kind, cols, cols == 1 ? 4 : 2, 0, p[0], values, hi - lo, k, y + 2, stride);
    e = mix(kind, cols, 1, e, p[0], values, hi - lo, k, y + 2, stride);
    for (; e < k; e++)
        for (int c = 0; c < cols; c++) {
            y[c * stride + 2 + e] = 0;
            for (int64_t j = 0; j < hi - lo; j++)
                y[c * stride + 2 + e] += p[c][j] * load1(kind, values, j * k + e);
        }
}

INLINE void pieces(int kind, const Step *s, int64_t layer, int me) {
    const Model *m = s->model;
    const Tokens *t = s->tokens;
    const int64_t shared = m->heads / m->kv_heads;
    for (int64_t item = me; item < s->pieces * m->kv_heads; item += s->team->threads)
        for (int64_t i = 0, step; i < t->n; i += step) {
            step = i + 4 <= t->n && t->row[i] == t->row[i + 3] ? 4 : 1;
            for (int64_t h = item % m->kv_heads * shared, to = h + shared; h < to; h++)
                if (step == 4)
                    piece(kind, 4, s, layer, i, h, item / m->kv_heads);
                else
                    piece(kind, 1, s, layer, i, h, item / m->kv_heads);
        }
}

static void gather(const Step *s, float *mixed) {
    const Model *m = s->model;
    const int64_t k = m->head_dim;
    for (int64_t i = 0; i < s->tokens->n; i++) {
        const int64_t slot = s->tokens->slot[i];
        const int64_t first = most(0, slot + 1 - m->window) / SPAN, last = slot / SPAN;
        for (int64_t h = 0; h < m->heads; h++) {
            const float *y = s->piece + (i * s->pieces * m->heads + h) * (k + 2);
            const int64_t step = m->heads * (k + 2);
            float *out = mixed + (i * m->heads + h) * k, size = -INFINITY, total = 0;
            for (int64_t p = first; p <= last; p++)
                size = y[p * step] > size ? y[p * step] : size;
            memset(out, 0, 4 * (size_t)k);
            for (int64_t p = first; p <= last; p++) {
                const float share = expf(y[p * step] - size);
                total += share * y[p * step + 1];
                for (int64_t e = 0; e < k; e++)
                    out[e] += share * y[p * step + 2 + e];
            }
            for (int64_t e = 0; e < k; e++)
                out[e] /= total;
        }
    }
}

static void attention(const Step *s, Own *own, const Layer *l, int64_t layer, int me) {
    const Model *m = s->model;
    const Tokens *t = s->tokens;
    const int64_t k = m->head_dim, width = qkv_width(m), heads = m->heads, kv = m->kv_heads;
    const Matrix *matrix[] = {&l->q, &l->k, &l->v};
    const int64_t start[] = {0, heads * k, (heads + kv) * k};
    int64_t lo, hi;
    for (int i = 0; i < 3; i++) {
        if (i == 0 || !alike(matrix[i], matrix[i - 1]))
            prepare(&own->in, matrix[i], own->hidden, t->n);
        share(s, me, matrix[i]->rows, &lo, &hi);
        multiply(matrix[i], &own->in, t->n, lo, hi, s->qkv + start[i], width);
    }
    meet(s->team);
    const float by = 1 / sqrtf((float)k);
    for (int64_t item = me; item < t->n * (heads + kv); item += s->team->threads) {
        const int64_t i = item / (heads + kv), h = item % (heads + kv);
        float *x = s->qkv + i * width + h * k;
        place(m, h < heads ? &l->q_norm : &l->k_norm, x, t->slot[i]);
        if (h < heads) {
            for (int64_t e = 0; e < k; e++)
                x[e] *= by;
        } else {
            const Cache *c = s->cache;
            const int64_t at = cells(m, c, layer, t->row[i], h - heads) + t->slot[i];
            keep(c, c->keys, c->key_scales, at, x, k);
            keep(c, c->values, c->value_scales, at, x + kv * k, k);
        }
    }
    meet(s->team);
    if (s->cache->kind == F32)
        pieces(F32, s, layer, me);
    else if (s->cache->kind == BF16)
        pieces(BF16, s, layer, me);
    else
        pieces(INT8, s, layer, me);
    meet(s->team);
    gather(s, own->mixed);
}

// This thread's rows of x = base + matrix times what is prepared. qkv is free by now.
static void add_to(const Step *s, Own *own, const Matrix *matrix, const float *base, int me) {
    const int64_t d = s->model->d_model, n = s->tokens->n;
    int64_t lo, hi;
    share(s, me, d, &lo, &hi);
    multiply(matrix, &own->in, n, lo, hi, s->qkv, d);
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = lo; r < hi; r++)
            s->x[i * d + r] = base[i * d + r] + s->qkv[i * d + r];
    meet(s->team);
}

static void mlp(const Step *s, Own *own, const Layer *l, int me) {
    const Model *m = s->model;
    const int64_t n = s->tokens->n;
    int64_t lo, hi;
    share(s, me, m->d_ff, &lo, &hi);
    prepare(&own->in, &l->up, own->hidden, n);
    multiply(&l->up, &own->in, n, lo, hi, s->inner, m->d_ff);
    float *acting = s->inner;
    if (l->gate.weight) {
        if (!alike(&l->gate, &l->up))
            prepare(&own->in, &l->gate, own->hidden, n);
        acting = s->gate;
        multiply(&l->gate, &own->in, n, lo, hi, acting, m->d_ff);
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = lo; r < hi; r += LANES) {
            float *y = s->inner + i * m->d_ff + r, *a = acting + i * m->d_ff + r, wide[LANES] = {0};
            const size_t bytes = 4 * (size_t)least(LANES, hi - r);
            memcpy(wide, a, bytes);
            vf acted = activate(m->activation, load(F32, wide, 0));
            if (acting != s->inner) {
                memcpy(wide, y, bytes);
                acted *= load(F32, wide, 0);
            }
            memcpy(y, &acted, bytes);
        }
    meet(s->team);
    prepare(&own->in, &l->down, s->inner, n);
}

static void run(void *argument, int me) {
    const Step *s = argument;
    const Model *m = s->model;
    const Tokens *t = s->tokens;
    const int64_t d = m->d_model;
    Own own = own_buffers(m, s->own + me * s->own_size, t->n, NULL);
    for (int64_t i = me; i < t->n; i += s->team->threads) {
        float *x = s->x + i * d;
        table_row(&m->embed, t->ids[i], x);
        for (int64_t e = 0; e < d; e++)
            x[e] = x[e] * m->embed_scale + (m->positions ? m->positions[t->slot[i] * d + e] : 0);
    }
    meet(s->team);
    // Pre-norm reads norm(x) and adds to x; post-norm (2017) reads and adds to the last norm's answer.
    const float *base = m->post ? own.hidden : s->x;
    if (m->post)
        memcpy(own.hidden, s->x, 4 * (size_t)(t->n * d));
    for (int64_t layer = 0; layer < m->layers; layer++) {
        const Layer *l = m->layer + layer;
        if (!m->post)
            norm_all(m, &l->attn_norm, s->x, own.hidden, t->n);
        attention(s, &own, l, layer, me);
        prepare(&own.in, &l->o, own.mixed, t->n);
        add_to(s, &own, &l->o, base, me);
        norm_all(m, m->post ? &l->attn_norm : &l->mlp_norm, s->x, own.hidden, t->n);
        mlp(s, &own, l, me);
        add_to(s, &own, &l->down, base, me);
        if (m->post)
            norm_all(m, &l->mlp_norm, s->x, own.hidden, t->n);
    }
    for (int64_t j = 0; j < t->m; j++) { // the wanted ones move to the front, in ascending order
        const float *x = base + t->wanted[j] * d;
        if (m->post)
            memmove(own.hidden + j * d, x, 4 * (size_t)d);
        else
            normalise(&m->norm, m->layernorm, m->eps, x, own.hidden + j * d, d);
    }
    int64_t lo, hi;
    share(s, me, m->vocab, &lo, &hi);
    prepare(&own.in, &m->head, own.hidden, t->m);
    multiply(&m->head, &own.in, t->m, lo, hi, t->logits, m->vocab);
    for (int64_t j = 0; m->softcap > 0 && j < t->m; j++)
        for (int64_t r = lo; r < hi; r++)
            t->logits[j * m->vocab + r] = m->softcap * tanhf(t->logits[j * m->vocab + r] / m->softcap);
    meet(s->team);
}

// Runs the tokens, fills their slots of the cache and the logits. Python has checked every size.
void decode(Team *team, const Model *model, const Cache *cache, const Tokens *tokens, char *memory) {
    Step s = {.team = team, .model = model, .cache = cache, .tokens = tokens};
    int64_t longest = 0;
    for (int64_t i = 0; i < tokens->n; i++)
        longest = most(longest, tokens->slot[i] + 1);
    scratch(&s, model, memory, team->threads, tokens->n, longest);
    together(team, run, &s);
}

// ---- the machine's limit: all threads read, and do nothing else ----

typedef struct {
    Team *team;
    const char *data;
    int64_t bytes;
    int32_t found; // so that no compiler leaves the reading out
} Sweep;

static void sweep(void *argument, int me) {
    Sweep *s = argument;
    const int64_t step = 8 * sizeof(vi), all = s->bytes / step, threads = s->team->threads;
    vi total[8] = {0};
    for (int64_t i = all * me / threads; i < all * (me + 1) / threads; i++)
        for (int j = 0; j < 8; j++)
            total[j] ^= *(const vi *)(s->data + i * step + j * (int64_t)sizeof(vi));
    for (int j = 1; j < 8; j++)
        total[0] ^= total[j];
    __atomic_fetch_xor(&s->found, total[0][0], __ATOMIC_RELAXED);
    meet(s->team);
}

int32_t read_all(Team *team, const char *data, int64_t bytes) {
    Sweep s = {team, data, bytes, 0};
    together(team, sweep, &s);
    return s.found;
}
