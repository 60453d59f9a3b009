// Vectors are GCC's and clang's own (`vector_size`): one source serves every instruction set. Only
// what compilers do badly names its instructions: widening, and sums of products of bytes.
#pragma once

#include <math.h>
#include <stdint.h>
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

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t i4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(2), may_alias)); // two of bf16
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t vb __attribute__((vector_size(LANES), aligned(1), may_alias));

enum Kind { F32, BF16, INT8, INT4 };
enum Activation { RELU, RELU2, GELU, GELU_TANH, SILU };

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
INLINE void put(float *p, vf x, int64_t count) { // as many as there are
    if (count >= LANES)
        store(p, x);
    for (int i = 0; count < LANES && i < LANES; i++)
        if (i < count)
            p[i] = x[i];
}
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf choose(vi yes, vf a, vf b) { return (vf)((yes & (vi)a) | (~yes & (vi)b)); }
INLINE vf largest(vf a, vf b) { return choose(a > b, a, b); } // b where one is NaN

INLINE float sum(vf x) {
    v4 part[LANES / 4], total = {0};
    memcpy(part, &x, sizeof x);
    for (int i = 0; i < LANES / 4; i++)
        total += part[i];
    return (total[0] + total[2]) + (total[1] + total[3]);
}

INLINE float top(vf x) {
    v4 part[LANES / 4];
    memcpy(part, &x, sizeof x);
    for (int i = 1; i < LANES / 4; i++) {
        const i4 more = part[i] > part[0];
        part[0] = (v4)((more & (i4)part[i]) | (~more & (i4)part[0]));
    }
    const float a = part[0][0] > part[0][2] ? part[0][0] : part[0][2];
    const float b = part[0][1] > part[0][3] ? part[0][1] : part[0][3];
    return a > b ? a : b;
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
#if defined(__AVX512F__) && LANES == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    vu h = widen16(p);
    vf size = (vf)((h & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)size | ((h & 0x8000) << 16));
#endif
}

INLINE vf vexp(vf x) { // Cephes' expf: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]
    x = largest(splat(-87.0f), x); // in this order NaN stays NaN
    x = -largest(splat(-88.0f), -x);
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
    vf positive = largest(splat(0), x); // in this order NaN stays NaN
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

// Sums of four products of bytes in every 32-bit lane: w of the weights, x of the inputs.
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

#if defined(__AVX512F__) && LANES == 16
// a's and b's first halves, or second ones: a word of each in turn.
INLINE vi interleave(int second, vi a, vi b) {
    const __m512i first = {0x1000000000, 0x1100000001, 0x1200000002, 0x1300000003,
                           0x1400000004, 0x1500000005, 0x1600000006, 0x1700000007};
    const __m512i order = _mm512_add_epi32(first, _mm512_set1_epi32(8 * second));
    return (vi)_mm512_permutex2var_epi32((__m512i)a, order, (__m512i)b);
}
#endif

// The columns of LANES vectors of words: four times, the first half and the second are interleaved.
INLINE void transpose(vi v[LANES]) {
#if defined(__AVX512F__) && LANES == 16
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
        vi to[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            to[i] = interleave(i % 2, v[i / 2], v[i / 2 + LANES / 2]);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            v[i] = to[i];
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            const int32_t word = v[i][j];
            v[i][j] = v[j][i], v[j][i] = word;
        }
#endif
}

// The sums of LANES vectors: halves of two are added to each other, four times.
INLINE vf sums(vf v[LANES]) {
#if defined(__AVX512F__) && LANES == 16
#pragma GCC unroll 4
    for (int count = 8; count; count /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < count; i++)
            v[i] = (vf)interleave(0, (vi)v[i], (vi)v[i + count]) +
                   (vf)interleave(1, (vi)v[i], (vi)v[i + count]);
    return v[0];
#else
    vf all;
    for (int i = 0; i < LANES; i++)
        all[i] = sum(v[i]);
    return all;
#endif
}

// Many inputs and bf16 weights meet in pairs, where the machine multiplies those.
#if defined(__AVX512BF16__) && LANES == 16
#define PAIRS 1
INLINE vf dot_pairs(vf d, vf w, vf x) {
    return (vf)_mm512_dpbf16_ps((__m512)d, (__m512bh)w, (__m512bh)x);
}
INLINE void to_pairs(const float *x, int32_t *words) { // LANES numbers, to the nearest
    _mm256_storeu_si256((void *)words, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x)));
}
#else
#define PAIRS 0
INLINE vf dot_pairs(vf d, vf w, vf x) { return d + w * x; }
INLINE void to_pairs(const float *x, int32_t *words) { memcpy(words, x, 4); }
#endif
