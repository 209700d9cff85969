"""The launcher behind `farcall run`: it starts the workers of a group on one host and ends all of them together.

    supervisor       the event loop: starts workers, copies their output, forwards signals, ends the run
    worker_process   one worker and the processes that it starts
    output           puts the worker's name before each of its lines
    signals          turns signals into bytes on a pipe, so that the event loop can wait for them
    bootstrap        the first code that runs in a worker's process; run as a file
    keeper           kills the processes that workers have started if the launcher itself is killed; run as a file
    exit_report      lets a worker tell the launcher that it failed because of another worker

The launcher starts fast and stays small: it imports nothing of farcall but `errors`, and neither numpy nor torch.
"""
