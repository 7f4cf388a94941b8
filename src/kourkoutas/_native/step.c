/* The Kourkoutas-β step on the CPU: all tensors of a param group in one call, two passes over memory.

   Pass 1 sums g² per bucket; the scalar rule of kourkoutas/rule.py turns each pooled norm into β2; pass 2 updates m, v,
   v_max and θ. Nothing of the framework is included: tensors are described by DLPack's C exchange table, and read and
   written through raw pointers.

   NOTE: complex tensors are pairs of reals, as in torch.optim.Adam.

   NOTE: same bits whatever the number of threads and the CPU. Tensors are cut into blocks of fixed size, a block is
   summed in double in a fixed order by whichever thread takes it, and the sums of blocks are added in order. Products
   are not contracted (-ffp-contract=off), so that machines with and without fused multiply-add agree.

   NOTE: adaptive_tiny needs max(⟨|θ|⟩, 1) before θ moves, and to read θ once more for it takes a tenth of the step. As it
   mostly is 1, pass 2 takes it for 1 and sums |θ| while it reads θ; where ⟨|θ|⟩ turns out to be larger, a third pass
   moves θ by the difference, which m and v̂ still tell. Tensors that are rounded when written, and all when sums were
   asked for before the step, are summed in pass 1. */

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

#include "formats.h"

enum { BLOCK = 8192, PIECE = 1024, LANES = 32 };
enum { WINDOW = 1024 }; /* rows of a trace, as in kourkoutas/trace.py */
/* Buckets are taken together until their gradients fill this much, so that pass 2 finds them in cache. */
enum { WAVE_BYTES = 8 << 20, SERIAL_WORK = 16384 };

typedef struct { /* as in kourkoutas/rule.py */
    double beta1, c1, beta2, c2; /* c = 1 - β */
    double rate, floor;          /* γ√b2/a1 and ε√b2: Δ = rate·m/(√v̂ + floor) */
    double limit, fade, leak;    /* γ·max_ratio or infinity, γλ, δ */
    double sign, root;           /* -1 to maximize; √b2 */
    double floor_used;           /* in pass 2, if it was not `floor` */
} Coefficients;

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

#define ARITHMETIC(T, ROOT)                                                                                           \
    INLINE T delta_##T(T m, T v_hat, T rate, T floor, T limit) { /* Δ = rate·m/(√v̂ + floor), clipped to ±limit */    \
        T delta = rate * m / (ROOT(v_hat) + floor);                                                                   \
        delta = delta > limit ? limit : delta;                                                                        \
        return delta < -limit ? -limit : delta;                                                                       \
    }                                                                                                                 \
    INLINE void body_##T(T *restrict theta, const T *restrict grad, T *restrict m, T *restrict v,                     \
                         T *restrict v_max, T *restrict before, long n, const Coefficients *k, int kept, int saved) { \
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
            if (saved) before[i] = theta[i];                                                                          \
            /* θ ← θ - (γλ·θ + Δ) */                                                                                  \
            T faded = fade != 0 ? fade * theta[i] : 0; /* 0·∞ would be NaN */                                         \
            theta[i] -= faded + delta_##T(m_t, v_hat, rate, floor, limit);                                            \
        }                                                                                                             \
    }                                                                                                                 \
    CLONES static void update_##T(T *p, const T *g, T *m, T *v, T *x, T *before, long n, const Coefficients *k) {     \
        if (x && before) body_##T(p, g, m, v, x, before, n, k, 1, 1);                                                 \
        else if (x) body_##T(p, g, m, v, x, before, n, k, 1, 0);                                                      \
        else if (before) body_##T(p, g, m, v, x, before, n, k, 0, 1);                                                 \
        else body_##T(p, g, m, v, x, before, n, k, 0, 0);                                                             \
    }                                                                                                                 \
    CLONES static void correct_##T(T *restrict theta, const T *restrict m, const T *restrict v_hat, long n,           \
                                   const Coefficients *k) {                                                           \
        const T rate = (T)k->rate, used = (T)k->floor_used, floor = (T)k->floor, limit = (T)k->limit;                 \
        for (long i = 0; i < n; i++)                                                                                  \
            theta[i] += delta_##T(m[i], v_hat[i], rate, used, limit) - delta_##T(m[i], v_hat[i], rate, floor, limit); \
    }

ARITHMETIC(float, sqrtf)
ARITHMETIC(double, sqrt)

typedef struct { /* hyper-parameters, packed by kourkoutas/torch/kernel.py in this order */
    double beta1, beta2_min, beta2_max, alpha, eps, tiny_spike, tiny_denom;
    double leak, max_ratio; /* negative: None */
    double warmup_steps, weight_decay;
    double adaptive_tiny, exact, corrected, skip, maximize, noisy, lr_warmup; /* 0 or 1 */
} Hyper;

typedef struct { /* numbers of the state: one per parameter or bucket of the group */
    void *at;
    Kind kind;
} Vector;

static double get(Vector x, int i) { return x.kind == F64 ? ((double *)x.at)[i] : (double)((float *)x.at)[i]; }
static void set(Vector x, int i, double value) {
    if (x.kind == F64) ((double *)x.at)[i] = value;
    else ((float *)x.at)[i] = (float)value;
}

typedef struct {
    char *theta, *g, *m, *v, *v_max;
    int64_t n;     /* real numbers */
    int64_t block; /* the first of its blocks */
    Kind kind, g_kind, s_kind; /* of θ, of the gradient, of m, v and v_max */
    uint32_t seed;             /* of the noise, where states are rounded with noise */
    double mean;               /* ⟨|θ|⟩, or 1 while it is not known */
    int bucket, place; /* place: its number in the group */
    Coefficients k;
} Item;

typedef struct {
    int number, items; /* number: in the group */
    double square, norm, sun, beta2; /* square: Σ g² */
    int updated;                     /* 0: skipped */
} Bucket;

typedef struct { /* one step of one param group */
    Hyper h;
    Item *items; /* by bucket */
    Bucket *buckets;
    int *bucket_at; /* per bucket of the group: its place in `buckets`, or -1 */
    double *sums;   /* per block: Σ g² and Σ |θ| */
    Vector step, ema, log_beta2;
    int64_t *skipped;
    PyObject *written, *grads; /* lists of what is written, and of the gradients: the plan owns them */
    int n_items, n_buckets, n_group_buckets;
    int64_t n_blocks;
    int summed; /* Σ g² and, for adaptive_tiny, ⟨|θ|⟩ are known before the step */
} Plan;

typedef enum { MEASURE, UPDATE, CORRECT } Pass;

typedef double (*SumFloat)(const float *, long);
typedef double (*SumDouble)(const double *, long);

static double block_sum(const char *x, Kind kind, long n, SumFloat of_float, SumDouble of_double) {
    float wide[PIECE];
    double sum = 0;
    for (long i = 0; i < n; i += PIECE) {
        long piece = n - i < PIECE ? n - i : PIECE;
        const char *at = x + i * KIND_BYTES[kind];
        if (kind == F32) sum += of_float((const float *)at, piece);
        else if (kind == F64) sum += of_double((const double *)at, piece);
        else {
            widen(wide, at, kind, piece);
            sum += of_float(wide, piece);
        }
    }
    return sum;
}

/* Whether |θ| is summed in pass 2. */
static int sums_late(const Plan *plan, const Item *it) {
    return plan->h.adaptive_tiny && !plan->summed && it->kind <= F64 && it->s_kind <= F64;
}

/* Updates at most PIECE elements; `before` is NULL, or takes θ as it was if it is not rounded. */
static void update_piece(const Item *it, int64_t first, long n, int noisy, void *before) {
    int64_t s_at = first * KIND_BYTES[it->s_kind];
    char *theta = it->theta + first * KIND_BYTES[it->kind];
    char *m = it->m + s_at, *v = it->v + s_at, *v_max = it->v_max ? it->v_max + s_at : NULL;
    const char *g = it->g + first * KIND_BYTES[it->g_kind];
    if (it->kind == F64) { /* then all are */
        update_double((double *)theta, (const double *)g, (double *)m, (double *)v, (double *)v_max, before, n, &it->k);
        return;
    }
    float wide[5][PIECE];
    float *wide_theta = (float *)theta, *wide_m = (float *)m, *wide_v = (float *)v, *wide_max = (float *)v_max;
    const float *wide_g = (const float *)g;
    if (it->g_kind != F32) {
        widen(wide[4], g, it->g_kind, n);
        wide_g = wide[4];
    }
    if (it->kind != F32) {
        widen(wide[0], theta, it->kind, n);
        wide_theta = wide[0];
    }
    if (it->s_kind != F32) {
        widen(wide[1], m, it->s_kind, n);
        widen(wide[2], v, it->s_kind, n);
        if (v_max) widen(wide[3], v_max, it->s_kind, n);
        wide_m = wide[1];
        wide_v = wide[2];
        wide_max = v_max ? wide[3] : NULL;
    }
    update_float(wide_theta, wide_g, wide_m, wide_v, wide_max, before, n, &it->k);
    if (it->kind != F32) narrow(theta, wide_theta, it->kind, n);
    if (it->s_kind == F32) return;
    if (noisy && it->s_kind == BF16) {
        narrow_noisy(m, v, v_max, wide_m, wide_v, wide_max, it->seed, (uint32_t)first, n);
        return;
    }
    narrow(m, wide_m, it->s_kind, n);
    narrow(v, wide_v, it->s_kind, n);
    if (v_max) narrow(v_max, wide_max, it->s_kind, n);
}

static void correct_block(const Item *it, int64_t first, long n) {
    int64_t at = first * KIND_BYTES[it->kind];
    char *theta = it->theta + at, *m = it->m + at, *v_hat = (it->v_max ? it->v_max : it->v) + at;
    if (it->kind == F64) correct_double((double *)theta, (double *)m, (double *)v_hat, n, &it->k);
    else correct_float((float *)theta, (float *)m, (float *)v_hat, n, &it->k);
}

typedef struct {
    Plan *plan;
    Pass pass;
    int first_item, last_item; /* of the wave */
    int64_t first, last, grain;
    atomic_llong next;
} Job;

static void do_block(const Job *job, const Item *it, int64_t block) {
    Plan *plan = job->plan;
    int64_t start = (block - it->block) * BLOCK;
    long n = it->n - start < BLOCK ? (long)(it->n - start) : BLOCK;
    if (job->pass == CORRECT) correct_block(it, start, n);
    if (job->pass == MEASURE) {
        const char *g = it->g + start * KIND_BYTES[it->g_kind];
        plan->sums[2 * block] = block_sum(g, it->g_kind, n, square_sum_float, square_sum_double);
        if (plan->h.adaptive_tiny && !sums_late(plan, it)) {
            const char *theta = it->theta + start * KIND_BYTES[it->kind];
            plan->sums[2 * block + 1] = block_sum(theta, it->kind, n, abs_sum_float, abs_sum_double);
        }
    }
    if (job->pass != UPDATE) return;
    int late = sums_late(plan, it);
    double before[PIECE], sum = 0;
    for (long i = 0; i < n; i += PIECE) {
        long piece = n - i < PIECE ? n - i : PIECE;
        update_piece(it, start + i, piece, plan->h.noisy > 0, late ? before : NULL);
        if (late) sum += block_sum((char *)before, it->kind, piece, abs_sum_float, abs_sum_double);
    }
    if (late) plan->sums[2 * block + 1] = sum;
}

static int has_work(const Job *job, const Item *it) {
    if (job->pass == MEASURE) return 1;
    if (!job->plan->buckets[it->bucket].updated) return 0;
    return job->pass == UPDATE || (sums_late(job->plan, it) && it->k.floor_used != it->k.floor);
}

static void work(void *argument) {
    Job *job = argument;
    Plan *plan = job->plan;
    for (;;) {
        int64_t a = atomic_fetch_add_explicit(&job->next, job->grain, memory_order_relaxed), b = a + job->grain;
        if (a >= job->last) return;
        if (b > job->last) b = job->last;
        if (job->pass == UPDATE) { /* backwards: what pass 1 read last is still in cache */
            int64_t mirror = job->first + job->last, end = mirror - a;
            a = mirror - b;
            b = end;
        }
        int low = job->first_item, high = job->last_item - 1;
        while (low < high) { /* the last item that starts at or before block a */
            int middle = (low + high + 1) / 2;
            if (plan->items[middle].block <= a) low = middle;
            else high = middle - 1;
        }
        for (const Item *it = &plan->items[low]; a < b; it++) {
            int64_t end = it->block + (it->n + BLOCK - 1) / BLOCK;
            int64_t stop = end < b ? end : b;
            if (has_work(job, it))
                for (; a < stop; a++) do_block(job, it, a);
            else if (a < stop)
                a = stop;
        }
    }
}

static void run_pass(Plan *plan, Pass pass, int first_item, int last_item, int threads) {
    const Item *last = &plan->items[last_item - 1];
    Job job = {.plan = plan, .pass = pass, .first_item = first_item, .last_item = last_item};
    job.first = plan->items[first_item].block;
    job.last = last->block + (last->n + BLOCK - 1) / BLOCK;
    int64_t elements = 0;
    for (int i = first_item; i < last_item; i++)
        if (has_work(&job, &plan->items[i])) elements += plan->items[i].n;
    if (!elements) return;
    int64_t most = elements / SERIAL_WORK + 1;
    if (threads > most) threads = (int)most;
    job.grain = (job.last - job.first) / ((int64_t)threads * 16);
    if (job.grain < 1) job.grain = 1;
    if (threads == 1) job.grain = job.last - job.first;
    atomic_init(&job.next, job.first);
    parallel(work, &job, threads);
}

/* Σ g² of an item (which = 0) or Σ |θ| (which = 1). */
static double total(const Plan *plan, const Item *it, int which) {
    double sum = 0;
    for (int64_t b = it->block, end = b + (it->n + BLOCK - 1) / BLOCK; b < end; b++) sum += plan->sums[2 * b + which];
    return sum;
}

static double mean_abs(const Plan *plan, const Item *it) { return it->n ? total(plan, it, 1) / (double)it->n : 0; }

static void measure(Plan *plan, int first_item, int last_item, int threads) {
    run_pass(plan, MEASURE, first_item, last_item, threads);
    for (int i = first_item; i < last_item;) {
        Bucket *bucket = &plan->buckets[plan->items[i].bucket];
        bucket->square = 0;
        for (int end = i + bucket->items; i < end; i++) {
            Item *it = &plan->items[i];
            bucket->square += total(plan, it, 0);
            it->mean = sums_late(plan, it) ? 1 : mean_abs(plan, it);
        }
    }
}

/* (ε + tiny_denom·max(⟨|θ|⟩, 1))·√b2, the second term with adaptive_tiny. */
static double floor_of(const Hyper *h, const Item *it) {
    double eps = h->eps;
    if (h->adaptive_tiny) eps += h->tiny_denom * (it->mean < 1 ? 1 : it->mean);
    return eps * it->k.root;
}

/* The scalar rule, as in kourkoutas/rule.py: n → r → sun → β2, bias corrections, and each parameter's coefficients. */
static void scalars(Plan *plan, int first_item, int last_item, double lr) {
    const Hyper *h = &plan->h;
    for (int i = first_item; i < last_item;) {
        Bucket *bucket = &plan->buckets[plan->items[i].bucket];
        int end = i + bucket->items;
        double n = sqrt(bucket->square), step = 0;
        bucket->sun = bucket->beta2 = bucket->norm = NAN;
        bucket->updated = !h->skip || isfinite(n);
        if (!bucket->updated) {
            ++plan->skipped[bucket->number];
            i = end;
            continue;
        }
        for (int j = i; j < end; j++) step = fmax(step, get(plan->step, plan->items[j].place) + 1);

        /* r = α·r + (1-α)·n */
        double r = h->alpha * get(plan->ema, bucket->number) + (1 - h->alpha) * n, sun = n / (n + r + h->tiny_spike);
        double c2 = 1 - h->beta2_max; /* with a fixed β2 whatever the norm, which need not be finite */
        if (h->beta2_min != h->beta2_max) c2 += (h->beta2_max - h->beta2_min) * sun;
        if (h->warmup_steps > 0 && step <= h->warmup_steps) {
            sun = 0;
            c2 = 1 - (h->beta2_min + h->beta2_max) / 2;
        }
        set(plan->ema, bucket->number, r);
        bucket->sun = sun;
        bucket->beta2 = 1 - c2;
        bucket->norm = n;

        for (; i < end; i++) {
            Item *it = &plan->items[i];
            Coefficients *k = &it->k;
            double t = get(plan->step, it->place) + 1, a1 = 1, b2 = 1;
            set(plan->step, it->place, t);
            it->seed = mixed(mixed((uint32_t)(int64_t)t) + (uint32_t)it->place);
            if (h->corrected) {
                /* a1 = 1 - β1^t,  b2 = 1 - β2_max^t, or 1 - Π β2 when exact */
                a1 = -expm1(t * (h->beta1 > 0 ? log(h->beta1) : -INFINITY));
                b2 = -expm1(t * (h->beta2_max > 0 ? log(h->beta2_max) : -INFINITY));
            }
            if (h->exact) {
                double log_beta2 = get(plan->log_beta2, it->place) + log1p(-c2);
                set(plan->log_beta2, it->place, log_beta2);
                b2 = -expm1(log_beta2);
            }
            k->beta1 = h->beta1;
            k->c1 = 1 - h->beta1;
            k->beta2 = 1 - c2;
            k->c2 = c2;
            /* γ_t = γ·√(1 - β2_max^t) with lr_warmup */
            double lr_t = h->lr_warmup ? lr * sqrt(-expm1(t * (h->beta2_max > 0 ? log(h->beta2_max) : -INFINITY))) : lr;
            k->root = sqrt(b2);
            k->rate = lr_t / a1 * k->root;
            k->floor = k->floor_used = floor_of(h, it);
            k->limit = h->max_ratio < 0 ? INFINITY : lr_t * h->max_ratio;
            k->fade = lr_t * h->weight_decay;
            k->leak = h->leak;
            k->sign = h->maximize ? -1 : 1;
        }
    }
}

static void step_group(Plan *plan, double lr, int threads) {
    for (int i = 0; i < plan->n_items;) {
        int last = i;
        int64_t bytes = 0;
        do {
            int end = last + plan->buckets[plan->items[last].bucket].items;
            for (; last < end; last++) bytes += plan->items[last].n * KIND_BYTES[plan->items[last].g_kind];
        } while (last < plan->n_items && bytes < WAVE_BYTES);
        if (!plan->summed) measure(plan, i, last, threads);
        scalars(plan, i, last, lr);
        run_pass(plan, UPDATE, i, last, threads);
        for (int j = i; j < last; j++) {
            Item *it = &plan->items[j];
            if (!sums_late(plan, it)) continue;
            it->mean = mean_abs(plan, it);
            it->k.floor = floor_of(&plan->h, it);
        }
        if (plan->h.adaptive_tiny) run_pass(plan, CORRECT, i, last, threads);
        i = last;
    }
}

typedef struct { /* DLPack's DLTensor */
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct { /* DLPack's DLPackExchangeAPI, major version 1 */
    uint32_t major, minor;
    void *previous, *allocate, *managed_from, *managed_to;
    int (*tensor_from)(void *, DLTensor *);
    void *stream;
} Exchange;

static const Exchange *exchange;
static PyObject *tensor_types[2];
static PyCFunction is_neg, is_conj; /* behind Tensor.is_neg and is_conj: half the time of a call from Python */
enum { NUMBERS = 4 }; /* vectors, the first of the names */
enum { NORM_EMA, STEP, LOG_BETA2, SKIPPED, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, GRAD, NAMES };
static const char *const NAME[NAMES] = {"norm_ema", "step",       "log_beta2",      "skipped",
                                        "exp_avg",  "exp_avg_sq", "max_exp_avg_sq", "grad"};
static PyObject *names[NAMES]; /* as Python strings */

typedef struct {
    DLTensor dl;
    Kind kind; /* of a complex tensor's two parts */
    int64_t n;
    int parts;   /* 2 of a complex tensor */
    int integer; /* int64 */
} View;

/* 0 if the tensor is a subclass's or has no storage, as zero tensors and functional tensors. */
static int read_tensor(PyObject *x, View *view) {
    DLTensor *dl = &view->dl;
    PyObject *type = (PyObject *)Py_TYPE(x);
    if (type != tensor_types[0] && type != tensor_types[1]) return 0;
    if (exchange->tensor_from(x, dl)) {
        PyErr_Clear();
        return 0;
    }
    if (dl->device_type != 1 || dl->lanes != 1) return 0;
    dl->data = (char *)dl->data + dl->byte_offset;
    view->n = 1;
    for (int d = 0; d < dl->ndim; d++) view->n *= dl->shape[d];
    view->integer = dl->code == 0 && dl->bits == 64;
    view->parts = dl->code == 5 ? 2 : 1;
    int bits = dl->bits / view->parts;
    view->kind = dl->code == 2 || dl->code == 5 ? (bits == 32 ? F32 : bits == 64 ? F64 : bits == 16 ? F16 : OTHER)
                 : dl->code == 4 && bits == 16 ? BF16 : OTHER;
    return dl->data || !view->n;
}

/* Whether the tensor is negated or conjugated lazily, by a bit that the table does not tell. */
static int lazy(PyObject *x, const View *view) {
    PyObject *negated = is_neg(x, NULL), *conjugated = view->parts == 2 ? is_conj(x, NULL) : NULL;
    Py_XDECREF(negated);
    Py_XDECREF(conjugated);
    PyErr_Clear();
    return negated != Py_False || (view->parts == 2 && conjugated != Py_False);
}

/* Whether the tensor fills one stretch of memory without gaps, in any order of its axes. */
static int dense(const View *x) {
    if (!x->dl.strides || !x->n) return 1;
    int64_t stride = 1;
    while (stride < x->n) {
        int d = 0;
        while (d < x->dl.ndim && (x->dl.shape[d] == 1 || x->dl.strides[d] != stride)) d++;
        if (d == x->dl.ndim) return 0;
        stride *= x->dl.shape[d];
    }
    return 1;
}

static int same_layout(const View *a, const View *b) {
    if (a->n != b->n || a->parts != b->parts || a->dl.ndim != b->dl.ndim) return 0;
    for (int d = 0; d < a->dl.ndim; d++) {
        if (a->dl.shape[d] != b->dl.shape[d]) return 0;
        if (a->dl.shape[d] > 1 && a->dl.strides && b->dl.strides && a->dl.strides[d] != b->dl.strides[d]) return 0;
    }
    return 1;
}

/* 1 if the tensor is one whose elements can be read and written, laid out as `like`. */
static int read_like(PyObject *x, View *view, const View *like) {
    return x && read_tensor(x, view) && view->kind != OTHER && same_layout(like, view) && !lazy(x, view);
}

static void destroy(PyObject *capsule) {
    Plan *plan = PyCapsule_GetPointer(capsule, "kourkoutas.plan");
    Py_XDECREF(plan->written);
    Py_XDECREF(plan->grads);
    free(plan->items);
    free(plan->buckets);
    free(plan->bucket_at);
    free(plan->sums);
    free(plan);
}

static PyObject *new_plan(size_t n_params, size_t n_buckets) {
    Plan *plan = calloc(1, sizeof *plan);
    PyObject *capsule = plan ? PyCapsule_New(plan, "kourkoutas.plan", destroy) : NULL;
    if (!capsule) {
        free(plan);
        return PyErr_NoMemory();
    }
    plan->items = calloc(n_params + 1, sizeof(Item));
    plan->buckets = calloc(n_buckets + 1, sizeof(Bucket));
    plan->bucket_at = calloc(n_buckets + 1, sizeof(int));
    plan->written = PyList_New(0);
    plan->grads = PyList_New(0);
    plan->n_group_buckets = (int)n_buckets;
    for (size_t b = 0; plan->bucket_at && b < n_buckets; b++) plan->bucket_at[b] = -1;
    if (plan->items && plan->buckets && plan->bucket_at && plan->written && plan->grads) return capsule;
    Py_DECREF(capsule);
    return PyErr_NoMemory();
}

/* 1: the tensor, or None, is one of the group's vectors, of `n` numbers. */
static int read_vector(Plan *plan, PyObject *x, int64_t n, Vector *vector) {
    View view;
    if (x == Py_None) return 1;
    if (!read_tensor(x, &view) || view.dl.ndim != 1 || view.n != n || (view.kind > F64 && !view.integer)) return 0;
    *vector = (Vector){view.dl.data, view.kind};
    return !PyList_Append(plan->written, x);
}

/* 1: gathered; 0: not for this kernel. `tensors` are θ, g, m, v and v_max, which is NULL where none is kept. */
static int gather_item(Plan *plan, PyObject *const *tensors, int place, int bucket_number) {
    View theta, grad, m, v, v_max = {.dl = {0}};
    if (!read_like(tensors[0], &theta, &theta) || !dense(&theta) || !read_like(tensors[1], &grad, &theta)) return 0;
    if (!read_like(tensors[2], &m, &theta) || !read_like(tensors[3], &v, &theta) || v.kind != m.kind) return 0;
    if (tensors[4] && (!read_like(tensors[4], &v_max, &theta) || v_max.kind != m.kind)) return 0;
    if ((theta.kind == F64) != (grad.kind == F64)) return 0;
    if (m.kind != theta.kind && (theta.kind == F64 || (m.kind != F32 && m.kind != BF16))) return 0;

    int *b = &plan->bucket_at[bucket_number];
    if (*b < 0) {
        *b = plan->n_buckets++;
        plan->buckets[*b] = (Bucket){.number = bucket_number};
    }
    plan->buckets[*b].items++;
    plan->items[plan->n_items++] = (Item){
        .theta = theta.dl.data, .g = grad.dl.data, .m = m.dl.data, .v = v.dl.data, .v_max = v_max.dl.data,
        .n = theta.n * theta.parts, .kind = theta.kind, .g_kind = grad.kind, .s_kind = m.kind,
        .bucket = *b, .place = place};
    for (int i = 0; i < 5; i++)
        if (tensors[i] && PyList_Append(i == 1 ? plan->grads : plan->written, tensors[i])) return 0;
    return 1;
}

/* 1: m, v and v_max were found in a parameter's state, whose numbers are still those of the vectors. */
static int find_state(const Plan *plan, PyObject *state, PyObject *views, int place, PyObject **tensors) {
    if (!state || !PyDict_Check(state)) return 0;
    for (int i = 0; i < NUMBERS; i++) {
        PyObject *list = PyTuple_GetItem(views, i);
        if (list && list != Py_None && PyDict_GetItemWithError(state, names[i]) != PyList_GetItem(list, place)) return 0;
    }
    for (int i = 0; i < 2 + (plan->h.leak >= 0); i++)
        if (!(tensors[2 + i] = PyDict_GetItemWithError(state, names[EXP_AVG + i]))) return 0;
    return 1;
}

static int by_bucket(const void *a, const void *b) {
    const Item *x = a, *y = b;
    return x->bucket != y->bucket ? x->bucket - y->bucket : x->place - y->place;
}

/* Puts the items of a bucket together, and numbers their blocks; 0 without memory. */
static int arrange(Plan *plan) {
    if (plan->n_buckets < plan->n_items) qsort(plan->items, (size_t)plan->n_items, sizeof(Item), by_bucket);
    for (int i = 0; i < plan->n_items; i++) {
        plan->items[i].block = plan->n_blocks;
        plan->n_blocks += (plan->items[i].n + BLOCK - 1) / BLOCK;
    }
    plan->sums = calloc(2 * (size_t)plan->n_blocks + 1, sizeof(double));
    return plan->sums != NULL;
}

/* Where a parameter stands in `state`, `guess` first. The others of its group usually follow: walking saves their hash. */
static Py_ssize_t find_place(PyObject *state, PyObject *p, Py_ssize_t guess) {
    PyObject *key, *own;
    Py_ssize_t at = guess, next = guess;
    if (PyDict_Next(state, &next, &key, &own) && key == p) return guess;
    for (at = next = 0; PyDict_Next(state, &next, &key, &own); at = next)
        if (key == p) return at;
    return 0;
}

/* gather(hyper, params, bucket_index, number of buckets, vectors, views, state, guess) → a plan of the step, or None if
   one of the tensors is not for this kernel, or state is missing.

   `vectors` are the numbers of the group's state, None for those that are not kept; `views` has for each a list of what
   the state of every parameter must show of it. `guess` is where the first parameter may stand in the state. */
static PyObject *gather(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 8) return PyErr_Format(PyExc_TypeError, "gather takes 8 arguments; got %zd", n_args);
    char *packed;
    Py_ssize_t size, n_buckets = PyLong_AsSsize_t(args[3]), cursor = PyLong_AsSsize_t(args[7]);
    PyObject *params = args[1], *index = args[2], *vectors = args[4], *views = args[5], *state = args[6];
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[0], &packed, &size)) return NULL;
    if (size != sizeof(Hyper)) return PyErr_Format(PyExc_ValueError, "`hyper` must have %zu bytes", sizeof(Hyper));
    if (!PyList_Check(params) || !PyList_Check(index) || !PyDict_Check(state)) Py_RETURN_NONE;
    Py_ssize_t n_params = PyList_Size(params);
    if (PyList_Size(index) != n_params) Py_RETURN_NONE;

    PyObject *capsule = new_plan((size_t)n_params, (size_t)n_buckets);
    if (!capsule) return NULL;
    Plan *plan = PyCapsule_GetPointer(capsule, "kourkoutas.plan");
    memcpy(&plan->h, packed, sizeof(Hyper));
    Vector skipped = {0};
    int ok = read_vector(plan, PyTuple_GetItem(vectors, STEP), n_params, &plan->step) &&
             read_vector(plan, PyTuple_GetItem(vectors, NORM_EMA), n_buckets, &plan->ema) &&
             read_vector(plan, PyTuple_GetItem(vectors, LOG_BETA2), n_params, &plan->log_beta2) &&
             read_vector(plan, PyTuple_GetItem(vectors, SKIPPED), n_buckets, &skipped);
    plan->skipped = skipped.at;

    if (n_params) cursor = find_place(state, PyList_GetItem(params, 0), cursor);
    for (int i = 0; ok && i < n_params; i++) {
        PyObject *p = PyList_GetItem(params, i), *key = NULL, *own = NULL, *tensors[5] = {p};
        Py_ssize_t next = cursor;
        if (PyDict_Next(state, &next, &key, &own) && key == p) cursor = next;
        else own = NULL;
        PyObject *g = tensors[1] = PyObject_GetAttr(p, names[GRAD]);
        long bucket = PyLong_AsLong(PyList_GetItem(index, i));
        ok = g == Py_None || (g && bucket >= 0 && bucket < n_buckets &&
                              find_state(plan, own ? own : PyDict_GetItemWithError(state, p), views, i, tensors) &&
                              gather_item(plan, tensors, i, (int)bucket));
        Py_XDECREF(g);
    }
    if (ok && arrange(plan)) return capsule;
    Py_DECREF(capsule);
    if (ok) return PyErr_NoMemory();
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* sums(plan, threads) → Σ g² of every bucket of the group; 0 where there is no gradient. */
static PyObject *sums(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 2) return PyErr_Format(PyExc_TypeError, "sums takes 2 arguments; got %zd", n_args);
    Plan *plan = PyCapsule_GetPointer(args[0], "kourkoutas.plan");
    int threads = (int)PyLong_AsLong(args[1]);
    if (!plan || PyErr_Occurred()) return NULL;
    plan->summed = 1;
    Py_BEGIN_ALLOW_THREADS
    if (plan->n_items) measure(plan, 0, plan->n_items, threads);
    Py_END_ALLOW_THREADS
    PyObject *found = PyList_New(plan->n_group_buckets);
    for (int b = 0; found && b < plan->n_group_buckets; b++) {
        int at = plan->bucket_at[b];
        PyList_SetItem(found, b, PyFloat_FromDouble(at < 0 ? 0 : plan->buckets[at].square));
    }
    return found;
}

/* apply(plan, lr, threads, ring, rows, first) → the tensors written.

   `ring` is None, or the trace (window, 3, buckets) whose row number `rows` takes sun, β2 and n of the group's buckets,
   which are `first` and on, with NaN for those that had no gradient. */
static PyObject *apply(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 6) return PyErr_Format(PyExc_TypeError, "apply takes 6 arguments; got %zd", n_args);
    Plan *plan = PyCapsule_GetPointer(args[0], "kourkoutas.plan");
    double lr = PyFloat_AsDouble(args[1]);
    int threads = (int)PyLong_AsLong(args[2]);
    long first = PyLong_AsLong(args[5]);
    if (!plan || PyErr_Occurred()) return NULL;

    float *row = NULL;
    int64_t width = 0;
    if (args[3] != Py_None) {
        View ring, rows;
        if (!read_tensor(args[3], &ring) || ring.kind != F32 || !read_tensor(args[4], &rows) || rows.n != 1)
            return PyErr_Format(PyExc_ValueError, "`ring` must be a float32 and `rows` an int64 tensor");
        width = ring.n / (3 * WINDOW);
        if (first < 0 || first + plan->n_group_buckets > width)
            return PyErr_Format(PyExc_ValueError, "`ring` has %lld buckets; need more", (long long)width);
        row = (float *)ring.dl.data + *(int64_t *)rows.dl.data % WINDOW * 3 * width + first;
    }

    Py_BEGIN_ALLOW_THREADS
    step_group(plan, lr, threads);
    Py_END_ALLOW_THREADS

    for (int b = 0; row && b < plan->n_group_buckets; b++) {
        const Bucket none = {.sun = NAN, .beta2 = NAN, .norm = NAN};
        const Bucket *bucket = plan->bucket_at[b] < 0 ? &none : &plan->buckets[plan->bucket_at[b]];
        row[b] = (float)bucket->sun;
        row[width + b] = (float)bucket->beta2;
        row[2 * width + b] = (float)bucket->norm;
    }
    Py_INCREF(plan->written);
    return plan->written;
}

/* The C function behind a method of tensors that takes no arguments, or NULL. */
static PyCFunction function_of(const char *name) {
    PyObject *tensor = PyObject_CallFunction(tensor_types[0], NULL);
    PyObject *method = tensor ? PyObject_GetAttrString(tensor, name) : NULL;
    PyCFunction found = method && PyCFunction_Check(method) && PyCFunction_GetFlags(method) == METH_NOARGS
                            ? PyCFunction_GetFunction(method) : NULL;
    Py_XDECREF(tensor);
    Py_XDECREF(method);
    PyErr_Clear();
    return found;
}

/* connect(exchange table, (tensor type, parameter type), openmp) → whether tensors can be asked for their lazy bits.

   `openmp`: whether to run on the process's OpenMP threads, if it has them. */
static PyObject *connect(PyObject *self, PyObject *args) {
    PyObject *capsule, *types;
    int openmp;
    if (!PyArg_ParseTuple(args, "OO!p", &capsule, &PyTuple_Type, &types, &openmp)) return NULL;
    if (PyTuple_Size(types) != 2) return PyErr_Format(PyExc_ValueError, "`connect` takes 2 types");
    const Exchange *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    while (table && table->major != 1) table = table->previous;
    if (!table) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "DLPack's table must have major version 1");
    exchange = table;
    Py_INCREF(types); /* kept, with the two in it, as long as the process lives */
    for (int i = 0; i < 2; i++) tensor_types[i] = PyTuple_GetItem(types, i);
    find_openmp(openmp);
    is_neg = function_of("is_neg");
    is_conj = function_of("is_conj");
    return PyBool_FromLong(is_neg && is_conj);
}

static PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS, "Take the framework's exchange table and tensor types."},
    {"gather", (PyCFunction)(void (*)(void))gather, METH_FASTCALL, "A plan of a group's step; None if not possible."},
    {"sums", (PyCFunction)(void (*)(void))sums, METH_FASTCALL, "Sum the squares of each bucket's gradients."},
    {"apply", (PyCFunction)(void (*)(void))apply, METH_FASTCALL, "Update everything gathered."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kourkoutas._native._step", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__step(void) {
    for (int i = 0; i < NAMES; i++) names[i] = PyUnicode_InternFromString(NAME[i]);
    return PyModule_Create(&module);
}
