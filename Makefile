# Every target does its own set-up on a bare machine with Python >= 3.11: it makes .venv, installs, runs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check format setup bench docs package clean
demo: $(READY)
	$(BIN)/coterie demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal  # three: some wait for processes

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python benchmarks/step_cost.py

docs: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python -m sphinx -W -E -q docs docs/_build/html
	@echo "The site: docs/_build/html/index.html"

package: $(READY)
	$(BIN)/python .ci/package.py

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "coterie needs Python >= 3.11, this is " + sys.version.split()[0] + "; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(READY)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
