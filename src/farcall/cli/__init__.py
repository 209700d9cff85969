"""The `farcall` command.

main     parses the arguments, calls the subcommand, reports wrong arguments
run      `farcall run`: works out what each worker is started with; `farcall.launcher` starts them
bench    `farcall bench`: the options of the benchmark; `farcall.bench` measures
"""
