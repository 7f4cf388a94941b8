/* One block of rows through the network and back, for one kind of CPU. Included by taylor.c once for each, with

   NAME(f)  the name of f for this CPU        TARGET  its attribute
   LANES    floats in a vector register       TALL    rows of a tile of x·w       WIDE  rows of a tile of xᵀ·g

   A matrix of ROWS rows lies in panels: the first PANEL columns of all rows, then the next. So both products below find
   what they multiply without gaps, and a tile stays in registers while its sum is formed. */

#define PANEL (2 * LANES)
#define SIZE ((size_t)ROWS * job->padded) /* of such a matrix */
#define VEC NAME(vec)
#define STATIC static TARGET __attribute__((noinline))
#define HELPER static inline TARGET __attribute__((always_inline))

_Static_assert(ROWS % TALL == 0 && PANEL % WIDE == 0 && PANEL >= INPUTS, "tiles fill blocks and panels");
typedef float VEC __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ivec) __attribute__((vector_size(4 * LANES)));

/* c = a·b for TALL rows and one panel of columns; b has `inner` rows. */
STATIC void NAME(tile)(float *restrict c, const float *restrict a, const float *restrict b, int inner) {
    VEC sum[TALL][2] = {{{0}}};
    for (int first = 0; first < inner; first += PANEL, a += ROWS * PANEL) {
        int end = inner - first < PANEL ? inner - first : PANEL;
        for (int k = 0; k < end; k++, b += PANEL) {
            VEC left = *(const VEC *)b, right = *(const VEC *)(b + LANES);
#pragma GCC unroll 16
            for (int i = 0; i < TALL; i++) {
                sum[i][0] += a[i * PANEL + k] * left;
                sum[i][1] += a[i * PANEL + k] * right;
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < TALL; i++) {
        *(VEC *)(c + i * PANEL) = sum[i][0];
        *(VEC *)(c + i * PANEL + LANES) = sum[i][1];
    }
}

/* z = x·w, with w packed in panels. */
STATIC void NAME(product)(const Job *job, float *z, const float *x, const float *w, int inner) {
    for (int j = 0; j < job->padded; j += PANEL)
        for (int i = 0; i < ROWS; i += TALL)
            NAME(tile)(z + (size_t)j * ROWS + i * PANEL, x + i * PANEL, w + (size_t)j * inner, inner);
}

/* c += aᵀ·g for WIDE columns of a panel of x and one panel of g. */
STATIC void NAME(cross)(float *restrict c, const float *restrict a, const float *restrict g) {
    VEC sum[WIDE][2];
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i++) {
        sum[i][0] = *(VEC *)(c + i * PANEL);
        sum[i][1] = *(VEC *)(c + i * PANEL + LANES);
    }
    for (int r = 0; r < ROWS; r++, a += PANEL, g += PANEL) {
        VEC left = *(const VEC *)g, right = *(const VEC *)(g + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < WIDE; i++) {
            sum[i][0] += a[i] * left;
            sum[i][1] += a[i] * right;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i++) {
        *(VEC *)(c + i * PANEL) = sum[i][0];
        *(VEC *)(c + i * PANEL + LANES) = sum[i][1];
    }
}

/* dw += xᵀ·g; dw lies in panels of `inner` rows, rounded up to whole tiles. */
STATIC void NAME(outer)(const Job *job, float *dw, const float *x, const float *g, int inner) {
    int tall = (inner + PANEL - 1) / PANEL * PANEL;
    for (int j = 0; j < job->padded; j += PANEL)
        for (int i = 0; i < inner; i += WIDE) {
            const float *a = x + (size_t)(i / PANEL) * ROWS * PANEL + i % PANEL;
            NAME(cross)(dw + ((size_t)j * tall + i * PANEL), a, g + (size_t)j * ROWS);
        }
}

HELPER VEC NAME(choose)(NAME(ivec) mask, VEC yes, VEC no) {
    return (VEC)((mask & (NAME(ivec))yes) | (~mask & (NAME(ivec))no));
}

/* σ(a) = 1/(1 + exp(-a)), with exp to about one unit in the last place. */
HELPER VEC NAME(sigmoid)(VEC a) {
    const float magic = 12582912.0f; /* 1.5·2²³: adding it rounds to a whole number, which its last bits then hold */
    VEC x = NAME(choose)(a > 87.0f, (VEC){0} - 87.0f, -a);
    x = NAME(choose)(a < -87.0f, (VEC){0} + 87.0f, x);
    VEC shifted = x * 1.44269504f + magic;
    VEC n = shifted - magic;
    VEC r = x - n * 0.693145752f - n * 1.42860677e-6f;
    VEC e = r * (1.0f / 5040) + 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    NAME(ivec) power = ((NAME(ivec))shifted << 23) + 0x3f800000; /* the bits of 2ⁿ */
    return 1.0f / (1.0f + e * (VEC)power);
}

/* h = the channels of f(z + b); see kourkoutas/lab/engines/taylor.py. */
STATIC void NAME(forward)(const Job *job, float *restrict h, const float *restrict z, const float *restrict b,
                          int channels) {
    int points = ROWS / channels, step = points * PANEL;
    for (int j = 0; j < job->padded; j += PANEL, z += ROWS * PANEL, h += ROWS * PANEL)
        for (int i = 0; i < step; i += LANES) {
#define AT(x, c) (*(VEC *)((x) + (c) * step + i))
#define OF(x, c) (*(const VEC *)((x) + (c) * step + i))
            VEC a = OF(z, 0) + *(const VEC *)(b + j + i % PANEL);
            VEC s = NAME(sigmoid)(a);
            AT(h, 0) = a * s;
            if (channels == 1) continue;
            VEC u = s - s * s, f1 = s + a * u, a1 = OF(z, 1);
            AT(h, 1) = f1 * a1;
            if (channels == 2) continue;
            VEC f2 = u * (2.0f + a * (1.0f - 2.0f * s)), a2 = OF(z, 2), a3 = OF(z, 3);
            AT(h, 2) = f1 * a2;
            AT(h, 3) = f1 * a3;
            AT(h, 4) = f1 * OF(z, 4) + f2 * (a1 * a1 + a2 * a2 + a3 * a3);
        }
}

/* g: from ∂loss/∂h to ∂loss/∂z in place; its values are added to db. The formulas stand in
 * lab/engines/taylor.py. */
STATIC void NAME(backward)(const Job *job, float *restrict g, const float *restrict z, const float *restrict b,
                           float *restrict db, int channels) {
    int points = ROWS / channels, step = points * PANEL;
    for (int j = 0; j < job->padded; j += PANEL, z += ROWS * PANEL, g += ROWS * PANEL) {
        VEC sum[2] = {*(VEC *)(db + j), *(VEC *)(db + j + LANES)};
        for (int i = 0; i < step; i += LANES) {
            VEC a = OF(z, 0) + *(const VEC *)(b + j + i % PANEL);
            VEC s = NAME(sigmoid)(a);
            VEC u = s - s * s, f1 = s + a * u, ga = f1 * OF(g, 0);
            if (channels > 1) {
                VEC r = 1.0f - 2.0f * s, f2 = u * (2.0f + a * r);
                VEC a1 = OF(z, 1), g1 = OF(g, 1), inner = a1 * g1;
                if (channels > 2) {
                    VEC a2 = OF(z, 2), a3 = OF(z, 3), g2 = OF(g, 2), g3 = OF(g, 3), gl = OF(g, 4);
                    VEC f3 = u * (r * (3.0f + a * r) - 2.0f * a * u);
                    VEC twice = 2.0f * f2 * gl;
                    inner += a2 * g2 + a3 * g3 + OF(z, 4) * gl;
                    ga += f3 * (a1 * a1 + a2 * a2 + a3 * a3) * gl;
                    AT(g, 1) = f1 * g1 + twice * a1;
                    AT(g, 2) = f1 * g2 + twice * a2;
                    AT(g, 3) = f1 * g3 + twice * a3;
                    AT(g, 4) = f1 * gl;
                } else {
                    AT(g, 1) = f1 * g1;
                }
                ga += f2 * inner;
            }
            AT(g, 0) = ga;
            sum[(i / LANES) % 2] += ga;
        }
        *(VEC *)(db + j) = sum[0];
        *(VEC *)(db + j + LANES) = sum[1];
    }
}

/* The last layer: y = h·w for one column. */
STATIC void NAME(read_out)(const Job *job, float *y, const float *h, const float *w) {
    for (int i = 0; i < ROWS; i++) {
        VEC sum = {0};
        for (int j = 0; j < job->padded; j += PANEL) {
            const float *at = h + (size_t)j * ROWS + i * PANEL;
            sum += *(const VEC *)at * *(const VEC *)(w + j);
            sum += *(const VEC *)(at + LANES) * *(const VEC *)(w + j + LANES);
        }
        float total = 0;
        for (int k = 0; k < LANES; k++) total += sum[k];
        y[i] = total;
    }
}

/* g = gy·wᵀ and dw += hᵀ·gy. */
STATIC void NAME(read_in)(const Job *job, float *g, float *dw, const float *h, const float *gy, const float *w) {
    for (int j = 0; j < job->padded; j += LANES) {
        size_t at = (size_t)(j / PANEL) * ROWS * PANEL + j % PANEL;
        VEC sum = *(VEC *)(dw + j), column = *(const VEC *)(w + j);
        for (int i = 0; i < ROWS; i++) {
            sum += gy[i] * *(const VEC *)(h + at + i * PANEL);
            *(VEC *)(g + at + i * PANEL) = gy[i] * column;
        }
        *(VEC *)(dw + j) = sum;
    }
}

STATIC void NAME(block)(const Job *job, Part *part, int block) {
    int last = job->layers - 1, channels = job->channels[block];
    size_t size = SIZE;
    load_rows(job, part->x, block, PANEL);
    for (int l = 0; l <= last; l++) {
        const float *x = l ? part->h + (l - 1) * size : part->x;
        NAME(product)(job, part->z + l * size, x, job->forth + job->at[l], l ? job->padded : INPUTS);
        NAME(forward)(job, part->h + l * size, part->z + l * size, job->biases + l * job->padded, channels);
    }
    float y[ROWS], gy[ROWS];
    const float *column = job->biases + (last + 1) * job->padded;
    NAME(read_out)(job, y, part->h + last * size, column);
    squares(job, part, block, y, gy);
    if (!job->gradient) return;
    float *g = part->g, *other = part->g + size;
    NAME(read_in)(job, g, part->dcolumn, part->h + last * size, gy, column);
    for (int l = last; l >= 0; l--) {
        NAME(backward)(job, g, part->z + l * size, job->biases + l * job->padded, part->db + l * job->padded, channels);
        NAME(outer)(job, part->dw + job->at_dw[l], l ? part->h + (l - 1) * size : part->x, g, l ? job->padded : INPUTS);
        if (!l) break;
        NAME(product)(job, other, g, job->back + job->at[l], job->padded);
        float *swap = g;
        g = other;
        other = swap;
    }
}

#undef AT
#undef OF
#undef HELPER
#undef STATIC
#undef VEC
#undef SIZE
#undef PANEL
#undef NAME
#undef TARGET
#undef LANES
#undef TALL
#undef WIDE
