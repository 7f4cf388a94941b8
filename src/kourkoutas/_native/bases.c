/* See bases.h. A matrix is one thread's work: a QR of a few hundred columns has too little in it for two. */

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "arithmetic.h"
#include "bases.h"

enum { BLOCK = 64 }; /* LAPACK takes no more columns together than this */

/* LAPACK's xGEQRF and xORGQR of square matrices, in Fortran's convention. Their `work` has `n_work` entries. BLAS's
   xGEMM: C ← beta·C + alpha·A·B, with A or B transposed where its letter is T. */
typedef void (*Factorize)(const int *, const int *, void *, const int *, void *, void *, const int *, int *);
typedef void (*Multiply)(const int *, const int *, const int *, void *, const int *, const void *, void *, const int *, int *);
typedef void (*Product)(const char *, const char *, const int *, const int *, const int *, const void *, const void *,
                        const int *, const void *, const int *, const void *, void *, const int *);

static Factorize geqrf[2]; /* in single precision, in double */
static Multiply orgqr[2];
static Product gemm[2];

int find_lapack(const char *path) {
    void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return 0;
    geqrf[0] = (Factorize)dlsym(library, "sgeqrf_");
    geqrf[1] = (Factorize)dlsym(library, "dgeqrf_");
    orgqr[0] = (Multiply)dlsym(library, "sorgqr_");
    orgqr[1] = (Multiply)dlsym(library, "dorgqr_");
    gemm[0] = (Product)dlsym(library, "sgemm_");
    gemm[1] = (Product)dlsym(library, "dgemm_");
    return geqrf[0] && geqrf[1] && orgqr[0] && orgqr[1] && gemm[0] && gemm[1];
}

typedef struct { /* what a thread needs for one matrix */
    double *values; /* diag(Qᵀ·L·Q) */
    void *columns;  /* n × n */
    void *tau;      /* n */
    void *work;
    int n_work;
} Room;

/* Where the columns come from, the largest value first; equal ones, and any that are not numbers, keep their order. */
static void sort(const double *values, int64_t *order, int n) {
    for (int j = 0; j < n; j++) {
        int at = j;
        for (; at > 0 && values[order[at - 1]] < values[j]; at--) order[at] = order[at - 1];
        order[at] = j;
    }
}

/* The steps before and after LAPACK for one type of numbers: the columns of the product in their new order, as LAPACK
   wants to see them, one after the other; and their orthogonal ones put back, row by row. */
#define DEFINE_STEPS(NAME, REAL)                                                                                      \
    static void gather_##NAME(const REAL *product, const REAL *basis, int64_t *order, int n, const Room *room) {      \
        for (int j = 0; j < n; j++) room->values[j] = 0;                                                              \
        for (int64_t i = 0; i < n; i++)                                                                               \
            for (int j = 0; j < n; j++) room->values[j] += (double)basis[i * n + j] * (double)product[i * n + j];     \
        sort(room->values, order, n);                                                                                 \
        REAL *columns = room->columns;                                                                                \
        for (int64_t i = 0; i < n; i++)                                                                               \
            for (int64_t j = 0; j < n; j++) columns[j * n + i] = product[i * n + order[j]];                           \
    }                                                                                                                 \
    static void scatter_##NAME(const Room *room, REAL *basis, int n) {                                                \
        const REAL *columns = room->columns;                                                                          \
        for (int64_t i = 0; i < n; i++)                                                                               \
            for (int64_t j = 0; j < n; j++) basis[i * n + j] = columns[j * n + i];                                    \
    }
DEFINE_STEPS(single, float)
DEFINE_STEPS(double, double)

typedef struct { /* a `Turn` that threads share */
    const Turn *turn;
    int n_work;
    atomic_llong next;
    atomic_int failed;
} SharedTurn;

static void turn_one(const Turn *turn, int64_t number, Room *room) {
    int n = turn->n, is_double = turn->is_double, info;
    int64_t first = number * n * n;
    int64_t *order = turn->order + number * n;
    if (is_double) gather_double((const double *)turn->product + first, (double *)turn->basis + first, order, n, room);
    else gather_single((const float *)turn->product + first, (float *)turn->basis + first, order, n, room);
    geqrf[is_double](&n, &n, room->columns, &n, room->tau, room->work, &room->n_work, &info);
    orgqr[is_double](&n, &n, &n, room->columns, &n, room->tau, room->work, &room->n_work, &info);
    if (is_double) scatter_double(room, (double *)turn->basis + first, n);
    else scatter_single(room, (float *)turn->basis + first, n);
}

/* What each thread does: takes matrices until there are none left. */
static void turn_some(void *argument) {
    SharedTurn *shared = argument;
    size_t n = (size_t)shared->turn->n, n_work = (size_t)shared->n_work;
    char *memory = malloc((n + n * n + n + n_work) * sizeof(double));
    if (!memory) {
        atomic_store(&shared->failed, 1);
        return;
    }
    double *values = (double *)memory;
    Room room = {values, values + n, values + n + n * n, values + n + n * n + n, shared->n_work};
    for (int64_t number; (number = atomic_fetch_add(&shared->next, 1)) < shared->turn->count;)
        turn_one(shared->turn, number, &room);
    free(memory);
}

int turn_bases(const Turn *turn, int threads) {
    SharedTurn shared = {.turn = turn, .n_work = turn->n * BLOCK};
    atomic_init(&shared.next, 0);
    atomic_init(&shared.failed, 0);
    run_on_threads(turn_some, &shared, threads < turn->count ? threads : (int)turn->count);
    return !atomic_load(&shared.failed);
}

typedef struct { /* `Moments` that threads share */
    const Moments *moments;
    atomic_llong next;
} SharedMoments;

/* One factor of one gradient. G lies row by row, so BLAS sees Gᵀ; to it and to us a symmetric matrix is the same. */
static void add_moment(const Moments *moments, int64_t number, int side) {
    int rows = moments->rows, columns = moments->columns;
    int n = side ? columns : rows, depth = side ? rows : columns;
    int is_double = moments->is_double;
    size_t bytes = is_double ? sizeof(double) : sizeof(float);
    const char *g = (const char *)moments->grads + (size_t)number * rows * columns * bytes;
    char *factor = (char *)moments->factors[side] + (size_t)number * n * n * bytes;
    double alpha = moments->gain[number] * moments->gain[number], beta = moments->keep[number];
    float single_alpha = (float)alpha, single_beta = (float)beta;
    const void *a = is_double ? (const void *)&alpha : &single_alpha, *b = is_double ? (const void *)&beta : &single_beta;
    gemm[is_double](side ? "N" : "T", side ? "T" : "N", &n, &n, &depth, a, g, &columns, g, &columns, b, factor, &n);
}

/* What each thread does: takes factors until there are none left, those of one gradient one after the other. */
static void add_some(void *argument) {
    SharedMoments *shared = argument;
    const Moments *moments = shared->moments;
    for (int64_t task; (task = atomic_fetch_add(&shared->next, 1)) < 2 * moments->count;)
        if (moments->factors[task % 2]) add_moment(moments, task / 2, (int)(task % 2));
}

void add_moments(const Moments *moments, int threads) {
    SharedMoments shared = {.moments = moments};
    atomic_init(&shared.next, 0);
    run_on_threads(add_some, &shared, threads);
}
