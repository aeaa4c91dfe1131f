# Every target does its own set-up on a bare machine with Python >= 3.11: it makes .venv, installs, runs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-cuda test-oldest coverage check format setup bench docs package lock clean
demo: $(READY)
	$(BIN)/coterie demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal  # three: some wait for processes

test-cuda: $(READY)  # the tests that need a GPU, and no others
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch finds no GPU")'
	$(BIN)/python -m pytest -m cuda -rs tests

# All dependencies at their lower bounds, in an environment of its own. TORCH=2.13.0 takes another torch.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	$(PYTHON) .ci/oldest.py $(TORCH) > .venv-oldest/oldest.txt
	.venv-oldest/bin/python -m pip install --quiet -c .venv-oldest/oldest.txt -e '.[tensorboard,flare,privacy,test]'
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n 3 --dist worksteal -W ignore::DeprecationWarning tests src

coverage: $(READY)  # lines and branches; of processes that tests start too
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -n 3 --dist worksteal
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

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

# What the container installs: every dependency with its hash. torch comes in many builds and is left out.
lock: $(READY)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet pyproject.toml --extra tensorboard --extra flare --extra privacy \
		-c constraints.txt --generate-hashes --python-version 3.11 --no-emit-package torch --no-annotate \
		--torch-backend cpu --custom-compile-command 'make lock' --output-file requirements.lock

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "coterie needs Python >= 3.11, this is " + sys.version.split()[0] + "; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(READY)

clean:
	rm -rf .venv .venv-oldest dist .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis
