"""The side-by-side benchmark: `farcall bench`, and what `make bench` of the repository shares with it.

    systems/       farcall and its peers, one module for each: how its ends start and what they can do
    processes      the processes of a measurement: started, asked and ended here
    bootstrap, endpoint
                   what runs in each of them
    timing         where the clock is read
    machine        what the run stood on, and who else was using it
    tables, screen
                   tables as text and as Markdown; the terminal
    effort         what is measured, and how much of it
    measurements   one turn of one system
    startup        the same for the start of many workers
    rounds         all turns in their order
    findings       what was found, and what could not be: medians, ratios, JSON
    report         tables and the page in docs/
    plots          the same as pictures
    command        puts them together

Nothing but the command line imports it, and that only when it is asked to: a worker never pays for it. Packages that
are not farcall's own are imported inside the functions that need them.
"""
