# Every target does its own set-up: a fresh clone, make and Python 3.11 or later are enough.
# Another Python: make PYTHON=python3.13 test. More for pytest: make test ARGS="-k rendezvous -x".

PYTHON ?= python3
ARGS ?=

VENV := .venv
BENCH_VENV := .venv-bench
PEERS_VENV := .venv-peers
PIP := python -m pip --disable-pip-version-check -qq
SOURCES = $(wildcard src tests benchmarks conformance examples)

.DEFAULT_GOAL := help
.PHONY: help demo test check conformance bench bench-peers simulate simulate-group chaos many bench-startup bench-workloads bench-training bench-encryption explore format clean

help:  ## say what there is (this)
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## start four workers on this machine and watch them call each other
	@$(VENV)/bin/farcall run -n 4 examples/demo.py

test: $(VENV)/.installed  ## run all tests
	$(VENV)/bin/python -m pytest $(ARGS)

check: $(VENV)/.installed  ## formatting, lint, types, and who imports whom
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -q tests/test_architecture.py

conformance: $(BENCH_VENV)/.installed  ## run PyTorch's own RPC tests on farcall (large download, once): ARGS="--category rref"
	$(BENCH_VENV)/bin/python -m conformance $(or $(ARGS),--category reachable)

bench: $(BENCH_VENV)/.installed  ## measure against torch, RPyC and raw sockets (large download, once)
	$(BENCH_VENV)/bin/python benchmarks/run.py $(ARGS)
	$(BENCH_VENV)/bin/python benchmarks/encryption.py
	PYTHONPATH=benchmarks $(BENCH_VENV)/bin/python -m training.run $(filter --quick --write-readme --strict,$(ARGS))

bench-peers: $(PEERS_VENV)/.peers  ## farcall beside eight others (large download, once): ARGS="--quick", ARGS="--write-docs"
	$(PEERS_VENV)/bin/farcall bench --peers all $(ARGS)
	$(if $(findstring --write-docs,$(ARGS)),$(PEERS_VENV)/bin/python benchmarks/peers.py)

simulate: $(VENV)/.installed  ## run random schedules of the reference protocol: ARGS="--schedules 1000000", ARGS="--books"
	$(VENV)/bin/python -m farcall.testing.simulate --jobs 2 $(ARGS)

simulate-group: $(VENV)/.installed  ## groups of up to 1,000 workers join, churn and agree, in virtual time
	$(VENV)/bin/python -m farcall.testing.group $(ARGS)

chaos: $(VENV)/.installed  ## kill, stop, cut off, add and remove real workers under load: ARGS="--seconds 3600"
	$(VENV)/bin/python -m farcall.testing.chaos $(ARGS)

many: $(VENV)/.installed  ## 64 workers on this machine start, call everyone, and shut down
	FARCALL_MANY_WORKERS=64 $(VENV)/bin/python -m pytest -q tests/integration/test_many_workers.py $(ARGS)

bench-startup: $(BENCH_VENV)/.installed  ## how long 32 workers take to start, beside torch's RPC
	$(BENCH_VENV)/bin/python benchmarks/startup.py $(ARGS)

bench-workloads: $(BENCH_VENV)/.installed  ## reinforcement learning and a parameter server, beside torch's RPC
	PYTHONPATH=benchmarks $(BENCH_VENV)/bin/python -m workloads.run $(ARGS)

bench-training: $(BENCH_VENV)/.installed  ## a training step with distributed autograd, beside torch's RPC
	PYTHONPATH=benchmarks $(BENCH_VENV)/bin/python -m training.run $(ARGS)

bench-encryption: $(VENV)/.installed  ## measure what encryption between hosts costs
	$(VENV)/bin/python benchmarks/encryption.py $(ARGS)

explore: $(VENV)/.installed  ## visit every state of a small group of the reference protocol
	$(VENV)/bin/python -m farcall.testing.explore $(ARGS)

fuzz: $(VENV)/.installed  ## throw bytes at everything that strangers reach (atheris): ARGS="-runs=2000000"
	@$(VENV)/bin/python -c 'import atheris' 2>/dev/null || $(VENV)/bin/$(PIP) install atheris
	for target in frames heads greeting store pickles; do \
	  $(VENV)/bin/python tests/fuzz/run.py $$target $(or $(ARGS),-runs=200000) || exit 1; done

format: $(VENV)/.installed  ## format the code and fix what can be fixed
	$(VENV)/bin/ruff format $(SOURCES)
	$(VENV)/bin/ruff check --fix $(SOURCES)

clean:  ## remove all that the other targets have made
	rm -rf $(VENV) $(BENCH_VENV) $(PEERS_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.installed: EXTRA := dev
$(BENCH_VENV)/.installed: EXTRA := peers
$(PEERS_VENV)/.installed: EXTRA := bench

# The stamp is written last, so a set-up that was interrupted is done again.
$(VENV)/.installed $(BENCH_VENV)/.installed $(PEERS_VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  found=$$($(PYTHON) --version 2>&1) || found="not there"; \
	  echo "farcall needs Python 3.11 or later, and '$(PYTHON)' is $$found." >&2; \
	  echo "Name another one: make PYTHON=python3.13 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(@D) with $$($(PYTHON) --version), once; this can take a minute ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/$(PIP) install --editable '.[$(EXTRA)]'
	@touch $@

# What farcall bench compares with, by the names that pip knows. Each by itself: one that cannot be installed here leaves
# the others be. None may bring another torch: other versions come with gigabytes of libraries.
PEERS := torch==2.13.0 rpyc Pyro5 grpcio xoscar distributed ray torchmonarch

$(PEERS_VENV)/.peers: $(PEERS_VENV)/.installed
	@echo torch==2.13.0 > $(@D)/constraints
	@failed=; for peer in $(PEERS); do \
	  echo "Installing $$peer ..."; \
	  $(@D)/bin/$(PIP) install --constraint $(@D)/constraints "$$peer" || failed="$$failed $$peer"; \
	done; \
	if [ -n "$$failed" ]; then echo "Could not be installed, and are left out this time:$$failed" >&2; else touch $@; fi
