/* Loss and gradient of a network of SiLU layers whose rows carry values, slopes and Laplacians.

   The formulas are those of kourkoutas/lab/engines/taylor.py. What is gained here is memory: a block of ROWS rows goes through
   all layers and back while it is in cache, and products and elementwise parts take turns on it. Nothing of the size of
   all rows is ever written.

   The loss is a sum over rows of weight·(y + bias·b - target - y[partner])²; a partner is a row of the same block.

   NOTE: a block is always added to the same one of `threads` sums, so that a number of threads has its own last bits. */

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"

enum { ROWS = 120, INPUTS = 3, MAX_LAYERS = 256, ALIGN = 64 };

/* The sums of one thread's blocks, and what it works on. */
typedef struct {
    float *x, *z, *h, *g, *dw, *db, *dcolumn;
    double loss, dbias;
} Part;

typedef struct Job {
    int layers, width, padded, panel, blocks, gradient, threads;
    const int32_t *channels, *rows, *target, *partner; /* of each block; of each of its rows, -1 for none */
    const float *weight, *bias, *x, *targets;
    const float *w[MAX_LAYERS], *b[MAX_LAYERS];
    float *dw[MAX_LAYERS], *db[MAX_LAYERS];
    size_t at[MAX_LAYERS], at_dw[MAX_LAYERS]; /* where a layer's packed weights and their gradient begin */
    float *forth, *back, *biases;             /* w, wᵀ, b packed in panels; after the biases, the last layer's column */
    Part *parts;
    void (*block)(const struct Job *, Part *, int);
    atomic_int next;
} Job;

static void load_rows(const Job *job, float *x, int block, int panel) {
    const int32_t *rows = job->rows + (size_t)block * ROWS;
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < INPUTS; k++) x[i * panel + k] = rows[i] < 0 ? 0 : job->x[(size_t)rows[i] * INPUTS + k];
}

/* Adds the block's share of the loss; gy = ∂loss/∂y. */
static void squares(const Job *job, Part *part, int block, const float *y, float *gy) {
    size_t first = (size_t)block * ROWS;
    float b = job->b[job->layers][0];
    memset(gy, 0, ROWS * sizeof *gy);
    for (int i = 0; i < ROWS; i++) {
        float weight = job->weight[first + i], bias = job->bias[first + i];
        if (weight == 0) continue;
        int target = job->target[first + i], partner = job->partner[first + i];
        float miss = y[i] + bias * b;
        if (target >= 0) miss -= job->targets[target];
        if (partner >= 0) miss -= y[partner];
        part->loss += (double)weight * miss * miss;
        float slope = 2 * weight * miss;
        gy[i] += slope;
        if (partner >= 0) gy[partner] -= slope;
        part->dbias += bias * slope;
    }
}

#if defined(__x86_64__)
#define NAME(f) f##_avx512
#define TARGET __attribute__((target("avx512f,fma")))
#define LANES 16
#define TALL 12
#define WIDE 8
#include "taylor_block.h"
#define NAME(f) f##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define TALL 6
#define WIDE 4
#include "taylor_block.h"
#endif
#define NAME(f) f##_plain
#define TARGET
#define LANES 4
#define TALL 8
#define WIDE 8
#include "taylor_block.h"

typedef struct {
    const char *name;
    int panel;
    void (*block)(const Job *, Part *, int);
} Variant;

static const Variant VARIANTS[] = {
#if defined(__x86_64__)
    {"avx512", 32, block_avx512},
    {"avx2", 16, block_avx2},
#endif
    {"plain", 8, block_plain},
};
enum { N_VARIANTS = sizeof VARIANTS / sizeof *VARIANTS };

static int supported(const Variant *variant) {
#if defined(__x86_64__)
    if (variant == &VARIANTS[0]) return __builtin_cpu_supports("avx512f");
    if (variant == &VARIANTS[1]) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return 1;
}

/* One layer's weights, as the products read them. */
static void pack(Job *job, int l) {
    int width = job->width, padded = job->padded, panel = job->panel, inner = l ? padded : INPUTS;
    int known = l ? width : INPUTS;
    float *biases = job->biases + (size_t)l * padded;
    memset(biases, 0, padded * sizeof *biases);
    memcpy(biases, l < job->layers ? job->b[l] : job->w[l], width * sizeof *biases);
    if (l == job->layers) return;
    const float *w = job->w[l];
    float *forth = job->forth + job->at[l], *back = job->back + job->at[l];
    for (int j = 0; j < padded; j += panel)
        for (int k = 0; k < inner; k++)
            for (int c = 0; c < panel; c++) *forth++ = k < known && j + c < width ? w[(size_t)k * width + j + c] : 0;
    for (int k = 0; l && k < padded; k += panel)
        for (int j = 0; j < padded; j++)
            for (int c = 0; c < panel; c++) *back++ = j < width && k + c < width ? w[(size_t)(k + c) * width + j] : 0;
}

/* One layer's gradient: the sum over the parts, unpacked. */
static void unpack(Job *job, int l) {
    int width = job->width, panel = job->panel, inner = l ? width : INPUTS, tall = l ? job->padded : panel;
    if (l == job->layers) {
        for (int j = 0; j < width; j++) {
            float sum = 0;
            for (int t = 0; t < job->threads; t++) sum += job->parts[t].dcolumn[j];
            job->dw[l][j] = sum;
        }
        double sum = 0;
        for (int t = 0; t < job->threads; t++) sum += job->parts[t].dbias;
        job->db[l][0] = (float)sum;
        return;
    }
    for (int j = 0; j < width; j++) {
        float sum = 0;
        for (int t = 0; t < job->threads; t++) sum += job->parts[t].db[(size_t)l * job->padded + j];
        job->db[l][j] = sum;
    }
    for (int j = 0; j < width; j += panel)
        for (int k = 0; k < inner; k++) {
            size_t at = job->at_dw[l] + (size_t)j * tall + k * panel;
            int end = width - j < panel ? width - j : panel;
            float *to = job->dw[l] + (size_t)k * width + j;
            memcpy(to, job->parts[0].dw + at, end * sizeof *to);
            for (int t = 1; t < job->threads; t++)
                for (int c = 0; c < end; c++) to[c] += job->parts[t].dw[at + c];
        }
}

static void pack_layers(void *argument) {
    Job *job = argument;
    for (int l; (l = atomic_fetch_add(&job->next, 1)) <= job->layers;) pack(job, l);
}

static void unpack_layers(void *argument) {
    Job *job = argument;
    for (int l; (l = atomic_fetch_add(&job->next, 1)) <= job->layers;) unpack(job, l);
}

static void work_parts(void *argument) {
    Job *job = argument;
    for (int t; (t = atomic_fetch_add(&job->next, 1)) < job->threads;)
        for (int b = t; b < job->blocks; b += job->threads) job->block(job, &job->parts[t], b);
}

static void in_parallel(Job *job, void (*work)(void *)) {
    atomic_store(&job->next, 0);
    parallel(work, job, job->threads);
}

static double run(Job *job) {
    in_parallel(job, pack_layers);
    in_parallel(job, work_parts);
    if (job->gradient) in_parallel(job, unpack_layers);
    double loss = 0;
    for (int t = 0; t < job->threads; t++) loss += job->parts[t].loss;
    return loss;
}

/* Working memory of the last call, for the next one: fresh pages cost as much as a small network's step. */
typedef struct {
    size_t bytes;
    char *memory;
} Spare;
static Spare *_Atomic spare;

static void give_back(Spare *mine) {
    mine = atomic_exchange(&spare, mine);
    if (mine) free(mine->memory);
    free(mine);
}

static Spare *borrow(size_t bytes) {
    Spare *mine = atomic_exchange(&spare, NULL);
    if (mine && mine->bytes >= bytes) return mine;
    if (mine) free(mine->memory);
    if (!mine) mine = malloc(sizeof *mine);
    if (!mine) return NULL;
    mine->bytes = bytes;
    if (posix_memalign((void **)&mine->memory, ALIGN, bytes)) {
        free(mine);
        return NULL;
    }
    return mine;
}

/* Hands out pieces of the working memory; with no memory it only counts. */
typedef struct {
    char *memory;
    size_t used;
} Arena;

static float *take(Arena *arena, size_t floats) {
    float *piece = arena->memory ? (float *)(arena->memory + arena->used) : NULL;
    arena->used += (floats * sizeof(float) + ALIGN - 1) / ALIGN * ALIGN;
    return piece;
}

static void lay_out(Job *job, Arena *arena) {
    size_t padded = job->padded, weights = 0, gradients = 0, size = ROWS * padded;
    for (int l = 0; l < job->layers; l++) {
        job->at[l] = weights;
        job->at_dw[l] = gradients;
        weights += padded * (l ? padded : INPUTS);
        gradients += padded * (l ? (int)padded : job->panel);
    }
    job->forth = take(arena, weights);
    job->back = take(arena, weights);
    job->biases = take(arena, (job->layers + 1) * padded);
    for (int t = 0; t < job->threads; t++) {
        Part *part = &job->parts[t];
        part->x = take(arena, (size_t)ROWS * job->panel);
        part->z = take(arena, job->layers * size);
        part->h = take(arena, job->layers * size);
        part->g = take(arena, 2 * size);
        size_t first = arena->used;
        part->dw = take(arena, gradients);
        part->db = take(arena, job->layers * padded);
        part->dcolumn = take(arena, padded);
        if (!arena->memory) continue;
        memset(arena->memory + first, 0, arena->used - first);
        memset(part->x, 0, (size_t)ROWS * job->panel * sizeof(float));
        part->loss = part->dbias = 0;
    }
}

/* The arguments of a call as buffers, released together. */
enum { MAX_BUFFERS = 8 + 4 * MAX_LAYERS };
typedef struct {
    int n;
    Py_buffer views[MAX_BUFFERS];
} Buffers;

/* The memory of `object`, 4 bytes an item; `items` says how many there must be, or receives the number if it is -1. */
static void *view(Buffers *buffers, PyObject *object, const char *name, Py_ssize_t *items, int flags) {
    Py_buffer *buffer = &buffers->views[buffers->n];
    if (PyObject_GetBuffer(object, buffer, flags)) return NULL;
    buffers->n++;
    if (*items < 0) *items = buffer->len / 4;
    if (buffer->len == *items * 4) return buffer->buf;
    PyErr_Format(PyExc_ValueError, "`%s` has %zd bytes; it must hold %zd numbers of 4 bytes", name, buffer->len, *items);
    return NULL;
}

/* Whether all of `n` indices are below `end`; -1 stands for none. */
static int below(const int32_t *index, Py_ssize_t n, Py_ssize_t end, const char *name) {
    for (Py_ssize_t i = 0; i < n; i++)
        if (index[i] < -1 || index[i] >= end) {
            PyErr_Format(PyExc_IndexError, "`%s` holds %d; it must be from -1 to %zd", name, (int)index[i], end - 1);
            return 0;
        }
    return 1;
}

/* Reads plan = (channels, rows, target, partner, weight, bias). */
static int read_plan(Job *job, Buffers *buffers, PyObject *plan, Py_ssize_t n_rows, Py_ssize_t n_targets) {
    static const char *const NAMES[] = {"channels", "rows", "target", "partner", "weight", "bias"};
    const void *found[6];
    Py_ssize_t blocks = -1, rows = 0;
    if (PyTuple_Size(plan) != 6) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "`plan` must hold 6 arrays");
        return 0;
    }
    for (int i = 0; i < 6; i++) {
        Py_ssize_t *items = i ? &rows : &blocks;
        if (!(found[i] = view(buffers, PyTuple_GetItem(plan, i), NAMES[i], items, PyBUF_SIMPLE))) return 0;
        if (!i) rows = blocks * ROWS;
    }
    job->blocks = (int)blocks;
    job->channels = found[0], job->rows = found[1], job->target = found[2], job->partner = found[3];
    job->weight = found[4], job->bias = found[5];
    for (Py_ssize_t b = 0; b < blocks; b++)
        if (job->channels[b] != 1 && job->channels[b] != 2 && job->channels[b] != 5) {
            PyErr_Format(PyExc_ValueError, "`channels` holds %d; it must be 1, 2 or 5", (int)job->channels[b]);
            return 0;
        }
    return below(job->rows, rows, n_rows, "rows") && below(job->target, rows, n_targets, "target") &&
           below(job->partner, rows, ROWS, "partner");
}

/* Reads the list [w, b, w, b, …] of parameters, or of arrays for their gradient. */
static int read_layers(Job *job, Buffers *buffers, PyObject *arrays, const char *name, int gradient) {
    Py_ssize_t n = PyList_Size(arrays), width = -1;
    if (n < 0) return 0;
    if (n % 2 || n < 4 || n / 2 > MAX_LAYERS || (gradient && n / 2 != job->layers + 1)) {
        PyErr_Format(PyExc_ValueError, "`%s` holds %zd arrays; it must be a weight and a bias for each layer", name, n);
        return 0;
    }
    job->layers = (int)(n / 2) - 1;
    int flags = gradient ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    for (int l = 0; l <= job->layers; l++) {
        /* The first bias gives the width, by which all the others are checked. */
        float *b = NULL, *w = NULL;
        Py_ssize_t outputs = l == job->layers ? 1 : width;
        if (!(b = view(buffers, PyList_GetItem(arrays, 2 * l + 1), name, &outputs, flags))) return 0;
        Py_ssize_t inputs = l ? width : INPUTS;
        if (!l) width = outputs;
        Py_ssize_t size = inputs * outputs;
        if (!(w = view(buffers, PyList_GetItem(arrays, 2 * l), name, &size, flags))) return 0;
        if (gradient)
            job->dw[l] = w, job->db[l] = b;
        else
            job->w[l] = w, job->b[l] = b;
    }
    if (gradient && width != job->width) {
        PyErr_Format(PyExc_ValueError, "`%s` is for width %zd; the network has %d", name, width, job->width);
        return 0;
    }
    job->width = (int)width;
    return 1;
}

static PyObject *prepare_and_run(Job *job, const Variant *variant) {
    job->panel = variant->panel;
    job->block = variant->block;
    job->padded = (job->width + job->panel - 1) / job->panel * job->panel;
    if (job->threads > job->blocks) job->threads = job->blocks ? job->blocks : 1;
    Part parts[MAX_THREADS];
    job->parts = parts;
    Arena arena = {NULL, 0};
    lay_out(job, &arena);
    Spare *memory = borrow(arena.used);
    if (!memory) return PyErr_NoMemory();
    arena = (Arena){memory->memory, 0};
    find_openmp(1);
    double loss;
    Py_BEGIN_ALLOW_THREADS;
    lay_out(job, &arena);
    loss = run(job);
    Py_END_ALLOW_THREADS;
    give_back(memory);
    return PyFloat_FromDouble(loss);
}

/* loss(x, targets, plan, parameters, gradients or None, threads, variant): the loss; the gradient is written. */
static PyObject *loss(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *x, *targets, *plan, *parameters, *gradients;
    int threads;
    const char *name;
    if (!PyArg_ParseTuple(args, "OOO!O!Ois", &x, &targets, &PyTuple_Type, &plan, &PyList_Type, &parameters, &gradients,
                          &threads, &name))
        return NULL;
    const Variant *variant = VARIANTS;
    while (variant < VARIANTS + N_VARIANTS && strcmp(variant->name, name)) variant++;
    if (variant == VARIANTS + N_VARIANTS || !supported(variant))
        return PyErr_Format(PyExc_ValueError, "`variant` is \"%s\", which this CPU does not have; see VARIANTS", name);
    if (threads < 1) return PyErr_Format(PyExc_ValueError, "`threads` is %d; it must be at least 1", threads);
    Job *job = calloc(1, sizeof *job);
    Buffers *buffers = calloc(1, sizeof *buffers);
    PyObject *out = NULL;
    if (!job || !buffers) {
        PyErr_NoMemory();
        goto done;
    }
    Py_ssize_t n_rows = -1, n_targets = -1;
    job->threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    job->gradient = gradients != Py_None;
    if (!(job->x = view(buffers, x, "x", &n_rows, PyBUF_SIMPLE))) goto done;
    if (!(job->targets = view(buffers, targets, "targets", &n_targets, PyBUF_SIMPLE))) goto done;
    if (!read_plan(job, buffers, plan, n_rows / INPUTS, n_targets)) goto done;
    if (!read_layers(job, buffers, parameters, "parameters", 0)) goto done;
    if (job->gradient && !read_layers(job, buffers, gradients, "gradients", 1)) goto done;
    out = prepare_and_run(job, variant);
done:
    if (buffers)
        while (buffers->n) PyBuffer_Release(&buffers->views[--buffers->n]);
    free(buffers);
    free(job);
    return out;
}

static PyMethodDef methods[] = {
    {"loss", loss, METH_VARARGS, "The loss of a network on planned rows, and its gradient."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kourkoutas._native._taylor", NULL, -1, methods, NULL, NULL, NULL, NULL};

/* VARIANTS: the kinds of CPU this one can stand in for, best first. */
PyMODINIT_FUNC PyInit__taylor(void) {
    PyObject *self = PyModule_Create(&module), *names = PyList_New(0);
    if (!self || !names) return NULL;
    for (int i = 0; i < N_VARIANTS; i++) {
        if (!supported(&VARIANTS[i])) continue;
        PyObject *name = PyUnicode_FromString(VARIANTS[i].name);
        if (!name || PyList_Append(names, name)) return NULL;
        Py_DECREF(name);
    }
    if (PyModule_AddIntConstant(self, "ROWS", ROWS) || PyModule_AddObjectRef(self, "VARIANTS", names)) return NULL;
    Py_DECREF(names);
    return self;
}
