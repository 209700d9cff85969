/* The Python side of ring.h.
 *
 *   RingPair(fd, capacity, side, leader_event, standby_event, spin_s, on_internal)
 *     One process's end of a link. Maps the memory behind `fd`; side 0 writes ring 0, side 1 writes ring 1. The events are
 *     the peer's and are only written to. `on_internal(bytes)` is called for each frame of the link itself; what it
 *     returns, unless None, stands in the result of `receive`. The caller makes sure that the memory is large enough
 *     (`mapping_size`) and cannot shrink: touching what is not there ends the process with SIGBUS.
 *     .send(*parts) -> bool            writes one frame; False: there is no room now
 *     .send_internal(*parts) -> bool   the same for a frame of the link itself
 *     .ask_for_room() -> bool          True: half of the ring is free, try again; False: the events of this process will be
 *                                      signalled. Not for frames that take more than half of the ring.
 *     .wait_for_room(size, seconds | None)  waits until a frame of that size fits, the time is over, or `close`
 *     .receive() -> list               all frames that are there, each as (bytes, ()), or what `on_internal` returned. If
 *                                      `on_internal` raises, so does this, and the frames before that one are lost.
 *     .wait(seconds | None) -> bool    a caller's wait until something can be read, the time is over, or `close`. Returns
 *                                      whether something can be read. One thread at a time.
 *     .is_readable() -> bool
 *     .unwatch()                       the leader does not read this ring (any more): its writer need not wake it
 *     .wake()                          ends the wait of another thread, or the next wait: it returns early
 *     .hang_up()                       the other end is gone: waits return at once from now on
 *     .close()                         ends the waits of this process. The memory goes with the object.
 *     .frames_in, .frames_out, .bytes_in, .bytes_out
 *   Waiter(epoll, leader_event, standby_event, spin_s)
 *     The leader's wait for many rings and descriptors.
 *     .watch(pairs)                    these are waited for from the next wait on
 *     .wait(seconds | None) -> list    of what has something: RingPairs that can be read, and (descriptor, events) of the
 *                                      epoll. Empty when the time is over, or the leader's event was signalled for
 *                                      something else.
 *     .run(more, blocked)              the leader is about to run user code (blocked: waits for a call of its own): from now
 *                                      on, writers wake the standby thread. more: requests are queued here already.
 *     .clear_alert()                   the standby thread looks now, and may be alerted again
 *     .skip_spin()                     the next wait does not spin on descriptors
 *   mapping_size(capacity) -> int
 *
 * Threads. `send` and `receive` keep the interpreter's lock while they touch a ring, so two threads never write or read
 * one ring at once; `on_internal` may give the lock up, and may call `receive` itself. Waits give it up, but only after a moment (HOLD_NS): a thread that gives it up may get it back as late as
 * sys.getswitchinterval() later if another thread computes, and most calls are answered sooner than that.
 * `Py_mod_gil` is not declared, so a free-threaded interpreter turns its lock on when it imports this module.
 *
 * Signals. Handlers run during waits, and what they raise is raised. If they raise nothing, the wait goes on; but that
 * of a `RingPair` ends, as the handler may have received what its thread waits for, or deferred an exception to here.
 *
 * Errors: DamagedError, a ConnectionAbortedError, if the peer has damaged the shared memory; ValueError, TypeError,
 * OverflowError for wrong arguments. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include "ring.h"
#include <errno.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>

#define MAX_PARTS 16
#define MAX_EVENTS 64
#define HOLD_NS 20000ull                 /* look so long with the interpreter's lock ... */
#define DEFAULT_SPIN_NS 50000ull         /* ... and so long without it, if the option `spin` is not smaller */
#define LOOK_FOR_SIGNALS_NS 20000000ull  /* a thread that waits for room sleeps too shortly to be interrupted by one */
#define LOOK_AT_DESCRIPTORS_NS 1000000ull /* busy rings do not keep the leader from looking at descriptors */
#define BUSY_MACHINE_NS 20000000ull /* how long the leader does not spin on descriptors after it was preempted */

_Static_assert(2 * sizeof(Ring) <= HEADERS_SIZE, "both headers fit");

static PyTypeObject *ring_pair_type;

typedef struct {
    PyObject_HEAD
    End end;
    void *mapping;
    PyObject *on_internal;
    uint64_t spin_ns, hold_ns;
    unsigned long long frames_in, frames_out, bytes_in, bytes_out;
} RingPair;

typedef struct {                         /* what the leader waits for; shared by the Waiter and a wait that is under way */
    int references, count;
    PyObject *pairs;                     /* a tuple that keeps the ends alive */
    End *ends[];
} Watched;

typedef struct {
    PyObject_HEAD
    int epoll, leader_event, standby_event;
    int is_alerted;                      /* the standby thread was woken by us and has not looked yet */
    Watched *watched;
    End *last;                           /* the end that was active last; may be gone, so it is only compared */
    uint64_t spin_ns, hold_ns, looked_ns;
    int spins_on_epoll; /* the last wait ended soon, by an event of a descriptor */
    long preempted;     /* how often the leader had lost its core to another thread, when it last looked */
    uint64_t sleeps_until;
} Waiter;

static PyObject *damaged_error;

static PyObject *damaged(void)
{
    PyErr_SetString(damaged_error, "the peer has damaged the shared memory of this link");
    return NULL;
}

/* Seconds from now, or None for never, as a point in time. */
static int point_in_time(PyObject *seconds, uint64_t *until)
{
    *until = NEVER;
    if (seconds == Py_None) return 0;
    double value = PyFloat_AsDouble(seconds);
    if (value == -1.0 && PyErr_Occurred()) return -1;
    if (!(value > 0)) value = 0;
    if (value < 1e9) *until = now_ns() + (uint64_t)(value * 1e9);
    return 0;
}

/* The option `spin` in seconds as nanoseconds: at most DEFAULT_SPIN_NS, of which the first HOLD_NS with the lock. */
static void set_spin(double seconds, uint64_t *spin_ns, uint64_t *hold_ns)
{
    uint64_t ns = seconds > 0 ? (seconds < 1.0 ? (uint64_t)(seconds * 1e9) : 1000000000ull) : 0;
    *spin_ns = ns < DEFAULT_SPIN_NS ? ns : DEFAULT_SPIN_NS;
    *hold_ns = ns < HOLD_NS ? ns : HOLD_NS;
}

/* --- RingPair ------------------------------------------------------------------------------------------------------ */

static PyObject *RingPair_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"fd", "capacity", "side", "leader_event", "standby_event", "spin_s", "on_internal",
                            "same_process", NULL};
    int fd, side, leader_event, standby_event, same_process = 0;
    Py_ssize_t capacity;
    double spin;
    PyObject *on_internal;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iniiidO|p", names, &fd, &capacity, &side, &leader_event,
                                     &standby_event, &spin, &on_internal, &same_process))
        return NULL;
    if (capacity < 0 || !is_valid_capacity((uint64_t)capacity) || (side != 0 && side != 1)) {
        PyErr_SetString(PyExc_ValueError, "the capacity must be a power of two from 4 KiB to 256 MiB, the side 0 or 1");
        return NULL;
    }
    size_t size = mapping_size((uint64_t)capacity);
    char *mapping = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    RingPair *self = (RingPair *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) {
        munmap(mapping, size);
        return NULL;
    }
    self->mapping = mapping;
    open_end(&self->end, mapping, (uint64_t)capacity, side);
    self->end.leader_event = leader_event;
    self->end.standby_event = standby_event;
    set_spin(spin, &self->spin_ns, &self->hold_ns);
    self->end.never_spins = same_process || !self->spin_ns;
    Py_INCREF(on_internal);
    self->on_internal = on_internal;
    return (PyObject *)self;
}

static int RingPair_traverse(RingPair *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->on_internal);
    return 0;
}

static int RingPair_clear(RingPair *self)
{
    Py_CLEAR(self->on_internal);
    return 0;
}

static void RingPair_dealloc(RingPair *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    RingPair_clear(self);
    if (self->mapping) munmap(self->mapping, mapping_size(self->end.capacity));
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Whether a ring can hold a frame of that size at all. If not, an error is set. */
static int is_valid_size(const RingPair *self, uint64_t size)
{
    if (size <= MAX_FRAME_SIZE && size + FRAME_WORD <= self->end.capacity) return 1;
    PyErr_Format(PyExc_ValueError, "a frame of %llu bytes does not fit into the ring", (unsigned long long)size);
    return 0;
}

static PyObject *send_frame(RingPair *self, PyObject *const *args, Py_ssize_t count, uint32_t flag)
{
    Py_buffer views[MAX_PARTS];
    Part parts[MAX_PARTS];
    Py_ssize_t taken = 0;
    size_t size = 0;
    int sent = -2;
    if (count > MAX_PARTS) return PyErr_Format(PyExc_ValueError, "%zd parts; at most %d", count, MAX_PARTS);
    for (; taken < count; taken++) {
        if (PyObject_GetBuffer(args[taken], &views[taken], PyBUF_SIMPLE)) goto done;
        parts[taken] = (Part){views[taken].buf, (size_t)views[taken].len};
        size += (size_t)views[taken].len;
    }
    if (!is_valid_size(self, size)) goto done;
    sent = put_frame(&self->end, parts, (int)count, (uint32_t)size, flag);
    if (sent == 1) {
        self->frames_out++;
        self->bytes_out += size;
    }
done:
    while (taken--) PyBuffer_Release(&views[taken]);
    if (sent == -2) return NULL;
    return sent < 0 ? damaged() : PyBool_FromLong(sent);
}

static PyObject *RingPair_send(RingPair *self, PyObject *const *args, Py_ssize_t count)
{
    return send_frame(self, args, count, 0);
}

static PyObject *RingPair_send_internal(RingPair *self, PyObject *const *args, Py_ssize_t count)
{
    return send_frame(self, args, count, FRAME_INTERNAL);
}

static PyObject *RingPair_ask_for_room(RingPair *self, PyObject *unused)
{
    int has_room = ask_for_room(&self->end);
    return has_room < 0 ? damaged() : PyBool_FromLong(has_room);
}

static PyObject *RingPair_wait_for_room(RingPair *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t until;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "wait_for_room takes 2 arguments, not %zd", count);
    unsigned long long size = PyLong_AsUnsignedLongLong(args[0]);
    if ((size == (unsigned long long)-1 && PyErr_Occurred()) || point_in_time(args[1], &until)) return NULL;
    if (!is_valid_size(self, size)) return NULL;
    do {
        Py_BEGIN_ALLOW_THREADS
        wait_for_room(&self->end, size, earlier(until, now_ns() + LOOK_FOR_SIGNALS_NS));
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals()) return NULL;
    } while (!has_room(&self->end, size) && !atomic_load(&self->end.closed) && now_ns() < until);
    Py_RETURN_NONE;
}

/* Append a frame to the list: as (bytes, ()), or what `on_internal` makes of it. Steals nothing. */
static int append_frame(RingPair *self, PyObject *frames, PyObject *frame, int is_internal)
{
    PyObject *item;
    if (is_internal) {
        item = PyObject_CallFunctionObjArgs(self->on_internal, frame, NULL);
    } else {
        PyObject *none = PyTuple_New(0);
        item = none ? PyTuple_Pack(2, frame, none) : NULL;
        Py_XDECREF(none);
    }
    if (item == NULL) return -1;
    int failed = item == Py_None ? 0 : PyList_Append(frames, item);
    Py_DECREF(item);
    return failed;
}

static PyObject *RingPair_receive(RingPair *self, PyObject *unused)
{
    End *end = &self->end;
    PyObject *frames = PyList_New(0);
    if (frames == NULL) return NULL;
    int64_t left = readable_bytes(end);
    int has_read = 0, is_damaged = left < 0, has_failed = 0;
    uint64_t stop = atomic_load(&end->tail) + (uint64_t)left; /* the writer may go on, so read what is there now */
    while (left > 0 && !has_failed) {
        int64_t word = frame_word(end, left);
        if (word < 0) {
            is_damaged = 1;
            break;
        }
        uint32_t size = (uint32_t)word & ~FRAME_INTERNAL;
        PyObject *frame = PyBytes_FromStringAndSize(NULL, size);
        if (frame == NULL) {
            has_failed = 1;
            break;
        }
        take_frame(end, PyBytes_AsString(frame), size);
        has_read = 1;
        self->frames_in++;
        self->bytes_in += size;
        has_failed = append_frame(self, frames, frame, ((uint32_t)word & FRAME_INTERNAL) != 0);
        Py_DECREF(frame);
        left = (int64_t)(stop - atomic_load(&end->tail)); /* `on_internal` may have received frames of this ring itself */
    }
    if (has_read) give_room_back(end);
    if (!is_damaged && !has_failed) return frames;
    Py_DECREF(frames);
    return has_failed ? NULL : damaged();
}

static PyObject *RingPair_wait(RingPair *self, PyObject *seconds)
{
    End *end = &self->end;
    uint64_t until;
    if (point_in_time(seconds, &until)) return NULL;
    if (!atomic_exchange(&end->woken, 0) && !spin_on_rings(&end, 1, end, self->hold_ns)) {
        uint64_t spin_ns = self->spin_ns, frames_in = self->frames_in;
        int is_interrupted = 0;
        do {
            Py_BEGIN_ALLOW_THREADS
            if (!spin_on_rings(&end, 1, end, spin_ns)) is_interrupted = sleep_on_ring(end, until);
            Py_END_ALLOW_THREADS
            if (PyErr_CheckSignals()) return NULL;
            spin_ns = 0;
            is_interrupted |= atomic_exchange(&end->woken, 0);
            is_interrupted |= self->frames_in != frames_in; /* a handler that ran after the spin has received frames */
        } while (!is_interrupted && !is_readable(end) && !atomic_load(&end->closed) && now_ns() < until);
    }
    return PyBool_FromLong(is_readable(end));
}

static PyObject *RingPair_is_readable(RingPair *self, PyObject *unused) { return PyBool_FromLong(is_readable(&self->end)); }

static PyObject *RingPair_unwatch(RingPair *self, PyObject *unused)
{
    End *end = &self->end;
    announce_poller(&end, 1, POLLER_AWAKE);
    Py_RETURN_NONE;
}

static PyObject *RingPair_wake(RingPair *self, PyObject *unused)
{
    wake_caller(&self->end);
    Py_RETURN_NONE;
}

static PyObject *RingPair_hang_up(RingPair *self, PyObject *unused)
{
    end_waits(&self->end);
    Py_RETURN_NONE;
}

static PyObject *RingPair_close(RingPair *self, PyObject *unused)
{
    close_end(&self->end);
    Py_RETURN_NONE;
}

#define COUNTER(name) \
    static PyObject *RingPair_get_##name(RingPair *self, void *unused) { return PyLong_FromUnsignedLongLong(self->name); }
COUNTER(frames_in)
COUNTER(frames_out)
COUNTER(bytes_in)
COUNTER(bytes_out)

/* --- Waiter -------------------------------------------------------------------------------------------------------- */

static void release_watched(Watched *watched)
{
    if (watched && !--watched->references) {
        Py_XDECREF(watched->pairs);
        PyMem_Free(watched);
    }
}

static Watched *new_watched(PyObject *pairs)
{
    Py_ssize_t count = PyTuple_Check(pairs) ? PyTuple_Size(pairs) : -1;
    int is_valid = count >= 0 && count <= INT_MAX;
    for (Py_ssize_t i = 0; is_valid && i < count; i++) is_valid = Py_TYPE(PyTuple_GetItem(pairs, i)) == ring_pair_type;
    if (!is_valid) {
        PyErr_SetString(PyExc_TypeError, "a tuple of RingPairs is wanted");
        return NULL;
    }
    Watched *watched = PyMem_Malloc(sizeof(Watched) + (size_t)count * sizeof(End *));
    if (watched == NULL) return (Watched *)PyErr_NoMemory();
    watched->references = 1;
    watched->count = (int)count;
    watched->pairs = pairs;
    Py_INCREF(pairs);
    for (Py_ssize_t i = 0; i < count; i++) watched->ends[i] = &((RingPair *)PyTuple_GetItem(pairs, i))->end;
    return watched;
}

static PyObject *Waiter_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"epoll", "leader_event", "standby_event", "spin_s", NULL};
    int epoll, leader_event, standby_event;
    double spin;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiid", names, &epoll, &leader_event, &standby_event, &spin))
        return NULL;
    /* Edge-triggered: the counter of the event is never read. */
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.fd = leader_event};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, leader_event, &event)) return PyErr_SetFromErrno(PyExc_OSError);
    PyObject *none = PyTuple_New(0);
    Watched *watched = none ? new_watched(none) : NULL;
    Py_XDECREF(none);
    if (watched == NULL) return NULL;
    Waiter *self = (Waiter *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) {
        release_watched(watched);
        return NULL;
    }
    self->epoll = epoll;
    self->leader_event = leader_event;
    self->standby_event = standby_event;
    self->watched = watched;
    set_spin(spin, &self->spin_ns, &self->hold_ns);
    return (PyObject *)self;
}

static int Waiter_traverse(Waiter *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    if (self->watched) Py_VISIT(self->watched->pairs);
    return 0;
}

static int Waiter_clear(Waiter *self)
{
    Watched *watched = self->watched;
    self->watched = NULL;
    release_watched(watched);
    return 0;
}

static void Waiter_dealloc(Waiter *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    Waiter_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *Waiter_watch(Waiter *self, PyObject *pairs)
{
    Watched *watched = new_watched(pairs);
    if (watched == NULL) return NULL;
    Watched *before = self->watched;
    self->watched = watched;
    release_watched(before);
    Py_RETURN_NONE;
}

/* The end that was active last, or the first one. `last` may be an end that is gone, so it is searched for. */
static End *last_active(const Watched *watched, End *last)
{
    for (int i = 0; i < watched->count; i++)
        if (watched->ends[i] == last) return last;
    return watched->count ? watched->ends[0] : NULL;
}

/* Returns the number of events, or -errno: a signal handler may change errno before it is looked at. */
static int look_into_epoll(const Waiter *self, struct epoll_event *events, int timeout_ms)
{
    int found = epoll_wait(self->epoll, events, MAX_EVENTS, timeout_ms);
    return found < 0 ? -errno : found;
}

/* The leader's sleep, at most MAX_SLEEP_NS: all peers have the descriptor of the leader's event, and one of them may take
 * the wake-ups of the others away. Returns what `look_into_epoll` does. */
static int sleep_in_epoll(const Waiter *self, const Watched *watched, struct epoll_event *events, uint64_t until)
{
    announce_poller(watched->ends, watched->count, POLLER_ASLEEP);
    uint64_t time = now_ns(), stop = earlier(until, time + MAX_SLEEP_NS);
    int is_over = stop <= time || any_readable(watched->ends, watched->count);
    if (!is_over) count_sleep();
    int found = look_into_epoll(self, events, is_over ? 0 : (int)((stop - time + 999999) / 1000000));
    announce_poller(watched->ends, watched->count, POLLER_AWAKE);
    return found;
}

static long times_preempted(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) ? 0 : usage.ru_nivcsw;
}

/* Whether the leader should spin on descriptors. There is no peer's core to look at here, as there is in a ring: the last
 * wait tells whether a frame is likely to come soon, and losing the core tells that other threads need it. A thread that
 * spins on a busy machine uses up its time, and then waits for its next turn when the frame comes. */
static int spin_pays_in_epoll(Waiter *self, uint64_t time)
{
    if (!self->spins_on_epoll) return 0;
    long preempted = times_preempted();
    if (preempted != self->preempted) self->sleeps_until = time + BUSY_MACHINE_NS;
    self->preempted = preempted;
    return time >= self->sleeps_until;
}

/* Looks for events of descriptors for a while. Returns what `look_into_epoll` does. */
static int spin_in_epoll(const Waiter *self, const Watched *watched, struct epoll_event *events, uint64_t ns)
{
    uint64_t stop = now_ns() + ns;
    int found;
    do found = look_into_epoll(self, events, 0);
    while (!found && !any_readable(watched->ends, watched->count) && now_ns() < stop);
    return found;
}

static PyObject *ready_list(Waiter *self, const Watched *watched, const struct epoll_event *events, int found)
{
    PyObject *ready = PyList_New(0);
    if (ready == NULL) return NULL;
    for (int i = 0; i < watched->count; i++)
        if (is_readable(watched->ends[i])) {
            self->last = watched->ends[i];
            if (PyList_Append(ready, PyTuple_GetItem(watched->pairs, i))) goto failed;
        }
    for (int i = 0; i < found; i++) {
        if (events[i].data.fd == self->leader_event) continue;
        PyObject *event = Py_BuildValue("iI", events[i].data.fd, events[i].events);
        if (event == NULL || PyList_Append(ready, event)) {
            Py_XDECREF(event);
            goto failed;
        }
        Py_DECREF(event);
    }
    return ready;
failed:
    Py_DECREF(ready);
    return NULL;
}

static PyObject *Waiter_wait(Waiter *self, PyObject *seconds)
{
    struct epoll_event events[MAX_EVENTS];
    uint64_t until, start = now_ns();
    int found = 0;
    if (point_in_time(seconds, &until)) return NULL;
    Watched *watched = self->watched;
    if (watched == NULL) return PyList_New(0);
    watched->references++;
    End **ends = watched->ends, *last = last_active(watched, self->last);
    int count = watched->count;
    announce_poller(ends, count, POLLER_AWAKE);
    int spins = spin_pays_for_leader(start), has_looked = 0;
    int is_ready = spin_on_rings(ends, count, last, spins ? self->hold_ns : 0);
    for (uint64_t spin_ns = spins ? self->spin_ns : 0; !is_ready; spin_ns = 0) {
        Py_BEGIN_ALLOW_THREADS
        if (!spin_on_rings(ends, count, last, spin_ns)) {
            if (spin_ns && spin_pays_in_epoll(self, start)) found = spin_in_epoll(self, watched, events, spin_ns);
            if (!found && !any_readable(ends, count)) found = sleep_in_epoll(self, watched, events, until);
            has_looked = 1;
        }
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals()) {
            release_watched(watched);
            return NULL;
        }
        if (found == -EINTR) found = 0; /* the handlers have returned, so the wait goes on */
        is_ready = found || any_readable(ends, count) || now_ns() >= until;
    }
    if (!has_looked && start - self->looked_ns > LOOK_AT_DESCRIPTORS_NS) {
        found = look_into_epoll(self, events, 0);
        has_looked = 1;
    }
    if (has_looked) self->looked_ns = start;
    self->spins_on_epoll = found > 0 && now_ns() - start < 2 * self->spin_ns;
    PyObject *ready = NULL;
    if (found >= 0) {
        ready = ready_list(self, watched, events, found);
    } else {
        errno = -found;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    release_watched(watched);
    return ready;
}

static PyObject *Waiter_run(Waiter *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) return PyErr_Format(PyExc_TypeError, "run takes 2 arguments, not %zd", count);
    int more = PyObject_IsTrue(args[0]), blocked = PyObject_IsTrue(args[1]);
    if (more < 0 || blocked < 0) return NULL;
    Watched *watched = self->watched;
    if (watched == NULL) Py_RETURN_NONE;
    announce_poller(watched->ends, watched->count, POLLER_RUNNING);
    for (int i = 0; i < watched->count && blocked; i++) publish_core(watched->ends[i], CORE_BLOCKED);
    if (!self->is_alerted && (more || any_readable(watched->ends, watched->count))) {
        self->is_alerted = 1;
        signal_event(self->standby_event);
    }
    Py_RETURN_NONE;
}

static PyObject *Waiter_skip_spin(Waiter *self, PyObject *unused)
{
    self->spins_on_epoll = 0;
    Py_RETURN_NONE;
}

static PyObject *Waiter_clear_alert(Waiter *self, PyObject *unused)
{
    self->is_alerted = 0;
    Py_RETURN_NONE;
}

static PyObject *module_mapping_size(PyObject *self, PyObject *capacity)
{
    unsigned long long value = PyLong_AsUnsignedLongLong(capacity);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
    if (!is_valid_capacity(value)) {
        PyErr_SetString(PyExc_ValueError, "the capacity must be a power of two from 4 KiB to 256 MiB");
        return NULL;
    }
    return PyLong_FromSize_t(mapping_size(value));
}

/* --- The module ---------------------------------------------------------------------------------------------------- */

#define METHOD(type, name, flags) {#name, (PyCFunction)(void (*)(void))type##_##name, flags, NULL}
#define GETTER(name) {#name, (getter)RingPair_get_##name, NULL, NULL, NULL}

static PyMethodDef pair_methods[] = {
    METHOD(RingPair, send, METH_FASTCALL), METHOD(RingPair, send_internal, METH_FASTCALL),
    METHOD(RingPair, ask_for_room, METH_NOARGS), METHOD(RingPair, wait_for_room, METH_FASTCALL),
    METHOD(RingPair, receive, METH_NOARGS), METHOD(RingPair, wait, METH_O), METHOD(RingPair, is_readable, METH_NOARGS),
    METHOD(RingPair, unwatch, METH_NOARGS), METHOD(RingPair, wake, METH_NOARGS), METHOD(RingPair, hang_up, METH_NOARGS),
    METHOD(RingPair, close, METH_NOARGS), {0}};
static PyGetSetDef pair_getters[] = {GETTER(frames_in), GETTER(frames_out), GETTER(bytes_in), GETTER(bytes_out), {0}};
static PyMethodDef waiter_methods[] = {
    METHOD(Waiter, watch, METH_O), METHOD(Waiter, wait, METH_O), METHOD(Waiter, run, METH_FASTCALL),
    METHOD(Waiter, clear_alert, METH_NOARGS), METHOD(Waiter, skip_spin, METH_NOARGS), {0}};
static PyMethodDef functions[] = {{"mapping_size", module_mapping_size, METH_O, NULL}, {0}};

static PyType_Slot pair_slots[] = {
    {Py_tp_new, RingPair_new}, {Py_tp_dealloc, RingPair_dealloc}, {Py_tp_traverse, RingPair_traverse},
    {Py_tp_clear, RingPair_clear}, {Py_tp_methods, pair_methods}, {Py_tp_getset, pair_getters},
    {Py_tp_doc, "One process's end of a link: a ring to write and a ring to read, in shared memory."}, {0}};
static PyType_Slot waiter_slots[] = {
    {Py_tp_new, Waiter_new}, {Py_tp_dealloc, Waiter_dealloc}, {Py_tp_traverse, Waiter_traverse},
    {Py_tp_clear, Waiter_clear}, {Py_tp_methods, waiter_methods},
    {Py_tp_doc, "The leader's wait for many rings and file descriptors."}, {0}};
static PyType_Spec pair_spec = {"farcall._native._rings.RingPair", sizeof(RingPair), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, pair_slots};
static PyType_Spec waiter_spec = {"farcall._native._rings.Waiter", sizeof(Waiter), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, waiter_slots};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_rings",
                                    "Rings in shared memory, and the wait for them.", -1, functions};

PyMODINIT_FUNC PyInit__rings(void)
{
    PyObject *self = PyModule_Create(&module);
    if (self == NULL) return NULL;
    ring_pair_type = (PyTypeObject *)PyType_FromSpec(&pair_spec);
    PyTypeObject *waiter_type = (PyTypeObject *)PyType_FromSpec(&waiter_spec);
    damaged_error = PyErr_NewException("farcall._native._rings.DamagedError", PyExc_ConnectionAbortedError, NULL);
    if (!ring_pair_type || !waiter_type || !damaged_error || PyModule_AddType(self, ring_pair_type)
        || PyModule_AddType(self, waiter_type) || PyModule_AddObjectRef(self, "DamagedError", damaged_error)) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
