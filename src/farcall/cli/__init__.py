"""The `farcall` command.

    main         the command line: reads the arguments, says what is wrong with them
    run          `farcall run`: what each worker is told (its environment, its command)
    bench        `farcall bench`: what is to be measured; the package `bench` does it
    supervisor   starts the workers, passes signals on, ends them all when one fails
    process      one worker's processes: the worker and what it starts
    signals      signals as events
    output       puts each worker's name before its lines
    bootstrap    the first thing a worker's process does; run as a file
    keeper       ends what the workers left when the launcher was killed; run as a file

But for `bench`, the command needs nothing of the rest of farcall but its errors and `last_words`, and imports neither
numpy nor torch: a launcher must be there at once and stay small.
"""
