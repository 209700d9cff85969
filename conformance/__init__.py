"""PyTorch's own tests of its RPC framework, run on farcall: `make conformance`, or `python -m conformance`.

The tests are those of the installed torch, unchanged; not a line of them is here. README.md says how to run them and
what is out of reach. The way of a test, from the outside in:

- `command`  reads the arguments, shows progress and table, decides about the exit status;
- `runner`   starts one nursery, hands it tests, and gets outcomes;
- `nursery`  a process that has torch and the tests loaded, and forks a warden for every test;
- `warden`   keeps the time limit of one test and leaves none of its processes behind;
- `suite`    torch's tests: what there is, and one of them run.

Beside them `categories` (which test is of which kind), `outcomes` (how a test ended, and why), `report` (the table, the
files), and for `suite` alone `stand_ins` (modules that cannot be imported) and `native` (who starts torch's agent).
"""
