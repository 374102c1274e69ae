# Two commands do everything, set-up included:
#   make train   trains the tiny recipe on real text and draws output/loss.png
#   make test    runs the tests, two files at a time (JOBS=N for more)
# and with more time:
#   make cluster trains the tiny recipe on four processes in two layouts, draws output/cluster.png, and compiles
#                a rank of the 105B recipe
#   make claims           runs the quick commands behind the numbers of README and docs, and compares
#   make test-torch          the comparisons with torch, which it installs
#   make test-slow GROUP=... the long tests of a group; `make test-slow` lists the groups
# Each takes MINDSPORE=2.10.0, with MindFormers 2.1.0, in an environment of its own (.venv-2.10.0).

TRAIN_2.9.0  := train
TRAIN_2.10.0 := train210
MINDFORMERS_2.9.0  := mindformers
MINDFORMERS_2.10.0 := mindformers21

PYTHON ?= $(shell command -v python3.11 || command -v python3.10 || command -v python3)
MINDSPORE ?= 2.9.0
VENV   ?= .venv$(if $(filter 2.9.0,$(MINDSPORE)),,-$(MINDSPORE))
JOBS   ?= 2
RECIPE ?= telechat3_moe/pretrain_tiny.yaml
BIN    := $(VENV)/bin
TRAIN  := $(or $(TRAIN_$(MINDSPORE)),$(error MINDSPORE=$(MINDSPORE): 2.9.0 or 2.10.0 expected))
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(JOBS)

# Without `make clean`, set-up is skipped until a file that decides it changes.
TRAIN_READY := $(VENV)/.ready-train
TEST_READY  := $(VENV)/.ready-test
TORCH_READY := $(VENV)/.ready-torch
DOCS_READY  := $(VENV)/.ready-docs

LIBRARIES := ops/libtelechat_ops.so tools/plan/native/libtelechat_planner.so

.PHONY: train cluster test test-torch test-slow claims lint docs clean

train: $(TRAIN_READY) $(LIBRARIES)
	$(BIN)/telechat-moe data build --recipe $(RECIPE)
	$(BIN)/telechat-moe train $(RECIPE) --resume
	@echo "To use the command telechat-moe in this shell: . $(BIN)/activate"

cluster: $(TRAIN_READY) $(LIBRARIES)
	$(BIN)/telechat-moe data build --recipe $(RECIPE)
	$(BIN)/python -m benchmarks.cluster
	$(BIN)/telechat-moe dryrun telechat3_moe/pretrain_105b_a4b_4k.yaml --rank 136 --html output/dryrun_105b.html

test: $(TEST_READY) $(LIBRARIES)
	$(PYTEST) --dist loadfile -m "not slow"

test-torch: $(TORCH_READY) $(LIBRARIES)
	$(PYTEST) --dist loadfile -m "torch and not slow"

test-slow: $(TORCH_READY) $(LIBRARIES)
	$(PYTEST) --dist loadgroup --slow-group "$(GROUP)"

claims: $(TORCH_READY) $(LIBRARIES)
	$(BIN)/python -m benchmarks.claims

lint: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(DOCS_READY)
	$(BIN)/python -m docs.generate.recipes_page > docs/recipes.md
	$(BIN)/python -m docs.generate.json_schema > recipes/schema.json
	$(BIN)/python -m benchmarks.claims --page
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir output/site

clean:
	rm -rf .venv .venv-2.10.0 $(VENV) build *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v in ((3, 10), (3, 11)) else f"Python 3.10 or 3.11 is needed, found {v[0]}.{v[1]}; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(TRAIN_READY): $(BIN)/python setup.py pyproject.toml
	$(INSTALL) -e '.[$(TRAIN)]'
	touch $@

# The install has built them; this is for sources that changed since.
$(LIBRARIES): $(wildcard ops/csrc/*.* ops/csrc/*/*.* tools/plan/native/*.cc tools/plan/native/*.h) | $(TRAIN_READY)
	$(BIN)/python -m telechat_moe.ops.build

$(TEST_READY): $(TRAIN_READY)
	$(INSTALL) -e '.[$(TRAIN),test,dev,$(MINDFORMERS_$(MINDSPORE))]'
	$(if $(filter 2.10.0,$(MINDSPORE)),$(INSTALL) --no-deps mindformers==2.1.0)
	touch $@

$(TORCH_READY): $(TEST_READY)
	$(INSTALL) torch==2.13.0
	$(INSTALL) --no-deps megatron-core==0.16.1 mindstudio-probe==26.2.0
	$(INSTALL) einops pandas pytz tensorboard
	touch $@

$(DOCS_READY): $(TEST_READY)
	$(INSTALL) -e '.[docs]'
	touch $@
