/* The arithmetic of one step of one param group: what it reads and writes, and the two functions that do it.

   `step.c` fills a GroupStep from the framework's tensors; `arithmetic.c` works on raw pointers and knows no Python. */

#ifndef KOURKOUTAS_ARITHMETIC_H
#define KOURKOUTAS_ARITHMETIC_H

#include <stdint.h>

typedef enum { F32, F64, BF16, F16, OTHER } Kind; /* of floating-point numbers */

/* The hyper-parameters of kourkoutas/rule.py, and the group's options. All are doubles, packed by
   kourkoutas/torch/kernel.py in this order; `step.c` tells it the names.

   leak and max_ratio are negative where Python has None. From adaptive_tiny on they are 0 or 1:
   `exact` and `corrected` are bias_correction == "exact" and != "none", `skip` is nonfinite == "skip", `noisy_states`
   and `noisy_params` say whether bfloat16 is rounded with noise. */
#define HYPER_FIELDS(FIELD)                                                                                           \
    FIELD(beta1)                                                                                                      \
    FIELD(beta2_min)                                                                                                  \
    FIELD(beta2_max)                                                                                                  \
    FIELD(alpha)                                                                                                      \
    FIELD(eps)                                                                                                        \
    FIELD(tiny_spike)                                                                                                 \
    FIELD(tiny_denom)                                                                                                 \
    FIELD(leak)                                                                                                       \
    FIELD(max_ratio)                                                                                                  \
    FIELD(warmup_steps)                                                                                               \
    FIELD(weight_decay)                                                                                               \
    FIELD(adaptive_tiny)                                                                                              \
    FIELD(exact)                                                                                                      \
    FIELD(corrected)                                                                                                  \
    FIELD(lr_warmup)                                                                                                  \
    FIELD(skip)                                                                                                       \
    FIELD(maximize)                                                                                                   \
    FIELD(noisy_states)                                                                                               \
    FIELD(noisy_params)

#define AS_DOUBLE(name) double name;
typedef struct {
    HYPER_FIELDS(AS_DOUBLE)
} Hyper;

typedef struct { /* as in kourkoutas/rule.py */
    double beta1, c1, beta2, c2; /* c = 1 - β */
    double rate, floor;          /* γ√b2/a1 and (ε + ...)·√b2: Δ = rate·m/(√v̂ + floor) */
    double limit, fade, leak;    /* γ·max_ratio or infinity, γλ, δ */
    double sign;                 /* -1 to maximize */
} Coefficients;

typedef struct { /* one of the group's vectors: a scalar per parameter or per bucket */
    void *data;
    Kind kind;
} Vector;

typedef struct { /* a parameter that has a gradient */
    char *theta, *g, *m, *v, *v_max;    /* v_max: NULL where none is kept */
    Kind theta_kind, g_kind, state_kind; /* state_kind: of m, v and v_max */
    int64_t n;                          /* real numbers in it */
    int64_t first_block;                /* number of the first of its blocks */
    int number;                         /* of the parameter in the group */
    int bucket;                         /* its place in `buckets` */
    uint32_t seed;                      /* of its noise at this step */
    double square;                      /* Σ g² */
    double mean_abs;                    /* ⟨|θ|⟩, for adaptive_tiny */
    Coefficients k;
} Param;

typedef struct { /* a bucket of which a parameter has a gradient */
    int number;       /* in the group */
    int n_params;     /* that have a gradient */
    double square;    /* Σ g² */
    int updated;      /* 0: skipped */
    double norm, sun, beta2; /* NaN if skipped */
} Bucket;

typedef struct { /* of one block */
    double square; /* Σ g² */
    double abs;    /* Σ |θ| */
} BlockSums;

typedef struct { /* one step of one param group */
    Hyper hyper;
    Param *params; /* those of a bucket stand together, in the order of `buckets` */
    Bucket *buckets;
    int n_params, n_buckets;
    BlockSums *sums;
    Vector step, norm_ema, log_beta2;
    int64_t *skipped;
    int measured; /* 1: `measure_group` was called */
} GroupStep;

/* Numbers the blocks of all params, and returns how many there are: `sums` needs as many entries. */
int64_t number_blocks(GroupStep *group);

/* Pass 1 of the whole group: `square` of every bucket. Only for those who want to see it before anything moves. */
void measure_group(GroupStep *group, int threads);

/* The step: scalars, m, v, v_max and θ, and what the buckets tell of it. */
void step_group(GroupStep *group, double lr, int threads);

/* Whether to run on the process's OpenMP threads, if it has them. */
void use_openmp(int wanted);

/* Calls work(job) on each of `threads` threads. */
void run_on_threads(void (*work)(void *), void *job, int threads);

#endif
