/* The Kourkoutas-β step on the CPU: all parameters of a group in one call, two passes over memory.

   Pass 1 sums g² per bucket, and |θ| per parameter for adaptive_tiny; the scalar rule of kourkoutas/rule.py turns each
   pooled norm into β2; pass 2 updates m, v, v_max and θ.

   NOTE: complex tensors are pairs of reals, as in torch.optim.Adam.

   NOTE: same bits whatever the number of threads and the CPU. Tensors are cut into blocks of fixed size, a block is
   summed in double in a fixed order by whichever thread takes it, and the sums of blocks are added in order. Products
   are not contracted (-ffp-contract=off), so that machines with and without fused multiply-add agree. */

#define _GNU_SOURCE
#include "arithmetic.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "formats.h"
#include "threads.h"

enum { BLOCK = 8192, PIECE = 1024, LANES = 32 };
/* Buckets are taken together until their gradients fill this much, so that pass 2 finds them in cache. */
enum { WAVE_BYTES = 8 << 20 };
enum { SERIAL_WORK = 16384 }; /* elements per thread below which another thread costs more than it helps */

/* Σ TERM(x) in double, in LANES partial sums. */
#define SUM(NAME, T, TERM)                                                                                            \
    CLONES static double NAME##_##T(const T *restrict x, long n) {                                                    \
        double lane[LANES] = {0}, sum = 0;                                                                            \
        long i = 0;                                                                                                   \
        for (; i + LANES <= n; i += LANES)                                                                            \
            for (int j = 0; j < LANES; j++) lane[j] += TERM((double)x[i + j]);                                        \
        for (int j = 0; i + j < n; j++) lane[j] += TERM((double)x[i + j]);                                            \
        for (int j = 0; j < LANES; j++) sum += lane[j];                                                               \
        return sum;                                                                                                   \
    }
#define SQUARE(x) (x) * (x)
SUM(square_sum, float, SQUARE)
SUM(square_sum, double, SQUARE)
SUM(abs_sum, float, fabs)
SUM(abs_sum, double, fabs)

/* `kept`: whether there is a v_max. */
#define UPDATE(T, ROOT)                                                                                               \
    INLINE void body_##T(T *restrict theta, const T *restrict grad, T *restrict m, T *restrict v,                     \
                         T *restrict v_max, long n, const Coefficients *k, int kept) {                                \
        const T beta1 = (T)k->beta1, c1 = (T)k->c1, beta2 = (T)k->beta2, c2 = (T)k->c2, rate = (T)k->rate;            \
        const T floor = (T)k->floor, limit = (T)k->limit, fade = (T)k->fade, leak = (T)k->leak, sign = (T)k->sign;    \
        for (long i = 0; i < n; i++) {                                                                                \
            T g = sign * grad[i];                                                                                     \
            /* m ← β1·m + (1-β1)·g,  v ← β2·v + (1-β2)·g² */                                                          \
            T m_t = beta1 * m[i] + c1 * g;                                                                            \
            T v_hat = beta2 * v[i] + c2 * (g * g);                                                                    \
            m[i] = m_t;                                                                                               \
            v[i] = v_hat;                                                                                             \
            if (kept) { /* v̂ = v_max ← max(δ·v_max, v) */                                                            \
                T old = leak * v_max[i];                                                                              \
                v_hat = old > v_hat ? old : v_hat;                                                                    \
                v_max[i] = v_hat;                                                                                     \
            }                                                                                                         \
            /* Δ = rate·m/(√v̂ + floor), clipped to ±limit */                                                         \
            T delta = rate * m_t / (ROOT(v_hat) + floor);                                                             \
            delta = delta > limit ? limit : delta;                                                                    \
            delta = delta < -limit ? -limit : delta;                                                                  \
            /* θ ← θ - (γλ·θ + Δ) */                                                                                  \
            T faded = fade != 0 ? fade * theta[i] : 0; /* 0·∞ would be NaN */                                         \
            theta[i] -= faded + delta;                                                                                \
        }                                                                                                             \
    }                                                                                                                 \
    CLONES static void update_##T(T *theta, const T *g, T *m, T *v, T *v_max, long n, const Coefficients *k) {        \
        if (v_max) body_##T(theta, g, m, v, v_max, n, k, 1);                                                          \
        else body_##T(theta, g, m, v, v_max, n, k, 0);                                                                \
    }
UPDATE(float, sqrtf)
UPDATE(double, sqrt)

/* `x` itself where it is float; else its numbers, widened into `buffer`. */
static float *as_float(void *x, Kind kind, float *buffer, long n) {
    if (kind == F32) return x;
    widen(buffer, x, kind, n);
    return buffer;
}

/* Rounds what `as_float` gave back into `x`: with noise where there are hashes and it is bfloat16, else to nearest. */
static void store(void *x, Kind kind, const float *values, NoiseOf which, const uint32_t *hash, long n) {
    if (kind == F32) return;
    if (kind == BF16 && hash) narrow_noisy(x, values, which, hash, n);
    else narrow(x, values, kind, n);
}

/* Updates at most PIECE elements of a parameter, from number `first` on. */
static void update_piece(const Hyper *h, const Param *p, int64_t first, long n) {
    int64_t state_at = first * KIND_BYTES[p->state_kind];
    void *theta = p->theta + first * KIND_BYTES[p->theta_kind], *g = p->g + first * KIND_BYTES[p->g_kind];
    void *m = p->m + state_at, *v = p->v + state_at, *v_max = p->v_max ? p->v_max + state_at : NULL;
    if (p->theta_kind == F64) { /* then all are */
        update_double(theta, g, m, v, v_max, n, &p->k);
        return;
    }
    float buffer[5][PIECE];
    float *wide_theta = as_float(theta, p->theta_kind, buffer[0], n);
    float *wide_g = as_float(g, p->g_kind, buffer[1], n);
    float *wide_m = as_float(m, p->state_kind, buffer[2], n);
    float *wide_v = as_float(v, p->state_kind, buffer[3], n);
    float *wide_max = v_max ? as_float(v_max, p->state_kind, buffer[4], n) : NULL;
    update_float(wide_theta, wide_g, wide_m, wide_v, wide_max, n, &p->k);

    int noisy_theta = h->noisy_params && p->theta_kind == BF16, noisy_state = h->noisy_states && p->state_kind == BF16;
    uint32_t hash[PIECE];
    if (noisy_theta || noisy_state) make_hashes(hash, p->seed, (uint32_t)first, n);
    store(theta, p->theta_kind, wide_theta, OF_THETA, noisy_theta ? hash : NULL, n);
    store(m, p->state_kind, wide_m, OF_M, noisy_state ? hash : NULL, n);
    store(v, p->state_kind, wide_v, OF_V, noisy_state ? hash : NULL, n);
    if (v_max) store(v_max, p->state_kind, wide_max, OF_V, noisy_state ? hash : NULL, n);
}

static double square_sum(void *x, Kind kind, long n) {
    float buffer[PIECE];
    if (kind == F64) return square_sum_double(x, n);
    return square_sum_float(as_float(x, kind, buffer, n), n);
}

static double abs_sum(void *x, Kind kind, long n) {
    float buffer[PIECE];
    if (kind == F64) return abs_sum_double(x, n);
    return abs_sum_float(as_float(x, kind, buffer, n), n);
}

static int64_t blocks_of(const Param *p) { return (p->n + BLOCK - 1) / BLOCK; }
static int64_t end_block(const Param *p) { return p->first_block + blocks_of(p); }

typedef struct {
    int64_t first, last; /* elements of its parameter */
} Block;

static Block elements(const Param *p, int64_t block) {
    int64_t first = (block - p->first_block) * BLOCK;
    return (Block){first, first + BLOCK < p->n ? first + BLOCK : p->n};
}

static long piece_at(int64_t first, int64_t last) { return last - first < PIECE ? (long)(last - first) : PIECE; }

/* Pass 1. */
static void measure_block(GroupStep *group, const Param *p, int64_t number) {
    Block block = elements(p, number);
    BlockSums sums = {0, 0};
    for (int64_t i = block.first; i < block.last; i += PIECE)
        sums.square += square_sum(p->g + i * KIND_BYTES[p->g_kind], p->g_kind, piece_at(i, block.last));
    if (group->hyper.adaptive_tiny)
        for (int64_t i = block.first; i < block.last; i += PIECE)
            sums.abs += abs_sum(p->theta + i * KIND_BYTES[p->theta_kind], p->theta_kind, piece_at(i, block.last));
    group->sums[number] = sums;
}

/* Pass 2. */
static void update_block(GroupStep *group, const Param *p, int64_t number) {
    Block block = elements(p, number);
    for (int64_t i = block.first; i < block.last; i += PIECE)
        update_piece(&group->hyper, p, i, piece_at(i, block.last));
}

typedef struct { /* a pass over some of the parameters, shared by threads */
    GroupStep *group;
    void (*do_block)(GroupStep *, const Param *, int64_t);
    int first_param, last_param;
    int64_t first, last; /* blocks */
    int64_t grain;       /* blocks that a thread takes at once */
    int backwards;
    atomic_llong next;
} Pass;

/* The parameter that a block is of: the last that starts at it or before. */
static const Param *param_at(const Pass *pass, int64_t block) {
    int low = pass->first_param, high = pass->last_param - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (pass->group->params[middle].first_block <= block) low = middle;
        else high = middle - 1;
    }
    return &pass->group->params[low];
}

static void do_blocks(const Pass *pass, int64_t first, int64_t last) {
    const Param *p = param_at(pass, first);
    for (int64_t block = first; block < last; block++) {
        while (block >= end_block(p)) p++;
        if (pass->group->buckets[p->bucket].updated) pass->do_block(pass->group, p, block);
    }
}

/* What each thread does: takes blocks until there are none left. */
static void work(void *argument) {
    Pass *pass = argument;
    for (;;) {
        int64_t first = atomic_fetch_add_explicit(&pass->next, pass->grain, memory_order_relaxed);
        if (first >= pass->last) return;
        int64_t last = first + pass->grain < pass->last ? first + pass->grain : pass->last;
        int64_t mirror = pass->first + pass->last;
        if (pass->backwards) do_blocks(pass, mirror - last, mirror - first);
        else do_blocks(pass, first, last);
    }
}

static void run_pass(Pass pass, int threads) {
    const Param *params = pass.group->params;
    pass.first = params[pass.first_param].first_block;
    pass.last = end_block(&params[pass.last_param - 1]);
    int64_t todo = 0;
    for (int i = pass.first_param; i < pass.last_param; i++)
        if (pass.group->buckets[params[i].bucket].updated) todo += params[i].n;
    if (!todo) return;
    int64_t most_threads = todo / SERIAL_WORK + 1;
    if (threads > most_threads) threads = (int)most_threads;
    int64_t blocks = pass.last - pass.first;
    pass.grain = threads == 1 ? blocks : blocks / ((int64_t)threads * 16);
    if (pass.grain < 1) pass.grain = 1;
    atomic_init(&pass.next, pass.first);
    parallel(work, &pass, threads);
}

static void add_up_blocks(const GroupStep *group, Param *p, Bucket *bucket) {
    double square = 0, abs = 0;
    for (int64_t block = p->first_block; block < end_block(p); block++) {
        square += group->sums[block].square;
        abs += group->sums[block].abs;
    }
    p->square = square;
    bucket->square += square;
    p->mean_abs = p->n ? abs / (double)p->n : 0;
}

static void measure(GroupStep *group, int first_param, int last_param, int threads) {
    Pass pass = {.group = group, .do_block = measure_block, .first_param = first_param, .last_param = last_param};
    run_pass(pass, threads);
    for (int i = first_param; i < last_param; i++) {
        Param *p = &group->params[i];
        add_up_blocks(group, p, &group->buckets[p->bucket]);
    }
}

static double get(Vector x, int i) { return x.kind == F64 ? ((double *)x.data)[i] : (double)((float *)x.data)[i]; }
static void set(Vector x, int i, double value) {
    if (x.kind == F64) ((double *)x.data)[i] = value;
    else ((float *)x.data)[i] = (float)value;
}

/* 1 - β^t */
static double one_minus_power(double beta, double t) { return -expm1(t * (beta > 0 ? log(beta) : -INFINITY)); }

/* n → r → sun → β2 of a bucket, of which `t` counts the steps; returns 1 - β2. */
static double move_bucket(GroupStep *group, Bucket *bucket, double n, double t) {
    const Hyper *h = &group->hyper;
    /* r = α·r + (1-α)·n */
    double r = h->alpha * get(group->norm_ema, bucket->number) + (1 - h->alpha) * n;
    double sun = n / (n + r + h->tiny_spike);
    double c2 = 1 - h->beta2_max; /* with a fixed β2 whatever the norm, which need not be finite */
    if (h->beta2_min != h->beta2_max) c2 += (h->beta2_max - h->beta2_min) * sun;
    if (h->warmup_steps > 0 && t <= h->warmup_steps) {
        sun = 0;
        c2 = 1 - (h->beta2_min + h->beta2_max) / 2;
    }
    set(group->norm_ema, bucket->number, r);
    bucket->sun = sun;
    bucket->beta2 = 1 - c2;
    bucket->norm = n;
    return c2;
}

/* Steps t and Σ log β2 of a parameter, and the coefficients of its update. */
static void move_param(GroupStep *group, Param *p, double c2, double lr) {
    const Hyper *h = &group->hyper;
    double t = get(group->step, p->number) + 1;
    set(group->step, p->number, t);
    p->seed = noise_seed(t, p->number);
    /* a1 = 1 - β1^t,  b2 = 1 - β2_max^t, or 1 - Π β2 when exact */
    double a1 = h->corrected ? one_minus_power(h->beta1, t) : 1;
    double b2 = h->corrected ? one_minus_power(h->beta2_max, t) : 1;
    if (h->exact) {
        double log_beta2 = get(group->log_beta2, p->number) + log1p(-c2);
        set(group->log_beta2, p->number, log_beta2);
        b2 = -expm1(log_beta2);
    }
    /* γ_t = γ·√(1 - β2_max^t) with lr_warmup */
    if (h->lr_warmup) lr = lr * sqrt(one_minus_power(h->beta2_max, t));
    /* ε + tiny_denom·max(⟨|θ|⟩, 1) */
    double eps = h->eps;
    if (h->adaptive_tiny) eps += h->tiny_denom * (p->mean_abs < 1 ? 1 : p->mean_abs);

    double root = sqrt(b2);
    p->k = (Coefficients){
        .beta1 = h->beta1,
        .c1 = 1 - h->beta1,
        .beta2 = 1 - c2,
        .c2 = c2,
        .rate = lr / a1 * root,
        .floor = eps * root,
        .limit = h->max_ratio < 0 ? INFINITY : lr * h->max_ratio,
        .fade = lr * h->weight_decay,
        .leak = h->leak,
        .sign = h->maximize ? -1 : 1,
    };
}

/* The scalar rule, as in kourkoutas/rule.py, of the bucket whose params start at `first`. */
static void move_scalars(GroupStep *group, int first, double lr) {
    Bucket *bucket = &group->buckets[group->params[first].bucket];
    int last = first + bucket->n_params;
    double n = sqrt(bucket->square), t = 0;
    bucket->updated = !group->hyper.skip || isfinite(n);
    if (!bucket->updated) {
        bucket->sun = bucket->beta2 = bucket->norm = NAN;
        ++group->skipped[bucket->number];
        return;
    }
    for (int i = first; i < last; i++) t = fmax(t, get(group->step, group->params[i].number) + 1);
    double c2 = move_bucket(group, bucket, n, t);
    for (int i = first; i < last; i++) move_param(group, &group->params[i], c2, lr);
}

/* The end of the params whose buckets are taken together with that of `first`. */
static int wave_end(const GroupStep *group, int first) {
    int64_t bytes = 0;
    int last = first;
    while (last < group->n_params && bytes < WAVE_BYTES) {
        int bucket = group->params[last].bucket;
        for (; last < group->n_params && group->params[last].bucket == bucket; last++)
            bytes += group->params[last].n * KIND_BYTES[group->params[last].g_kind];
    }
    return last;
}

int64_t number_blocks(GroupStep *group) {
    int64_t blocks = 0;
    for (int i = 0; i < group->n_params; i++) {
        group->params[i].first_block = blocks;
        blocks += blocks_of(&group->params[i]);
    }
    return blocks;
}

void measure_group(GroupStep *group, int threads) {
    if (group->n_params && !group->measured) measure(group, 0, group->n_params, threads);
    group->measured = 1;
}

void step_group(GroupStep *group, double lr, int threads) {
    for (int first = 0, last; first < group->n_params; first = last) {
        last = wave_end(group, first);
        if (!group->measured) measure(group, first, last, threads);
        for (int i = first; i < last; i += group->buckets[group->params[i].bucket].n_params) move_scalars(group, i, lr);
        /* backwards: what pass 1 read last is still in cache */
        Pass pass = {.group = group, .do_block = update_block, .first_param = first, .last_param = last, .backwards = 1};
        run_pass(pass, threads);
    }
}

void use_openmp(int wanted) { find_openmp(wanted); }

void run_on_threads(void (*work)(void *), void *job, int threads) { parallel(work, job, threads); }
