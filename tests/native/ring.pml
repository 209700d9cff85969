/* How the two ends of a ring sleep and wake each other (src/farcall/_native/ring.h), for the model checker SPIN.
 *
 * Who stands for what
 *   Writer    `put_frame`, `wake_reader` and `ask_for_room`: the only writer of the ring
 *   Caller    `RingPair_receive` with `give_room_back`, and `sleep_on_ring`: the thread that waits for a reply
 *   Poller    the same reads; `sleep_in_epoll` (it sleeps as the leader), and `Waiter_run` (it runs user code, and the
 *             standby thread is to be woken in its place: for the memory of the ring both are one process)
 *   Closer    `end_waits`: the link is closed while a caller sleeps. Only with CLOSES.
 *   Memory    the store buffers of the cores
 *
 * Memory. Each process has a buffer of one store for each word. `Memory` may write any buffered store into memory at
 * any moment, so stores to different words become visible in any order, and late. A process sees its own buffered
 * stores. `FENCE` is a full fence: it waits until the buffer of the process is empty. A release store waits for the
 * earlier stores of the process. An exchange reads and writes memory in one step and empties the buffer of its own word
 * only. This is weaker than x86. Loads happen in program order: on aarch64 the acquire loads and the fences see to that
 * for every load on which a decision to sleep depends.
 *
 * No sleep ends by the clock here, though MAX_SLEEP_NS ends each one in production: a wake-up that only the clock makes
 * good is a lost one. Peers are honest here; ring_test.c and tests/behaviour attack.
 *
 * Properties
 *   - No lost wake-up and no deadlock: SPIN reports an "invalid end state" if not every frame has been written and read.
 *     The check for cycles (pan -l) shows that every execution ends, so "at the end" is "eventually".
 *   - A frame is read as it was written, and never one that was not (assertions).
 *
 * CALLER or POLLER says who reads. Each name that test_models.py lists plants one bug. */

#define FRAMES   5
#define CAPACITY 2                       /* frames that fit */
#define EMPTY    255                     /* no store is buffered */

#define AWAKE    0                       /* POLLER_... of ring.h */
#define ASLEEP   1
#define RUNNING  2

#define WRITER   0                       /* the processes that have a store buffer */
#define READER   1
#define CLOSER   2
#define PROCESSES 3

#define HEAD     0                       /* the words in memory */
#define TAIL     1
#define SLEEPS   2                       /* reader_sleeps */
#define STATE    3                       /* poller */
#define WAITS    4                       /* writer_waits */
#define CLOSED   5
#define BYTES    6                       /* the bytes of frame i are at BYTES + i % CAPACITY */
#define WORDS    (BYTES + CAPACITY)

byte memory[WORDS];
byte buffer[PROCESSES * WORDS];
bit  in_futex;                           /* the caller sleeps in FUTEX_WAIT */
bit  leader_event, standby_event;        /* the eventfds of the reading process */
bit  room_event;                         /* the eventfds of the writing process, both in one */

#define BUFFERED(p, w) buffer[(p) * WORDS + (w)]
#define LOAD(p, w)     (BUFFERED(p, w) == EMPTY -> memory[w] : BUFFERED(p, w))
#define STORE(p, w, x) BUFFERED(p, w) = x
#define FENCE(p)       (BUFFERED(p, HEAD) == EMPTY && BUFFERED(p, TAIL) == EMPTY && BUFFERED(p, SLEEPS) == EMPTY && \
                        BUFFERED(p, STATE) == EMPTY && BUFFERED(p, WAITS) == EMPTY && BUFFERED(p, CLOSED) == EMPTY && \
                        BUFFERED(p, BYTES) == EMPTY && BUFFERED(p, BYTES + 1) == EMPTY)
#define RELEASE(p)     FENCE(p)          /* before a release store: the earlier stores become visible first */

/* Reads the word into `old` and stores x, in one step. */
inline exchange(p, w, x, old)
{
    atomic { BUFFERED(p, w) == EMPTY -> old = memory[w]; memory[w] = x }
}

#define DRAIN(p, w)    atomic { BUFFERED(p, w) != EMPTY -> memory[w] = BUFFERED(p, w); BUFFERED(p, w) = EMPTY }

proctype Memory()
{
end:
    do
    :: DRAIN(WRITER, HEAD)
    :: DRAIN(WRITER, WAITS)
    :: DRAIN(WRITER, BYTES)
    :: DRAIN(WRITER, BYTES + 1)
    :: DRAIN(READER, TAIL)
    :: DRAIN(READER, SLEEPS)
    :: DRAIN(READER, STATE)
    :: DRAIN(CLOSER, SLEEPS)
    :: DRAIN(CLOSER, CLOSED)
    od
}

proctype Writer()
{
    byte written, old;                   /* `written` is `End.head`, in private memory */

    do
    :: written == FRAMES -> break
    :: else ->
        if
        :: written - LOAD(WRITER, TAIL) < CAPACITY ->            /* put_frame */
            STORE(WRITER, BYTES + written % CAPACITY, written + 1);
#ifndef HEAD_BEFORE_BYTES
            RELEASE(WRITER);
#endif
            written++;
            STORE(WRITER, HEAD, written);
#ifdef LOOK_BEFORE_HEAD                  /* plants a bug: nothing keeps the load of the flags behind the store */
            skip;
#else
            FENCE(WRITER);                                       /* wake_reader */
#endif
            if
            :: LOAD(WRITER, SLEEPS) == 1 ->
                exchange(WRITER, SLEEPS, 0, old);
                if
                :: old == 1 -> in_futex = 0                      /* futex_wake_all */
                :: else
                fi
            :: else
            fi;
            if
            :: LOAD(WRITER, STATE) != AWAKE ->
                exchange(WRITER, STATE, AWAKE, old);
                if
                :: old == ASLEEP -> leader_event = 1
                :: old == RUNNING -> standby_event = 1
                :: else
                fi
            :: else
            fi
        :: else ->                                               /* ask_for_room */
#ifdef ASK_AFTER_LOOK
            if
            :: 2 * (written - LOAD(WRITER, TAIL)) <= CAPACITY -> goto try_again
            :: else
            fi;
            STORE(WRITER, WAITS, 1);
            FENCE(WRITER);
#else
            STORE(WRITER, WAITS, 1);
#ifndef NO_FENCE_OF_WAITING_WRITER
            FENCE(WRITER);
#endif
            if
            :: 2 * (written - LOAD(WRITER, TAIL)) <= CAPACITY -> goto try_again
            :: else
            fi;
#endif
            atomic { room_event -> room_event = 0 }
        fi;
try_again:
        skip
    od
}

/* RingPair_receive: reads all frames that are there, and gives the room back. */
inline receive()
{
    limit = LOAD(READER, HEAD);
    assert(limit >= read && limit - read <= CAPACITY);
    do
    :: read == limit -> break
    :: else ->
        assert(LOAD(READER, BYTES + read % CAPACITY) == read + 1);
        read++
    od;
    RELEASE(READER);                                             /* give_room_back */
    STORE(READER, TAIL, read);
#ifndef NO_FENCE_OF_ROOM
    FENCE(READER);
#endif
    if
    :: LOAD(READER, WAITS) == 1 && 2 * (LOAD(READER, HEAD) - read) <= CAPACITY ->
        exchange(READER, WAITS, 0, old);
        if
        :: old == 1 -> room_event = 1
        :: else
        fi
    :: else
    fi
}

#define READABLE (LOAD(READER, HEAD) != read)

proctype Caller()
{
    byte read, limit, old;               /* `read` is `End.tail`, in private memory */

    do
    :: read == FRAMES || LOAD(READER, CLOSED) == 1 -> break
    :: else ->
        if
        :: READABLE -> receive(); goto awake
        :: else
        fi;                                                      /* sleep_on_ring */
#ifdef FLAG_AFTER_LOOK
        if
        :: READABLE || LOAD(READER, CLOSED) == 1 -> goto out_of_futex
        :: else
        fi;
        STORE(READER, SLEEPS, 1);
        FENCE(READER);
#else
        STORE(READER, SLEEPS, 1);
#ifndef NO_FENCE_OF_SLEEPER
        FENCE(READER);
#endif
        if
        :: READABLE || LOAD(READER, CLOSED) == 1 -> goto out_of_futex
        :: else
        fi;
#endif
#ifdef FUTEX_WITHOUT_COMPARISON
        in_futex = 1;
#else
        atomic {                                                 /* futex_sleep: the kernel compares and sleeps in one */
            if
            :: memory[SLEEPS] == 1 -> in_futex = 1
            :: else
            fi
        }
#endif
        in_futex == 0;
out_of_futex:
        STORE(READER, SLEEPS, 0);
awake:
        skip
    od
}

proctype Poller()
{
    byte read, limit, old;

    do
    :: read == FRAMES -> break
    :: read != FRAMES && READABLE -> receive()
    :: read != FRAMES && !READABLE ->
        if
        :: old = ASLEEP                                          /* sleep_in_epoll */
        :: old = RUNNING                                         /* Waiter_run */
        fi;
#ifdef FLAG_AFTER_LOOK
        if
        :: READABLE -> goto awake
        :: else
        fi;
#endif
        if                                                       /* announce_poller */
        :: LOAD(READER, STATE) != old -> STORE(READER, STATE, old)
        :: else
        fi;
#ifndef NO_FENCE_OF_SLEEPER
        FENCE(READER);
#endif
#ifndef FLAG_AFTER_LOOK
        if
        :: READABLE -> goto awake
        :: else
        fi;
#endif
        if
        :: old == ASLEEP -> atomic { leader_event -> leader_event = 0 }
        :: old == RUNNING -> atomic { standby_event -> standby_event = 0 }
        fi;
awake:
        old = 0;
        if                                                       /* announce_poller, without a fence */
        :: LOAD(READER, STATE) != AWAKE -> STORE(READER, STATE, AWAKE)
        :: else
        fi
    od
}

proctype Closer()                                                /* end_waits */
{
#ifdef CLOSED_AFTER_WAKE_UP
    STORE(CLOSER, SLEEPS, 0);
    FENCE(CLOSER);
    in_futex = 0;
    STORE(CLOSER, CLOSED, 1)
#else
    STORE(CLOSER, CLOSED, 1);
    FENCE(CLOSER);                                               /* both stores are sequentially consistent */
    STORE(CLOSER, SLEEPS, 0);
    FENCE(CLOSER);
    in_futex = 0
#endif
}

init
{
    atomic {
        byte i;
        for (i : 0 .. PROCESSES * WORDS - 1) { buffer[i] = EMPTY }
        run Memory();
#ifdef CLOSES
        run Closer();
#else
        run Writer();
#endif
#ifdef CALLER
        run Caller()
#else
        run Poller()
#endif
    }
}
