# Every target does its own set-up: a fresh clone, make and Python 3.11 or later are enough.
# Another Python: make PYTHON=python3.13 test. More for pytest: make test ARGS="-k rendezvous -x".

PYTHON ?= python3
ARGS ?=

VENV := .venv
DEMO_VENV := .venv-demo
BENCH_VENV := .venv-bench
PEERS_VENV := .venv-peers
CLIENTS_VENV := .venv-clients
PIP := python -m pip --disable-pip-version-check -qq
SOURCES = $(wildcard src tests benchmarks clients conformance examples)

FAST_TESTS := $(addprefix tests/,architecture backends bench cli launcher protocol security serialization) \
  tests/test_*.py --ignore tests/test_docs.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-transports test-native test-aarch64 model test-fast test-pythons test-pythons-short check baselines conformance clients bench bench-peers simulate simulate-group chaos many bench-startup bench-workloads bench-training bench-hosts floors coverage explore fuzz format clean

help:  ## say what there is (this)
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO_VENV)/.installed  ## start four workers on this machine and watch them call each other
	@$(DEMO_VENV)/bin/farcall run -n 4 examples/demo.py

test: $(VENV)/.installed  ## run all tests but the longest
	$(VENV)/bin/python -m pytest -m "not long" $(ARGS)

test-long: $(VENV)/.installed  ## the tests that take more than ten seconds each: some 3 minutes
	$(VENV)/bin/python -m pytest -m long $(ARGS)

test-pythons:  ## run the tests without torch on every other Python that is claimed and found (PATH, pyenv)
	@$(PYTHON) tests/on_pythons.py $(ARGS)

test-pythons-short:  ## the same for what depends on the version most: some 2 minutes each
	@$(PYTHON) tests/on_pythons.py --short $(ARGS)

test-fast: $(VENV)/.installed  ## the tests that need neither torch nor many processes: under two minutes, for a person at work
	$(VENV)/bin/python -m pytest -q -m "not slow and not long" $(FAST_TESTS) $(ARGS)

test-transports: $(VENV)/.installed  ## the tests of behaviour over TCP, TLS, memory, and Unix sockets without the C extension
	$(VENV)/bin/python -m pytest -q tests/behaviour --transport tcp $(ARGS)
	$(VENV)/bin/python -m pytest -q tests/behaviour --transport tls $(ARGS)
	$(VENV)/bin/python -m pytest -q tests/behaviour --transport memory $(ARGS)
	FARCALL_NATIVE=0 $(VENV)/bin/python -m pytest -q tests/behaviour $(ARGS)

test-native: $(VENV)/.installed  ## the tests of the C extension with more rounds, and on aarch64 under qemu: some 3 minutes
	FARCALL_RING_AARCH64=1 FARCALL_RING_ROUNDS=$(or $(ROUNDS),10) $(VENV)/bin/python -m pytest tests/native $(ARGS)

test-aarch64: $(VENV)/.installed  ## the tests of the rings in C, compiled for aarch64 and run under qemu
	FARCALL_RING_AARCH64=1 $(VENV)/bin/python -m pytest tests/native/test_ring_c.py -k aarch64 $(ARGS)

model: $(VENV)/.installed  ## check the models of the rings and of the lead with SPIN: some 2 minutes
	@missing=; for tool in spin gcc; do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -n "$$missing" ]; then echo "Not installed:$$missing. The Debian packages have the same names." >&2; exit 1; fi
	FARCALL_MODEL_LARGE=1 $(VENV)/bin/python -m pytest -q tests/native/test_models.py $(ARGS)

check: $(VENV)/.installed  ## formatting, lint, types, and who imports whom
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --config-file tests/mypy.ini
	$(VENV)/bin/python -m pytest -q tests/architecture

baselines: $(VENV)/.installed  ## lower the recorded counts of lint violations and retired words to what is left of them
	PYTHONPATH=tests $(VENV)/bin/python -m architecture.baselines

conformance: $(BENCH_VENV)/.installed  ## run PyTorch's own RPC tests on farcall (large download, once): ARGS="--category rref"
	$(BENCH_VENV)/bin/python -m conformance $(or $(ARGS),--category reachable)

clients: $(CLIENTS_VENV)/.clients  ## run packages that use torch's RPC on torch and on farcall (large download, once): ARGS="torchrl"
	$(CLIENTS_VENV)/bin/python -m clients $(ARGS)

bench: $(BENCH_VENV)/.installed  ## measure against torch, RPyC and raw sockets (large download, once)
	$(BENCH_VENV)/bin/python benchmarks/run.py $(ARGS)
	PYTHONPATH=benchmarks $(BENCH_VENV)/bin/python -m training.run $(filter --quick --write-readme --strict,$(ARGS))

bench-peers: $(PEERS_VENV)/.peers  ## farcall beside eight others (large download, once): ARGS="--quick", ARGS="--write-docs"
	$(PEERS_VENV)/bin/python benchmarks/compare.py $(ARGS)
	$(if $(findstring --write-docs,$(ARGS)),$(PEERS_VENV)/bin/python benchmarks/peers.py)

simulate: $(VENV)/.installed  ## run random schedules of reference counting: ARGS="--schedules 1000000"
	PYTHONPATH=tests $(VENV)/bin/python -m simulation.simulate --jobs 2 $(ARGS)

simulate-group: $(VENV)/.installed  ## groups of up to 1,000 workers join, churn and agree, in virtual time
	PYTHONPATH=tests $(VENV)/bin/python -m simulation.group $(ARGS)

chaos: $(VENV)/.installed  ## kill, stop, cut off, add and remove real workers under load: ARGS="--seconds 3600"
	PYTHONPATH=tests $(VENV)/bin/python -m simulation.chaos $(ARGS)

many: $(VENV)/.installed  ## 64 workers on this machine start, call everyone, and shut down
	FARCALL_MANY_WORKERS=64 $(VENV)/bin/python -m pytest -q tests/integration/test_many_workers.py $(ARGS)

bench-startup: $(BENCH_VENV)/.installed  ## how long 32 workers take to start, beside torch's RPC
	$(BENCH_VENV)/bin/python benchmarks/startup.py $(ARGS)

bench-workloads: $(BENCH_VENV)/.installed  ## reinforcement learning and a parameter server, beside torch's RPC
	PYTHONPATH=benchmarks $(BENCH_VENV)/bin/python -m workloads.run $(ARGS)

bench-training: $(BENCH_VENV)/.installed  ## a training step with distributed autograd, beside torch's RPC
	PYTHONPATH=benchmarks $(BENCH_VENV)/bin/python -m training.run $(ARGS)

floors: $(BENCH_VENV)/.installed  ## whether every benchmark reaches its floor in the best of up to five runs: an hour or more
	PYTHONPATH=benchmarks $(BENCH_VENV)/bin/python -m floors $(ARGS)

coverage: $(VENV)/.installed  ## which lines and branches the tests reach (without the torch edge): a report in htmlcov
	@$(VENV)/bin/python -c 'import coverage' 2>/dev/null || $(VENV)/bin/$(PIP) install coverage
	$(VENV)/bin/python -m coverage run --branch --source farcall -m pytest -q $(or $(ARGS),--ignore tests/pytorch --ignore tests/conformance)
	$(VENV)/bin/python -m coverage html -q
	$(VENV)/bin/python -m coverage report --sort cover --skip-covered

bench-hosts: $(BENCH_VENV)/.installed  ## between two hosts, in clear text and encrypted: ARGS="--quick", ARGS="--write-docs"
	PYTHONPATH=benchmarks $(BENCH_VENV)/bin/python -m hosts.run $(ARGS)

explore: $(VENV)/.installed  ## visit every state of reference counting in a small group
	PYTHONPATH=tests $(VENV)/bin/python -m simulation.explore $(ARGS)

fuzz: $(VENV)/.installed  ## throw bytes at everything that strangers reach (atheris): ARGS="-runs=2000000"
	@$(VENV)/bin/python -c 'import atheris' 2>/dev/null || $(VENV)/bin/$(PIP) install atheris
	for target in frames shared heads handshake greeting store pickles; do \
	  $(VENV)/bin/python tests/fuzz/run.py $$target $(or $(ARGS),-runs=200000) || exit 1; done

format: $(VENV)/.installed  ## format the code and fix what can be fixed
	$(VENV)/bin/ruff format $(SOURCES)
	$(VENV)/bin/ruff check --fix $(SOURCES)

clean:  ## remove all that the other targets have made
	rm -rf $(DEMO_VENV) $(VENV) .venv-3.* $(BENCH_VENV) $(PEERS_VENV) $(CLIENTS_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

$(DEMO_VENV)/.installed: EXTRAS :=
$(VENV)/.installed: EXTRAS := [dev]
$(BENCH_VENV)/.installed: EXTRAS := [peers]
$(PEERS_VENV)/.installed: EXTRAS := [bench]
$(CLIENTS_VENV)/.installed: EXTRAS := [torch]

# The stamp is written last, so a set-up that was interrupted is done again. The installation compiles the C extension.
$(DEMO_VENV)/.installed $(VENV)/.installed $(BENCH_VENV)/.installed $(PEERS_VENV)/.installed $(CLIENTS_VENV)/.installed: pyproject.toml hatch_build.py $(wildcard src/farcall/_native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  found=$$($(PYTHON) --version 2>&1) || found="not there"; \
	  echo "farcall needs Python 3.11 or later, and '$(PYTHON)' is $$found." >&2; \
	  echo "Name another one: make PYTHON=python3.13 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(@D) with $$($(PYTHON) --version), once; this can take a minute ..."
	@$(PYTHON) -m venv $(@D)
	@echo torch==2.13.0 > $(@D)/constraints
	@$(@D)/bin/$(PIP) install --constraint $(@D)/constraints --editable '.$(EXTRAS)'
	@touch $@

# What bench-peers compares with, by the names that pip knows. Each by itself: one that cannot be installed here leaves
# the others be. None may bring another torch: other versions come with gigabytes of libraries.
PEERS := torch==2.13.0 rpyc Pyro5 grpcio xoscar distributed ray torchmonarch

$(PEERS_VENV)/.peers: $(PEERS_VENV)/.installed
	@failed=; for peer in $(PEERS); do \
	  echo "Installing $$peer ..."; \
	  $(@D)/bin/$(PIP) install --constraint $(@D)/constraints "$$peer" || failed="$$failed $$peer"; \
	done; \
	if [ -n "$$failed" ]; then echo "Could not be installed, and are left out this time:$$failed" >&2; else touch $@; fi

# Each client by itself, as above. A client that could not be installed is tried again the next time.
$(CLIENTS_VENV)/.clients: $(CLIENTS_VENV)/.installed clients/catalog.py
	@$(@D)/bin/python -m clients --requirements | while read -r requirements; do \
	  echo "Installing $$requirements ..."; \
	  $(@D)/bin/$(PIP) install --constraint $(@D)/constraints $$requirements || \
	    { echo "Could not be installed, and is left out this time: $$requirements" >&2; touch $(@D)/.failed; }; \
	done; \
	if [ -e $(@D)/.failed ]; then rm $(@D)/.failed; else touch $@; fi
