// One call a step: a few tokens through the whole Transformer, by one team of threads.
//
// PyTorch runs some 400 operators a token, each of which wakes and joins its threads; a small
// model's weights are read in less time than that takes. Here a team walks through the layers
// together and meets only where one thread needs what another has made (`meet`, six times a layer).
//
// Read from `decode` up: -> `run` -> attention, MLP -> matrix.h -> vectors.h; team.h.
//
// Shapes: n tokens of any rows, D d_model, H heads, K key/value heads, E head_dim, F d_ff, V vocab.

#include "matrix.h"
#include "team.h"

#define SPAN 128                              // keys that one piece of attention reads
#define INNER (1 << 18)                       // bytes of the cache for each thread's inner caches
#define PANEL (LANES * (LANES == 16 ? 4 : 2)) // of them, that stay in registers

// ---- what Python hands over (native/binding.py has the same structures) ----

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
    atomic_int strange; // whether a logit is NaN or infinite
} Tokens;

// ---- a step ----

typedef struct {
    Team *team;
    const Model *model;
    const Cache *cache;
    Tokens *tokens;
    float *x, *qkv, *inner, *gate, *piece; // of all threads: see `scratch`
    int64_t pieces; // of attention's answer, of which each sees SPAN keys, or all if shared
    uintptr_t own, all; // each thread's, own_size bytes; many inputs, of all threads
    int64_t own_size;
} Step;

// A thread's own buffers.
typedef struct {
    float *hidden, *mixed; // (n, D): what the blocks read; (n, H E): attention's answer
    Inputs in;
    float *turned, *some; // (SPAN / PANEL, E, PANEL): keys; (4, E + 2): a span's answers
} Own;

// Cuts memory into buffers, each on a cache line of its own; from 0 it only counts.
static void *cut(uintptr_t *at, int64_t bytes) {
    void *here = (void *)*at;
    *at += (uintptr_t)(bytes + 63) / 64 * 64;
    return here;
}

static Own own_buffers(const Model *m, uintptr_t memory, int64_t n, int64_t *bytes) {
    uintptr_t at = memory;
    const int64_t wide = m->heads * m->head_dim, widest = most(most(m->d_model, wide), m->d_ff);
    Own own;
    own.hidden = cut(&at, 4 * n * m->d_model);
    own.mixed = cut(&at, 4 * n * wide);
    own.in.words = cut(&at, 4 * n * widest);
    own.in.q = cut(&at, n * widest);
    own.in.scale = cut(&at, 4 * n * (widest / BLOCK + 1));
    own.in.total = cut(&at, 4 * n * (widest / BLOCK + 1));
    own.in.start = cut(&at, 4 * n * (widest / BLOCK + 1));
    own.in.band = cut(&at, 4 * BAND * widest);
    own.turned = cut(&at, 4 * SPAN * m->head_dim);
    own.some = cut(&at, 4 * 4 * (m->head_dim + 2));
    if (bytes)
        *bytes = (int64_t)(at - memory);
    return own;
}

static int64_t qkv_width(const Model *m) { return (m->heads + 2 * m->kv_heads) * m->head_dim; }

static uintptr_t scratch(Step *s, const Model *m, uintptr_t at, int threads, int64_t n,
                         int64_t slots) {
    s->pieces = n < WIDE ? (slots + SPAN - 1) / SPAN : 1;
    s->x = cut(&at, 4 * n * m->d_model);
    s->qkv = cut(&at, 4 * n * most(qkv_width(m), m->d_model));
    s->inner = cut(&at, 4 * n * m->d_ff);
    s->gate = cut(&at, 4 * n * m->d_ff);
    s->piece = cut(&at, 4 * n * s->pieces * m->heads * (m->head_dim + 2));
    own_buffers(m, 0, n < WIDE ? n : 0, &s->own_size);
    s->own = (uintptr_t)cut(&at, threads * s->own_size);
    int64_t all_size;
    own_buffers(m, 0, n < WIDE ? 0 : n, &all_size);
    s->all = (uintptr_t)cut(&at, all_size);
    return at;
}

int64_t scratch_bytes(const Model *m, int threads, int64_t n, int64_t slots) {
    Step s;
    return (int64_t)scratch(&s, m, 0, threads, n, slots);
}

// This thread's rows of a matrix.
static void share(const Step *s, int me, int64_t rows, int64_t *lo, int64_t *hi) {
    const int64_t tiles = (rows + TILE - 1) / TILE, threads = s->team->threads;
    *lo = least(rows, tiles * me / threads * TILE);
    *hi = least(rows, tiles * (me + 1) / threads * TILE);
}

// Inputs are made by every thread for itself, which is sooner done than met for; many inputs by all
// threads together, in the same buffers.
static int shared(const Step *s) { return s->tokens->n >= WIDE; }

static void my_tokens(const Step *s, int me, int64_t *lo, int64_t *hi) {
    const int64_t n = s->tokens->n, threads = s->team->threads;
    *lo = shared(s) ? n * me / threads : 0;
    *hi = shared(s) ? n * (me + 1) / threads : n;
}

static void meet_if_shared(const Step *s) {
    if (shared(s))
        meet(s->team);
}

static void normalise(const Norm *norm, int layernorm, float eps, const float *x, float *y,
                      int64_t k) {
    const float mean = layernorm ? moment(1, 0, x, k) / (float)k : 0;
    const float by = 1 / sqrtf(moment(2, mean, x, k) / (float)k + eps);
    for (int64_t i = 0; i < k; i++)
        y[i] = (x[i] - mean) * by * norm->weight[i] + (norm->bias ? norm->bias[i] : 0);
}

static void norm_all(const Model *m, const Norm *norm, const float *x, float *y, int64_t lo,
                     int64_t hi) {
    for (int64_t i = lo; i < hi; i++)
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
static void keep(const Cache *c, void *cells, float *scales, int64_t slot, const float *x,
                 int64_t k) {
    if (c->kind == F32) {
        memcpy((float *)cells + slot * k, x, 4 * (size_t)k);
        return;
    }
    float size = 0, strange = 0;
    for (int64_t i = 0; i < k; i++) {
        size = fabsf(x[i]) > size ? fabsf(x[i]) : size;
        strange += x[i] - x[i]; // NaN, if a number is not finite, else 0
    }
    const float step = size / 127 + strange;
    for (int64_t i = 0; i < k; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        if (x[i] == x[i])
            bits += 0x7fff + (bits >> 16 & 1); // to the nearest bf16, halves to even
        if (c->kind == BF16)
            ((uint16_t *)cells)[slot * k + i] = (uint16_t)(bits >> 16);
        else
            ((int8_t *)cells)[slot * k + i] =
                step > 0 ? (int8_t)((x[i] / step + 0x1.8p23f) - 0x1.8p23f) : 0;
    }
    if (c->kind == INT8)
        scales[slot] = step;
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

// Vector e of a key, in the order of the queries' numbers.
INLINE vf key_part(int kind, const char *key, int64_t e, int64_t k) {
    const int64_t pair = e / (2 * LANES) * 2 * LANES;
    const int split = kind == BF16 && pair + 2 * LANES <= k;
    return split ? part(kind, key, pair, e > pair) : load(kind, key, e);
}

// Keys as floats, and turned: (panels, E, PANEL).
static void turn(const Cache *cache, int64_t slot, int64_t count, int64_t k, float *turned) {
    const int kind = cache->kind;
    const int64_t size = k * size_of(kind);
    const char *keys = (const char *)cache->keys + slot * size;
    for (int64_t j = 0; j < count; j += LANES, keys += LANES * size) {
        float *to = turned + j / PANEL * k * PANEL + j % PANEL;
        const int64_t some = least(LANES, count - j);
        int64_t e = 0;
        for (; e + LANES <= k; e += LANES) {
            vi v[LANES] = {0};
            for (int64_t r = 0; r < some; r++)
                v[r] = (vi)key_part(kind, keys + r * size, e, k);
            transpose(v);
            for (int i = 0; i < LANES; i++)
                store(to + (e + i) * PANEL, (vf)v[i]);
        }
        for (; e < k; e++)
            for (int64_t r = 0; r < some; r++)
                to[e * PANEL + r] = load1(kind, keys + r * size, e);
    }
}

INLINE vf two_parts(int kind, const char *key, int64_t e, const float *q) {
    return part(kind, key, e, 0) * load(F32, q, e) + part(kind, key, e, 1) * load(F32, q, e + LANES);
}

// Products of a query and keys: a vector a key, and the sums of LANES of them at once.
INLINE void few_scores(int kind, const char *keys, int64_t count, int64_t k, const float *q,
                       float *p) {
    const int64_t size = k * size_of(kind), together = k % (2 * LANES) ? 0 : count / LANES * LANES;
    for (int64_t j = 0; j < together; j += LANES) {
        const char *key = keys + j * size;
        for (int64_t b = LANES * size; b < 2 * LANES * size; b += 64)
            __builtin_prefetch(key + b);
        vf total[LANES];
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++)
            total[r] = two_parts(kind, key + r * size, 0, q);
        for (int64_t e = 2 * LANES; e < k; e += 2 * LANES)
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++)
                total[r] += two_parts(kind, key + r * size, e, q);
        store(p + j, sums(total));
    }
    for (int64_t j = together; j < count; j++)
        dense(kind, 1, keys + j * size, k, q, 0, p + j, 0);
}

// Products of four queries and a panel of turned keys.
INLINE void scores(const float *turned, int64_t k, const float *q, int64_t stride, float *p) {
    vf total[PANEL / LANES][4] = {0};
    for (int64_t e = 0; e < k; e++)
        for (int a = 0; a < PANEL / LANES; a++) {
            const vf key = load(F32, turned, e * PANEL + a * LANES);
            for (int c = 0; c < 4; c++)
                total[a][c] += key * q[c * stride + e];
        }
    for (int a = 0; a < PANEL / LANES; a++)
        for (int c = 0; c < 4; c++)
            store(p + c * (SPAN + LANES) + a * LANES, total[a][c]);
}

// One query head of `cols` tokens in a row over one span of keys: the largest score, the sum of
// exponentials, and E mixed values (Dao et al. 2023's split; `merge` and `gather` put the pieces
// together). `turned` is the span's keys, or NULL.
INLINE void piece(int kind, int cols, const Step *s, int64_t layer, int64_t i, int64_t h,
                  int64_t span, const float *turned, float *y, int64_t stride) {
    const Model *m = s->model;
    const Cache *cache = s->cache;
    const int64_t k = m->head_dim, width = qkv_width(m);
    int64_t first[4], end[4], lo = INT64_MAX, hi = 0;
    for (int c = 0; c < cols; c++) {
        first[c] = most(span * SPAN, s->tokens->slot[i + c] + 1 - m->window);
        end[c] = least((span + 1) * SPAN, s->tokens->slot[i + c] + 1);
        lo = least(lo, first[c]), hi = most(hi, end[c]);
    }
    for (int c = 0; c < cols; c++)
        y[c * stride] = -INFINITY;
    if (lo >= hi)
        return;
    lo = turned ? span * SPAN : lo;
    const int64_t at = cells(m, cache, layer, s->tokens->row[i], h / (m->heads / m->kv_heads)) + lo;
    const char *keys = (const char *)cache->keys + at * k * size_of(kind);
    const char *values = (const char *)cache->values + at * k * size_of(kind);
    float p[4][SPAN + LANES];
    const float *q = s->qkv + i * width + h * k;
    if (cols == 4 && turned)
        for (int64_t j = 0; j < hi - lo; j += PANEL)
            scores(turned + j * k, k, q, width, p[0] + j);
    else
        for (int c = 0; c < cols; c++)
            few_scores(kind, keys, hi - lo, k, q + c * width, p[c]);
    for (int c = 0; c < cols; c++) {
        // Vectors reach past the last key: there, and where this token sees nothing, is -infinity.
        const int64_t from = first[c] - lo, to = most(from, end[c] - lo), count = hi - lo;
        for (int64_t j = 0; kind == INT8 && j < count; j++)
            p[c][j] *= cache->key_scales[at + j];
        for (int64_t j = 0; j < from; j++)
            p[c][j] = -INFINITY;
        for (int64_t j = to; j < count + LANES; j++)
            p[c][j] = -INFINITY;
        vf size = load(F32, p[c], 0), total = {0};
        for (int64_t j = LANES; j < count; j += LANES)
            size = largest(size, load(F32, p[c], j));
        const float best = top(size);
        for (int64_t j = 0; j < count; j += LANES) {
            const vf share = vexp(load(F32, p[c], j) - best);
            store(p[c] + j, share);
            total += share;
        }
        for (int64_t j = 0; kind == INT8 && j < count; j++)
            p[c][j] *= cache->value_scales[at + j];
        // Keys that are seen and not numbers are not taken for unseen ones.
        y[c * stride] = best == -INFINITY && from < to ? NAN : best;
        y[c * stride + 1] = sum(total);
    }
    const int wide = cols == 1 || LANES == 16 ? 4 : 2;
    int64_t e = mix(kind, cols, wide, 0, p[0], values, hi - lo, k, y + 2, stride);
    e = mix(kind, cols, 1, e, p[0], values, hi - lo, k, y + 2, stride);
    for (; e < k; e++)
        for (int c = 0; c < cols; c++) {
            y[c * stride + 2 + e] = 0;
            for (int64_t j = 0; j < hi - lo; j++)
                y[c * stride + 2 + e] += p[c][j] * load1(kind, values, j * k + e);
        }
}

// The same for what the cache holds, and 4 tokens or 1.
static void some_keys(int cols, const Step *s, int64_t layer, int64_t i, int64_t h, int64_t span,
                      const float *turned, float *y, int64_t stride) {
    switch (s->cache->kind * 2 + (cols == 4)) {
    case F32 * 2:
        piece(F32, 1, s, layer, i, h, span, NULL, y, stride);
        break;
    case F32 * 2 + 1:
        piece(F32, 4, s, layer, i, h, span, turned, y, stride);
        break;
    case BF16 * 2:
        piece(BF16, 1, s, layer, i, h, span, NULL, y, stride);
        break;
    case BF16 * 2 + 1:
        piece(BF16, 4, s, layer, i, h, span, turned, y, stride);
        break;
    case INT8 * 2:
        piece(INT8, 1, s, layer, i, h, span, NULL, y, stride);
        break;
    default:
        piece(INT8, 4, s, layer, i, h, span, turned, y, stride);
    }
}

// The answer over some keys, and over more of them.
static void merge(float *y, const float *more, int64_t k) {
    if (more[0] == -INFINITY) // it sees none of them
        return;
    const float best = more[0] > y[0] ? more[0] : y[0];
    const float before = expf(y[0] - best), by = expf(more[0] - best);
    y[0] = best;
    for (int64_t e = 1; e < k + 2; e++)
        y[e] = before * y[e] + by * more[e];
}

// Many tokens: one query head of those from `from` to `to`, over all keys that they see.
static void all_keys(const Step *s, const Own *own, int64_t layer, int64_t h, int64_t from,
                     int64_t to) {
    const Model *m = s->model;
    const Tokens *t = s->tokens;
    const Cache *cache = s->cache;
    const int64_t k = m->head_dim, stride = m->heads * (k + 2);
    float *y = s->piece + h * (k + 2);
    for (int64_t i = from, end; i < to; i = end) { // the tokens of one row
        for (end = i + 1; end < to && t->row[end] == t->row[i];)
            end++;
        for (int64_t j = i; j < end; j++) {
            memset(y + j * stride, 0, 4 * (size_t)(k + 2));
            y[j * stride] = -INFINITY;
        }
        const int64_t at = cells(m, cache, layer, t->row[i], h / (m->heads / m->kv_heads));
        const int64_t first = most(0, t->slot[i] + 1 - m->window), last = t->slot[end - 1];
        float *turned = end - i < WIDE ? NULL : own->turned;
        for (int64_t span = first / SPAN; span <= last / SPAN; span++) {
            if (turned)
                turn(cache, at + span * SPAN, least(SPAN, last + 1 - span * SPAN), k, turned);
            for (int64_t j = i, cols; j < end; j += cols) {
                cols = j + 4 <= end ? 4 : 1;
                some_keys((int)cols, s, layer, j, h, span, turned, own->some, k + 2);
                for (int64_t c = 0; c < cols; c++)
                    merge(y + (j + c) * stride, own->some + c * (k + 2), k);
            }
        }
    }
}

static void pieces(const Step *s, const Own *own, int64_t layer, int me) {
    const Model *m = s->model;
    const Tokens *t = s->tokens;
    const int64_t k = m->head_dim, threads = s->team->threads;
    if (shared(s)) {
        const int64_t items = m->heads * threads;
        for (int64_t item; (item = take(s->team, me, layer + 1, items)) >= 0;)
            all_keys(s, own, layer, item / threads, t->n * (item % threads) / threads,
                     t->n * (item % threads + 1) / threads);
        return;
    }
    int64_t unseen = s->pieces; // spans before all windows
    for (int64_t i = 0; i < t->n; i++)
        unseen = least(unseen, most(0, t->slot[i] + 1 - m->window) / SPAN);
    const int64_t items = (s->pieces - unseen) * m->heads, stride = s->pieces * m->heads * (k + 2);
    for (int64_t item; (item = take(s->team, me, layer + 1, items)) >= 0;) {
        const int64_t h = item % m->heads, span = unseen + item / m->heads;
        for (int64_t i = 0, cols; i < t->n; i += cols) {
            float *y = s->piece + ((i * s->pieces + span) * m->heads + h) * (k + 2);
            cols = i + 4 <= t->n && t->row[i] == t->row[i + 3] ? 4 : 1;
            some_keys((int)cols, s, layer, i, h, span, NULL, y, stride);
        }
    }
}

static void gather(const Step *s, Own *own, int64_t lo, int64_t hi) {
    const Model *m = s->model;
    const int64_t k = m->head_dim, step = m->heads * (k + 2);
    for (int64_t i = lo; i < hi; i++) {
        const int64_t slot = s->tokens->slot[i];
        const int64_t first = shared(s) ? 0 : most(0, slot + 1 - m->window) / SPAN;
        const int64_t last = shared(s) ? 0 : slot / SPAN;
        for (int64_t h = 0; h < m->heads; h++) {
            const float *y = s->piece + (i * s->pieces * m->heads + h) * (k + 2);
            float *all = own->some, *out = own->mixed + (i * m->heads + h) * k;
            memcpy(all, y + first * step, 4 * (size_t)(k + 2));
            for (int64_t p = first + 1; p <= last; p++)
                merge(all, y + p * step, k);
            for (int64_t e = 0; e < k; e++)
                out[e] = all[2 + e] / all[1];
        }
    }
}

// A query is scaled, and in the order that its keys' kind wants.
static void query(const Cache *c, float *x, int64_t k, float *room) {
    const float by = 1 / sqrtf((float)k);
    for (int64_t e = 0; e < k; e++)
        room[e] = x[e] * by;
    if (c->kind == BF16)
        split(room, x, k);
    else
        memcpy(x, room, 4 * (size_t)k);
}

// Inputs x of a matrix, as it wants them.
static void prepare_inputs(const Step *s, Own *own, const Matrix *matrix, const float *x, int me) {
    int64_t lo, hi;
    my_tokens(s, me, &lo, &hi);
    prepare(&own->in, matrix, x, s->tokens->n, lo, hi);
    meet_if_shared(s);
}

// Of one row, as long as the keys and values that its tokens see fit the inner caches: this thread's
// part of them is asked for, so that it comes while threads meet.
static void ask_cache(const Step *s, int64_t layer, int me) {
    const Model *m = s->model;
    const Cache *c = s->cache;
    const Tokens *t = s->tokens;
    const int64_t size = m->head_dim * size_of(c->kind), end = t->slot[t->n - 1];
    const int64_t first = most(0, t->slot[0] + 1 - m->window), count = most(0, end - first);
    const int64_t threads = s->team->threads, mine = count * (me + 1) / threads * size;
    if (t->row[0] != t->row[t->n - 1] || 2 * m->kv_heads * count * size > threads * INNER)
        return;
    for (int64_t h = 0; h < m->kv_heads; h++) {
        const int64_t at = (cells(m, c, layer, t->row[0], h) + first) * size;
        for (int64_t b = count * me / threads * size; b < mine; b += 64) {
            __builtin_prefetch((const char *)c->keys + at + b, 0, 2);
            __builtin_prefetch((const char *)c->values + at + b, 0, 2);
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
        if (i == 0 || !alike(matrix[i], matrix[i - 1])) {
            meet_if_shared(s); // nobody needs the inputs before
            prepare_inputs(s, own, matrix[i], own->hidden, me);
        }
        share(s, me, matrix[i]->rows, &lo, &hi);
        multiply(matrix[i], &own->in, t->n, lo, hi, s->qkv + start[i], width);
    }
    ask_cache(s, layer, me);
    meet(s->team);
    for (int64_t item = me; item < t->n * (heads + kv); item += s->team->threads) {
        const int64_t i = item / (heads + kv), h = item % (heads + kv);
        float *x = s->qkv + i * width + h * k;
        place(m, h < heads ? &l->q_norm : &l->k_norm, x, t->slot[i]);
        if (h < heads) {
            query(s->cache, x, k, (float *)own->in.band);
        } else {
            const Cache *c = s->cache;
            const int64_t at = cells(m, c, layer, t->row[i], h - heads) + t->slot[i];
            keep(c, c->keys, c->key_scales, at, x, k);
            keep(c, c->values, c->value_scales, at, x + kv * k, k);
        }
    }
    meet(s->team);
    pieces(s, own, layer, me);
    meet(s->team);
    my_tokens(s, me, &lo, &hi);
    gather(s, own, lo, hi);
    prepare_inputs(s, own, &l->o, own->mixed, me);
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

// Of numbers lo to hi: y = the activation of a, times y if that is another.
static void act(int activation, const float *a, float *y, int64_t lo, int64_t hi) {
    int64_t i = lo;
    for (; i + LANES <= hi; i += LANES) {
        const vf acted = activate(activation, load(F32, a, i));
        store(y + i, a == y ? acted : (vf)(acted * load(F32, y, i)));
    }
    for (; i < hi; i++) {
        const float acted = activate(activation, splat(a[i]))[0];
        y[i] = a == y ? acted : acted * y[i];
    }
}

static void mlp(const Step *s, Own *own, const Layer *l, int me) {
    const Model *m = s->model;
    const int64_t n = s->tokens->n;
    int64_t lo, hi;
    share(s, me, m->d_ff, &lo, &hi);
    prepare_inputs(s, own, &l->up, own->hidden, me);
    multiply(&l->up, &own->in, n, lo, hi, s->inner, m->d_ff);
    float *acting = s->inner;
    if (l->gate.weight) {
        if (!alike(&l->gate, &l->up)) {
            meet_if_shared(s);
            prepare_inputs(s, own, &l->gate, own->hidden, me);
        }
        acting = s->gate;
        multiply(&l->gate, &own->in, n, lo, hi, acting, m->d_ff);
    }
    for (int64_t i = 0; i < n; i++)
        act(m->activation, acting + i * m->d_ff, s->inner + i * m->d_ff, lo, hi);
    meet(s->team);
    prepare_inputs(s, own, &l->down, s->inner, me);
}

static void run(void *argument, int me) {
    const Step *s = argument;
    const Model *m = s->model;
    Tokens *t = s->tokens;
    const int64_t d = m->d_model;
    const uintptr_t at = s->own + (uintptr_t)(me * s->own_size);
    Own own = own_buffers(m, at, shared(s) ? 0 : t->n, NULL);
    if (shared(s)) {
        Own all = own_buffers(m, s->all, t->n, NULL);
        all.in.band = own.in.band, all.turned = own.turned, all.some = own.some;
        own = all;
    }
    int64_t lo, hi;
    my_tokens(s, me, &lo, &hi);
    for (int64_t i = me; i < t->n; i += s->team->threads) {
        float *x = s->x + i * d;
        table_row(&m->embed, t->ids[i], x);
        for (int64_t e = 0; e < d; e++)
            x[e] = x[e] * m->embed_scale + (m->positions ? m->positions[t->slot[i] * d + e] : 0);
    }
    meet(s->team);
    // Pre-norm reads norm(x) and adds to x; post-norm (2017) reads the last norm and adds to it.
    const float *base = m->post ? own.hidden : s->x;
    if (m->post)
        memcpy(own.hidden + lo * d, s->x + lo * d, 4 * (size_t)((hi - lo) * d));
    for (int64_t layer = 0; layer < m->layers; layer++) {
        const Layer *l = m->layer + layer;
        if (!m->post)
            norm_all(m, &l->attn_norm, s->x, own.hidden, lo, hi);
        attention(s, &own, l, layer, me);
        add_to(s, &own, &l->o, base, me);
        norm_all(m, m->post ? &l->attn_norm : &l->mlp_norm, s->x, own.hidden, lo, hi);
        mlp(s, &own, l, me);
        add_to(s, &own, &l->down, base, me);
        if (m->post)
            norm_all(m, &l->mlp_norm, s->x, own.hidden, lo, hi);
    }
    if (m->post)
        meet_if_shared(s);
    const int64_t chosen = shared(s) && me ? 0 : t->m;
    for (int64_t j = 0; j < chosen; j++) { // the wanted ones move to the front, in ascending order
        const float *x = base + t->wanted[j] * d;
        if (m->post)
            memmove(own.hidden + j * d, x, 4 * (size_t)d);
        else
            normalise(&m->norm, m->layernorm, m->eps, x, own.hidden + j * d, d);
    }
    prepare(&own.in, &m->head, own.hidden, t->m, 0, chosen);
    meet_if_shared(s);
    share(s, me, m->vocab, &lo, &hi);
    multiply(&m->head, &own.in, t->m, lo, hi, t->logits, m->vocab);
    for (int64_t j = 0; j < t->m; j++) {
        float *y = t->logits + j * m->vocab, strange = 0;
        for (int64_t r = lo; m->softcap > 0 && r < hi; r++)
            y[r] = m->softcap * tanhf(y[r] / m->softcap);
        for (int64_t r = lo; r < hi; r++)
            strange = y[r] - y[r] == 0 ? strange : 1; // what is not finite has no difference
        if (strange)
            atomic_store(&t->strange, 1);
    }
    meet(s->team);
}

// Runs the tokens, fills their slots of the cache and the logits; whether those are finite. Python
// has checked every size.
int decode(Team *team, const Model *model, const Cache *cache, Tokens *tokens, char *memory) {
    Step s = {.team = team, .model = model, .cache = cache, .tokens = tokens};
    int64_t longest = 0;
    for (int64_t i = 0; i < tokens->n; i++)
        longest = most(longest, tokens->slot[i] + 1);
    scratch(&s, model, (uintptr_t)memory, team->threads, tokens->n, longest);
    together(team, run, &s);
    return !atomic_load(&tokens->strange);
}

// ---- several steps, each with the token that the one before has made likeliest ----

typedef struct {
    const int64_t *stops; // ids that end it
    int64_t *ids;         // (count): what was chosen
    float *logprobs;      // (count): the log of its share
    int64_t stop_count, count;
    int64_t vocab; // ids from there on are never chosen
} Choices;

// The likeliest of the first `vocab` of all logits, of equal ones the first.
static int64_t likeliest(const float *y, int64_t vocab, int64_t all, float *logprob) {
    float best = -INFINITY, of_all, total = 0;
    vf tops = splat(best), totals = {0};
    int64_t i = 0, id = 0;
    for (; i + LANES <= vocab; i += LANES)
        tops = largest(tops, load(F32, y, i));
    for (best = top(tops); i < vocab; i++)
        best = y[i] > best ? y[i] : best;
    while (y[id] != best)
        id++;
    for (of_all = best, i = vocab; i < all; i++)
        of_all = y[i] > of_all ? y[i] : of_all;
    for (i = 0; i + LANES <= all; i += LANES)
        totals += vexp(load(F32, y, i) - of_all);
    for (; i < all; i++)
        total += expf(y[i] - of_all);
    *logprob = best - of_all - logf(total + sum(totals));
    return id;
}

// From one token of one row on. How many were chosen, the last of which has not run yet; fewer than
// the count after a stop; -1 where logits are not finite.
int64_t greedy(Team *team, const Model *model, const Cache *cache, const Tokens *first,
               char *memory, Choices *c) {
    int64_t id = *first->ids, slot = *first->slot;
    Tokens tokens = {.ids = &id, .row = first->row, .slot = &slot, .wanted = first->wanted,
                     .logits = first->logits, .n = 1, .m = 1};
    for (int64_t n = 0; n < c->count; slot++) {
        if (!decode(team, model, cache, &tokens, memory))
            return -1;
        id = likeliest(tokens.logits, c->vocab, model->vocab, c->logprobs + n);
        c->ids[n++] = id;
        for (int64_t i = 0; i < c->stop_count; i++)
            if (id == c->stops[i])
                return n;
    }
    return c->count;
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

// Below 8 a processor's own library may multiply many inputs faster.
int lanes(void) { return LANES; }

int32_t read_all(Team *team, const char *data, int64_t bytes) {
    Sweep s = {team, data, bytes, 0};
    together(team, sweep, &s);
    return s.found;
}
