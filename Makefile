# Everything a person types. Each target first looks whether what it needs is
# installed (scripts/setup.sh does nothing when it is), then builds and runs.

BINARIES := $(or $(CARGO_TARGET_DIR),target)/release
# Lab output is a person's; results of `bench` are kept in the repository.
DEMO_FLAGS ?=
BENCH_FLAGS ?=
SOAK_FLAGS ?=

.DEFAULT_GOAL := help
.PHONY: help build demo test lint bench soak steady mutants fuzz guest guest-agent guest-demo

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

build: ## Build Strata (release)
	@scripts/setup.sh build
	cargo build --release --workspace --locked

demo: ## Redis in DRAM, on zram and on Strata, side by side (under five minutes)
	@scripts/setup.sh demo
	cargo build --release --workspace --locked
	$(BINARIES)/strata-lab demo $(DEMO_FLAGS)

guest-demo: ## Strata inside a guest, over (emulated) persistent memory, to try (under five minutes)
	@scripts/setup.sh disk
	cargo build --release --workspace --locked
	$(BINARIES)/strata-lab guest-demo $(DEMO_FLAGS)

test: ## Format, lints, unit tests, and programs under real pressure
	@scripts/setup.sh test
	@scripts/setup.sh guest || echo "make: without kernels for guests; what only those show will be skipped" >&2
	@scripts/setup.sh criu || echo "make: without CRIU; what needs it will be skipped" >&2
	@scripts/test.sh

lint: ## Format and lints only
	@scripts/setup.sh build
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

bench: ## Interleaved comparisons with confidence intervals, into bench/results (an hour; ROW=name: one)
	@scripts/setup.sh bench
	@$(if $(filter compile,$(ROW)),scripts/setup.sh compile)
	@$(if $(filter density figure3 figure4 instances,$(ROW)),scripts/setup.sh disk)
	cargo build --release --workspace --locked
	-@scripts/memtierd.sh
	$(BINARIES)/strata-lab bench $(if $(ROW),--only $(ROW)) $(BENCH_FLAGS)

soak: ## The program tests for longer, with hundreds of worker deaths
	@scripts/setup.sh test
	cargo build --release --workspace --lib --bins --examples --locked
	tests/run.sh --soak $(SOAK_FLAGS)

steady: ## The tests five times, twice with one core busy: none may be flaky
	@scripts/setup.sh test
	@scripts/steady.sh

mutants: ## Break ten lines, one after the other: do the tests notice?
	@scripts/setup.sh test
	@tests/mutants.py

fuzz: ## What strangers send, under a coverage-guided fuzzer (SECONDS=60 for each target)
	@scripts/setup.sh build
	scripts/fuzz.sh $(or $(SECONDS),60)

guest-agent: ## The agent for the inside of a guest, linked statically
	@scripts/setup.sh build
	@scripts/guest-agent.sh

guest: ## Of the tests, only what other kernels show in emulated guests
	@scripts/setup.sh guest
	@scripts/setup.sh criu || echo "make: without CRIU; what needs it will be skipped" >&2
	cargo build --release --workspace --locked
	tests/run.sh --only guest-
