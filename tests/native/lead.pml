/* How the threads of an executor hand the lead on, and how frames wake them, for the model checker SPIN.
 *
 * Who stands for what
 *   Thread       runtime/executor: `_live`, `_stand_by`, `_see_to_successor`, `_lead`, `_follow`, `_before_wait`,
 *                `_after_wait`; with transports/poller: `wait`, `run`, `block`, `stand_by`, `clear_alert`; and
 *                _native/module.c: `Waiter_wait`, `sleep_in_epoll`, `Waiter_run`
 *   RingSender   another process writes frames into a ring: `put_frame` and `wake_reader` of _native/ring.h
 *   StreamSender another process writes a frame into a socket
 *   Connector    another process connects, or hangs up: an event of the `_rare` epoll
 *   Submitter    another thread of this process: `Executor.submit`
 *   Watcher      another thread of this process: `Poller.watch` for a link with a ring
 *
 * A function of a user returns, or never returns, or waits for a call of its own that ends, or waits for ever. SPIN tries
 * all of them at each job, and a function that returns may take any time: the other processes run meanwhile.
 *
 * What is assumed
 *   - Memory is sequentially consistent. The words of a ring are looked at by two processes, and ring.pml shows that
 *     their fences suffice. All else belongs to Python code of one process.
 *   - Steps of Python code interleave with everything but the sections that the executor's lock excludes.
 *   - Sleeps have no time limit, so that no clock hides a lost wake-up: MAX_SLEEP_S and MAX_SLEEP_NS do not exist here.
 *     `sleep(GRACE_S)` takes any time. An idle thread may end at any time if `_retire` lets it.
 *   - The system can create threads. No error is raised. `close` is left out: it wakes all threads again and again.
 *
 * Properties
 *   - No lost wake-up: when nothing moves any more, all frames, connections and jobs that were sent have been read, and
 *     no job is queued that the limit allows to run (`Observer`). The check for cycles (pan -l) shows that every
 *     execution comes to such an end, so this is "every frame is read eventually".
 *   - At most one leader: the thread that waits on the poller is the one that `_leader` names, and is alone there.
 *   - No deadlock: no thread ends elsewhere than asleep, or in a function of a user ("invalid end state").
 *   - No more than MAX_RUNNING functions are started at once.
 *
 * Each name that test_models.py lists plants one bug. SPIN has not been shown to find those that are not listed there
 * (ALERT_CLEARED_AFTER_LOOK, RUN_IN_TWO_STEPS, BLOCK_IN_TWO_STEPS, SUBMIT_WAKES_LEADER_ONLY, WATCH_WAKES_LEADER_ONLY,
 * ARMED_FOR_EVER): no search for them has ended yet. NEVER_WAITS leaves out functions that wait, for a shorter search. */

#ifndef MAX_RUNNING
#define MAX_RUNNING 1                    /* num_worker_threads */
#endif
#ifndef FRAMES_0
#define FRAMES_0 0                       /* frames sent in ring 0 */
#endif
#ifndef FRAMES_1
#define FRAMES_1 0                       /* frames sent in ring 1 */
#endif
#ifndef STREAM_FRAMES
#define STREAM_FRAMES 0
#endif
#ifndef CONNECTIONS
#define CONNECTIONS 0
#endif
#ifndef SUBMITS
#define SUBMITS 0
#endif

#define AWAKE   0                        /* POLLER_... of ring.h */
#define ASLEEP  1
#define RUNNING 2

/* The executor */
bit  lock;
byte leader, run_number, last_run;       /* _leader, _run, _runs */
byte running, idle, ready;               /* _running, _idle, len(ready) */
bit  standing_by;                        /* the lock _standing_by */

/* The poller */
bit  is_running, is_armed;               /* _is_running, _is_armed */
bit  is_alerted;                         /* of the Waiter */
byte watched = 1;                        /* the rings that the Waiter watches, as bits */

/* The kernel */
bit  leader_event;                       /* edge-triggered in the leader's epoll: reported once */
bit  standby_event;                      /* level-triggered in the standby thread's epoll, and read by it */
byte stream, connections;                /* unread frames of a socket; connections and hang-ups that wait */
bit  stream_armed;                       /* the streams are in the standby thread's epoll, once */

/* The rings */
byte head[2], tail[2], poller[2];

/* For the properties */
byte waiting_threads;                    /* threads in `Poller.wait` or a handler */

#define IS_WATCHED(set, r) ((((set) >> (r)) & 1) == 1)
#define READABLE(set)      ((IS_WATCHED(set, 0) && head[0] != tail[0]) || (IS_WATCHED(set, 1) && head[1] != tail[1]))

inline acquire() { atomic { lock == 0 -> lock = 1 } }
inline release() { lock = 0 }

/* announce_poller; each store is a step of its own */
inline announce(set, state)
{
    if
    :: IS_WATCHED(set, 0) && poller[0] != state -> poller[0] = state
    :: else
    fi;
#if FRAMES_1
    if
    :: IS_WATCHED(set, 1) && poller[1] != state -> poller[1] = state
    :: else
    fi
#endif
}

/* Poller.run and Poller.block */
inline poller_run()
{
#ifdef WATCHES
    is_running = 1;
#endif
    announce(watched, RUNNING);
    atomic {
        if
#ifdef NO_LOOK_AFTER_RUNNING
        :: !is_alerted && has_more -> is_alerted = 1; standby_event = 1
#else
        :: !is_alerted && (has_more || READABLE(watched)) -> is_alerted = 1; standby_event = 1
#endif
        :: else
        fi;
        has_more = 0
    };
#if STREAM_FRAMES
    if
    :: !is_armed -> is_armed = 1; stream_armed = 1
    :: else
    fi
#endif
}

/* Poller.wait with the handlers: reads what there is */
inline poller_wait()
{
    atomic { waiting_threads++; assert(waiting_threads == 1 && leader == _pid && run_number == 0) };
#ifdef WATCHES
    is_running = 0;
#endif
#if STREAM_FRAMES
    if
    :: is_armed -> is_armed = 0; stream_armed = 0
    :: else
    fi;
#endif
    set = watched;                                               /* Waiter_wait */
    announce(set, AWAKE);
    do
    :: READABLE(set) ->
        if                                                       /* descriptors are looked at from time to time */
        :: found = 1
        :: skip
        fi;
        break
    :: else ->                                                   /* sleep_in_epoll */
#ifdef FLAG_AFTER_LOOK
        if
        :: READABLE(set) -> skip
        :: else -> announce(set, ASLEEP);
end_leading_mutant:
            leader_event || stream > 0 || connections > 0
        fi;
#else
        announce(set, ASLEEP);
#ifdef NO_LOOK_AFTER_ASLEEP
end_leading_mutant:
        leader_event || stream > 0 || connections > 0;
#else
end_leading:
        READABLE(set) || leader_event || stream > 0 || connections > 0;
#endif
#endif
        if
        :: leader_event || stream > 0 || connections > 0 -> found = 1
        :: else
        fi;
        announce(set, AWAKE);
        if
        :: found -> break
        :: else
        fi
    od;
    atomic {                                                     /* the handlers */
        if
        :: found -> leader_event = 0; ready = ready + stream; stream = 0; connections = 0; found = 0
        :: else
        fi;
        if
        :: IS_WATCHED(set, 0) -> ready = ready + head[0] - tail[0]; tail[0] = head[0]
        :: else
        fi;
        if
        :: IS_WATCHED(set, 1) -> ready = ready + head[1] - tail[1]; tail[1] = head[1]
        :: else
        fi;
        set = 0;
        waiting_threads--
    }
}

/* A job: takes one from the queue if there is still one, and runs its function */
inline run_job()
{
    if
    :: atomic { ready > 0 -> ready-- };
        if
        :: skip                                                  /* returns */
        :: goto blocked                                          /* never returns */
#ifndef NEVER_WAITS
        :: before_wait();
            if
            :: after_wait()
            :: goto blocked
            fi
#endif
        fi
    :: else
    fi
}

inline before_wait()
{
    acquire();
    running--;
    if
    :: leader == _pid ->
        assert(run_number != 0);
        leader = 0;
        run_number = 0;
        has_more = ready > 0;
#ifdef BLOCK_IN_TWO_STEPS
        release();
        poller_run()
#else
        poller_run();
        release()
#endif
    :: else ->
        has_place = ready > 0 && running < MAX_RUNNING;
        release();
        if
#ifndef NO_WAKE_UP_FOR_PLACE
        :: has_place -> has_place = 0; leader_event = 1
#endif
        :: else
        fi
    fi
}

inline after_wait() { atomic { lock == 0 -> running++ } }

proctype Thread()
{
    byte set, run_before;
    bit  found, has_place, has_more;

live:
end_idle:
    atomic {
        if
        :: standing_by == 0 -> standing_by = 1
#ifdef RETIRES
        :: idle > 1 && lock == 0 -> idle--; goto ended           /* _retire */
#endif
        fi
    };

stand_by:
#ifndef ALERT_CLEARED_AFTER_LOOK
    is_alerted = 0;                                              /* Poller.clear_alert */
#endif
    atomic {
        lock == 0;
        if
        :: leader == 0 || (run_number != 0 && run_number == run_before) ->
#ifndef LEAD_TAKEN_IN_TWO_STEPS
            leader = _pid; run_number = 0; idle--;
#endif
            goto leads
        :: else -> run_before = run_number
        fi
    };
#ifdef ALERT_CLEARED_AFTER_LOOK
    is_alerted = 0;
#endif
    if
    :: run_before != 0 -> skip                                   /* sleep(GRACE_S) */
    :: run_before == 0 && connections > 0 ->                     /* sleeps GRACE_S until the next look differs */
end_grace:
        leader == 0 || run_number != 0 || connections == 0
    :: run_before == 0 && connections == 0 ->                    /* Poller.stand_by */
#ifdef EVENT_READ_BEFORE_SLEEP
        standby_event = 0;
#endif
end_standing_by:
        atomic {
            standby_event || connections > 0 || (stream > 0 && stream_armed);
            if
            :: stream > 0 && stream_armed -> stream_armed = 0    /* EPOLLONESHOT */
            :: else
            fi
        };
#ifndef ARMED_FOR_EVER
        is_armed = 0;
#endif
#ifndef EVENT_READ_BEFORE_SLEEP
        standby_event = 0
#endif
    fi;
    goto stand_by;

leads:
#ifdef LEAD_TAKEN_IN_TWO_STEPS
    atomic { lock == 0 -> leader = _pid; run_number = 0; idle-- };
#endif
    run_before = 0;
    atomic {
        standing_by = 0;
        if                                                       /* _see_to_successor */
#ifndef NO_SUCCESSOR
        :: idle == 0 -> idle++; run Thread()
#endif
        :: else
        fi
    };

lead:
    if
#ifdef LIMIT_CHECKED_WITHOUT_LOCK
    :: ready > 0 && running < MAX_RUNNING ->
        acquire();
#else
    :: ready > 0 ->
        atomic {
            lock == 0;
            if
            :: running >= MAX_RUNNING -> goto wait
            :: else -> lock = 1
            fi
        };
#endif
        d_step { last_run++; run_number = last_run; running++; assert(running <= MAX_RUNNING) };
        has_more = ready > 1;
#ifdef RUN_IN_TWO_STEPS
        release();
#endif
        poller_run();
#ifndef RUN_IN_TWO_STEPS
        release();
#endif
        run_job();
        atomic {
            lock == 0 -> running--;
            if
#ifdef LEADS_AFTER_ITS_JOB
            :: leader = _pid
#else
            :: leader != _pid && leader != 0 -> goto follow
            :: leader == 0 -> leader = _pid
            :: leader == _pid
#endif
            fi;
            run_number = 0
        };
        goto lead
    :: else
    fi;
wait:
    poller_wait();
    goto lead;

follow:
    atomic {
        lock == 0;
        if
        :: ready == 0 || running >= MAX_RUNNING || leader == 0 -> goto follow_ends
        :: else -> running++; assert(running <= MAX_RUNNING)
        fi
    };
    run_job();
    atomic { lock == 0 -> running-- };
    goto follow;
follow_ends:
    atomic { lock == 0 -> idle++ };
    goto live;

blocked:
end_blocked:
    false;
ended:
    skip
}

proctype RingSender(byte r; byte frames)
{
    byte old;

    do
    :: frames == 0 -> break
    :: else ->
        head[r]++;                                               /* put_frame */
        frames--;
        if                                                       /* wake_reader */
        :: poller[r] != AWAKE ->
            d_step { old = poller[r]; poller[r] = AWAKE };
            if
            :: old == ASLEEP -> leader_event = 1
            :: old == RUNNING -> standby_event = 1
            :: else
            fi
        :: else
        fi
    od
}

proctype StreamSender()
{
    byte frames = STREAM_FRAMES;

    do
    :: frames == 0 -> break
    :: else -> stream++; frames--
    od
}

proctype Connector() { connections++ }

proctype Submitter()
{
    byte jobs = SUBMITS;

    do
    :: jobs == 0 -> break
    :: else ->
        ready++;
        jobs--;
        if
#ifndef SUBMIT_WAKES_LEADER_ONLY
        :: run_number != 0 -> standby_event = 1
#endif
        :: else ->
            if
            :: leader == 0 -> standby_event = 1
            :: else -> leader_event = 1
            fi
        fi
    od
}

proctype Watcher()
{
    watched = 3;
    if
#ifdef WATCH_WAKES_LEADER_ONLY
    :: leader_event = 1
#else
    :: is_running -> standby_event = 1
    :: else -> leader_event = 1
#endif
    fi
}

proctype Observer()
{
    timeout;
    assert(!READABLE(watched) && stream == 0 && connections == 0);
    assert(ready == 0 || running >= MAX_RUNNING)
}

init
{
    atomic {
        idle = 1;                                                /* `start` starts two; the first starts a second here */
        run Thread();
        if
        :: FRAMES_0 > 0 -> run RingSender(0, FRAMES_0)
        :: else
        fi;
        if
        :: FRAMES_1 > 0 -> run RingSender(1, FRAMES_1)
        :: else
        fi;
        if
        :: STREAM_FRAMES > 0 -> run StreamSender()
        :: else
        fi;
        if
        :: CONNECTIONS > 0 -> run Connector()
        :: else
        fi;
        if
        :: SUBMITS > 0 -> run Submitter()
        :: else
        fi;
#ifdef WATCHES
        run Watcher();
#endif
        run Observer()
    }
}
