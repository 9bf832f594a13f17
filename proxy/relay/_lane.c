/* Sends on whole plain frames of one connection pair. What each part is for: see _lane.pyi.

   It knows no policy. Who may pass is Python's to say, for a short time (`renew`); what passes is
   counted, taken off a lease, and sent on with one call for all that a read brought. Whatever is
   not plain goes to Python with the bytes that were read, behind what was sent on before it. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <arpa/inet.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    BUFFER_BYTES = 64 << 10,
    REQUEST_START = 12, /* length, API key and version, correlation id */
    RESPONSE_START = 8, /* length, correlation id */
    MAX_IN_FLIGHT = 32, MAX_KEPT = (64 << 10) / MAX_IN_FLIGHT, SAMPLE_EVERY = 67,
};
enum { BATCH_LENGTH = 8, BATCH_PREFIX = 12, BATCH_MAGIC = 16, LAST_DELTA = 23, MIN_BATCH = 61 };
#define OBJECT(of) ((PyObject *)(of))
#define KEPT(of) {of->about, of->starts, of->renew, of->observe, of->shapes, of->rows, of->run, of->began}
#define EACH(kept, what) for (size_t n = 0; n < sizeof kept / sizeof *kept; n++) what(kept[n])
static const int64_t PERMIT_NS = 250000000, SAMPLE_AFTER_NS = 250000000;

enum { METER_NOTHING, METER_REQUESTS, METER_RESPONSES, ANY_RESPONSE = 0, KNOWN_RESPONSE, NO_RESPONSE, WHOLE_RESPONSE };
enum { LEFT, TAKEN, UNTIL_NS, VALUE = 0, REQUESTS }; /* of a lease, and of a counter */
enum { OF_REQUESTS, OF_COUNT, OF_LEASE, OF_UNSHOWN, VIEWS };
enum { CLIENT, BROKER, FAILED = -2, BLOCKED };
enum { BEFORE, KINDS, ON_REQUESTS, ON_RESPONSES, CHANNELS, GIVEN = CHANNELS + 2 };

typedef struct {
    PyObject_HEAD
    uint32_t api;
    int metered, response, unsampled, until_shown;
    char *start; /* of its frames, behind the correlation id */
    Py_ssize_t start_bytes;
    int limit_at, limit; /* what a Fetch may ask for at most, 0 for as much as it does */
    int64_t run_start, run_end, run_bytes, run_records, run_count; /* of the run that was shown last */
    int64_t sample_ns, until_ns, *lease, *unshown;
    double *requests, *count; /* cells of counters */
    PyObject *about, *starts, *renew, *observe, *shapes, *rows, *run, *began;
    Py_buffer views[VIEWS]; /* of the cells */
} Kind;

typedef struct {
    Kind *kind;
    PyObject *request; /* what is shown of it, or NULL */
    uint32_t number, bytes;
    int64_t read_ns, sent_ns; /* sent_ns is 0 where the time is not sampled */
} Exchange;

typedef struct {
    PyObject_HEAD
    int fd[2], most;
    int request_bytes, response_bytes; /* how much to read at a time; 0: all is Python's */
    PyObject *given[GIVEN]; /* NULL: a callback has closed the lane */
    Exchange in_flight[MAX_IN_FLIGHT];
    unsigned oldest, next;
    int64_t free_ns, active_ns;
} Lane;

static char buffer[BUFFER_BYTES]; /* nothing in it outlives a call, nor a call into Python */
static PyTypeObject *kind_type;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static uint32_t int32_at(const char *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return ntohl(value);
}

static int64_t int64_at(const char *at) { return (int64_t)((uint64_t)int32_at(at) << 32 | int32_at(at + 4)); }

/* --- what a kind may, and what is counted of it --- */

static int has_room(Kind *kind, int64_t bytes, int64_t now) {
    int64_t *lease = kind->lease;
    return now < kind->until_ns && (!lease || (lease[LEFT] >= bytes && now < lease[UNTIL_NS]));
}

/* Returns 1 and takes the bytes off the lease if they may pass, 0 if not, -1 for an exception. */
static int takes(Kind *kind, int64_t bytes, int64_t now) {
    if (!has_room(kind, bytes, now)) {
        Py_INCREF(OBJECT(kind)); /* it may be forgotten meanwhile */
        PyObject *may = PyObject_CallFunctionObjArgs(kind->renew, kind->about, kind, NULL);
        kind->until_ns = may && PyObject_IsTrue(may) == 1 ? now + PERMIT_NS : 0;
        int has = has_room(kind, bytes, now);
        Py_DECREF(OBJECT(kind));
        Py_XDECREF(may);
        if (!may || !has) return may ? 0 : -1;
    }
    if (kind->lease) kind->lease[LEFT] -= bytes, kind->lease[TAKEN] += bytes;
    return 1;
}

/* Returns the length of a (mask, content) if a frame begins like that; 0 if not, -1 for an exception. */
static int64_t begins(PyObject *shape, const char *frame, int64_t bytes) {
    char *mask, *content;
    Py_ssize_t length, same, at = 0;
    if (PyBytes_AsStringAndSize(PyTuple_GetItem(shape, 0), &mask, &length) ||
        PyBytes_AsStringAndSize(PyTuple_GetItem(shape, 1), &content, &same)) return -1;
    while (at < length && at < same && at < bytes && (frame[at] & mask[at]) == content[at]) at++;
    return at == length ? at : 0;
}

/* Whether a response names no broker: its API never does, or it equals, under a mask, one that did
   not (see ProduceResponseShapes). Returns -1 for an exception. */
static int is_plain(Kind *kind, const char *frame, int64_t bytes) {
    int64_t same = 0;
    if (kind->response != KNOWN_RESPONSE) return kind->response != NO_RESPONSE;
    for (Py_ssize_t n = 0; same >= 0 && same != bytes && n < PyList_Size(kind->shapes); n++)
        same = begins(PyList_GetItem(kind->shapes, n), frame, bytes);
    return same < 0 ? -1 : same == bytes;
}

/* Where the records end that a response of a run has from `at` on, if it has nothing else, or -1; their bytes. */
static int64_t end_of(Kind *kind, const char *frame, int64_t at, int64_t bytes, int64_t *records) {
    int64_t end = -1, last = bytes - PyLong_AsLong(PyList_GetItem(kind->run, 3));
    while (last < bytes && at < last && frame[at++] & 0x80) continue; /* their length is that of the batches */
    for (*records = last - at; at + MIN_BATCH <= last && frame[at + BATCH_MAGIC] == 2; at += BATCH_PREFIX + (int64_t)int32_at(frame + at + BATCH_LENGTH))
        end = (int64_t)((uint64_t)int64_at(frame + at) + int32_at(frame + at + LAST_DELTA) + 1);
    return at == last && !memcmp(frame + last, "\0\0", (size_t)(bytes - last)) ? end : -1;
}

/* Keeps copies of a request and its response; in place of those before where it goes on with a run. */
static int show(Kind *kind, Exchange *exchange, const char *frame, int64_t bytes) {
    char *asked = PyBytes_AsString(exchange->request);
    int64_t start = -1, end = -1, records = 0, asked_bytes = exchange->bytes;
    if (PyList_Size(kind->run)) { /* the parts of a FetchRunShape */
        int64_t like = begins(PyList_GetItem(kind->run, 0), asked, asked_bytes);
        int64_t at = begins(PyList_GetItem(kind->run, 1), frame, bytes);
        if (like < 0 || at < 0) return -1;
        if (at && like == asked_bytes)
            start = int64_at(asked + PyLong_AsLong(PyList_GetItem(kind->run, 2))), end = end_of(kind, frame, at, bytes, &records);
    }
    Py_ssize_t rows = PyList_Size(kind->rows);
    PyObject *before = rows ? PyList_GetItem(kind->rows, rows - 1) : NULL, *done = NULL;
    int goes_on = before && start >= 0 && start == kind->run_end && start < end && PyTuple_GetItem(before, 0) == kind->about;
    if (!goes_on) kind->run_start = start, kind->run_bytes = kind->run_records = kind->run_count = 0, *kind->unshown += asked_bytes;
    else *kind->unshown -= PyBytes_Size(PyTuple_GetItem(before, 2));
    kind->run_end = end, kind->run_bytes += bytes, kind->run_records += records, kind->run_count++, *kind->unshown += bytes;
    PyObject *row = Py_BuildValue("(OOy#dLLLL)", kind->about, exchange->request, frame, (Py_ssize_t)bytes, (double)exchange->read_ns / 1e6,
                                  kind->run_start, kind->run_bytes, kind->run_records, kind->run_count);
    if (!row) return -1;
    if (goes_on) return PyList_SetItem(kind->rows, rows - 1, row);
    int failed = PyList_Append(kind->rows, row) || (!rows && !(done = PyObject_CallFunctionObjArgs(kind->began, NULL)));
    Py_DECREF(row);
    Py_XDECREF(done);
    return failed ? -1 : 0;
}

static PyObject *leave(PyObject *to, int64_t sent, int64_t plain, int64_t got, int error) {
    int64_t body = plain > got ? plain - got : 0, end = plain - body;
    return PyObject_CallFunction(to, "y#y#iL", buffer + sent, (Py_ssize_t)(end - sent),
                                 buffer + end, (Py_ssize_t)(got - end), error, body);
}

/* Returns what a channel does with so much of the buffer. */
static int64_t by_tls(PyObject *channel, const char *what, int64_t bytes, int flags) {
    PyObject *done = PyObject_CallMethod(channel, what, "N", PyMemoryView_FromMemory(buffer, bytes, flags));
    int64_t count = done ? PyLong_AsLongLong(done) : FAILED;
    Py_XDECREF(done);
    return count;
}

/* Reads; returns how much, 0 for the end of the stream or if it is Python's, BLOCKED, or FAILED. By
   a system call of its own: in libc's it would be a point where a thread may be cancelled. */
static int64_t read_some(Lane *self, int from, int bytes, int *error) {
    if (!bytes) return 0;
    if (bytes > BUFFER_BYTES) bytes = BUFFER_BYTES;
    PyObject *tls = self->given[CHANNELS + from];
    if (tls != Py_None) return by_tls(tls, "recv_into", bytes, PyBUF_WRITE);
    ssize_t got = syscall(SYS_recvfrom, self->fd[from], buffer, (size_t)bytes, 0, NULL, NULL);
    if (got >= 0 || errno == EAGAIN || errno == EINTR) return got;
    *error = errno;
    return 0;
}

static int64_t send_some(Lane *self, int to, int64_t bytes, int flags) {
    if (!bytes) return 0;
    PyObject *tls = self->given[CHANNELS + to];
    int64_t sent = tls == Py_None ? syscall(SYS_sendto, self->fd[to], buffer, (size_t)bytes, MSG_NOSIGNAL | flags, NULL, 0) : by_tls(tls, "send", bytes, PyBUF_READ);
    return sent == BLOCKED ? 0 : sent; /* why, is for Python to find when it sends the rest */
}

static Kind *kind_of(Lane *self, const char *frame, int64_t bytes) {
    for (Py_ssize_t n = 0; n < PyList_Size(self->given[KINDS]); n++) {
        Kind *kind = (Kind *)PyList_GetItem(self->given[KINDS], n);
        if (PyObject_TypeCheck(OBJECT(kind), kind_type) && kind->api == int32_at(frame + 4) && bytes >= REQUEST_START + kind->start_bytes &&
            !memcmp(frame + REQUEST_START, kind->start, kind->start_bytes)) return kind;
    }
    return NULL;
}

static PyObject *requests_ready(Lane *self, PyObject *unused) {
    int error = 0, may;
    int64_t at = 0, got = self->given[BEFORE] ? read_some(self, CLIENT, self->request_bytes, &error) : BLOCKED;
    if (got < 0) return got == FAILED ? NULL : Py_NewRef(Py_None);
    if (self->oldest == self->next) self->oldest = self->next = 0; /* in the same line of the cache */
    unsigned first = self->next;
    int64_t now = now_ns();
    Py_ssize_t before = PyObject_Size(self->given[BEFORE]);
    while (got - at >= REQUEST_START) {
        char *frame = buffer + at;
        int64_t bytes = (int64_t)int32_at(frame) + 4;
        unsigned waiting = self->next - self->oldest;
        if (bytes < REQUEST_START || bytes > got - at) break;
        Kind *kind = kind_of(self, frame, bytes);
        if (kind && kind->unshown && waiting && bytes > MAX_KEPT) break; /* of several in flight little is kept */
        if (!kind || waiting == MAX_IN_FLIGHT || (int)waiting + before + 1 >= self->most || kind->until_shown == 1) break;
        if ((may = takes(kind, kind->metered == METER_REQUESTS ? bytes : 0, now)) < 0) return NULL;
        if (!may) break;
        kind->until_shown -= kind->until_shown > 0;
        if (kind->limit) {
            uint32_t limit = htonl((uint32_t)kind->limit);
            memcpy(frame + kind->limit_at, &limit, sizeof limit);
        }
        kind->requests[VALUE]++, kind->count[REQUESTS]++;
        if (kind->response == NO_RESPONSE) kind->count[VALUE] += (double)bytes;
        else {
            int is_sampled = --kind->unsampled <= 0 || now >= kind->sample_ns;
            if (is_sampled) kind->unsampled = SAMPLE_EVERY, kind->sample_ns = now + SAMPLE_AFTER_NS;
            Py_INCREF(OBJECT(kind));
            PyObject *request = kind->unshown ? PyBytes_FromStringAndSize(frame, (Py_ssize_t)bytes) : NULL;
            if (kind->unshown && !request) return NULL;
            self->in_flight[self->next++ % MAX_IN_FLIGHT] =
                (Exchange){kind, request, int32_at(frame + 8), (uint32_t)bytes, now, is_sampled};
        }
        at += bytes;
    }
    int64_t sent = send_some(self, BROKER, at, 0);
    for (unsigned n = first; n != self->next; n++)
        if (self->in_flight[n % MAX_IN_FLIGHT].sent_ns) self->in_flight[n % MAX_IN_FLIGHT].sent_ns = now_ns();
    self->active_ns = now;
    if (sent == FAILED) return NULL;
    if (at && sent == got) Py_RETURN_NONE;
    return leave(self->given[ON_REQUESTS], sent, at, got, error);
}

static PyObject *responses_ready(Lane *self, PyObject *unused) {
    int error = 0, may;
    int64_t at = 0, got = self->given[BEFORE] ? read_some(self, BROKER, self->response_bytes, &error) : BLOCKED;
    if (got < 0) return got == FAILED ? NULL : Py_NewRef(Py_None);
    int64_t now = now_ns();
    Exchange sampled = {0};
    int is_first = PyObject_Size(self->given[BEFORE]) == 0; /* of all that wait for their responses */
    while (is_first && got - at >= RESPONSE_START && self->oldest != self->next) {
        char *frame = buffer + at;
        int64_t bytes = (int64_t)(int32_t)int32_at(frame) + 4;
        Exchange *exchange = &self->in_flight[self->oldest % MAX_IN_FLIGHT];
        Kind *kind = exchange->kind;
        if (bytes < RESPONSE_START || int32_at(frame + 4) != exchange->number || (bytes > got - at && exchange->request)) break;
        if ((may = bytes > got - at ? kind->response == ANY_RESPONSE : is_plain(kind, frame, bytes)) < 0) return NULL;
        if (!may) break;
        if (kind->metered == METER_RESPONSES && (may = takes(kind, bytes, now)) < 0) return NULL;
        if (!may) break;
        if (exchange->request && show(kind, exchange, frame, bytes)) return NULL;
        Py_CLEAR(exchange->request);
        kind->count[VALUE] += (double)(exchange->bytes + bytes);
        if (exchange->sent_ns) kind = sampled.kind, sampled = *exchange;
        Py_XDECREF(OBJECT(kind));
        self->oldest++;
        at += bytes;
    }
    int64_t sent = at > got ? send_some(self, CLIENT, got, MSG_MORE) : send_some(self, CLIENT, at, 0);
    int failed = sent == FAILED;
    if (sampled.kind) {
        int64_t began = sampled.sent_ns > self->free_ns ? sampled.sent_ns : self->free_ns;
        int64_t own = sampled.sent_ns - sampled.read_ns + now_ns() - now;
        PyObject *done = failed ? NULL : PyObject_CallFunction(sampled.kind->observe, "dd",
            now > began ? (double)(now - began) / 1e6 : 0.0, (double)own / 1e6);
        failed |= !done;
        Py_XDECREF(done);
        Py_DECREF(OBJECT(sampled.kind));
    }
    if (failed) return NULL;
    if (at) self->free_ns = now;
    self->active_ns = now;
    if (at == got && sent == got && got) Py_RETURN_NONE;
    return leave(self->given[ON_RESPONSES], sent, at, got, error);
}

/* --- for Python --- */

static PyObject *take(Lane *self, PyObject *most) {
    long limit = PyLong_AsLong(most);
    PyObject *taken = limit == -1 && PyErr_Occurred() ? NULL : PyList_New(0);
    while (taken && limit-- > 0 && self->oldest != self->next) {
        Exchange each = self->in_flight[self->oldest++ % MAX_IN_FLIGHT];
        PyObject *row = Py_BuildValue("(OiIdN)", each.kind->about, (int)each.number, each.bytes,
            (double)each.read_ns / 1e6, each.request ? each.request : Py_NewRef(Py_None));
        if (!row || PyList_Append(taken, row)) Py_CLEAR(taken);
        Py_XDECREF(row);
        Py_DECREF(OBJECT(each.kind));
    }
    return taken;
}

static PyObject *close_lane(Lane *self, PyObject *unused) {
    self->request_bytes = self->response_bytes = 0;
    for (; self->oldest != self->next; self->oldest++) {
        Exchange *each = &self->in_flight[self->oldest % MAX_IN_FLIGHT];
        Py_CLEAR(each->request);
        Py_DECREF(OBJECT(each->kind));
    }
    for (int n = 0; n < GIVEN; n++) Py_CLEAR(self->given[n]);
    Py_RETURN_NONE;
}

static int init_lane(Lane *self, PyObject *args, PyObject *unused) {
    PyObject **given = self->given;
    int is_given = PyArg_ParseTuple(args, "iii(OO!OOOO)", self->fd, self->fd + BROKER, &self->most, given + BEFORE,
                                    &PyList_Type, given + KINDS, given + ON_REQUESTS, given + ON_RESPONSES, given + CHANNELS, given + CHANNELS + 1);
    for (int n = 0; n < GIVEN; n++) given[n] = is_given ? Py_NewRef(given[n]) : NULL;
    return is_given - 1;
}

static void free_lane(Lane *self) {
    PyTypeObject *type = Py_TYPE(OBJECT(self));
    Py_XDECREF(close_lane(self, NULL));
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *waiting(Lane *self, void *unused) { return PyLong_FromUnsignedLong(self->next - self->oldest); }

static int init_kind(Kind *self, PyObject *args, PyObject *named) {
    static char *names[] = {"about", "api", "start", "renew", "observe", "requests", "count", "lease", "metered",
                            "response", "limit_at", "shapes", "rows", "run", "unshown", "began", NULL};
    PyObject *cells[VIEWS];
    if (!PyArg_ParseTupleAndKeywords(args, named, "OISOOOOOiiiOOOOO", names, &self->about, &self->api, &self->starts,
                                     &self->renew, &self->observe, cells + OF_REQUESTS, cells + OF_COUNT, cells + OF_LEASE,
                                     &self->metered, &self->response, &self->limit_at,
                                     &self->shapes, &self->rows, &self->run, cells + OF_UNSHOWN, &self->began))
        return self->about = NULL, -1;
    PyObject *kept[] = KEPT(self);
    EACH(kept, Py_INCREF);
    PyBytes_AsStringAndSize(self->starts, &self->start, &self->start_bytes);
    if (self->limit_at && self->limit_at + 4 > REQUEST_START + self->start_bytes)
        return PyErr_SetString(PyExc_ValueError, "the limit is not within the start"), -1;
    for (int n = 0; n < VIEWS; n++)
        if ((n < OF_LEASE || cells[n] != Py_None) && PyObject_GetBuffer(cells[n], self->views + n, PyBUF_WRITABLE)) return -1;
    self->requests = self->views[OF_REQUESTS].buf, self->count = self->views[OF_COUNT].buf;
    self->lease = self->views[OF_LEASE].buf, self->unshown = self->views[OF_UNSHOWN].buf;
    return 0;
}

static void free_kind(Kind *self) {
    PyTypeObject *type = Py_TYPE(OBJECT(self));
    for (int n = 0; n < VIEWS; n++) PyBuffer_Release(self->views + n);
    PyObject *kept[] = KEPT(self);
    if (self->about) EACH(kept, Py_DECREF);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef lane_methods[] = {
    {"requests_ready", (PyCFunction)requests_ready, METH_NOARGS, NULL},
    {"responses_ready", (PyCFunction)responses_ready, METH_NOARGS, NULL},
    {"take", (PyCFunction)take, METH_O, NULL},
    {"close", (PyCFunction)close_lane, METH_NOARGS, NULL},
    {NULL}};
static PyMemberDef lane_members[] = {
    {"active_ns", T_LONGLONG, offsetof(Lane, active_ns), READONLY, NULL},
    {"request_bytes", T_INT, offsetof(Lane, request_bytes), 0, NULL},
    {"response_bytes", T_INT, offsetof(Lane, response_bytes), 0, NULL},
    {NULL}};
static PyGetSetDef lane_values[] = {{"waiting", (getter)waiting, NULL, NULL, NULL}, {NULL}};
static PyMemberDef kind_members[] = {
    {"about", T_OBJECT, offsetof(Kind, about), READONLY, NULL}, {"limit", T_INT, offsetof(Kind, limit), 0, NULL},
    {"until_shown", T_INT, offsetof(Kind, until_shown), 0, NULL}, {NULL}};

static PyType_Slot lane_slots[] = {
    {Py_tp_init, init_lane}, {Py_tp_dealloc, free_lane}, {Py_tp_methods, lane_methods},
    {Py_tp_members, lane_members}, {Py_tp_getset, lane_values}, {0, NULL}};
static PyType_Slot kind_slots[] = {
    {Py_tp_init, init_kind}, {Py_tp_dealloc, free_kind}, {Py_tp_members, kind_members}, {0, NULL}};
static PyType_Spec lane_spec = {"proxy.relay._lane.Lane", sizeof(Lane), 0, Py_TPFLAGS_DEFAULT, lane_slots};
static PyType_Spec kind_spec = {"proxy.relay._lane.Kind", sizeof(Kind), 0, Py_TPFLAGS_DEFAULT, kind_slots};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_lane", NULL, -1, NULL};

PyMODINIT_FUNC PyInit__lane(void) {
    PyObject *made = PyModule_Create(&module), *lane = PyType_FromSpec(&lane_spec);
    kind_type = (PyTypeObject *)PyType_FromSpec(&kind_spec);
    if (!made || !lane || !kind_type || PyModule_AddObjectRef(made, "Lane", lane) ||
        PyModule_AddObjectRef(made, "Kind", (PyObject *)kind_type)) return NULL;
    Py_DECREF(lane);
    return made;
}
