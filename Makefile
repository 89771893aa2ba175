# `make up` and `make test` set themselves up in .venv.
# TORCH chooses the build of torch; the pin keeps a CPU machine from fetching another with CUDA.
PYTHONS := python3.11 python3.12 python3
# One name at a time, because some shells look up only the first one.
PYTHON ?= $(or $(firstword $(foreach name,$(PYTHONS),$(shell command -v $(name)))),$(error none of $(PYTHONS) is here))
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Where `observe-test` and `postgres` unpack Debian packages that the machine lacks.
UNPACKED := build/debian
export PATH := $(PATH):$(CURDIR)/$(UNPACKED)/usr/bin

.PHONY: setup up test triton-3.6 python-3.12-test arm worst-bodies compose-test clients-test public-clients-test agents-test agents smg-test dynamo-test nixl-test s3-test ui-test observe-test postgres lint lock sbom protos docs bench chaos

setup: $(VENV)/.installed

# requirements/ holds the version and the hashes of all installed packages except torch, whose build
# TORCH chooses; --no-deps, because the files are complete.
LOCKED := install -qq --require-hashes --no-deps -r
$(VENV)/.installed: pyproject.toml requirements/dev.txt
	@echo "installing into $(VENV) (a few minutes) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(LOCKED) requirements/dev.txt
	$(BIN)/pip install -qq $(TORCH)
	$(BIN)/pip install -qq --no-deps --no-build-isolation --editable .
	touch $@

TOOLS := build/tools
$(TOOLS)/.installed: requirements/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip $(LOCKED) requirements/tools.txt
	touch $@

# Writes requirements/ from pyproject.toml, for Python 3.11 and later. UPGRADE=--upgrade takes newer
# versions than those in the files.
LOCK = $(TOOLS)/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate \
	--no-emit-package torch --custom-compile-command 'make lock' $(UPGRADE) pyproject.toml
# Images can have these extras (docs/deploy-docker.md).
IMAGE_EXTRAS := worker transformers nixl far buckets kv-events postgres
lock: $(TOOLS)/.installed
	$(LOCK) --extra worker --extra transformers --extra dev --group build -o requirements/dev.txt
	$(LOCK) -c requirements/dev.txt -o requirements/services.txt
	for extra in $(IMAGE_EXTRAS); do $(LOCK) -c requirements/dev.txt --extra $$extra -o requirements/$$extra.txt || exit 1; done
	$(LOCK:pyproject.toml=--group) build -o requirements/build.txt
	$(LOCK:pyproject.toml=--group) tools -o requirements/tools.txt

# Lists the installed packages, with licences, in CycloneDX's format; OF is the environment's
# Python.
OF ?= $(BIN)/python
sbom: setup $(TOOLS)/.installed
	$(TOOLS)/bin/cyclonedx-py environment $(OF) --pyproject pyproject.toml --mc-type application \
		--gather-license-texts --output-reproducible --of JSON -o build/sbom.json

# Serves a model that chats, 93 MB from the package index; DEMO=tiny: the small one that is shipped.
up: setup
	$(BIN)/quire up --demo --detach $(if $(filter tiny,$(DEMO)),--model models/quire-tiny-python)

# How many processes of pytest share the tests. One that has none left takes half of another's.
TESTERS ?= 2
test: setup lint
	$(BIN)/pytest -n $(TESTERS) --dist worksteal

# Installs the Triton that torch 2.11 has on GPU machines; tests/kernels/test_compile.py then compiles
# every kernel with it, too.
OTHER_TRITON := build/triton-3.6
triton-3.6: $(OTHER_TRITON)
$(OTHER_TRITON): | setup
	$(BIN)/pip install -qq --no-deps --target $@ triton==3.6.0

# Installs a compiler and an emulator for ARM, if they can be had; tests/kernels/test_other_cpus.py then
# runs the C kernels there, too.
arm:
	command -v aarch64-linux-gnu-gcc && command -v qemu-aarch64 || \
		tests/debian_packages.sh arm gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user

# Imports all processes under the Python and numpy of GPU machines; skipped by name without that
# Python. TORCH_3_12, such as torch==2.11.0, is a large download; without it, only the syntax of
# modules that need torch is checked.
PYTHON_3_12 ?= python3.12
TORCH_3_12 ?=
ENV_3_12 := build/python-3.12
python-3.12-test:
	if $(PYTHON_3_12) --version; then \
		$(PYTHON_3_12) -m venv $(ENV_3_12) && \
		$(ENV_3_12)/bin/pip $(LOCKED) requirements/worker.txt && \
		$(if $(TORCH_3_12),$(ENV_3_12)/bin/pip install -qq $(TORCH_3_12) && ,)\
		$(ENV_3_12)/bin/python -m tests.import_all; \
	else echo "skipped: there is no $(PYTHON_3_12)"; fi

# Builds the images and runs compose.yaml on this machine's Docker engine. BASE_IMAGE, PIP_CONFIG_FILE
# and TORCH choose what they are built from (docs/deploy-docker.md).
compose-test: setup
	$(BIN)/python -m tests.compose.engine
	$(BIN)/pytest -m docker tests/compose

# Tests the clients in other languages against a live service; skips languages without a toolchain
# by name.
clients-test: setup
	clients/toolchains.sh
	$(BIN)/pytest -m clients -rs tests/clients

# Tests public clients whose requirements conflict with the tests', or with each other's (LiteLLM
# wants an older openai than the Agents SDK does); they get their own environments.
PUBLIC_CLIENTS := build/public-clients
OPENAI_AGENTS := build/openai-agents
LM_EVAL := build/lm-eval
public-clients-test: setup agents
	test -x $(PUBLIC_CLIENTS)/bin/python || $(PYTHON) -m venv $(PUBLIC_CLIENTS)
	$(PUBLIC_CLIENTS)/bin/pip install -qq instructor litellm
	test -x $(LM_EVAL)/bin/python || $(PYTHON) -m venv $(LM_EVAL)
	$(LM_EVAL)/bin/pip install -qq 'lm-eval[api]>=0.4.10,<0.5' transformers
	PUBLIC_CLIENTS_PYTHON=$(PUBLIC_CLIENTS)/bin/python LM_EVAL_PYTHON=$(LM_EVAL)/bin/python $(WITH_AGENTS) \
		$(BIN)/pytest -rs -m public_clients tests/e2e tests/unit/router

# Tests the agents among them: the Agents SDK, Codex and Claude Code; those that cannot be had are
# skipped by name.
AGENTS := build/agents
WITH_AGENTS = OPENAI_AGENTS_PYTHON=$(OPENAI_AGENTS)/bin/python PATH="$(CURDIR)/$(AGENTS)/node_modules/.bin:$$PATH"
agents-test: setup agents
	$(WITH_AGENTS) $(BIN)/pytest -rs -m public_clients tests/unit/router/openai tests/unit/router/anthropic tests/e2e/test_command_line_agents.py tests/e2e/test_public_clients.py -k "agents or codex or calls_a_tool"

agents:
	test -x $(OPENAI_AGENTS)/bin/python || $(PYTHON) -m venv $(OPENAI_AGENTS)
	ls -d $(OPENAI_AGENTS)/lib/*/site-packages/agents > /dev/null 2>&1 || $(OPENAI_AGENTS)/bin/pip install -qq openai-agents || true
	test -x $(AGENTS)/node_modules/.bin/codex || ! command -v npm \
		|| npm install --silent --prefix $(AGENTS) @anthropic-ai/claude-code @openai/codex || true

# Tests the Shepherd Model Gateway, from the package index, in front of two cells; skipped by name
# if it cannot be had. KILLS=30 kills more processes behind it.
SMG := build/smg
KILLS ?= 6
smg-test: setup
	test -x $(SMG)/bin/smg || { $(PYTHON) -m venv $(SMG) && $(SMG)/bin/pip install -qq 'smg>=1.13,<2'; } || true
	SMG=$(SMG)/bin/smg KILLS=$(KILLS) $(BIN)/pytest -m smg -rs tests/smg

# Tests Dynamo's index of KV and its frontend before two cells, in an environment of its own; skipped
# by name if it cannot be had.
DYNAMO := build/dynamo
dynamo-test: setup
	ls -d $(DYNAMO)/lib/*/site-packages/dynamo > /dev/null 2>&1 || { $(PYTHON) -m venv $(DYNAMO) && $(DYNAMO)/bin/pip install -qq 'ai-dynamo-runtime>=1.6,<2'; } || true
	DYNAMO=$(DYNAMO)/bin/python KILLS=$(KILLS) $(BIN)/pytest -m dynamo -rs tests/dynamo

# Tests KV transfer by NIXL, from the package index, installed beside the environment (it needs no
# CUDA).
NIXL := build/nixl
nixl-test: setup
	test -d $(NIXL)/nixl || $(BIN)/pip install -qq --no-deps --target $(NIXL) 'nixl>=1.5,<2' 'nixl-cu12>=1.5,<2'
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(NIXL) $(BIN)/pytest -rs tests/e2e/test_nixl.py

# Tests the far tier on a local S3 server. Its packages conflict with others about python-dateutil.
S3 := build/s3
s3-test: setup
	test -d $(S3)/moto || $(BIN)/pip install -qq --target $(S3) 'moto[s3]>=5.2,<6' 'flask>=3.1,<4' 'flask-cors>=6,<7' s3fs
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(S3) $(BIN)/pytest -rs tests/unit/gpu_worker/kv/test_far_store.py

# Tests the web page in a browser; skipped by name if there is no Chromium and none can be
# installed.
ui-test: setup
	$(BIN)/python -m docs.generate.browser || tests/debian_packages.sh ui chromium
	$(BIN)/pytest -m browser -rs tests/browser

# Tests metrics with a real Prometheus; skipped by name if there is none and none can be installed.
observe-test: setup
	command -v prometheus || tests/debian_packages.sh --into $(UNPACKED) observe prometheus
	$(BIN)/pytest -m 'observe or not observe' -rs tests/observe

# Unpacks PostgreSQL; tests that need it are skipped by name if there is none and none can be had.
postgres:
	ls /usr/lib/postgresql/*/bin/initdb $(UNPACKED)/usr/lib/postgresql/*/bin/initdb 2>/dev/null | grep . \
		|| tests/debian_packages.sh --into $(UNPACKED) postgres postgresql

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

protos: setup
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. --grpc_python_out=. protos/quire/*/*.proto

docs: setup
	$(BIN)/python -m docs.generate
	$(BIN)/python -m docs.generate.screenshots

bench: setup
	$(BIN)/python bench/serve.py

# Searches for a minute for the request that holds a router's event loop the longest.
worst-bodies: setup
	$(BIN)/python bench/worst_bodies.py --minutes 1

# Kills and stops processes and cuts links under live streams, for about half an hour.
chaos: setup
	$(BIN)/python bench/chaos.py --kills 200
