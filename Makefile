# make demo: train the sandbox policy.   make test: lint and every test.   Both set up .venv first.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3,$(shell $(name) -c 'import sys; sys.version_info[:2] in ((3, 11), (3, 12)) and print("$(name)")' 2>/dev/null)))
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PINS := images/requirements/sandbox.txt
SET_UP := .venv/set-up
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps

.PHONY: demo test lint pins clean

demo: $(SET_UP)
	.venv/bin/pyflyte run workflows/dapo.py dapo

test: lint
	.venv/bin/python -m pytest

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
	uv pip compile pyproject.toml --extra sandbox --extra dev --universal --python-version 3.11 --quiet \
	  --override images/requirements/left-out.txt --no-annotate --custom-compile-command "make pins" -o $(PINS)

clean:
	rm -rf .venv runs
