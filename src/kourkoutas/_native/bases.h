/* The factors and bases of `basis="eigen"`, many at once, by the BLAS and LAPACK that the framework brings. */

#ifndef KOURKOUTAS_BASES_H
#define KOURKOUTAS_BASES_H

#include <stdint.h>

typedef struct { /* matrices of n × n, one after the other, row by row */
    const void *product; /* L·Q of each */
    void *basis;         /* Q of each, which becomes the new one */
    int64_t *order;      /* where each column was before, n entries of each */
    int64_t count;
    int n;
    int is_double;
} Turn;

typedef struct { /* gradients of `rows` × `columns`, one after the other, row by row */
    const void *grads;
    void *factors[2];          /* of the rows, and of the columns; NULL where there are none */
    const double *keep, *gain; /* an entry for each gradient */
    int64_t count;
    int rows, columns;
    int is_double;
} Moments;

/* Looks for BLAS and LAPACK in a library that the process has loaded, given by its path; 0 if they are not there. */
int find_lapack(const char *path);

/* Sorts the columns of each basis by diag(Qᵀ·L·Q), the largest first, and Q ← qr(L·Q); 0 without memory. */
int turn_bases(const Turn *turn, int threads);

/* L ← keep·L + gain²·G·Gᵀ and R ← keep·R + gain²·Gᵀ·G. */
void add_moments(const Moments *moments, int threads);

#endif
