# Every target sets up what it needs; nothing has to be done by hand before.
#
#   make serve     a broker on loopback, data in ./headrace-data
#   make test      the whole suite; its parts are lint (ruff, mypy, import-linter) and unit (pytest)
#
# Another Python: make PYTHON=python3.12. Arguments for the broker: make serve ARGS='--log-format json'.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
ARGS ?=
SECONDS_EACH ?= 60
# `python3 -m venv` needs python3-venv on Debian; without pip it does not, and the outer pip can serve the inner Python.
PIP := $(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python
ROOMS := core_log filtering delay controller gateways spark
# Java and Node, where the machine has none, are put here (interop/runtimes.py).
RUNTIMES := $(CURDIR)/$(VENV)/runtimes
export PATH := $(RUNTIMES)/bin:$(PATH)
# Where it is set, each of the hundreds of brokers that the suite starts would compile all of its sources: a second of CPU.
unexport PYTHONDONTWRITEBYTECODE
# Runs one part of the suite and says how long it took.
# The shell ends at the first command that fails: so write `a; b`, and not `a && b`, of which it forgives the first.
part = @start=$$(date +%s); echo "== $(1)"; $(2); echo "== $(1): $$(( $$(date +%s) - start )) s"

.PHONY: serve test lint unit runtimes interop bench bench-delay bench-spark spark-cluster sim sim-delay kill-delay walks mutants crash fuzz chaos flood security clean

serve: $(VENV)/base
	@exec $(BIN)/headrace serve $(ARGS)

test: $(VENV)/dev runtimes
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory unit

lint: $(VENV)/dev
	$(call part,ruff,$(BIN)/ruff check .; $(BIN)/ruff format --check .)
	$(call part,mypy,$(BIN)/mypy)
	$(call part,import-linter,$(BIN)/lint-imports)

# Some files at a time: most of the time of the suite is waiting for sockets, disks and processes.
WORKERS ?= 3
unit: $(VENV)/dev
	$(call part,pytest,$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --durations=40 --durations-min=4 $(ARGS))

# The claims of speed, one file each, beside the limits of the machine they ran on.
bench: $(VENV)/dev
	@$(MAKE) --no-print-directory -C bench all
	$(call part,bench,$(BIN)/python -m bench.run $(ARGS))

# What a careful reader of code would flag: shells, temporary files, weak hashes, pickles, SQL made of text. The rules on
# assert (ours stay on) and on random (it is handed in, never for secrets) do not fit this house.
security: $(VENV)/dev
	$(call part,security,$(BIN)/ruff check --select S --ignore S101$(comma)S311 src $(ROOMS))

# Other people's clients, and the kill -9 loop for a minute. One that is not installed fails it, but for
# ARGS=--allow-missing; ARGS='--only bunny' runs one.
interop: $(VENV)/dev runtimes
	$(call part,interop,$(BIN)/python -m interop.run $(ARGS))

crash: $(VENV)/dev
	$(call part,crash,$(BIN)/python -m tests.core_log.power crash $(ARGS))

# The delay engine against an oracle, through crashes and clocks that are set: 100,000 operations.
sim-delay: $(VENV)/dev
	$(call part,sim-delay,$(BIN)/python -m tests.delay.simulation run $(ARGS))

# kill -9 while 100,000 parked messages fire, and 10,000 cancelled at the tick at which they are due.
kill-delay: $(VENV)/dev
	$(call part,kill-delay,COUNT=100000 RACES=10000 $(BIN)/python -m pytest -q tests/delay/test_kill.py tests/delay/test_delays.py -k 't3 or t4')

N ?= 10000000
bench-delay: $(VENV)/dev
	$(call part,bench-delay,$(BIN)/python -m bench.delay $(N); $(BIN)/python -m bench.delay_amqp)

# Spark reading the log beside Spark reading Parquet; SCALE=0.1 with a tenth of the data.
bench-spark: $(VENV)/dev runtimes
	$(call part,bench-spark,$(BIN)/python -m bench.spark)

# What takes more JVMs than the suite should start: a standalone master with two workers, and a driver under kill -9.
spark-cluster: $(VENV)/dev runtimes
	$(call part,spark-cluster,$(BIN)/python -m pytest -q tests/spark/proof_cluster.py tests/spark/proof_kill.py $(ARGS))

# A million distinct topics over MQTT: as messages, as retained messages and as subscriptions.
flood: $(VENV)/dev
	$(call part,flood,$(BIN)/python -m pytest -q -s tests/gateways/mqtt/proof_flood.py $(ARGS))

mutants: $(VENV)/dev
	$(call part,mutants,$(BIN)/python -m tests.core_log.power mutants $(ARGS))
	$(call part,mutants of the delay engine,$(BIN)/python -m tests.delay.simulation mutants $(ARGS))
	$(call part,mutants of the protocol,$(BIN)/python -m tests.simulation.partition_stories)
	$(call part,mutants that tests tell,$(BIN)/python -m tests.simulation.directed)
	$(call part,mutants of the cluster,$(BIN)/python -m tests.simulation.cluster mutants $(ARGS))

# Hostile octets for each parser, SECONDS of them each.
fuzz: $(VENV)/fuzz
	$(call part,fuzz,for target in tests/fuzz/*.py; do echo "$$target"; $(BIN)/python $$target -max_total_time=$(SECONDS_EACH) -print_final_stats=1 $(ARGS); done)

# Random walks over one shard with three replicas: the protocol as it is, then each planted mistake.
WALKS ?= 30000
walks: $(VENV)/dev
	$(call part,walks,$(BIN)/python -m tests.simulation.partition_walk $(WALKS))
	$(call part,planted,$(BIN)/python -m tests.simulation.partition_stories)

# Whole clusters in one process, by a seed each: what the ledger (bench/sim-ledger.jsonl) does not have of these sources.
SEEDS ?= 1-1000
sim: $(VENV)/dev
	$(call part,sim,$(BIN)/python -m tests.simulation.cluster run --seeds $(SEEDS))

chaos: $(VENV)/dev
	$(call part,chaos,$(BIN)/python -m interop.cluster.chaos $(ARGS))

runtimes: $(VENV)/dev
	@$(BIN)/python interop/runtimes.py $(RUNTIMES)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("headrace needs Python 3.11 or later: make PYTHON=...")'
	$(PYTHON) -m venv --without-pip $(VENV)

$(VENV)/base: pyproject.toml | $(BIN)/python
	$(PIP) install -q -e .
	@touch $@

$(VENV)/fuzz: $(VENV)/dev
	$(PIP) install -q -e '.[fuzz]'
	@touch $@

$(VENV)/dev: pyproject.toml | $(BIN)/python
	$(PIP) install -q -e '.[dev,spark]'
	@touch $@ $(VENV)/base

clean:
	rm -rf $(VENV) dist build

comma := ,
