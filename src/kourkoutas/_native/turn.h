/* One step of orthogonal iteration of many bases at once, by the LAPACK that the framework brings. */

#ifndef KOURKOUTAS_TURN_H
#define KOURKOUTAS_TURN_H

#include <stdint.h>

typedef struct { /* matrices of n × n, one after the other, row by row */
    const void *product; /* L·Q of each */
    void *basis;         /* Q of each, which becomes the new one */
    int64_t *order;      /* where each column was before, n entries of each */
    int64_t count;
    int n;
    int is_double;
} Turn;

/* Looks for LAPACK in a library that the process has loaded, given by its path; 0 if it is not there. */
int find_lapack(const char *path);

/* Sorts the columns of each basis by diag(Qᵀ·L·Q), the largest first, and Q ← qr(L·Q); 0 without memory. */
int turn_bases(const Turn *turn, int threads);

#endif
