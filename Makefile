# Needs Go and make; the race detector needs a C compiler besides. `make help` lists the targets.

GO       ?= go
# Of fuzz-http 5m, unless FUZZTIME is given.
HTTP_FUZZTIME := $(if $(FUZZTIME),$(FUZZTIME),5m)
FUZZTIME ?= 60s
NATS     ?= nats://127.0.0.1:4222
PACKAGES ?= ./...
BENCH    ?= .
ARGS     ?=
SEED     ?= 1
OLD      ?=

.DEFAULT_GOAL := help
.PHONY: help build image demo run test race fuzz bench bench-append bench-append-flat bench-project bench-project-flat bench-telemetry bench-verify soak scale e2e e2e-upgrade e2e-scale e2e-restore e2e-compose watch-storm fuzz-http lint manifests vuln verify clean

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
			{ $(GO) test -run '^$$' -timeout 0 -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x "$$(dirname "$$file")" 2>&1 </dev/null || echo "go test failed"; } | tee "$$out"; \
			if grep -q '^go test failed' "$$out"; then \
				grep -q 'context deadline exceeded' "$$out" && ! grep -q 'Failing input written' "$$out" || exit 1; \
				echo "the deadline was reported as a failure; no failing input was found"; \
			fi; \
		done; \
	done

fuzz-http: ## Send both programs what no client would for FUZZTIME (5m here), watching goroutines and memory
	@out=$$(mktemp); trap 'rm -f "$$out"' EXIT; \
	PALIMPSEST_FUZZ_LOG="$$out" $(GO) test -run '^$$' -timeout 0 -parallel 2 -fuzz '^FuzzHTTP$$' -fuzztime $(HTTP_FUZZTIME) ./internal/api; \
	cat "$$out"

bench: ## Measure the fold and the parser: time and allocations per event
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem ./internal/session ./internal/events

# With BENCH_JSON=1, JSON is all that comes on stdout.
bench-append: ## Measure appends beside raw publishes to the same server, in two minutes (BENCH_DURABILITY=always: synced; ARGS=--help)
	@$(GO) run ./bench/append $(ARGS)

bench-append-flat: ## Measure appends to sessions of up to a million events, and memory
	@$(GO) run ./bench/append --flat $(ARGS)

bench-project: ## Measure projection and reads beside bare consumers, KV writes and KV reads, in under three minutes (ARGS=--help)
	@$(GO) run ./bench/project $(ARGS)

bench-project-flat: ## Measure the bytes written to KV an event, for sessions of up to a million events
	@$(GO) run ./bench/project --flat $(ARGS)

bench-telemetry: ## Measure what traces and metrics cost, on appends and on projection, in three minutes (BENCH_JSON=1: JSON)
	@$(GO) run ./bench/append --telemetry $(ARGS)
	@$(GO) run ./bench/project --telemetry $(ARGS)

bench-verify: ## Measure verify --all beside 32 bare filtered consumers (ARGS='--events 2000000': the heavy run)
	@$(GO) run ./bench/verify $(ARGS)

soak: ## Load real programs, kill the appender again and again, check all (ARGS='-duration 1m')
	@$(GO) run ./test/soak $(ARGS)

# SCALE is sessions, events and the projector's GOMEMLIMIT.
scale: ## Project 100,000 sessions and 5 million events within a memory limit, and rebuild (SCALE=1000,50000,128MiB: less)
	PALIMPSEST_SCALE=$${SCALE:-100000,5000000,1024MiB} $(GO) test -count=1 -v -timeout 90m -run '^TestAFleetIsProjectedAndRebuilt$$' ./test/e2e

# One seed, or several of which each has its turn: SEED='1 2 3', SEED=1..20.
e2e: ## Faults drawn from SEED on a real cluster under load, then check all (SEED=1..20, ARGS='-duration 30s'; as root: in namespaces)
	@mkdir -p bin && $(GO) build -o bin/faults ./test/faults
	@failed=; for seed in $$(echo '$(SEED)' | awk '{ for (i = 1; i <= NF; i++) { n = split($$i, r, /\.\./); for (s = r[1]; s <= (n > 1 ? r[2] : r[1]); s++) print s } }'); do \
		bin/faults -seed $$seed $(ARGS) || failed="$$failed $$seed"; \
	done; [ -z "$$failed" ] || { echo "findings with seed$$failed"; exit 1; }

e2e-restore: ## Back up, wipe and restore a store of RESTORE_EVENTS (1000000) events, check all of it
	RESTORE_EVENTS=$${RESTORE_EVENTS:-1000000} $(GO) test -count=1 -v -timeout 60m -run '^TestAStoreIsRestoredFromItsBackup$$' ./test/e2e

# OLD is a commit; the latest tag, or ten commits ago, unless given.
e2e-upgrade: ## Replace programs of an earlier commit one by one under load, and go back; the same with another version of the fold (OLD=v1.2)
	@mkdir -p bin && $(GO) build -o bin/faults ./test/faults
	bin/faults -seed $(SEED) -upgrade version -old '$(OLD)' $(ARGS)
	bin/faults -seed $(SEED) -upgrade fold $(ARGS)

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

e2e-compose: image ## Take parts of the Compose stack away under the load of e2e, then check all as e2e does (ARGS='-workers 12')
	@mkdir -p bin && $(GO) build -o bin/faults ./test/faults
	bin/faults -compose -seed $(SEED) $(ARGS)

# A module of its own, so that the programs do not depend on Kubernetes and KEDA; the first run
# compiles their types, which takes minutes.
manifests: ## Check deploy/k8s against the types of Kubernetes and KEDA
	cd deploy/k8s/check && $(GO) test ./...

vuln: ## Look for known vulnerabilities in what the programs call; says so when the database cannot be reached
	@out=$$(mktemp); trap 'rm -f "$$out"' EXIT; \
	if $(GO) tool govulncheck ./cmd/... ./client >"$$out" 2>&1; then cat "$$out"; \
	elif grep -q '^govulncheck: fetching vulnerabilities' "$$out"; then cat "$$out"; echo "the vulnerability database was not reached: nothing was checked"; \
	else cat "$$out"; exit 1; fi

image: ## Build the container images palimpsest/{appender,projector,balance,nats} from scratch; nothing is pulled
	@command -v docker >/dev/null || { echo "docker is needed (Debian: apt-get install docker.io), and its daemon"; exit 1; }
	rm -rf bin/image && mkdir -p bin/image/data
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o bin/image/ ./cmd/appender ./cmd/projector ./deploy/balance
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o bin/image/nats-server github.com/nats-io/nats-server/v2
	cp "$$(for f in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do [ -e $$f ] && echo $$f && break; done)" bin/image/ca-certificates.crt
	docker build -q -t palimpsest/appender --build-arg PROGRAM=appender -f deploy/image/Dockerfile bin/image
	docker build -q -t palimpsest/projector --build-arg PROGRAM=projector -f deploy/image/Dockerfile bin/image
	docker build -q -t palimpsest/balance -f deploy/image/balance.Dockerfile bin/image
	docker build -q -t palimpsest/nats -f deploy/image/nats.Dockerfile bin/image

clean: ## Remove bin/; data/ stays
	rm -rf bin
