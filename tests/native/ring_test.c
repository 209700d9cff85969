/* Tests of src/farcall/_native/ring.h alone, without Python. Threads stand in for processes, so that the sanitizers see
 * both ends. test_ring_c.py builds this file in several ways and runs each test.
 *
 *     ring_test FACTOR NAME ...       runs the tests of these names; FACTOR scales the number of rounds
 *
 * A test that fails says why and ends the program with status 1. A test that hangs is ended by SIGALRM.
 *
 * Lost wake-ups. A sleep has a time limit, so a wake-up that is lost shows as a sleep that lasted to its limit although
 * a frame had been there for most of that time. Frames therefore carry the time at which they were written. */
#include "ring.h"
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#define MS 1000000ull                    /* in nanoseconds */
#define LIMIT_NS (900 * MS)              /* a sleep of this length was not ended by a wake-up */
#define TEST_TIME_S 240                  /* SIGALRM ends a test that takes longer: under qemu all is slow */
#define LENGTH(array) ((int)(sizeof(array) / sizeof *(array)))

#define FAIL(...) (printf("%s:%d: ", __func__, __LINE__), printf(__VA_ARGS__), printf("\n"), fflush(stdout), _exit(1))
#define CHECK(condition) ((condition) ? (void)0 : FAIL("not true: %s", #condition))
#define CHECK_EQUAL(value, wanted)                                                                     \
    do {                                                                                               \
        long long value_ = (long long)(value), wanted_ = (long long)(wanted);                          \
        if (value_ != wanted_) FAIL("%s is %lld, not %lld", #value, value_, wanted_);                  \
    } while (0)

/* Defines a test and enters it into the table. test_ring_c.py finds the names by this word. */
#define TEST(name)                                                                                     \
    static void name(void);                                                                            \
    __attribute__((constructor)) static void enter_##name(void) { tests[test_count++] = (Test){#name, name}; } \
    static void name(void)

typedef struct { const char *name; void (*run)(void); } Test;
static Test tests[100];
static int test_count;
static double factor = 1;

static int rounds(int count) { return count * factor < 1 ? 1 : (int)(count * factor); }

/* When to end a test with very many rounds: on a busy machine each round may take a time slice. */
static uint64_t end_of_rounds(void) { return now_ns() + (uint64_t)(factor < 1 ? 1500 : factor * 1500) * MS; }

/* --- Help for the tests -------------------------------------------------------------------------------------------- */

typedef struct { uint64_t state; } Random;

static uint64_t random_word(Random *random)
{
    random->state ^= random->state << 13;
    random->state ^= random->state >> 7;
    random->state ^= random->state << 17;
    return random->state;
}

static uint32_t random_below(Random *random, uint32_t limit) { return (uint32_t)(random_word(random) >> 16) % limit; }

static void ignore_signal(int number) { (void)number; }

/* Do nothing for a random time, mostly so short that the other thread is between two instructions of its own. */
static void delay(Random *random)
{
    uint32_t scale = random_below(random, 128);
    uint32_t count = random_below(random, scale == 0 ? 100000 : scale < 16 ? 2000 : 300);
    for (volatile uint32_t i = 0; i < count; i++) {}
}

/* Write to cache lines that the other thread has written to. The stores that follow are late then, and loads are not: a
 * missing fence between a store and a load shows soon. */
static void delay_stores(void)
{
    static _Alignas(64) _Atomic uint32_t lines[16][16];
    for (int i = 0; i < LENGTH(lines); i++) atomic_store_explicit(&lines[i][0], 1, memory_order_relaxed);
}

/* Wait until the other thread has done something. It may need this core. */
static void give_way(int looks)
{
    if (looks < 2000) relax();
    else sched_yield();
}

/* Both ends of a link. Each of the three blocks of memory lies between pages that cannot be touched: reading or writing
 * outside ends the program. */
typedef struct {
    End a, b;
    char *headers, *bytes[2];
    uint64_t capacity;
    int events[2][2];                    /* by end (a, b), then leader's and standby thread's */
} Link;

static char *map_guarded(size_t size)
{
    char *memory = mmap(NULL, size + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED);
    CHECK_EQUAL(mprotect(memory + 4096, size, PROT_READ | PROT_WRITE), 0);
    return memory + 4096;
}

static void open_link(Link *link, uint64_t capacity)
{
    link->capacity = capacity;
    link->headers = map_guarded(HEADERS_SIZE);
    for (int side = 0; side < 2; side++) link->bytes[side] = map_guarded(capacity);
    open_end(&link->a, link->headers, capacity, 0);
    open_end(&link->b, link->headers, capacity, 1);
    link->a.out_bytes = link->b.in_bytes = link->bytes[0];
    link->b.out_bytes = link->a.in_bytes = link->bytes[1];
    for (int i = 0; i < 4; i++) CHECK((link->events[i / 2][i % 2] = eventfd(0, EFD_NONBLOCK)) >= 0);
    link->a.leader_event = link->events[1][0];
    link->a.standby_event = link->events[1][1];
    link->b.leader_event = link->events[0][0];
    link->b.standby_event = link->events[0][1];
}

static void close_link(Link *link)
{
    munmap(link->headers - 4096, HEADERS_SIZE + 8192);
    for (int side = 0; side < 2; side++) munmap(link->bytes[side] - 4096, link->capacity + 8192);
    for (int i = 0; i < 4; i++) close(link->events[i / 2][i % 2]);
}

/* Let both rings of a new link begin at this position, as if so many bytes had gone through them. */
static void start_at(Link *link, uint64_t position)
{
    End *ends[2] = {&link->a, &link->b};
    for (int i = 0; i < 2; i++) {
        ends[i]->head = position;
        ends[i]->tail = position;
        atomic_store(&ends[i]->out->head, position);
        atomic_store(&ends[i]->out->tail, position);
    }
}

static pthread_t start(void *(*run)(void *), void *argument)
{
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, run, argument), 0);
    return thread;
}

static void join(pthread_t thread) { CHECK_EQUAL(pthread_join(thread, NULL), 0); }

static void sleep_ns(uint64_t ns)
{
    struct timespec pause = {(time_t)(ns / 1000000000ull), (long)(ns % 1000000000ull)};
    nanosleep(&pause, NULL);
}

/* How often an event was signalled since the last look. */
static uint64_t signals_of(int event)
{
    uint64_t count = 0;
    return read(event, &count, sizeof count) == sizeof count ? count : 0;
}

static int put_bytes(End *end, const char *bytes, uint32_t size, uint32_t flag)
{
    Part part = {bytes, size};
    return put_frame(end, &part, 1, size, flag);
}

/* Read the next frame as module.c does. Returns its word, -1 if the ring is damaged, -2 if there is no frame. The memory
 * is of the frame's size, so that AddressSanitizer notices one byte too many. */
static int64_t read_frame(End *end, char **frame)
{
    *frame = NULL;
    int64_t left = readable_bytes(end);
    if (left <= 0) return left ? -1 : -2;
    int64_t word = frame_word(end, left);
    if (word < 0) return -1;
    uint32_t size = (uint32_t)word & ~FRAME_INTERNAL;
    CHECK((*frame = malloc(size + !size)) != NULL);
    take_frame(end, *frame, size);
    return word;
}

/* Read one frame and throw it away. */
static void skip_frame(End *end)
{
    char *frame;
    CHECK(read_frame(end, &frame) >= 0);
    free(frame);
}

/* --- Frames between two ends that keep to the rules ------------------------------------------------------------------ */

TEST(layout_is_that_of_the_description)
{
    static _Alignas(4096) char mapping[HEADERS_SIZE + 2 * 4096];
    End a, b;
    CHECK_EQUAL(mapping_size(4096), sizeof mapping);
    open_end(&a, mapping, 4096, 0);
    open_end(&b, mapping, 4096, 1);
    CHECK((char *)a.out == mapping && a.out == b.in && (char *)a.in == mapping + sizeof(Ring) && a.in == b.out);
    CHECK(a.out_bytes == mapping + HEADERS_SIZE && a.out_bytes == b.in_bytes);
    CHECK(a.in_bytes == mapping + HEADERS_SIZE + 4096 && a.in_bytes == b.out_bytes);
    uint64_t wrong[] = {0, 1, 2048, 4095, 4097, 6144, (1u << 28) + 1, 1u << 29, 1ull << 32, UINT64_MAX, 1ull << 63};
    for (int i = 0; i < LENGTH(wrong); i++) CHECK(!is_valid_capacity(wrong[i]));
    for (uint64_t capacity = 4096; capacity <= 1u << 28; capacity *= 2) CHECK(is_valid_capacity(capacity));
}

TEST(ring_holds_its_capacity_and_no_more)
{
    Link link;
    char bytes[4096] = {0}, *frame;
    open_link(&link, 4096);
    CHECK_EQUAL(put_bytes(&link.a, bytes, 4096 - FRAME_WORD + 1, 0), 0);
    CHECK_EQUAL(put_bytes(&link.a, bytes, 4096 - FRAME_WORD, FRAME_INTERNAL), 1); /* the largest frame fills it */
    CHECK_EQUAL(put_bytes(&link.a, bytes, 0, 0), 0);
    CHECK_EQUAL(has_room(&link.a, 0), 0);
    CHECK_EQUAL(readable_bytes(&link.b), 4096);
    CHECK_EQUAL(read_frame(&link.b, &frame), (4096 - FRAME_WORD) | FRAME_INTERNAL);
    free(frame);
    CHECK_EQUAL(put_bytes(&link.a, bytes, 0, 0), 0); /* the room is not given back yet */
    give_room_back(&link.b);
    for (int i = 0; i < 1024; i++) CHECK_EQUAL(put_bytes(&link.a, bytes, 0, 0), 1); /* frames without bytes */
    CHECK_EQUAL(put_bytes(&link.a, bytes, 0, 0), 0);
    for (int i = 0; i < 1024; i++) skip_frame(&link.b);
    CHECK_EQUAL(read_frame(&link.b, &frame), -2);
    close_link(&link);
}

#define TABLE_SIZE (1 << 17)
static char table[TABLE_SIZE];           /* frame number i is a piece of this table of random bytes that begins at i */

typedef struct { End *end; uint64_t seed; int count; } Stream;

/* The size of the next frame: mostly small, sometimes nothing, sometimes as large as possible. */
static uint32_t next_size(Random *random, uint64_t capacity)
{
    uint32_t largest = (uint32_t)(capacity - FRAME_WORD);
    switch (random_below(random, 32)) {
    case 0: return 0;
    case 1: return largest;
    case 2: return largest - random_below(random, 8);
    case 3: case 4: case 5: return random_below(random, largest);
    default: return random_below(random, 200);
    }
}

static int cut_into_parts(Random *random, const char *bytes, uint32_t size, Part *parts, int most)
{
    int count = (int)random_below(random, (uint32_t)most) + 1;
    for (int i = 0; i < count; i++) {
        uint32_t piece = i == count - 1 ? size : random_below(random, size + 1);
        parts[i] = (Part){bytes, piece};
        bytes += piece;
        size -= piece;
    }
    return count;
}

static void *write_stream(void *argument)
{
    Stream *stream = argument;
    End *end = stream->end;
    Random sizes = {stream->seed}, choices = {stream->seed + 1};
    for (int i = 0; i < stream->count; i++) {
        Part parts[16];
        uint32_t size = next_size(&sizes, end->capacity), flag = i % 5 ? 0 : FRAME_INTERNAL;
        int count = cut_into_parts(&choices, table + i % 4096, size, parts, 16), done;
        while (!(done = put_frame(end, parts, count, size, flag))) wait_for_room(end, size, now_ns() + 20 * MS);
        CHECK_EQUAL(done, 1);
    }
    return NULL;
}

static void *read_stream(void *argument)
{
    Stream *stream = argument;
    End *end = stream->end;
    Random sizes = {stream->seed}, choices = {stream->seed + 2};
    for (int i = 0; i < stream->count;) {
        char *frame;
        if (random_below(&choices, 2)) spin_on_rings(&end, 1, end, random_below(&choices, 10000));
        if (!is_readable(end)) sleep_on_ring(end, now_ns() + 2000 * MS);
        int64_t word;
        while ((word = read_frame(end, &frame)) != -2) {
            uint32_t size = next_size(&sizes, end->capacity);
            if (word != (int64_t)(size | (i % 5 ? 0 : FRAME_INTERNAL))) FAIL("frame %d: word %llx", i, (long long)word);
            if (memcmp(frame, table + i % 4096, size)) FAIL("the bytes of frame %d are not what was written", i);
            free(frame);
            i++;
            if (random_below(&choices, 4) == 0) break; /* some frames stay for the next round */
        }
        give_room_back(end);
    }
    return NULL;
}

static void stream_both_ways(uint64_t capacity, uint64_t position, int count, int never_spins)
{
    Link link;
    Stream there, back;
    open_link(&link, capacity);
    start_at(&link, position);
    link.a.never_spins = link.b.never_spins = never_spins;
    pthread_t threads[4];
    there = (Stream){&link.a, 12345, count};
    back = (Stream){&link.b, 67891, count};
    Stream there_read = {&link.b, 12345, count}, back_read = {&link.a, 67891, count};
    threads[0] = start(write_stream, &there);
    threads[1] = start(read_stream, &there_read);
    threads[2] = start(write_stream, &back);
    threads[3] = start(read_stream, &back_read);
    for (int i = 0; i < 4; i++) join(threads[i]);
    CHECK(!is_readable(&link.a) && !is_readable(&link.b));
    close_link(&link);
}

TEST(frames_arrive_whole_and_in_order)
{
    Random random = {4711};
    for (int i = 0; i < TABLE_SIZE; i++) table[i] = (char)(random_word(&random) >> 32);
    stream_both_ways(4096, 0, rounds(5000), 0);
    stream_both_ways(4096, UINT64_MAX - 100000, rounds(2000), 1); /* the counters overflow on the way */
    stream_both_ways(65536, 0, rounds(1000), 0);
}

/* --- Nobody misses a wake-up ----------------------------------------------------------------------------------------- */

#define TIMED_FRAME_SIZE 600             /* large: its stores are still on their way when the writer looks who sleeps */

/* Writes frames that begin with the time. Waits before each until the last one was read, and then a random moment, so that
 * the reader is about to fall asleep, or has just done so. The last frame has the flag. */
static void *write_at_bad_moments(void *argument)
{
    Stream *stream = argument;
    End *end = stream->end;
    Random random = {stream->seed};
    char frame[TIMED_FRAME_SIZE] = {0};
    uint64_t stop = end_of_rounds();
    for (int is_last = 0, i = 1; !is_last; i++) {
        for (int looks = 0; atomic_load(&end->out->tail) != end->head; looks++) give_way(looks);
        delay_stores(); /* of the reader */
        delay(&random);
        uint64_t time = now_ns();
        memcpy(frame, &time, sizeof time);
        is_last = i == stream->count || time > stop;
        delay_stores(); /* of this thread */
        CHECK_EQUAL(put_bytes(end, frame, sizeof frame, is_last ? FRAME_INTERNAL : 0), 1);
    }
    return NULL;
}

/* Fail if a sleep was as long as it could be although this frame was there. Returns whether it was the last frame. */
static int read_timed_frame(End *end, uint64_t slept)
{
    char *frame;
    uint64_t written;
    int64_t word = read_frame(end, &frame);
    if (word == -2) return 0;
    CHECK_EQUAL(word & ~(int64_t)FRAME_INTERNAL, TIMED_FRAME_SIZE);
    memcpy(&written, frame, sizeof written);
    free(frame);
    uint64_t age = now_ns() - written;
    if (slept > LIMIT_NS && age > LIMIT_NS) FAIL("a wake-up was lost: a frame was there for %llu ms", (long long)(age / MS));
    return word != TIMED_FRAME_SIZE;
}

TEST(sleeping_caller_misses_no_wakeup)
{
    Link link;
    open_link(&link, 4096);
    Stream stream = {&link.a, 99, rounds(150000)};
    pthread_t writer = start(write_at_bad_moments, &stream);
    for (int is_last = 0; !is_last;) {
        uint64_t before = now_ns();
        if (!is_readable(&link.b)) sleep_on_ring(&link.b, before + 2000 * MS);
        is_last = read_timed_frame(&link.b, now_ns() - before);
        delay_stores();
        give_room_back(&link.b);
    }
    join(writer);
    CHECK(!is_readable(&link.b));
    CHECK_EQUAL(signals_of(link.events[1][0]) + signals_of(link.events[1][1]), 0); /* no poller was announced */
    close_link(&link);
}

#define MAX_WRITERS 3

/* The leader sleeps in epoll, or is busy: then this thread plays the standby thread. */
static void sleep_as_leader(End *const *ends, int count, int epoll)
{
    struct epoll_event event;
    delay_stores();
    announce_poller(ends, count, POLLER_ASLEEP);
    if (!any_readable(ends, count)) epoll_wait(epoll, &event, 1, 1000);
}

static void sleep_as_standby(End *const *ends, int count, int event)
{
    struct pollfd poll_event = {.fd = event, .events = POLLIN};
    delay_stores();
    announce_poller(ends, count, POLLER_RUNNING);
    if (!any_readable(ends, count)) poll(&poll_event, 1, 1000);
    signals_of(event);
}

static void poll_writers(int count, int frames)
{
    Link links[MAX_WRITERS];
    Stream streams[MAX_WRITERS];
    End *ends[MAX_WRITERS];
    pthread_t writers[MAX_WRITERS];
    Random random = {31};
    int epoll = epoll_create1(0);
    for (int i = 0; i < count; i++) {
        open_link(&links[i], 4096);
        links[i].a.leader_event = links[0].events[1][0]; /* one leader, so one pair of events for all its links */
        links[i].a.standby_event = links[0].events[1][1];
        ends[i] = &links[i].b;
        streams[i] = (Stream){&links[i].a, 7 + (uint64_t)i, frames};
    }
    struct epoll_event event = {.events = EPOLLIN | EPOLLET};
    CHECK_EQUAL(epoll_ctl(epoll, EPOLL_CTL_ADD, links[0].events[1][0], &event), 0);
    for (int i = 0; i < count; i++) writers[i] = start(write_at_bad_moments, &streams[i]);
    for (int left = count; left;) {
        uint64_t before = now_ns();
        if (random_below(&random, 3)) sleep_as_leader(ends, count, epoll);
        else sleep_as_standby(ends, count, links[0].events[1][1]);
        uint64_t slept = now_ns() - before;
        announce_poller(ends, count, POLLER_AWAKE);
        for (int i = 0; i < count; i++) {
            left -= read_timed_frame(ends[i], slept);
            give_room_back(ends[i]);
        }
    }
    for (int i = 0; i < count; i++) join(writers[i]);
    for (int i = 0; i < count; i++) close_link(&links[i]);
    close(epoll);
}

TEST(poller_misses_no_wakeup)
{
    poll_writers(1, rounds(150000)); /* with more writers, one of them may make up for the wake-up that another lost */
    poll_writers(MAX_WRITERS, rounds(10000));
}

TEST(writer_wakes_whom_the_poller_word_names)
{
    Link link;
    End *end;
    open_link(&link, 4096);
    end = &link.b;
    int *leader = &link.events[1][0], *standby = &link.events[1][1];
    for (int round = 0; round < 3; round++) {
        CHECK_EQUAL(put_bytes(&link.a, "x", 1, 0), 1);
        CHECK_EQUAL(signals_of(*leader) + signals_of(*standby), 0); /* the poller looks by itself */
        announce_poller(&end, 1, POLLER_ASLEEP);
        CHECK_EQUAL(signals_of(*leader) + signals_of(*standby), 0);
        CHECK_EQUAL(put_bytes(&link.a, "x", 1, 0), 1);
        CHECK_EQUAL(put_bytes(&link.a, "x", 1, 0), 1); /* it is woken once */
        CHECK_EQUAL(signals_of(*leader), 1);
        CHECK_EQUAL(signals_of(*standby), 0);
        announce_poller(&end, 1, POLLER_RUNNING);
        CHECK_EQUAL(put_bytes(&link.a, "x", 1, 0), 1);
        CHECK_EQUAL(put_bytes(&link.a, "x", 1, 0), 1);
        CHECK_EQUAL(signals_of(*leader), 0);
        CHECK_EQUAL(signals_of(*standby), 1);
        announce_poller(&end, 1, POLLER_ASLEEP);
        announce_poller(&end, 1, POLLER_AWAKE); /* it found something else to do */
        CHECK_EQUAL(put_bytes(&link.a, "x", 1, 0), 1);
        CHECK_EQUAL(signals_of(*leader) + signals_of(*standby), 0);
    }
    CHECK_EQUAL(signals_of(link.events[0][0]) + signals_of(link.events[0][1]), 0);
    close_link(&link);
}

/* --- Room ------------------------------------------------------------------------------------------------------------- */

static void fill(End *end)
{
    char bytes[60] = {0};
    while (put_bytes(end, bytes, sizeof bytes, 0) == 1) {}
}

TEST(room_is_signalled_once_when_half_is_free)
{
    Link link;
    open_link(&link, 4096); /* 64 frames of 64 bytes */
    int *leader = &link.events[0][0], *standby = &link.events[0][1];
    CHECK_EQUAL(ask_for_room(&link.a), 1); /* it is empty */
    atomic_store(&link.a.out->writer_waits, 0);
    for (int round = 0; round < 3; round++) {
        fill(&link.a);
        CHECK_EQUAL(ask_for_room(&link.a), 0);
        for (int i = 0; i < 31; i++) {
            skip_frame(&link.b);
            give_room_back(&link.b);
        }
        CHECK_EQUAL(signals_of(*leader) + signals_of(*standby), 0);
        CHECK_EQUAL(ask_for_room(&link.a), 0);
        skip_frame(&link.b);
        give_room_back(&link.b); /* the 32nd */
        CHECK_EQUAL(signals_of(*leader), 1);
        CHECK_EQUAL(signals_of(*standby), 1);
        CHECK_EQUAL(atomic_load(&link.a.out->writer_waits), 0);
        for (int i = 0; i < 32; i++) {
            skip_frame(&link.b);
            give_room_back(&link.b); /* nobody asked again */
        }
        CHECK_EQUAL(signals_of(*leader) + signals_of(*standby), 0);
    }
    close_link(&link);
}

typedef struct { Link *link; _Atomic int full, drained; int count; } Turns; /* `full` is -1 at the end */

/* Fills the ring again and again. Then it asks for room and sleeps, as a link does, until one of its events is signalled. */
static void *write_when_there_is_room(void *argument)
{
    Turns *turns = argument;
    End *end = &turns->link->a;
    int *events = turns->link->events[0];
    Random random = {77};
    char bytes[1360] = {0};
    uint64_t stop = end_of_rounds();
    for (int i = 1; i <= turns->count && now_ns() < stop; i++) {
        while (put_bytes(end, bytes, sizeof bytes, 0) == 1) {}
        delay_stores();
        atomic_store(&turns->full, i);
        delay(&random);
        if (!ask_for_room(end)) {
            struct pollfd event = {.fd = events[i % 2], .events = POLLIN};
            uint64_t before = now_ns();
            while (poll(&event, 1, 1000) != 1)
                if (atomic_load(&turns->drained) == i && now_ns() - before > LIMIT_NS) FAIL("nobody signalled that there is room");
        }
        signals_of(events[0]);
        signals_of(events[1]);
        for (int looks = 0; atomic_load(&turns->drained) != i; looks++) give_way(looks);
    }
    atomic_store(&turns->full, -1);
    return NULL;
}

TEST(writer_that_waits_for_room_misses_no_signal)
{
    Link link;
    Random random = {5};
    open_link(&link, 4096);
    Turns turns = {&link, 0, 0, rounds(100000)};
    pthread_t writer = start(write_when_there_is_room, &turns);
    for (int i = 1;; i++) {
        for (int looks = 0; atomic_load(&turns.full) == i - 1; looks++) give_way(looks);
        if (atomic_load(&turns.full) < 0) break;
        delay(&random);
        for (int frame = 0; frame < 3; frame++) skip_frame(&link.b);
        delay_stores();
        give_room_back(&link.b); /* the only time in this turn */
        atomic_store(&turns.drained, i);
    }
    join(writer);
    close_link(&link);
}

typedef struct { End *end; uint64_t size, until, took; _Atomic int is_started, is_done; } RoomWait;

static void *wait_for_that_room(void *argument)
{
    RoomWait *wait = argument;
    uint64_t before = now_ns();
    atomic_store(&wait->is_started, 1);
    wait_for_room(wait->end, wait->size, wait->until);
    wait->took = now_ns() - before;
    atomic_store(&wait->is_done, 1);
    return NULL;
}

/* Start a thread that waits for room, and return when it waits. */
static pthread_t start_room_wait(RoomWait *wait)
{
    pthread_t thread = start(wait_for_that_room, wait);
    while (!atomic_load(&wait->is_started)) sched_yield();
    sleep_ns(3 * MS);
    CHECK(!atomic_load(&wait->is_done));
    return thread;
}

TEST(wait_for_room_ends_with_room_time_or_close)
{
    for (int never_spins = 0; never_spins < 2; never_spins++) {
        Link link;
        open_link(&link, 4096);
        link.a.never_spins = never_spins;
        RoomWait wait = {.end = &link.a, .size = 4092, .until = NEVER};
        wait_for_that_room(&wait); /* there is room */
        CHECK(wait.took < 500 * MS);
        fill(&link.a);
        wait.until = now_ns() + 20 * MS; /* there is none */
        wait_for_that_room(&wait);
        CHECK(now_ns() >= wait.until && wait.took < 500 * MS);
        wait = (RoomWait){.end = &link.a, .size = 124, .until = NEVER};
        pthread_t thread = start_room_wait(&wait);
        skip_frame(&link.b);
        give_room_back(&link.b); /* not enough */
        sleep_ns(3 * MS);
        CHECK(!atomic_load(&wait.is_done));
        skip_frame(&link.b);
        give_room_back(&link.b);
        join(thread);
        CHECK(wait.took < 1000 * MS);
        wait = (RoomWait){.end = &link.a, .size = 4092, .until = NEVER};
        thread = start_room_wait(&wait);
        close_end(&link.a);
        join(thread);
        CHECK(wait.took < 1000 * MS);
        close_link(&link);
    }
}

/* A thread waits for room without the interpreter's lock while another one, with it, writes into the same ring. */
TEST(wait_for_room_bears_a_second_writer)
{
    Link link;
    open_link(&link, 4096);
    for (int i = 0; i < rounds(300); i++) {
        fill(&link.a);
        RoomWait wait = {.end = &link.a, .size = 2000, .until = NEVER};
        pthread_t thread = start(wait_for_that_room, &wait);
        for (int frame = 0; is_readable(&link.b); frame++) {
            skip_frame(&link.b);
            give_room_back(&link.b);
            if (frame % 2) put_bytes(&link.a, "", 0, 0);
        }
        join(thread);
    }
    close_link(&link);
}

/* --- Sleeping and spinning -------------------------------------------------------------------------------------------- */

typedef struct { End *end; uint64_t until, took; int until_closed; _Atomic int is_started, is_done; } Sleep;

static void *sleep_for_test(void *argument)
{
    Sleep *sleep = argument;
    uint64_t before = now_ns();
    atomic_store(&sleep->is_started, 1);
    do sleep_on_ring(sleep->end, sleep->until);
    while (sleep->until_closed && !atomic_load(&sleep->end->closed));
    sleep->took = now_ns() - before;
    atomic_store(&sleep->is_done, 1);
    return NULL;
}

/* Start a thread that sleeps on the ring, and return when it is asleep or about to be. */
static pthread_t start_sleep(Sleep *sleep)
{
    pthread_t thread = start(sleep_for_test, sleep);
    while (!atomic_load(&sleep->is_started) || !atomic_load(&sleep->end->in->reader_sleeps)) sched_yield();
    sleep_ns(3 * MS);
    return thread;
}

static void *wake_word(void *argument)
{
    _Atomic uint32_t *word = argument;
    sleep_ns(5 * MS);
    atomic_store(word, 0); /* or the thread might fall asleep after the wake-up */
    futex_wake_all(word);
    return NULL;
}

/* 1 means that another process did it: wake-ups that were for nothing are counted by that. */
TEST(futex_sleep_says_whether_it_was_woken)
{
    _Atomic uint32_t word = 0;
    CHECK_EQUAL(futex_sleep(&word, now_ns() + 500 * MS), 1);
    atomic_store(&word, 2);
    CHECK_EQUAL(futex_sleep(&word, now_ns() + 500 * MS), 1);
    atomic_store(&word, 1);
    CHECK_EQUAL(futex_sleep(&word, 0), 0);
    uint64_t until = now_ns() + 5 * MS;
    CHECK_EQUAL(futex_sleep(&word, until), 0);
    CHECK(now_ns() >= until);
    pthread_t thread = start(wake_word, &word);
    CHECK_EQUAL(futex_sleep(&word, now_ns() + 2000 * MS), 1);
    join(thread);
}

TEST(sleep_ends_with_a_frame_a_signal_or_its_time)
{
    Link link;
    struct sigaction action = {.sa_handler = ignore_signal};
    open_link(&link, 4096);
    CHECK_EQUAL(sigaction(SIGUSR1, &action, NULL), 0);
    Sleep sleep = {.end = &link.b, .until = now_ns() + 30 * MS};
    sleep_for_test(&sleep);
    CHECK(now_ns() >= sleep.until && sleep.took < 700 * MS);
    CHECK_EQUAL(atomic_load(&link.b.in->reader_sleeps), 0); /* so that the next writer need not wake anybody */
    sleep = (Sleep){.end = &link.b, .until = NEVER};
    pthread_t thread = start_sleep(&sleep);
    while (!atomic_load(&sleep.is_done)) { /* the first signal may come before the thread is asleep */
        pthread_kill(thread, SIGUSR1);
        sleep_ns(MS);
    }
    join(thread);
    CHECK(sleep.took < 700 * MS);
    sleep = (Sleep){.end = &link.b, .until = NEVER};
    thread = start_sleep(&sleep);
    CHECK(atomic_load(&caller_slept_at) != 0);
    CHECK_EQUAL(put_bytes(&link.a, "x", 1, 0), 1);
    join(thread);
    CHECK(sleep.took < 700 * MS);
    CHECK_EQUAL(atomic_load(&caller_slept_at), 0);
    sleep = (Sleep){.end = &link.b, .until = NEVER};
    sleep_for_test(&sleep); /* the frame is still there */
    CHECK(sleep.took < 700 * MS);
    skip_frame(&link.b);
    sleep = (Sleep){.end = &link.b, .until = 0};
    sleep_for_test(&sleep); /* its time is over */
    CHECK(sleep.took < 700 * MS);
    CHECK_EQUAL(link.b.futile_wakeups, 0);
    close_link(&link);
}

TEST(sleep_lasts_at_most_a_second)
{
    Link link;
    open_link(&link, 4096);
    Sleep sleep = {.end = &link.b, .until = NEVER};
    sleep_for_test(&sleep); /* nobody will ever wake it */
    CHECK(sleep.took >= 900 * MS && sleep.took < 3000 * MS);
    close_link(&link);
}

TEST(close_wakes_a_sleeper)
{
    for (int i = 0; i < rounds(20); i++) {
        Link link;
        open_link(&link, 4096);
        Sleep sleep = {.end = &link.b, .until = NEVER, .until_closed = 1};
        pthread_t thread = start(sleep_for_test, &sleep);
        while (!atomic_load(&sleep.is_started)) sched_yield();
        for (volatile int moment = 0; moment < i * 200; moment++) {} /* of its way to sleep */
        uint64_t before = now_ns();
        close_end(&link.b);
        join(thread);
        CHECK(now_ns() - before < 500 * MS);
        CHECK_EQUAL(link.b.leader_event, -1); /* the peer's events may be closed now */
        CHECK_EQUAL(link.b.standby_event, -1);
        close_link(&link);
    }
}

/* A writer clears the word and then wakes the sleeper. If it was killed in between, the sleeper sleeps on. */
TEST(close_wakes_a_sleeper_whose_writer_was_killed)
{
    Link link;
    open_link(&link, 4096);
    Sleep sleep = {.end = &link.b, .until = NEVER, .until_closed = 1};
    pthread_t thread = start_sleep(&sleep);
    atomic_store(&link.b.in->reader_sleeps, 0);
    uint64_t before = now_ns();
    close_end(&link.b);
    join(thread);
    CHECK(now_ns() - before < 500 * MS);
    close_link(&link);
}

TEST(spinning_ends_when_it_should)
{
    Link links[3];
    End *ends[3];
    for (int i = 0; i < 3; i++) {
        open_link(&links[i], 4096);
        ends[i] = &links[i].b;
    }
    uint64_t before = now_ns();
    CHECK_EQUAL(spin_on_rings(NULL, 0, NULL, 1000 * MS), 0); /* no rings */
    CHECK_EQUAL(spin_on_rings(ends, 3, ends[1], 0), 0);      /* no time */
    ends[1]->never_spins = 1;
    CHECK_EQUAL(spin_on_rings(ends, 3, ends[1], 1000 * MS), 0);
    ends[1]->never_spins = 0;
    publish_core(&links[1].a, CORE_BLOCKED);
    CHECK_EQUAL(spin_on_rings(ends, 3, ends[1], 1000 * MS), 0); /* the peer will not answer soon */
    CHECK(now_ns() - before < 500 * MS);
    publish_core(&links[1].a, 4000); /* a core that is not ours */
    before = now_ns();
    CHECK_EQUAL(spin_on_rings(ends, 3, ends[1], 20 * MS), 0);
    CHECK(now_ns() - before >= 20 * MS && now_ns() - before < 500 * MS);
    CHECK(atomic_load(&links[2].a.in->writer_core) != 0); /* each peer knows our core */
    put_bytes(&links[2].a, "x", 1, 0);
    before = now_ns();
    CHECK_EQUAL(spin_on_rings(ends, 3, ends[1], 1000 * MS), 1);
    CHECK_EQUAL(spin_on_rings(ends, 3, ends[1], 0), 1);
    CHECK(now_ns() - before < 500 * MS);
    for (int i = 0; i < 3; i++) close_link(&links[i]);
}

TEST(leader_does_not_spin_when_a_caller_has_just_fallen_asleep)
{
    CHECK(spin_pays_for_leader(now_ns()));
    atomic_store(&caller_slept_at, 10 * MS);
    CHECK(!spin_pays_for_leader(10 * MS));
    CHECK(!spin_pays_for_leader(11 * MS));
    CHECK(spin_pays_for_leader(11 * MS + 1));
    atomic_store(&caller_slept_at, 0);
}

/* With one core for both, spinning would take the time that the peer needs. */
TEST(spinning_ends_on_a_shared_core)
{
    Link link;
    cpu_set_t before, one;
    open_link(&link, 4096);
    End *end = &link.b;
    CHECK_EQUAL(sched_getaffinity(0, sizeof before, &before), 0);
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK_EQUAL(sched_setaffinity(0, sizeof one, &one), 0);
    publish_core(&link.a, (uint32_t)sched_getcpu() + 1);
    uint64_t start = now_ns();
    CHECK_EQUAL(spin_on_rings(&end, 1, end, 2000 * MS), 0);
    CHECK(now_ns() - start < 1000 * MS);
    CHECK_EQUAL(sched_setaffinity(0, sizeof before, &before), 0);
    close_link(&link);
}

/* Waits of a peer that answers late: how many of them spin. */
static int count_spins(End *end, int waits)
{
    int count = 0;
    for (int i = 0; i < waits; i++) {
        spins.is_futile = 0;
        CHECK_EQUAL(spin_on_rings(&end, 1, end, MS / 20), 0);
        count += spins.is_futile;
        count_sleep();
    }
    return count;
}

static void *send_soon(void *argument)
{
    End *end = argument;
    struct timespec pause = {0, MS};
    nanosleep(&pause, NULL);
    put_bytes(end, "x", 1, 0);
    return NULL;
}

TEST(futile_spins_become_rare_and_come_back)
{
    Link link;
    char byte;
    open_link(&link, 4096);
    End *end = &link.b;
    publish_core(&link.a, 4000); /* a core that is not ours */
    CHECK_EQUAL(count_spins(end, 3), 3);
    CHECK(count_spins(end, 1000) < 50);
    CHECK_EQUAL(spins.failures, MAX_SPIN_FAILURES);
    for (int tries = 0; spins.failures && tries < 1000; tries++) { /* a try is lost if the sender uses our core */
        spins.skips = 0;
        publish_core(&link.a, 4000);
        pthread_t thread = start(send_soon, &link.a);
        spin_on_rings(&end, 1, end, 10000 * MS);
        join(thread);
        take_frame(end, &byte, 1);
        give_room_back(end);
    }
    publish_core(&link.a, 4000);
    CHECK_EQUAL(spins.failures, 0);
    CHECK_EQUAL(count_spins(end, 3), 3);
    close_link(&link);
}

/* --- Peers that do not keep to the rules ------------------------------------------------------------------------------ */

TEST(wrong_positions_are_noticed)
{
    Link link;
    uint64_t wrong[] = {4097, 4100, 1ull << 32, 3ull << 32, 1ull << 62, 1ull << 63, UINT64_MAX, UINT64_MAX - 4096};
    open_link(&link, 4096);
    for (int at = 0; at < 2; at++) {
        uint64_t position = at ? UINT64_MAX - 5000 : 0;
        start_at(&link, position);
        for (int i = 0; i < LENGTH(wrong); i++) {
            char *frame;
            atomic_store(&link.a.in->head, position + wrong[i]); /* more than the ring holds, or less than was read */
            CHECK_EQUAL(readable_bytes(&link.a), -1);
            CHECK_EQUAL(read_frame(&link.a, &frame), -1);
            CHECK(is_readable(&link.a)); /* so a thread that waits looks, and notices */
            atomic_store(&link.a.out->tail, position - wrong[i]);
            CHECK_EQUAL(put_bytes(&link.a, "x", 1, 0), -1);
            CHECK_EQUAL(ask_for_room(&link.a), -1);
            CHECK(has_room(&link.a, 1)); /* likewise */
            wait_for_room(&link.a, 4092, NEVER);
        }
        CHECK_EQUAL(link.a.head, position);
        CHECK_EQUAL(link.a.tail, position);
    }
    close_link(&link);
}

TEST(wrong_frame_words_are_noticed)
{
    Link link;
    uint32_t sizes[] = {97, 98, 4093, 4096, 4097, 65536, 0x3fffffff, 0x40000000, 0x7fffffff, 0x7ffffffc};
    open_link(&link, 4096);
    for (uint64_t position = 0; position < 4096; position += 4093) { /* the second time, the word wraps */
        start_at(&link, position);
        atomic_store(&link.a.out->head, position + 100);
        for (int i = 0; i < LENGTH(sizes); i++)
            for (int flag = 0; flag < 2; flag++) {
                uint32_t word = sizes[i] | (flag ? FRAME_INTERNAL : 0);
                char *frame;
                copy_in(&link.a, position, (char *)&word, FRAME_WORD);
                CHECK_EQUAL(read_frame(&link.b, &frame), -1);
            }
        uint32_t word = 96; /* exactly what is there */
        copy_in(&link.a, position, (char *)&word, FRAME_WORD);
        CHECK_EQUAL(frame_word(&link.b, 100), 96);
        for (int left = 0; left < 4; left++) { /* not even a word */
            atomic_store(&link.a.out->head, position + (uint64_t)left);
            char *frame;
            CHECK_EQUAL(read_frame(&link.b, &frame), left ? -1 : -2);
            CHECK_EQUAL(frame_word(&link.b, left), -1);
        }
        CHECK_EQUAL(link.b.tail, position);
    }
    close_link(&link);
}

/* What this side tells its peer is a copy: the peer may overwrite it. */
TEST(own_positions_are_private)
{
    Link link;
    open_link(&link, 4096);
    CHECK_EQUAL(put_bytes(&link.a, "abc", 3, 0), 1);
    atomic_store(&link.a.out->head, 0);
    CHECK_EQUAL(put_bytes(&link.a, "de", 2, 0), 1);
    CHECK_EQUAL(atomic_load(&link.a.out->head), 2 * FRAME_WORD + 5);
    atomic_store(&link.b.in->tail, 12345);
    skip_frame(&link.b);
    atomic_store(&link.b.in->tail, 54321);
    skip_frame(&link.b);
    give_room_back(&link.b);
    CHECK_EQUAL(atomic_load(&link.b.in->tail), 2 * FRAME_WORD + 5);
    CHECK(!is_readable(&link.b));
    close_link(&link);
}

typedef struct {
    Link *link;
    uint64_t seed;
    int way;                             /* what is overwritten, see `harm` */
    _Atomic int stop;
} Attack;

/* Overwrites what the peer of end `a` can reach, which is everything, until told to stop. ThreadSanitizer does not look
 * at this function: the races are what it is for. */
__attribute__((no_sanitize("thread,address,undefined"), noinline)) static void *harm(void *argument)
{
    Attack *attack = argument;
    Link *link = attack->link;
    Random random = {attack->seed};
    struct { volatile uint64_t head; volatile uint32_t writer_core; } *in = (void *)link->a.in;
    volatile uint64_t *out_tail = (void *)&link->a.out->tail, *in_head = &in->head;
    volatile uint32_t *word = (void *)&link->a.in->reader_sleeps, *out_word = (void *)&link->a.out->reader_sleeps;
    volatile uint32_t *poller = (void *)&link->a.out->poller, *in_poller = (void *)&link->a.in->poller;
    volatile uint32_t *waits = (void *)&link->a.in->writer_waits, *out_waits = (void *)&link->a.out->writer_waits;
    volatile uint64_t *headers = (void *)link->headers;
    volatile uint32_t *bytes = (void *)link->bytes[1];
    while (!*(volatile int *)&attack->stop) {
        for (int i = 0; i < 64; i++) {
            uint64_t value = random_word(&random);
            switch (attack->way) {
            case 0: /* anything anywhere */
                headers[value % (2 * sizeof(Ring) / 8)] = random_word(&random) >> (value % 64);
                bytes[value % (link->capacity / 4)] = (uint32_t)(random_word(&random) >> (value % 64));
                break;
            case 1: /* positions that may be right, frame words that may be */
                *in_head = *(volatile uint64_t *)&link->a.tail + value % (link->capacity + 8);
                *out_tail = *(volatile uint64_t *)&link->a.head - (value >> 20) % (link->capacity + 8);
                bytes[value % (link->capacity / 4)] = (uint32_t)(value >> 32) % 300;
                break;
            case 2: /* the words by which sides wake each other */
                *word = *out_word = (uint32_t)value % 4;
                *poller = *in_poller = (uint32_t)(value >> 8) % 5;
                *waits = *out_waits = (uint32_t)(value >> 16) % 2;
                in->writer_core = value % 7 ? (uint32_t)(value >> 24) % 4 : CORE_BLOCKED;
                break;
            case 3: *word = 2; break;
            case 4: *word = 0; break;
            case 5: syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); break; /* and the 1 stays */
            case 6: in->writer_core = (uint32_t)sched_getcpu() + 1 + (uint32_t)value % 2; break;
            }
        }
    }
    return NULL;
}

/* One thing that a process does with its end, chosen at random. Returns how long it may take. */
static uint64_t act(End *end, Random *random, int event)
{
    static const char bytes[4096];
    char *frame;
    Part parts[16];
    uint32_t size = random_below(random, 8) ? random_below(random, 100) : random_below(random, 4096 - FRAME_WORD + 1);
    uint64_t ns = random_below(random, 300000);
    switch (random_below(random, 9)) {
    case 0: case 1: {
        uint64_t head = end->head;
        int count = cut_into_parts(random, bytes, size, parts, 16);
        int sent = put_frame(end, parts, count, size, random_below(random, 2) ? FRAME_INTERNAL : 0);
        CHECK_EQUAL(end->head - head, sent == 1 ? FRAME_WORD + size : 0);
        break;
    }
    case 2: case 3: {
        int64_t left = readable_bytes(end), word;
        for (; left > 0 && (word = frame_word(end, left)) >= 0; free(frame)) {
            size = (uint32_t)word & ~FRAME_INTERNAL;
            CHECK(size <= 4096 - FRAME_WORD);
            CHECK((frame = malloc(size + !size)) != NULL);
            take_frame(end, frame, size);
            left -= (int64_t)(FRAME_WORD + size);
        }
        give_room_back(end);
        break;
    }
    case 4: ask_for_room(end); break;
    case 5: wait_for_room(end, size, now_ns() + ns); return ns;
    case 6: spin_on_rings(&end, 1, end, ns); return ns;
    case 7: sleep_on_ring(end, now_ns() + ns); return ns;
    default:
        announce_poller(&end, 1, random_below(random, 3));
        if (!is_readable(end)) signals_of(event);
    }
    return 0;
}

TEST(hostile_peer_cannot_make_this_side_fault_or_hang)
{
    for (int way = 0; way < 3; way++) {
        Link link;
        open_link(&link, 4096);
        Attack attack = {&link, 1234 + (uint64_t)way, way, 0};
        Random random = {(uint64_t)way + 17};
        pthread_t thread = start(harm, &attack);
        uint64_t slow = 0, worst = 0, end = now_ns() + (uint64_t)rounds(150) * MS;
        while (now_ns() < end) {
            uint64_t before = now_ns(), allowed = act(&link.a, &random, link.events[0][0]), took = now_ns() - before;
            if (took > allowed + 100 * MS) slow++; /* the machine may be busy: once or twice is no fault */
            if (took > worst) worst = took;
        }
        atomic_store(&attack.stop, 1);
        join(thread);
        if (slow > 3 || worst > 2000 * MS) FAIL("way %d: %d waits were too long, the worst %d ms", way, (int)slow, (int)(worst / MS));
        close_link(&link);
    }
}

/* Whatever the peer does with the word on which a caller sleeps, the caller does not run all the time. */
TEST(futile_wakeups_are_met_by_short_sleeps)
{
    for (int way = 3; way < 6; way++) {
        Link link;
        open_link(&link, 4096);
        Attack attack = {&link, 99, way, 0};
        pthread_t thread = start(harm, &attack);
        uint64_t start = now_ns(), end = start + 100 * MS;
        int sleeps = 0;
        for (; now_ns() < end; sleeps++) sleep_on_ring(&link.a, now_ns() + 2 * MS);
        atomic_store(&attack.stop, 1);
        join(thread);
        int most = MAX_FUTILE_WAKEUPS + (int)((now_ns() - start) / FUTILE_SLEEP_NS) + 64;
        if (sleeps > most) FAIL("way %d: %d sleeps in 100 ms, more than %d", way, sleeps, most);
        close_link(&link);
    }
}

TEST(short_sleeps_end_with_the_next_frame)
{
    Link link;
    open_link(&link, 4096);
    link.b.futile_wakeups = MAX_FUTILE_WAKEUPS;
    for (int i = 0; i < 3; i++) {
        Sleep sleep = {.end = &link.b, .until = NEVER};
        sleep_for_test(&sleep);
        CHECK(sleep.took >= FUTILE_SLEEP_NS && sleep.took < 500 * MS);
    }
    Sleep sleep = {.end = &link.b, .until = now_ns() + FUTILE_SLEEP_NS / 20};
    sleep_for_test(&sleep); /* not longer than was asked for */
    CHECK(sleep.took < 500 * MS);
    CHECK_EQUAL(link.b.futile_wakeups, MAX_FUTILE_WAKEUPS);
    CHECK_EQUAL(put_bytes(&link.a, "x", 1, 0), 1);
    sleep_on_ring(&link.b, NEVER);
    CHECK_EQUAL(link.b.futile_wakeups, 0);
    close_link(&link);
}

TEST(spinning_ends_in_time_whatever_core_the_peer_names)
{
    Link link;
    open_link(&link, 4096);
    End *end = &link.a;
    Attack attack = {&link, 4, 6, 0};
    pthread_t thread = start(harm, &attack);
    int slow = 0;
    for (int i = 0; i < 100; i++) {
        uint64_t before = now_ns();
        CHECK_EQUAL(spin_on_rings(&end, 1, end, MS / 2), 0);
        slow += now_ns() - before > 100 * MS; /* the machine may be busy */
    }
    atomic_store(&attack.stop, 1);
    join(thread);
    CHECK(slow < 4);
    close_link(&link);
}

/* ---------------------------------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    if (argc < 3) FAIL("usage: ring_test FACTOR NAME ...");
    factor = atof(argv[1]);
    for (int i = 2; i < argc; i++) {
        int number = 0;
        while (number < test_count && strcmp(tests[number].name, argv[i])) number++;
        if (number == test_count) FAIL("there is no test %s", argv[i]);
        alarm(TEST_TIME_S);
        uint64_t before = now_ns();
        tests[number].run();
        printf("%s: passed in %.2f s\n", argv[i], (double)(now_ns() - before) / 1e9);
    }
    return 0;
}
