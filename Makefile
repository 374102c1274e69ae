# Two commands do everything, set-up included:
#   make train   trains the tiny recipe on real text and draws output/loss.png
#   make test    runs the tests, two files at a time (JOBS=N for more)
# and with more time:
#   make cluster trains the tiny recipe on four processes in two layouts, draws output/cluster.png, and compiles
#                a rank of the 105B recipe

PYTHON ?= $(shell command -v python3.11 || command -v python3.10 || command -v python3)
VENV   ?= .venv
JOBS   ?= 2
RECIPE ?= telechat3_moe/pretrain_tiny.yaml
BIN    := $(VENV)/bin

# Without `make clean`, set-up is skipped until a file that decides it changes.
TRAIN_READY := $(VENV)/.ready-train
TEST_READY  := $(VENV)/.ready-test

LIBRARY := ops/libtelechat_ops.so

.PHONY: train cluster test test-slow lint docs clean

train: $(TRAIN_READY) $(LIBRARY)
	$(BIN)/telechat-moe data build --recipe $(RECIPE)
	$(BIN)/telechat-moe train $(RECIPE) --resume

cluster: $(TRAIN_READY) $(LIBRARY)
	$(BIN)/telechat-moe data build --recipe $(RECIPE)
	$(BIN)/python -m benchmarks.cluster
	$(BIN)/telechat-moe dryrun telechat3_moe/pretrain_105b_a4b_4k.yaml --rank 136 --html output/dryrun_105b.html

# Real processes are killed and stopped while others compute: a test that fails is run twice more, and listed at the end.
test: $(TEST_READY) $(LIBRARY)
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) --dist loadfile --reruns 2 -r fEsR --durations=30

test-slow: $(TEST_READY) $(LIBRARY)
	$(BIN)/python -m pytest -m slow

lint: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(TEST_READY)
	$(BIN)/python -m telechat_moe.recipe.docs > docs/recipes.md
	$(BIN)/python -m telechat_moe.recipe.json_schema > recipes/schema.json

clean:
	rm -rf $(VENV) build *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v in ((3, 10), (3, 11)) else f"Python 3.10 or 3.11 is needed (MindSpore 2.9.0 has no wheel for {v[0]}.{v[1]}); set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(TRAIN_READY): $(BIN)/python setup.py pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train]'
	touch $@

# The install has built it; this is for sources that changed since.
$(LIBRARY): $(wildcard ops/csrc/*.* ops/csrc/*/*.* tools/plan/native/*.*) | $(TRAIN_READY)
	$(BIN)/python -m telechat_moe.ops.build

$(TEST_READY): $(TRAIN_READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train,mindformers,test,dev]'
	touch $@
