"""The benchmark behind `farcall bench`, and code that the repository's own benchmarks share with it.

A *system* is something that makes remote calls: farcall, or a peer such as gRPC. A run consists of *rounds*; in each
round every system has one *turn* for each *part* of the benchmark (payload, in-flight, startup and so on). In a turn,
processes are started, and asked for a value at some *points*: payload sizes, numbers of calls in flight.

    system         the interface of a system that is measured
    farcall_rpc, payloads, reference_uses
                   farcall as such a system, what it sends, and how references are used; the adapters for other systems
                   are in the repository's benchmarks/systems
    processes      starts, asks and ends the processes of a measurement
    bootstrap, endpoint
                   the code that runs in each of those processes
    computing      threads that compute all the time, as load beside a measurement
    timing         reads the clock around calls
    machine        describes the machine, and measures how busy other programs keep it
    tables, screen
                   tables as text and as Markdown; the terminal
    effort         what to measure, and how much of it
    measurements   one turn of one system
    startup        the same for the start of many workers
    rounds         runs all turns in order
    findings       the results, and reasons for missing ones: medians, ratios, JSON
    report         tables, and the page in docs/
    plots          the same as pictures
    command        the whole run

Only the command line imports this package, and only for `farcall bench`, so workers never pay for it. Packages other
than farcall are imported inside the functions that need them.
"""
