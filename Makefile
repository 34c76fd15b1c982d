# Needs Go and make; the race detector needs a C compiler besides. `make help` lists the targets.

GO       ?= go
FUZZTIME ?= 60s
NATS     ?= nats://127.0.0.1:4222
PACKAGES ?= ./...
BENCH    ?= .
ARGS     ?=

.DEFAULT_GOAL := help
.PHONY: help build demo run test race fuzz bench bench-append bench-append-flat bench-project bench-project-flat soak e2e-scale watch-storm lint verify clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## Build bin/appender and bin/projector
	$(GO) build -trimpath -o bin/ ./cmd/appender ./cmd/projector

demo: build ## Show a session from its log to its messages, on real programs, and stop them again
	$(GO) build -trimpath -o bin/ ./internal/demo/play
	@bin/play

run: build ## Run both programs on ports 8080, 8081 and 4222 with the store in data/, until Ctrl-C
	$(GO) build -trimpath -o bin/ ./internal/demo/play
	@bin/play --keep

test: ## Run all tests (PACKAGES=./internal/... for some)
	$(GO) test $(PACKAGES)

race: ## Run all tests under the race detector, the programs that they start too
	PALIMPSEST_RACE=1 $(GO) test -race -timeout 40m $(PACKAGES)

# Before 1.27, go test -fuzz may report its own deadline as a failure (golang/go#75804). A
# finding says where the failing input was written; only that counts.
fuzz: ## Run every fuzz target for FUZZTIME (60s)
	@set -e; out=$$(mktemp); trap 'rm -f "$$out"' EXIT; \
	for file in $$(grep -rl --include='*_test.go' '^func Fuzz' . | sort); do \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$$file"); do \
			echo "== $$(dirname "$$file") $$target, $(FUZZTIME)"; \
			{ $(GO) test -run '^$$' -timeout 0 -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) "$$(dirname "$$file")" 2>&1 </dev/null || echo "go test failed"; } | tee "$$out"; \
			if grep -q '^go test failed' "$$out"; then \
				grep -q 'context deadline exceeded' "$$out" && ! grep -q 'Failing input written' "$$out" || exit 1; \
				echo "the deadline was reported as a failure; no failing input was found"; \
			fi; \
		done; \
	done

bench: ## Measure the fold and the parser: time and allocations per event
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem ./internal/session ./internal/events

# With BENCH_JSON=1, JSON is all that comes on stdout.
bench-append: ## Measure appends beside raw publishes to the same server, in two minutes (BENCH_DURABILITY=always: synced; ARGS=--help)
	@$(GO) run ./bench/append $(ARGS)

bench-append-flat: ## Measure appends to sessions of up to a million events, and memory
	@$(GO) run ./bench/append --flat $(ARGS)

bench-project: ## Measure projection and reads beside bare consumers, KV writes and KV reads, in two minutes (ARGS=--help)
	@$(GO) run ./bench/project $(ARGS)

bench-project-flat: ## Measure the bytes written to KV an event, for sessions of up to a million events
	@$(GO) run ./bench/project --flat $(ARGS)

soak: ## Load real programs, kill the appender again and again, check all (ARGS='-duration 1m')
	@$(GO) run ./test/soak $(ARGS)

e2e-scale: ## Kill, freeze, add and drain workers, restart servers and clusters under load, in a few minutes
	PALIMPSEST_LONG=1 $(GO) test -count=1 -v -timeout 20m -run '^TestScale' ./test/e2e

watch-storm: ## Watch sessions that are compacted without end, WATCH_STORM (20) times longer than in the tests
	WATCH_STORM=$${WATCH_STORM:-20} $(GO) test -count 1 -timeout 40m -v -run TestWatchersOutlastAStorm ./internal/projection

lint: ## Check formatting, go vet, staticcheck
	@unformatted=$$(gofmt -l .); \
	if [ -n "$$unformatted" ]; then echo "not formatted (gofmt -w them):"; echo "$$unformatted"; exit 1; fi
	$(GO) vet ./...
	$(GO) tool staticcheck ./...

verify: build ## Check every log and snapshot at NATS (NATS=nats://127.0.0.1:4222)
	bin/projector verify --all --nats '$(NATS)'

clean: ## Remove bin/; data/ stays
	rm -rf bin
