/* Rings of frames in memory that two processes share, and how a thread waits for one. Plain C without Python, so that
 * sanitizers and a model checker can be pointed at it (tests/native). module.c is the Python side.
 *
 * A link between two processes has two rings, one for each direction, in one mapping:
 *
 *     | header of ring 0 | header of ring 1 | padding to 4096 | bytes of ring 0 | bytes of ring 1 |
 *
 * A ring has one writer and one reader. `head` counts the bytes that were ever written, `tail` those that were ever read;
 * they never wrap, and `head - tail` bytes are unread. A frame is a word of four bytes (its size, and one flag) and its
 * bytes; it wraps at the end of the ring.
 *
 * Threads of the reading process
 *   A *caller* waits for one ring alone. It sleeps on the futex word `reader_sleeps`.
 *   The *leader* waits for many rings and for file descriptors. It sleeps in epoll and is woken by an eventfd.
 *   The *standby* thread sleeps until the leader is needed and runs user code. A second eventfd wakes it.
 * The leader says in every ring it reads what it does (`poller`), so a writer knows whom to wake: nobody, the leader, or
 * the standby thread.
 *
 * No wake-up is lost. A writer stores `head`, fences, and looks who sleeps. A sleeper says that it sleeps, fences, and
 * looks at `head` once more. Whatever the order, one of the two sees the other. The same holds for a writer that waits for
 * room and the reader that makes it. `make model` checks this with store buffers (tests/native/ring.pml).
 *
 * The peer is not trusted. It can write anything into the mapping at any moment. So the positions that this side advances
 * live in private memory and are only copied out; a position of the peer is read once, checked, and then used; a frame's
 * size is copied out before it is checked. The words by which sides wake each other can at worst cause a wake-up too many,
 * or none. A peer that wakes a caller again and again for nothing is met by short sleeps (`MAX_FUTILE_WAKEUPS`). A sleep
 * that nobody ends is over after MAX_SLEEP_NS, and the thread looks for itself: at its deadline, and whether the link was
 * closed meanwhile. A peer that was killed half-way through a wake-up is the same as one that does not want to wake. */
#ifndef FARCALL_RING_H
#define FARCALL_RING_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { POLLER_AWAKE, POLLER_ASLEEP, POLLER_RUNNING }; /* looks at its rings; sleeps in epoll; runs user code */
#define HEADERS_SIZE 4096
#define FRAME_WORD sizeof(uint32_t)
#define FRAME_INTERNAL 0x80000000u       /* flag in the frame word: the frame is for the link itself, not for its user */
#define MAX_FRAME_SIZE 0x3fffffffu
#define CORE_BLOCKED UINT32_MAX          /* in place of a core: the thread that would answer waits for a call of its own */
#define MAX_FUTILE_WAKEUPS 64            /* in a row, after which a caller sleeps by the clock until a frame comes */
#define FUTILE_SLEEP_NS 1000000ull
#define MAX_SLEEP_NS 1000000000ull       /* then look, whether woken or not */
#define MOVE_INTERVAL_NS 4000000ull      /* leave a core that is shared with the peer at most this often */
#define MAX_MOVE_INTERVAL_NS 5000000000ull
#define MAX_SPIN_FAILURES 9              /* more futile spins than successful ones: then 64 waits go without a spin */
#define NEVER UINT64_MAX

typedef struct {                         /* in shared memory; fields of different writers are on different cache lines */
    _Alignas(64) _Atomic uint64_t head;              /* by the writer: bytes written so far */
    _Atomic uint32_t writer_core;                    /* by the writer: the core it used last plus one, or CORE_BLOCKED */
    _Alignas(64) _Atomic uint64_t tail;              /* by the reader: bytes read so far */
    _Alignas(64) _Atomic uint32_t reader_sleeps;     /* futex: 1 while a caller sleeps on this ring */
    _Atomic uint32_t poller;                         /* by the reader: POLLER_... */
    _Alignas(64) _Atomic uint32_t writer_waits;      /* 1 while the writer wants to be told of room */
} Ring;

typedef struct {                         /* one process's end of a link; in private memory */
    Ring *out, *in;                      /* the ring that we write, the ring that we read */
    char *out_bytes, *in_bytes;
    uint64_t capacity;                   /* of each ring: a power of two */
    _Atomic uint64_t head;               /* of the ring that we write; a thread may wait for room while another writes */
    _Atomic uint64_t tail;               /* of the ring that we read; the leader may look while a caller reads */
    int leader_event, standby_event;     /* the peer's eventfds, or -1 */
    int never_spins;                     /* the peer is in this process, or spinning is turned off */
    uint32_t futile_wakeups;             /* in a row, of callers that sleep on `in` */
    _Atomic uint32_t woken;              /* a thread of this side ends the wait of another one, or the next wait */
    _Atomic uint32_t closed;             /* by this side, or the other end is gone: nobody sleeps any more */
} End;

typedef struct { const char *bytes; size_t size; } Part;

/* When a caller of this process fell asleep on a ring, 0 if none sleeps. See `spin_pays_for_leader`. */
static _Atomic uint64_t caller_slept_at;

static inline uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline uint64_t earlier(uint64_t a, uint64_t b) { return a < b ? a : b; }

static inline size_t mapping_size(uint64_t capacity) { return HEADERS_SIZE + 2 * (size_t)capacity; }

static inline int is_valid_capacity(uint64_t capacity)
{
    return capacity >= 4096 && capacity <= (1u << 28) && !(capacity & (capacity - 1));
}

/* Lay one end over a mapping of `mapping_size(capacity)` bytes. Side 0 writes ring 0, side 1 writes ring 1. */
static void open_end(End *end, char *mapping, uint64_t capacity, int side)
{
    Ring *rings = (Ring *)mapping;
    *end = (End){.out = rings + side, .in = rings + !side, .capacity = capacity, .leader_event = -1, .standby_event = -1,
                 .out_bytes = mapping + HEADERS_SIZE + (side ? capacity : 0),
                 .in_bytes = mapping + HEADERS_SIZE + (side ? 0 : capacity)};
}

/* --- Waking and sleeping ------------------------------------------------------------------------------------------- */

static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static struct timespec time_until(uint64_t until)
{
    uint64_t time = now_ns(), left = until > time ? until - time : 0;
    return (struct timespec){(time_t)(left / 1000000000ull), (long)(left % 1000000000ull)};
}

/* Sleep while the word is 1. Returns 1 when woken, at once if the word is not 1; 0 after a signal, and at `until`. */
static int futex_sleep(_Atomic uint32_t *word, uint64_t until)
{
    struct timespec timeout = time_until(until);
    return !syscall(SYS_futex, word, FUTEX_WAIT, 1, &timeout, NULL, 0) || errno == EAGAIN;
}

static void signal_event(int event)
{
    uint64_t one = 1;
    if (event >= 0 && write(event, &one, sizeof one) < 0) {
        /* EAGAIN: the counter is full, so the sleeper has been woken. EBADF: the link is being closed. */
    }
}

/* After a write. The exchanges make one writer wake a sleeper, once. */
static void wake_reader(End *end)
{
    Ring *ring = end->out;
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&ring->reader_sleeps, memory_order_relaxed) && atomic_exchange(&ring->reader_sleeps, 0))
        futex_wake_all(&ring->reader_sleeps);
    if (atomic_load_explicit(&ring->poller, memory_order_relaxed) != POLLER_AWAKE) {
        uint32_t poller = atomic_exchange(&ring->poller, POLLER_AWAKE);
        if (poller != POLLER_AWAKE) signal_event(poller == POLLER_ASLEEP ? end->leader_event : end->standby_event);
    }
}

/* --- Writing ------------------------------------------------------------------------------------------------------- */

static inline void publish_core(End *end, uint32_t core)
{
    if (atomic_load_explicit(&end->out->writer_core, memory_order_relaxed) != core)
        atomic_store_explicit(&end->out->writer_core, core, memory_order_relaxed);
}

static inline void copy_in(End *end, uint64_t at, const char *from, size_t size)
{
    size_t offset = at & (end->capacity - 1), first = end->capacity - offset;
    if (first >= size) {
        memcpy(end->out_bytes + offset, from, size);
    } else {
        memcpy(end->out_bytes + offset, from, first);
        memcpy(end->out_bytes, from + first, size - first);
    }
}

static inline void copy_out(const End *end, uint64_t at, char *to, size_t size)
{
    size_t offset = at & (end->capacity - 1), first = end->capacity - offset;
    if (first >= size) {
        memcpy(to, end->in_bytes + offset, size);
    } else {
        memcpy(to, end->in_bytes + offset, first);
        memcpy(to + first, end->in_bytes, size - first);
    }
}

/* The number of bytes that the peer has not read yet. More than the capacity: the peer has damaged the ring. */
static inline uint64_t unread_bytes(const End *end)
{
    return atomic_load_explicit(&end->head, memory_order_relaxed)
        - atomic_load_explicit(&end->out->tail, memory_order_acquire);
}

/* Write one frame that consists of several parts. 1: done, 0: there is no room now, -1: the peer has damaged the ring. */
static int put_frame(End *end, const Part *parts, int count, uint32_t size, uint32_t flag)
{
    uint64_t used = unread_bytes(end);
    if (used > end->capacity) return -1;
    if (used + FRAME_WORD + size > end->capacity) return 0;
    uint32_t word = size | flag;
    uint64_t at = atomic_load_explicit(&end->head, memory_order_relaxed);
    copy_in(end, at, (const char *)&word, FRAME_WORD);
    at += FRAME_WORD;
    for (int i = 0; i < count; at += parts[i++].size) copy_in(end, at, parts[i].bytes, parts[i].size);
    atomic_store_explicit(&end->head, at, memory_order_relaxed);
    publish_core(end, (uint32_t)sched_getcpu() + 1);
    atomic_store_explicit(&end->out->head, at, memory_order_release);
    wake_reader(end);
    return 1;
}

/* Ask to be told when at least half of the ring is free. 1: it is free already, so try again; 0: the peer will signal
 * both events of this process. -1: the peer has damaged the ring. Not for a frame that takes more than half of the ring:
 * it might not fit into the half that is free. */
static int ask_for_room(End *end)
{
    atomic_store(&end->out->writer_waits, 1);
    atomic_thread_fence(memory_order_seq_cst);
    uint64_t used = unread_bytes(end);
    if (used > end->capacity) return -1;
    return 2 * used <= end->capacity;
}

static inline int has_room(const End *end, uint64_t size)
{
    uint64_t used = unread_bytes(end);
    return used > end->capacity || used + FRAME_WORD + size <= end->capacity; /* damage is noticed by the next write */
}

/* Wait until a frame of that size fits, the end is closed, or `until`. For a thread that sends a large frame: it spins for a
 * moment and then sleeps by the clock, as the reader wakes pollers only. */
static void wait_for_room(const End *end, uint64_t size, uint64_t until)
{
    uint64_t stop = now_ns() + 50000;
    while (!has_room(end, size) && !atomic_load(&end->closed)) {
        uint64_t time = now_ns();
        if (time >= until) return;
        if (time < stop && !end->never_spins) {
            for (int i = 0; i < 64 && !has_room(end, size); i++) relax();
        } else {
            struct timespec pause = {0, 100000};
            nanosleep(&pause, NULL);
        }
    }
}

/* --- Reading ------------------------------------------------------------------------------------------------------- */

static inline int is_readable(const End *end)
{
    return atomic_load_explicit(&end->in->head, memory_order_acquire)
        != atomic_load_explicit(&end->tail, memory_order_relaxed);
}

/* The number of bytes that can be read now, or -1 if the peer has damaged the ring. */
static inline int64_t readable_bytes(const End *end)
{
    uint64_t used = atomic_load_explicit(&end->in->head, memory_order_acquire)
        - atomic_load_explicit(&end->tail, memory_order_relaxed);
    return used <= end->capacity ? (int64_t)used : -1;
}

/* The word of the frame that `left` readable bytes begin with, or -1 if the peer has damaged the ring: the frame must
 * fit into these bytes. */
static inline int64_t frame_word(const End *end, int64_t left)
{
    uint32_t word;
    if (left < (int64_t)FRAME_WORD) return -1;
    copy_out(end, atomic_load_explicit(&end->tail, memory_order_relaxed), (char *)&word, FRAME_WORD);
    __asm__ __volatile__("" : "+r"(word)); /* or the compiler may read the shared memory again after the check */
    if ((int64_t)(word & ~FRAME_INTERNAL) > left - (int64_t)FRAME_WORD) return -1;
    return (int64_t)word;
}

/* Copy the frame of that size out and step over it. */
static inline void take_frame(End *end, char *to, uint32_t size)
{
    uint64_t tail = atomic_load_explicit(&end->tail, memory_order_relaxed);
    copy_out(end, tail + FRAME_WORD, to, size);
    atomic_store_explicit(&end->tail, tail + FRAME_WORD + size, memory_order_relaxed);
}

/* After reading: give the room back. A writer that waits for room is woken when half of the ring is free, by both events
 * of its process: its leader may be asleep, or run user code. */
static void give_room_back(End *end)
{
    uint64_t tail = atomic_load_explicit(&end->tail, memory_order_relaxed);
    atomic_store_explicit(&end->in->tail, tail, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&end->in->writer_waits, memory_order_relaxed)) {
        uint64_t used = atomic_load_explicit(&end->in->head, memory_order_relaxed) - tail;
        if (2 * used <= end->capacity && atomic_exchange(&end->in->writer_waits, 0)) {
            signal_event(end->leader_event);
            signal_event(end->standby_event);
        }
    }
}

static int any_readable(End *const *ends, int count)
{
    for (int i = 0; i < count; i++)
        if (is_readable(ends[i])) return 1;
    return 0;
}

/* --- Spinning ------------------------------------------------------------------------------------------------------
 *
 * To wake a thread takes about 4 us on the same core and 33 us on another one; a whole small call takes 6. So a thread that
 * waits looks for a while before it sleeps, but only while the peer runs on another core: on the same core each look
 * takes the time that the peer needs to answer. Each side publishes the core that it used last. */

static _Thread_local struct { uint64_t next, interval, judge, kept_waiting; } moves;
static _Thread_local struct { int is_futile, failures, skips; } spins;

/* How long this thread has been kept waiting for a core so far, in nanoseconds. 0 if the system does not tell. */
static uint64_t time_kept_waiting(void)
{
    unsigned long long waited = 0;
    char text[64];
    int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    text[size < 0 ? 0 : size] = 0;
    return sscanf(text, "%*s %llu", &waited) == 1 ? waited : 0;
}

/* The kernel may keep two processes that wake each other on one core for seconds, beside an idle core. Ask it to run this
 * thread elsewhere. If others need that core we are kept waiting for it: then ask half as often. */
static void leave_core(int core)
{
    cpu_set_t allowed, others;
    uint64_t time = now_ns();
    if (time < moves.next || sched_getaffinity(0, sizeof allowed, &allowed)) return;
    if (moves.interval < MOVE_INTERVAL_NS) moves.interval = MOVE_INTERVAL_NS;
    moves.next = time + moves.interval;
    moves.judge = time + MOVE_INTERVAL_NS;
    others = allowed;
    CPU_CLR(core, &others);
    moves.kept_waiting = time_kept_waiting();
    if (CPU_COUNT(&others) && !sched_setaffinity(0, sizeof others, &others))
        sched_setaffinity(0, sizeof allowed, &allowed);
}

/* Some time after a move: was it a good one? */
static void judge_move(uint64_t time)
{
    if (!moves.judge || time < moves.judge) return;
    uint64_t length = time - (moves.judge - MOVE_INTERVAL_NS);
    moves.judge = 0;
    if (time_kept_waiting() - moves.kept_waiting < length / 8) moves.interval = MOVE_INTERVAL_NS;
    else if (moves.interval < MAX_MOVE_INTERVAL_NS) moves.interval *= 2;
    moves.next = time + moves.interval;
}

/* Look at the rings for a while, as long as that pays. `last` is the end that was active last: its peer's core counts.
 * 1: there is something to read, 0: time to sleep. */
static int spin_on_rings(End *const *ends, int count, const End *last, uint64_t ns)
{
    if (any_readable(ends, count)) return 1;
    if (!ns || !count || last->never_spins || spins.skips) return 0;
    uint64_t start = now_ns(), stop = start + ns;
    judge_move(start);
    int looks = 64 / count + 1;
    for (;;) {
        uint32_t peer = atomic_load_explicit(&last->in->writer_core, memory_order_relaxed);
        if (peer == CORE_BLOCKED) break;
        uint32_t core = (uint32_t)sched_getcpu() + 1;
        for (int i = 0; i < count; i++) publish_core(ends[i], core);
        if (peer == core) {
            leave_core((int)core - 1);
            if ((uint32_t)sched_getcpu() + 1 == core) break;
        }
        for (int i = 0; i < looks; i++) {
            if (any_readable(ends, count)) {
                if (spins.failures) spins.failures--;
                spins.is_futile = 0;
                return 1;
            }
            relax();
        }
        if (now_ns() >= stop) {
            spins.is_futile = 1;
            break;
        }
    }
    return any_readable(ends, count);
}

/* A spin that ends in sleep was futile: the peer answers late, or waits for a core itself. A few of them do no harm. The
 * more there are beyond the successful ones, the more waits go without a spin until the next try. */
static void count_sleep(void)
{
    if (spins.is_futile) {
        if (spins.failures < MAX_SPIN_FAILURES) spins.failures++;
        spins.skips = 1 << spins.failures >> 3;
        spins.is_futile = 0;
    } else if (spins.skips) {
        spins.skips--;
    }
}

/* Whether the leader of this process should spin. Not if a caller of the same process has just fallen asleep: the reply
 * that the caller waits for may need this core. */
static int spin_pays_for_leader(uint64_t time)
{
    uint64_t slept = atomic_load_explicit(&caller_slept_at, memory_order_relaxed);
    return !slept || time - slept > 1000000;
}

/* --- Sleeping ------------------------------------------------------------------------------------------------------ */

/* A caller's sleep: until the ring has something to read, the end is closed, a signal, or `until`. May end earlier, and
 * after MAX_SLEEP_NS it does: the caller looks what it was. One thread at a time may sleep on a ring. Returns whether a
 * signal ended it. */
static int sleep_on_ring(End *end, uint64_t until)
{
    _Atomic uint32_t *word = &end->in->reader_sleeps;
    uint64_t time = now_ns();
    int is_woken = 0, is_interrupted = 0;
    if (end->futile_wakeups >= MAX_FUTILE_WAKEUPS) {
        struct timespec pause = time_until(earlier(until, time + FUTILE_SLEEP_NS));
        is_interrupted = nanosleep(&pause, NULL) != 0;
    } else {
        atomic_store(word, 1);
        atomic_thread_fence(memory_order_seq_cst);
        atomic_store_explicit(&caller_slept_at, time, memory_order_relaxed);
        if (!is_readable(end) && !atomic_load(&end->closed) && !atomic_load(&end->woken)) {
            count_sleep();
            is_woken = futex_sleep(word, earlier(until, time + MAX_SLEEP_NS));
            is_interrupted = !is_woken && errno == EINTR;
        }
        atomic_store_explicit(&caller_slept_at, 0, memory_order_relaxed);
        atomic_store(word, 0);
    }
    if (is_readable(end)) end->futile_wakeups = 0;
    else if (is_woken && !atomic_load(&end->woken)) end->futile_wakeups++;
    return is_interrupted;
}

/* End the wait of a caller of this process; if there is none, the next one. */
static void wake_caller(End *end)
{
    atomic_store(&end->woken, 1);
    atomic_store(&end->in->reader_sleeps, 0);
    futex_wake_all(&end->in->reader_sleeps);
}

/* End the waits of this process on this link, for good. */
static void end_waits(End *end)
{
    atomic_store(&end->closed, 1);
    atomic_store(&end->in->reader_sleeps, 0);
    futex_wake_all(&end->in->reader_sleeps); /* even if the word was 0: a peer that was killed has not woken the sleeper */
}

static void close_end(End *end)
{
    end_waits(end);
    end->leader_event = end->standby_event = -1; /* their owner closes them; the numbers may be used again */
}

/* Tell the writers of these rings what the leader does. A fence follows where the leader looks at the rings once more
 * before it relies on being woken. */
static void announce_poller(End *const *ends, int count, uint32_t state)
{
    for (int i = 0; i < count; i++)
        if (atomic_load_explicit(&ends[i]->in->poller, memory_order_relaxed) != state)
            atomic_store_explicit(&ends[i]->in->poller, state, memory_order_relaxed);
    if (state != POLLER_AWAKE) atomic_thread_fence(memory_order_seq_cst);
}
#endif
