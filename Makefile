# Every target explains itself: `make help`. All but `help`, `clean` and `lock` bring their own virtual environment.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
export PIN_CASES ?= ../shared/cases
.DEFAULT_GOAL := help
.PHONY: help setup demo up down kafka topics token job crm chessboard test test-messaging test-pooled check lint types contracts queues acls openapi requirements bench chaos lock clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: ## make .venv from requirements.lock (needs Python 3.11 or newer and nothing else)
	@command -v $(PYTHON) >/dev/null || { echo "setup: no $(PYTHON) on PATH (make PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) libs/devstack/setup_env.py

demo: setup ## run the main job on embedded Postgres and Kafka and show what happens (PIN_KAFKA=apache|host:port)
	@$(BIN)/python -m devstack demo

up: setup ## start the whole platform and stay; Ctrl-C stops everything
	@$(BIN)/python -m devstack up

down: setup ## stop a platform that `make up` left running in another terminal
	@$(BIN)/python -m devstack down

kafka: setup ## fetch Apache Kafka from Maven Central and try it (then: make test PIN_KAFKA=apache)
	@$(BIN)/python -m devstack kafka

topics: setup ## create the contracts' topics on BOOTSTRAP=host:port and report drift (PIN_KAFKA_*: how to reach it)
	@PIN_ENV=$${PIN_ENV:-development} PIN_KAFKA_SECURITY=$${PIN_KAFKA_SECURITY:-plaintext} $(BIN)/python -m chassis.contracts topics contracts --bootstrap $(or $(BOOTSTRAP),127.0.0.1:9092) --replicas $(or $(REPLICAS),1)

token: setup ## print an access token for the running development platform (TENANT=, SUB=, ROLES=, SCOPE=)
	@$(BIN)/python -m devstack token

job: setup ## run one cycle of a job of the running development platform (JOB=timeline-overdue, SERVICE=crm)
	@$(BIN)/python -m devstack job $(or $(JOB),timeline-overdue) --service $(or $(SERVICE),crm)

crm: setup ## run a verb of crm on the running development platform (VERB="audit verify", "dead-letters list", "outbox parked")
	@$(BIN)/python -m devstack crm $(VERB)

chessboard: setup ## run a verb of chessboard on the running development platform (VERB="dead-letters list", "outbox parked")
	@$(BIN)/python -m devstack chessboard $(VERB)

test: setup ## run the tests on embedded Postgres and Kafka
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup tests $(ARGS)

test-messaging: setup ## run the messaging and fault tests only (with PIN_KAFKA=apache on Apache Kafka)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "messaging or chaos" tests $(ARGS)

test-pooled: setup ## run the database tests behind pgbouncer in transaction mode (says so where it is not installed)
	@if command -v pgbouncer >/dev/null || test -x /usr/sbin/pgbouncer; then \
	  PIN_POOLER=pgbouncer $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup tests/services tests/libs/chassis \
	    -m "not messaging and not chaos" $(ARGS); \
	elif [ -n "$$CI" ]; then echo "test-pooled: pgbouncer is not installed (Debian package pgbouncer)" >&2; exit 1; \
	else echo "test-pooled: skipped, pgbouncer is not installed (Debian package pgbouncer)"; fi

check: lint types contracts requirements test ## everything that CI runs before the tests on Apache Kafka

lint: setup ## formatting, lint, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports

types: setup ## strict types
	@$(BIN)/mypy libs/*/src services/*/src

contracts: setup ## contract files: our rules, evolution, old records; and the foreign parser (needs npm; says so without)
	@$(BIN)/python -m chassis.contracts check contracts --on $$(date -u +%F)
	@$(BIN)/python -m devstack judge-contracts

queues: setup ## write contracts/QUEUES.md: every topic and queue with who answers for it
	@$(BIN)/python -m chassis.contracts queues contracts

acls: setup ## print the Kafka permissions that the contracts imply (BOOTSTRAP=, FORMAT=commands|json, CONFIG=client file)
	@$(BIN)/python -m chassis.contracts acls contracts --bootstrap $(or $(BOOTSTRAP),127.0.0.1:9092) --format $(or $(FORMAT),commands) $(if $(CONFIG),--command-config $(CONFIG))

openapi: setup ## renew contracts/openapi from the code (RELEASE=1: partners may rely on it from now on)
	@$(BIN)/python tests/contracts/openapi_snapshots.py $(if $(RELEASE),--release)

requirements: setup ## requirement id -> tests or waiver; fails for a due id that has neither
	@$(BIN)/python tests/requirements_report.py $(ARGS)

bench: setup ## measure, every figure a ratio within one run; JSON in .pin/bench.json (Apache Kafka where present)
	@$(BIN)/python -m tests.bench $(ARGS)

chaos: setup ## every kind of fault under load, for minutes (CHAOS_FAULTS=40, CHAOS_KILLS=20, CHAOS_SEED=, CHAOS_ONLY=)
	@CHAOS_FAULTS=$(or $(CHAOS_FAULTS),40) CHAOS_KILLS=$(or $(CHAOS_KILLS),20) $(BIN)/python -m pytest -s -m chaos tests/chaos $(ARGS)

lock: setup ## renew requirements.lock from the pyproject files
	@$(BIN)/uv pip compile pyproject.toml --all-extras --group dev --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --no-emit-package bizcal --no-emit-package chassis --no-emit-package devstack \
	  --no-emit-package crm --no-emit-package chessboard --quiet --upgrade --output-file requirements.lock

clean: ## remove what the targets made (.venv, .pin, caches)
	@rm -rf .venv .pin .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
