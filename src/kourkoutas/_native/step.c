/* The Kourkoutas-β step on the CPU for Python: from the framework's tensors to the raw pointers of `arithmetic.c`.

   Nothing of the framework is included: tensors are described by DLPack's C exchange table.

     gather   describes a group's tensors, or says that one of them is not for this kernel
     sums     Σ g² of each bucket, for those who want to see it before anything moves
     apply    moves everything that was gathered
     squares  Σ g² of each parameter, once that was done
     turn, add_moments   turn bases and move factors, for the step in the eigenbasis */

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "arithmetic.h"
#include "bases.h"
#include "tensors.h"

enum { WINDOW = 1024 }; /* rows of a trace, as in kourkoutas/trace.py */

/* The names of a parameter's state: scalars in the order of `rule.State`, and what is like the parameter. */
enum { NORM_EMA, STEP, LOG_BETA2, SKIPPED, SCALARS };
enum { EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ };
static PyObject *scalar_names, *moment_names; /* tuples */
static PyObject *grad_name;

#define PLAN "kourkoutas.plan"

typedef struct { /* what `gather` found */
    GroupStep group;
    int n_group_params, n_group_buckets; /* with a gradient or without */
    int *bucket_at;      /* per bucket of the group: its place in `group.buckets`, or -1 without a gradient */
    PyObject *written;   /* list of the tensors that the step writes */
    PyObject *grads;     /* list of the gradients, which must live as long */
} Plan;

static void destroy(PyObject *capsule) {
    Plan *plan = PyCapsule_GetPointer(capsule, PLAN);
    Py_XDECREF(plan->written);
    Py_XDECREF(plan->grads);
    free(plan->group.params);
    free(plan->group.buckets);
    free(plan->group.sums);
    free(plan->bucket_at);
    free(plan);
}

/* A capsule with an empty plan. */
static PyObject *new_plan(size_t n_params, size_t n_buckets) {
    Plan *plan = calloc(1, sizeof *plan);
    PyObject *capsule = plan ? PyCapsule_New(plan, PLAN, destroy) : NULL;
    if (!capsule) {
        free(plan);
        return PyErr_NoMemory();
    }
    plan->group.params = calloc(n_params + 1, sizeof(Param));
    plan->group.buckets = calloc(n_buckets + 1, sizeof(Bucket));
    plan->bucket_at = calloc(n_buckets + 1, sizeof(int));
    plan->written = PyList_New(0);
    plan->grads = PyList_New(0);
    plan->n_group_params = (int)n_params;
    plan->n_group_buckets = (int)n_buckets;
    if (plan->group.params && plan->group.buckets && plan->bucket_at && plan->written && plan->grads) {
        for (size_t b = 0; b < n_buckets; b++) plan->bucket_at[b] = -1;
        return capsule;
    }
    Py_DECREF(capsule);
    return PyErr_NoMemory();
}

typedef struct { /* the arguments of `gather`: a group, and the optimizer's state */
    Hyper hyper;
    PyObject *params, *bucket_index; /* lists, one entry per parameter */
    Py_ssize_t n_params, n_buckets;
    PyObject *vectors; /* per scalar: a tensor, or None for one that is not kept */
    PyObject *views;   /* per scalar: a list of what each parameter's state must show of its vector, or None */
    PyObject *state;   /* dict from parameter to its own state */
} Request;

static int is_list_of(PyObject *x, Py_ssize_t n) { return PyList_Check(x) && PyList_Size(x) == n; }
static int is_tuple_of(PyObject *x, Py_ssize_t n) { return PyTuple_Check(x) && PyTuple_Size(x) == n; }

/* 1: read; 0 with an exception: the arguments are not what kourkoutas/torch/kernel.py passes. */
static int read_request(PyObject *const *args, Py_ssize_t n_args, Request *request) {
    if (n_args != 7) {
        PyErr_Format(PyExc_TypeError, "gather takes 7 arguments; got %zd", n_args);
        return 0;
    }
    char *packed;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(args[0], &packed, &size)) return 0;
    if (size != sizeof(Hyper)) {
        PyErr_Format(PyExc_ValueError, "`hyper` must have %zu bytes; got %zd", sizeof(Hyper), size);
        return 0;
    }
    memcpy(&request->hyper, packed, sizeof(Hyper));
    request->params = args[1];
    request->bucket_index = args[2];
    request->n_buckets = PyLong_AsSsize_t(args[3]);
    request->vectors = args[4];
    request->views = args[5];
    request->state = args[6];
    return !PyErr_Occurred();
}

/* Whether the containers fit each other. */
static int is_consistent(Request *request) {
    if (!PyList_Check(request->params) || !PyDict_Check(request->state) || request->n_buckets < 0) return 0;
    request->n_params = PyList_Size(request->params);
    if (!is_list_of(request->bucket_index, request->n_params)) return 0;
    if (!is_tuple_of(request->vectors, SCALARS) || !is_tuple_of(request->views, SCALARS)) return 0;
    for (int i = 0; i < SCALARS; i++) {
        PyObject *list = PyTuple_GetItem(request->views, i);
        if (list != Py_None && !is_list_of(list, request->n_params)) return 0;
    }
    return 1;
}

/* 1: the scalar's vector, of `n` entries, was read, or is None. */
static int read_vector(Plan *plan, const Request *request, int scalar, Py_ssize_t n, Vector *vector) {
    PyObject *x = PyTuple_GetItem(request->vectors, scalar);
    if (x == Py_None) return 1;
    View view;
    if (!read_tensor(x, &view) || view.dl.ndim != 1 || view.n != n) return 0;
    int fits = scalar == SKIPPED ? view.integer : view.kind == F32 || view.kind == F64;
    *vector = (Vector){view.dl.data, view.kind};
    return fits && !PyList_Append(plan->written, x);
}

static int read_vectors(Plan *plan, const Request *request) {
    GroupStep *group = &plan->group;
    Vector skipped = {0};
    int ok = read_vector(plan, request, STEP, request->n_params, &group->step) &&
             read_vector(plan, request, NORM_EMA, request->n_buckets, &group->norm_ema) &&
             read_vector(plan, request, LOG_BETA2, request->n_params, &group->log_beta2) &&
             read_vector(plan, request, SKIPPED, request->n_buckets, &skipped);
    group->skipped = skipped.data;
    return ok;
}

typedef struct { /* of one parameter; v_max is NULL where none is kept */
    PyObject *theta, *g, *m, *v, *v_max;
} Tensors;

static PyObject *moment(PyObject *own, int which) {
    return PyDict_GetItemWithError(own, PyTuple_GetItem(moment_names, which));
}

/* Whether a parameter's state still shows the views of the vectors. */
static int shows_views(const Request *request, PyObject *own, Py_ssize_t number) {
    for (int i = 0; i < SCALARS; i++) {
        PyObject *views = PyTuple_GetItem(request->views, i);
        if (views == Py_None) continue;
        PyObject *shown = PyDict_GetItemWithError(own, PyTuple_GetItem(scalar_names, i));
        if (shown != PyList_GetItem(views, number)) return 0;
    }
    return 1;
}

/* 1: m, v and v_max were found in the parameter's state. */
static int find_moments(const Request *request, Py_ssize_t number, Tensors *x) {
    PyObject *own = PyDict_GetItemWithError(request->state, x->theta);
    if (!own || !PyDict_Check(own) || !shows_views(request, own, number)) return 0;
    x->m = moment(own, EXP_AVG);
    x->v = moment(own, EXP_AVG_SQ);
    if (!x->m || !x->v) return 0;
    if (request->hyper.leak < 0) return 1;
    x->v_max = moment(own, MAX_EXP_AVG_SQ);
    return x->v_max != NULL;
}

/* 1: the tensors can be read and written; `p` tells where they are. */
static int read_param(const Tensors *x, Param *p) {
    View theta, g, m, v, v_max = {.dl = {0}};
    if (!read_like(x->theta, &theta, &theta) || !dense(&theta) || !read_like(x->g, &g, &theta)) return 0;
    if (!read_like(x->m, &m, &theta) || !read_like(x->v, &v, &theta) || v.kind != m.kind) return 0;
    if (x->v_max && (!read_like(x->v_max, &v_max, &theta) || v_max.kind != m.kind)) return 0;
    if ((theta.kind == F64) != (g.kind == F64)) return 0;
    if (m.kind != theta.kind && (theta.kind == F64 || (m.kind != F32 && m.kind != BF16))) return 0;
    *p = (Param){
        .theta = theta.dl.data,
        .g = g.dl.data,
        .m = m.dl.data,
        .v = v.dl.data,
        .v_max = v_max.dl.data,
        .theta_kind = theta.kind,
        .g_kind = g.kind,
        .state_kind = m.kind,
        .n = theta.n * theta.parts,
    };
    return 1;
}

/* The place of a bucket in `group.buckets`, one parameter more in it. */
static int enter_bucket(Plan *plan, int number) {
    GroupStep *group = &plan->group;
    if (plan->bucket_at[number] < 0) {
        plan->bucket_at[number] = group->n_buckets++;
        group->buckets[plan->bucket_at[number]] = (Bucket){.number = number, .updated = 1};
    }
    group->buckets[plan->bucket_at[number]].n_params++;
    return plan->bucket_at[number];
}

/* 1: the plan owns the tensors. */
static int keep(Plan *plan, const Tensors *x) {
    if (PyList_Append(plan->grads, x->g) || PyList_Append(plan->written, x->theta)) return 0;
    if (PyList_Append(plan->written, x->m) || PyList_Append(plan->written, x->v)) return 0;
    return !x->v_max || !PyList_Append(plan->written, x->v_max);
}

/* 1: the parameter's step is planned; 0: it is not for this kernel, or there is an exception. */
static int add_param(Plan *plan, const Request *request, Py_ssize_t number, PyObject *grad) {
    Tensors tensors = {.theta = PyList_GetItem(request->params, number), .g = grad};
    long bucket = PyLong_AsLong(PyList_GetItem(request->bucket_index, number));
    if (bucket < 0 || bucket >= request->n_buckets) return 0;
    Param p;
    if (!find_moments(request, number, &tensors) || !read_param(&tensors, &p)) return 0;
    p.number = (int)number;
    p.bucket = enter_bucket(plan, (int)bucket);
    plan->group.params[plan->group.n_params++] = p;
    return keep(plan, &tensors);
}

/* The same for every parameter that has a gradient. */
static int add_params(Plan *plan, const Request *request) {
    for (Py_ssize_t i = 0; i < request->n_params; i++) {
        PyObject *grad = PyObject_GetAttr(PyList_GetItem(request->params, i), grad_name);
        int ok = grad && (grad == Py_None || add_param(plan, request, i, grad));
        Py_XDECREF(grad);
        if (!ok) return 0;
    }
    return 1;
}

static int by_bucket(const void *a, const void *b) {
    const Param *x = a, *y = b;
    return x->bucket != y->bucket ? x->bucket - y->bucket : x->number - y->number;
}

/* Puts the params of a bucket together, and makes room for the sums of their blocks; 0 without memory. */
static int arrange(GroupStep *group) {
    if (group->n_buckets < group->n_params) qsort(group->params, (size_t)group->n_params, sizeof(Param), by_bucket);
    group->sums = calloc((size_t)number_blocks(group) + 1, sizeof(BlockSums));
    return group->sums != NULL;
}

/* gather(hyper, params, bucket_index, number of buckets, vectors, views, state) → a plan of the step, or None if one of
   the tensors is not for this kernel, or state is missing. `Request` says what the arguments are. */
static PyObject *gather(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n_args) {
    Request request;
    if (!read_request(args, n_args, &request)) return NULL;
    if (!is_consistent(&request)) Py_RETURN_NONE;
    PyObject *capsule = new_plan((size_t)request.n_params, (size_t)request.n_buckets);
    if (!capsule) return NULL;
    Plan *plan = PyCapsule_GetPointer(capsule, PLAN);
    plan->group.hyper = request.hyper;
    if (!read_vectors(plan, &request) || !add_params(plan, &request)) {
        Py_DECREF(capsule);
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    if (arrange(&plan->group)) return capsule;
    Py_DECREF(capsule);
    return PyErr_NoMemory();
}

/* sums(plan, threads) → Σ g² of every bucket of the group; 0 where there is no gradient. */
static PyObject *sums(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 2) return PyErr_Format(PyExc_TypeError, "sums takes 2 arguments; got %zd", n_args);
    Plan *plan = PyCapsule_GetPointer(args[0], PLAN);
    int threads = (int)PyLong_AsLong(args[1]);
    if (!plan || PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    measure_group(&plan->group, threads);
    Py_END_ALLOW_THREADS
    PyObject *found = PyList_New(plan->n_group_buckets);
    for (int b = 0; found && b < plan->n_group_buckets; b++) {
        int at = plan->bucket_at[b];
        PyList_SetItem(found, b, PyFloat_FromDouble(at < 0 ? 0 : plan->group.buckets[at].square));
    }
    return found;
}

typedef struct { /* where a trace (window, 3, buckets) takes the row of this step */
    float *sun, *beta2, *norm; /* of the group's first bucket and on; NULL without a trace */
} Row;

/* 1: found; 0 with an exception. `rows` counts the rows written so far; the group's buckets are `first` and on. */
static int find_row(const Plan *plan, PyObject *ring, PyObject *rows, long first, Row *row) {
    View trace, count;
    if (!read_tensor(ring, &trace) || trace.kind != F32 || !read_tensor(rows, &count) || !count.integer || count.n != 1) {
        PyErr_Format(PyExc_ValueError, "`ring` must be a float32 and `rows` an int64 tensor");
        return 0;
    }
    int64_t width = trace.n / (3 * WINDOW);
    if (first < 0 || first + plan->n_group_buckets > width) {
        PyErr_Format(PyExc_ValueError, "`ring` has %lld buckets; need more", (long long)width);
        return 0;
    }
    int64_t number = *(int64_t *)count.dl.data % WINDOW;
    row->sun = (float *)trace.dl.data + number * 3 * width + first;
    row->beta2 = row->sun + width;
    row->norm = row->beta2 + width;
    return 1;
}

/* NaN for the buckets that had no gradient. */
static void write_row(const Plan *plan, Row row) {
    const Bucket none = {.sun = NAN, .beta2 = NAN, .norm = NAN};
    for (int b = 0; b < plan->n_group_buckets; b++) {
        int at = plan->bucket_at[b];
        const Bucket *bucket = at < 0 ? &none : &plan->group.buckets[at];
        row.sun[b] = (float)bucket->sun;
        row.beta2[b] = (float)bucket->beta2;
        row.norm[b] = (float)bucket->norm;
    }
}

/* apply(plan, lr, threads, ring, rows, first) → the tensors written; `find_row` tells of the trace, None without. */
static PyObject *apply(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 6) return PyErr_Format(PyExc_TypeError, "apply takes 6 arguments; got %zd", n_args);
    Plan *plan = PyCapsule_GetPointer(args[0], PLAN);
    double lr = PyFloat_AsDouble(args[1]);
    int threads = (int)PyLong_AsLong(args[2]);
    PyObject *ring = args[3], *rows = args[4];
    long first = PyLong_AsLong(args[5]);
    if (!plan || PyErr_Occurred()) return NULL;
    Row row = {0};
    if (ring != Py_None && !find_row(plan, ring, rows, first, &row)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    step_group(&plan->group, lr, threads);
    Py_END_ALLOW_THREADS
    if (row.sun) write_row(plan, row);
    Py_INCREF(plan->written);
    return plan->written;
}

/* squares(plan) → Σ g² of every parameter of the group, after `apply`; 0 where there is no gradient. */
static PyObject *squares(PyObject *Py_UNUSED(self), PyObject *capsule) {
    Plan *plan = PyCapsule_GetPointer(capsule, PLAN);
    if (!plan) return NULL;
    PyObject *found = PyList_New(plan->n_group_params);
    for (int i = 0; found && i < plan->n_group_params; i++) PyList_SetItem(found, i, PyFloat_FromDouble(0));
    for (int i = 0; found && i < plan->group.n_params; i++) {
        const Param *p = &plan->group.params[i];
        PyList_SetItem(found, p->number, PyFloat_FromDouble(p->square));
    }
    return found;
}

/* turn(product, basis, order, threads): see bases.h. */
static PyObject *turn(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 4) return PyErr_Format(PyExc_TypeError, "turn takes 4 arguments; got %zd", n_args);
    View product, basis, order;
    int ok = read_tensor(args[0], &product) && read_like(args[1], &basis, &product) && read_tensor(args[2], &order);
    int threads = (int)PyLong_AsLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    ok = ok && product.dl.ndim == 3 && product.dl.shape[1] == product.dl.shape[2] && in_order(&product);
    ok = ok && basis.kind == product.kind && (basis.kind == F32 || basis.kind == F64) && product.parts == 1;
    ok = ok && order.integer && in_order(&order) && order.n * product.dl.shape[2] == product.n;
    if (!ok) return PyErr_Format(PyExc_ValueError, "`turn` takes square matrices of one kind, and int64 for their order");
    Turn job = {
        .product = product.dl.data,
        .basis = basis.dl.data,
        .order = order.dl.data,
        .count = product.dl.shape[0],
        .n = (int)product.dl.shape[2],
        .is_double = basis.kind == F64,
    };
    int done;
    Py_BEGIN_ALLOW_THREADS
    done = turn_bases(&job, threads);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* A factor of every gradient of a stack, or None: 0 if it is neither. */
static int read_factors(PyObject *x, const View *grads, int64_t n, View *factors) {
    *factors = (View){.dl = {.data = NULL}};
    if (x == Py_None) return 1;
    if (!read_tensor(x, factors) || factors->dl.ndim != 3 || !in_order(factors)) return 0;
    return factors->kind == grads->kind && factors->parts == 1 && factors->dl.shape[1] == n && factors->dl.shape[2] == n &&
           factors->dl.shape[0] == grads->dl.shape[0];
}

/* A number in float64 for every gradient of a stack. */
static int read_weights(PyObject *x, const View *grads, View *weights) {
    return read_tensor(x, weights) && weights->kind == F64 && weights->parts == 1 && in_order(weights) &&
           weights->n == grads->dl.shape[0];
}

/* Whether squares of each gain, and so of gradients that it makes about 1, are far from the limits of float32. */
static int can_be_squared(const double *gain, int64_t count) {
    const double safe = 1e-15;
    for (int64_t i = 0; i < count; i++)
        if (!(gain[i] > safe && gain[i] < 1 / safe)) return 0;
    return 1;
}

/* add_moments(grads, factors of rows or None, factors of columns or None, keep, gain, threads) → whether it was done:
   see bases.h. It is not done if a `gain` is too large or too small. */
static PyObject *add_moments_of(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 6) return PyErr_Format(PyExc_TypeError, "add_moments takes 6 arguments; got %zd", n_args);
    View grads, of_rows, of_columns, keep, gain;
    int ok = read_tensor(args[0], &grads) && grads.dl.ndim == 3 && in_order(&grads) && grads.parts == 1;
    ok = ok && (grads.kind == F32 || grads.kind == F64);
    ok = ok && read_factors(args[1], &grads, grads.dl.shape[1], &of_rows);
    ok = ok && read_factors(args[2], &grads, grads.dl.shape[2], &of_columns);
    ok = ok && read_weights(args[3], &grads, &keep) && read_weights(args[4], &grads, &gain);
    int threads = (int)PyLong_AsLong(args[5]);
    if (PyErr_Occurred()) return NULL;
    if (!ok) return PyErr_Format(PyExc_ValueError, "`add_moments` takes matrices of one kind, and float64 for their weights");
    if (!can_be_squared(gain.dl.data, gain.n)) Py_RETURN_FALSE;
    Moments job = {
        .grads = grads.dl.data,
        .factors = {of_rows.dl.data, of_columns.dl.data},
        .keep = keep.dl.data,
        .gain = gain.dl.data,
        .count = grads.dl.shape[0],
        .rows = (int)grads.dl.shape[1],
        .columns = (int)grads.dl.shape[2],
        .is_double = grads.kind == F64,
    };
    Py_BEGIN_ALLOW_THREADS
    add_moments(&job, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_TRUE;
}

/* connect_lapack(path of a library) → whether `turn` and `add_moments` can be used. */
static PyObject *connect_lapack(PyObject *Py_UNUSED(self), PyObject *args) {
    const char *path;
    if (!PyArg_ParseTuple(args, "s", &path)) return NULL;
    return PyBool_FromLong(find_lapack(path));
}

/* connect(exchange table, (tensor type, parameter type), openmp) → whether tensors can be asked for their lazy bits.

   `openmp`: whether to run on the process's OpenMP threads, if it has them. */
static PyObject *connect(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *capsule, *types;
    int openmp;
    if (!PyArg_ParseTuple(args, "OO!p", &capsule, &PyTuple_Type, &types, &openmp)) return NULL;
    if (!connect_tensors(capsule, types)) return NULL;
    use_openmp(openmp);
    return PyBool_FromLong(is_neg && is_conj);
}

static PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS, "Take the framework's exchange table and tensor types."},
    {"gather", (PyCFunction)(void (*)(void))gather, METH_FASTCALL, "A plan of a group's step; None if not possible."},
    {"sums", (PyCFunction)(void (*)(void))sums, METH_FASTCALL, "Sum the squares of each bucket's gradients."},
    {"apply", (PyCFunction)(void (*)(void))apply, METH_FASTCALL, "Update everything gathered."},
    {"squares", squares, METH_O, "The sums of squares of each parameter's gradient."},
    {"connect_lapack", connect_lapack, METH_VARARGS, "Take LAPACK from a library that is loaded."},
    {"turn", (PyCFunction)(void (*)(void))turn, METH_FASTCALL, "Turn bases."},
    {"add_moments", (PyCFunction)(void (*)(void))add_moments_of, METH_FASTCALL, "Add gradients to their factors."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kourkoutas._native._step", NULL, -1, methods, NULL, NULL, NULL, NULL};

/* Adds a tuple of interned strings to the module, and keeps it in `kept`, too, if that is not NULL; 0: it failed. */
static int add_names(PyObject *self, const char *name, const char *const *strings, Py_ssize_t n, PyObject **kept) {
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple && i < n; i++) {
        PyObject *string = PyUnicode_InternFromString(strings[i]);
        if (!string || PyTuple_SetItem(tuple, i, string)) Py_CLEAR(tuple);
    }
    int ok = tuple && !PyModule_AddObjectRef(self, name, tuple);
    if (ok && kept) *kept = Py_NewRef(tuple);
    Py_XDECREF(tuple);
    return ok;
}

#define AS_STRING(name) #name,
static const char *const HYPER[] = {HYPER_FIELDS(AS_STRING)};
static const char *const SCALAR[] = {"norm_ema", "step", "log_beta2", "skipped"};
static const char *const MOMENT[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
#define LENGTH(x) (Py_ssize_t)(sizeof(x) / sizeof *(x))

PyMODINIT_FUNC PyInit__step(void) {
    PyObject *self = PyModule_Create(&module);
    grad_name = PyUnicode_InternFromString("grad");
    if (self && grad_name && add_names(self, "HYPER_FIELDS", HYPER, LENGTH(HYPER), NULL) &&
        add_names(self, "SCALARS", SCALAR, LENGTH(SCALAR), &scalar_names) &&
        add_names(self, "MOMENTS", MOMENT, LENGTH(MOMENT), &moment_names))
        return self;
    Py_XDECREF(self);
    return NULL;
}
