/* Python types over _ring_core.h. Policy (locks, epochs, errors, waiting) is in ring.py; these two types only move
 * bytes. Both hold the segment's buffer, so that it cannot be unmapped under them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_ring_core.h"

static PyObject *view_escaped(void) {
    PyErr_SetString(PyExc_BufferError, "the handler kept a view of a record; copy what must outlive the handler");
    return NULL;
}

/* ---- Producer ---- */

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    ring_producer ring;
} ProducerObject;

static int open_memory(PyObject *source, Py_buffer *memory) {
    if (PyObject_GetBuffer(source, memory, PyBUF_WRITABLE) < 0) return -1;
    ring_memory mem = {0};
    if (memory->len > RING_HEADER_BYTES) ring_open(&mem, memory->buf);
    if (mem.capacity == 0 || (uint64_t)memory->len != RING_HEADER_BYTES + mem.capacity) {
        PyBuffer_Release(memory);
        PyErr_SetString(PyExc_ValueError, "not a ring segment");
        return -1;
    }
    return 0;
}

static int is_open(const Py_buffer *memory) {
    if (memory->obj) return 1;
    PyErr_SetString(PyExc_ValueError, "operation on a closed ring endpoint");
    return 0;
}

static int read_kind(PyObject *object, uint16_t *kind) {
    long value = PyLong_AsLong(object);
    if (value == -1 && PyErr_Occurred()) return -1;
    if (value < 0 || value > UINT16_MAX) {
        PyErr_Format(PyExc_ValueError, "kind must be between 0 and 65535, not %ld", value);
        return -1;
    }
    *kind = (uint16_t)value;
    return 0;
}

static int Producer_init(ProducerObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"memory", "data_event", NULL};
    PyObject *source;
    int data_event;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oi", names, &source, &data_event)) return -1;
    if (self->memory.obj) PyBuffer_Release(&self->memory);
    if (open_memory(source, &self->memory) < 0) return -1;
    if (ring_producer_attach(&self->ring, self->memory.buf, data_event) < 0) {
        ring_poison(&self->ring.mem);
        PyBuffer_Release(&self->memory);
        PyErr_SetString(PyExc_ValueError, "the cursors of the ring are impossible");
        return -1;
    }
    return 0;
}

static void Producer_dealloc(ProducerObject *self) {
    if (self->memory.obj) PyBuffer_Release(&self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int append_object(ring_producer *ring, PyObject *payload, uint16_t kind, int *result) {
    if (PyBytes_CheckExact(payload)) {
        *result = ring_append(ring, (const uint8_t *)PyBytes_AS_STRING(payload), (size_t)PyBytes_GET_SIZE(payload), kind);
        return 0;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE) < 0) return -1;
    *result = ring_append(ring, view.buf, (size_t)view.len, kind);
    PyBuffer_Release(&view);
    return 0;
}

static PyObject *Producer_push(ProducerObject *self, PyObject *const *args, Py_ssize_t count) {
    uint16_t kind;
    int result;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "push takes payload and kind, not %zd arguments", count);
    if (!is_open(&self->memory) || read_kind(args[1], &kind) < 0) return NULL;
    if (append_object(&self->ring, args[0], kind, &result) < 0) return NULL;
    return PyLong_FromLong(result == RING_PUBLISHED ? ring_publish(&self->ring) : result);
}

static PyObject *Producer_push_many(ProducerObject *self, PyObject *const *args, Py_ssize_t count) {
    uint16_t kind;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "push_many takes payloads and kind, not %zd arguments", count);
    if (!is_open(&self->memory) || read_kind(args[1], &kind) < 0) return NULL;
    PyObject *payloads = PySequence_Fast(args[0], "push_many needs a sequence of payloads");
    if (!payloads) return NULL;
    Py_ssize_t done = 0;
    int result = RING_PUBLISHED, failed = 0;
    for (; done < PySequence_Fast_GET_SIZE(payloads); done++) {
        failed = append_object(&self->ring, PySequence_Fast_GET_ITEM(payloads, done), kind, &result) < 0;
        if (failed || result != RING_PUBLISHED) break;
    }
    Py_DECREF(payloads);
    if (done) ring_publish(&self->ring);
    if (failed) return NULL;
    return PyLong_FromSsize_t(done == 0 && result < 0 ? result : done);
}

static PyObject *Producer_prepare_wait(ProducerObject *self, PyObject *length) {
    size_t wanted = PyLong_AsSize_t(length);
    if (wanted == (size_t)-1 && PyErr_Occurred()) return NULL;
    if (!is_open(&self->memory)) return NULL;
    int result = ring_producer_prepare(&self->ring, wanted);
    return result < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyBool_FromLong(result);
}

static PyObject *Producer_cancel_wait(ProducerObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!is_open(&self->memory)) return NULL;
    ring_producer_cancel(&self->ring);
    Py_RETURN_NONE;
}

static PyObject *Producer_close(ProducerObject *self, PyObject *Py_UNUSED(ignored)) {
    if (self->memory.obj) PyBuffer_Release(&self->memory);
    Py_RETURN_NONE;
}

static PyObject *Producer_free_bytes(ProducerObject *self, void *Py_UNUSED(closure)) {
    if (!is_open(&self->memory)) return NULL;
    int64_t room = ring_free(&self->ring, __ATOMIC_ACQUIRE);
    return PyLong_FromLongLong(room < 0 ? 0 : room);
}

static PyMethodDef producer_methods[] = {
    {"push", (PyCFunction)(void (*)(void))Producer_push, METH_FASTCALL, "One message; a PushResult or a negative code."},
    {"push_many", (PyCFunction)(void (*)(void))Producer_push_many, METH_FASTCALL,
     "Several messages, one store of tail; how many were taken, or a negative code."},
    {"prepare_wait", (PyCFunction)Producer_prepare_wait, METH_O, "True if it is safe to sleep on the space event."},
    {"cancel_wait", (PyCFunction)Producer_cancel_wait, METH_NOARGS, "Takes the announcement back."},
    {"close", (PyCFunction)Producer_close, METH_NOARGS, "Lets go of the segment's memory."},
    {NULL},
};

static PyGetSetDef producer_properties[] = {
    {"free_bytes", (getter)Producer_free_bytes, NULL, "Bytes free in the ring.", NULL},
    {NULL},
};

static PyTypeObject ProducerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ipc._ring.Producer",
    .tp_basicsize = sizeof(ProducerObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The writing end of a ring.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Producer_init,
    .tp_dealloc = (destructor)Producer_dealloc,
    .tp_methods = producer_methods,
    .tp_getset = producer_properties,
};

/* ---- Consumer ---- */

/* The object exports the message being handled through the buffer protocol. Every memoryview of it, however it was
 * made, counts in `exports`, so a view that outlives its handler is noticed. */
typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    ring_consumer ring;
    ring_message message;
    Py_ssize_t exports;
    int handling;
    int busy;
} ConsumerObject;

static void Consumer_drop(ConsumerObject *self) {
    if (self->memory.obj) PyBuffer_Release(&self->memory);
    free(self->ring.scratch);
    self->ring.scratch = NULL;
}

static int Consumer_init(ConsumerObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"memory", "space_event", NULL};
    PyObject *source;
    int space_event;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oi", names, &source, &space_event)) return -1;
    Consumer_drop(self);
    if (open_memory(source, &self->memory) < 0) return -1;
    if (ring_consumer_attach(&self->ring, self->memory.buf, space_event) < 0) {
        ring_poison(&self->ring.mem);
        PyBuffer_Release(&self->memory);
        PyErr_SetString(PyExc_ValueError, "the cursors of the ring are impossible");
        return -1;
    }
    return 0;
}

static void Consumer_dealloc(ConsumerObject *self) {
    Consumer_drop(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int Consumer_getbuffer(ConsumerObject *self, Py_buffer *view, int flags) {
    if (!self->handling) {
        view->obj = NULL;
        PyErr_SetString(PyExc_BufferError, "no message is being handled");
        return -1;
    }
    void *payload = (void *)(uintptr_t)self->message.payload;
    if (PyBuffer_FillInfo(view, (PyObject *)self, payload, (Py_ssize_t)self->message.length, 1, flags) < 0) return -1;
    self->exports++;
    return 0;
}

static void Consumer_releasebuffer(ConsumerObject *self, Py_buffer *Py_UNUSED(view)) { self->exports--; }

/* A traceback keeps the handler's frame and so its view alive: release the view itself and keep the first error. */
static void release_after_error(PyObject *view) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *released = PyObject_CallMethod(view, "release", NULL);
    if (!released) PyErr_Clear();
    Py_XDECREF(released);
    PyErr_Restore(type, value, traceback);
}

static int handle_message(ConsumerObject *self, PyObject *handler) {
    Py_ssize_t exports = self->exports;
    PyObject *args[2] = {PyLong_FromLong(self->message.kind), NULL};
    if (!args[0]) return -1;
    self->handling = 1;
    args[1] = PyMemoryView_FromObject((PyObject *)self);
    self->handling = 0;
    if (!args[1]) {
        Py_DECREF(args[0]);
        return -1;
    }
    PyObject *result = PyObject_Vectorcall(handler, args, 2, NULL);
    if (!result) release_after_error(args[1]);
    Py_DECREF(args[0]);
    Py_DECREF(args[1]);
    if (!result) return -1;
    Py_DECREF(result);
    if (self->exports > exports) {
        view_escaped();
        return -1;
    }
    return 0;
}

static int enter(ConsumerObject *self) {
    if (!is_open(&self->memory)) return -1;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "the consumer is in use: a handler must not read its own ring");
        return -1;
    }
    self->busy = 1;
    return 0;
}

static PyObject *Consumer_poll(ConsumerObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "poll takes handler, max_records and max_bytes");
    Py_ssize_t max_records = PyLong_AsSsize_t(args[1]), max_bytes = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || enter(self) < 0) return NULL;
    ring_consumer *ring = &self->ring;
    Py_ssize_t done = 0;
    int result = 1, failed = 0;
    while (done < max_records && (Py_ssize_t)(ring->next - ring->head) < max_bytes && !failed) {
        result = ring_next(ring, &self->message);
        if (result <= 0) break;
        failed = handle_message(self, args[0]) < 0;
        done++;
    }
    if (result >= 0) ring_release(ring);
    self->busy = 0;
    if (failed) return NULL;
    return PyLong_FromSsize_t(done == 0 && result < 0 ? result : done);
}

static PyObject *Consumer_prepare_wait(ConsumerObject *self, PyObject *Py_UNUSED(ignored)) {
    if (enter(self) < 0) return NULL;
    int result = ring_consumer_prepare(&self->ring);
    self->busy = 0;
    return result < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyBool_FromLong(result);
}

static PyObject *Consumer_cancel_wait(ConsumerObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!is_open(&self->memory)) return NULL;
    ring_consumer_cancel(&self->ring);
    Py_RETURN_NONE;
}

static PyObject *Consumer_spin(ConsumerObject *self, PyObject *microseconds) {
    long limit = PyLong_AsLong(microseconds);
    if (limit == -1 && PyErr_Occurred()) return NULL;
    if (limit < 0 || limit > 1000000) return PyErr_Format(PyExc_ValueError, "spin takes 0 to 1000000 microseconds");
    if (enter(self) < 0) return NULL;
    int found;
    Py_BEGIN_ALLOW_THREADS
    found = ring_spin(&self->ring, (unsigned)limit);
    Py_END_ALLOW_THREADS
    self->busy = 0;
    return PyBool_FromLong(found);
}

static PyObject *Consumer_close(ConsumerObject *self, PyObject *Py_UNUSED(ignored)) {
    if (!self->memory.obj) Py_RETURN_NONE;
    if (self->exports) return view_escaped();
    if (enter(self) < 0) return NULL;
    self->busy = 0;
    Consumer_drop(self);
    Py_RETURN_NONE;
}

static PyObject *Consumer_pending(ConsumerObject *self, void *Py_UNUSED(closure)) {
    if (!is_open(&self->memory)) return NULL;
    uint64_t tail = __atomic_load_n(ring_word(&self->ring.mem, RING_OFF_TAIL), __ATOMIC_ACQUIRE);
    return PyLong_FromUnsignedLongLong(tail - self->ring.head);
}

static PyObject *Consumer_position(ConsumerObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(self->ring.head);
}

static PyMethodDef consumer_methods[] = {
    {"poll", (PyCFunction)(void (*)(void))Consumer_poll, METH_FASTCALL,
     "Hands messages to handler(kind, view); how many, or a negative fault."},
    {"prepare_wait", (PyCFunction)Consumer_prepare_wait, METH_NOARGS, "True if it is safe to sleep on the data event."},
    {"cancel_wait", (PyCFunction)Consumer_cancel_wait, METH_NOARGS, "Takes the announcement back."},
    {"spin", (PyCFunction)Consumer_spin, METH_O, "Looks for data for some microseconds without the interpreter lock."},
    {"close", (PyCFunction)Consumer_close, METH_NOARGS, "Lets go of the segment's memory."},
    {NULL},
};

static PyGetSetDef consumer_properties[] = {
    {"pending", (getter)Consumer_pending, NULL, "Bytes published and not yet released.", NULL},
    {"position", (getter)Consumer_position, NULL, "The consumer's cursor.", NULL},
    {NULL},
};

static PyBufferProcs consumer_buffer = {
    .bf_getbuffer = (getbufferproc)Consumer_getbuffer,
    .bf_releasebuffer = (releasebufferproc)Consumer_releasebuffer,
};

static PyTypeObject ConsumerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ipc._ring.Consumer",
    .tp_basicsize = sizeof(ConsumerObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The reading end of a ring.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Consumer_init,
    .tp_dealloc = (destructor)Consumer_dealloc,
    .tp_methods = consumer_methods,
    .tp_getset = consumer_properties,
    .tp_as_buffer = &consumer_buffer,
};

static struct PyModuleDef ring_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ipc._ring",
    .m_doc = "The two ends of a shared-memory ring, in C.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__ring(void) {
    ring_crc_init();
    PyObject *module = PyModule_Create(&ring_module);
    if (!module) return NULL;
    /* 0: stores and loads here are ordered by themselves, the peer needs no membarrier. */
    if (PyModule_AddIntConstant(module, "FENCE", 0) < 0 || PyModule_AddType(module, &ProducerType) < 0 ||
        PyModule_AddType(module, &ConsumerType) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
