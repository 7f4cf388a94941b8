/* Tensors without the framework's headers: DLPack's C exchange table describes them. */

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

enum { CPU = 1 };                                     /* DLPack's device type */
enum { INT = 0, FLOAT = 2, BFLOAT = 4, COMPLEX = 5 }; /* DLPack's type codes */

static const Exchange *exchange;
static PyObject *tensor_types[2];
static PyCFunction is_neg, is_conj; /* behind Tensor.is_neg and is_conj: half the time of a call from Python */

typedef struct {
    DLTensor dl;
    Kind kind; /* of a complex tensor's two parts */
    int64_t n;
    int parts;   /* 2 of a complex tensor */
    int integer; /* int64 */
} View;

static Kind kind_of(int code, int bits) {
    if (code == BFLOAT) return bits == 16 ? BF16 : OTHER;
    if (code != FLOAT && code != COMPLEX) return OTHER;
    if (bits == 16) return F16;
    if (bits == 32) return F32;
    return bits == 64 ? F64 : OTHER;
}

/* 0 if the tensor is a subclass's or has no storage, as zero tensors and functional tensors. */
static int read_tensor(PyObject *x, View *view) {
    DLTensor *dl = &view->dl;
    PyObject *type = (PyObject *)Py_TYPE(x);
    if (type != tensor_types[0] && type != tensor_types[1]) return 0;
    if (exchange->tensor_from(x, dl)) {
        PyErr_Clear();
        return 0;
    }
    if (dl->device_type != CPU || dl->lanes != 1) return 0;
    dl->data = (char *)dl->data + dl->byte_offset;
    view->n = 1;
    for (int d = 0; d < dl->ndim; d++) view->n *= dl->shape[d];
    view->integer = dl->code == INT && dl->bits == 64;
    view->parts = dl->code == COMPLEX ? 2 : 1;
    int bits = dl->bits / view->parts;
    view->kind = kind_of(dl->code, bits);
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

/* The same with the last axis innermost, and so on; whatever has no elements is in order. */
static int in_order(const View *x) {
    if (!x->n) return 1;
    int64_t stride = 1;
    for (int d = x->dl.ndim - 1; d >= 0 && x->dl.strides; stride *= x->dl.shape[d--])
        if (x->dl.shape[d] > 1 && x->dl.strides[d] != stride) return 0;
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

/* Takes the framework's exchange table, and its types (tensor, parameter); 0 with an exception. */
static int connect_tensors(PyObject *capsule, PyObject *types) {
    if (PyTuple_Size(types) != 2) {
        PyErr_Format(PyExc_ValueError, "`connect` takes 2 types");
        return 0;
    }
    const Exchange *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!table) return 0;
    while (table && table->major != 1) table = table->previous;
    if (!table) {
        PyErr_Format(PyExc_ValueError, "DLPack's table must have major version 1");
        return 0;
    }
    exchange = table;
    Py_INCREF(types); /* kept, with the two in it, as long as the process lives */
    for (int i = 0; i < 2; i++) tensor_types[i] = PyTuple_GetItem(types, i);
    is_neg = function_of("is_neg");
    is_conj = function_of("is_conj");
    return 1;
}
