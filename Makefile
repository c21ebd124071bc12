# Two commands: `make demo` and `make test`. Each makes .venv and fetches the default model if need be.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test cover lint types bench figures model clean

demo: model
	$(BIN)/specdec demo

# Tiny models run on one thread each, side by side; the real model gets the machine to itself.
test: model
	$(BIN)/python -m pytest -q -n 2 -m "not gpu and not gemma and not model"
	$(BIN)/python -m pytest -q -m model

cover: model
	$(BIN)/python -m pytest -q -n 2 -m "not gpu and not gemma and not model" --cov --cov-report= --cov-fail-under=0
	$(BIN)/python -m pytest -q -m model --cov --cov-append --cov-report=term

lint: $(READY) types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/linear_cpu.py

# The figures of the documents, from the committed results: the same results give the same bytes.
figures: $(READY)
	$(BIN)/python benchmarks/figures.py benchmarks/results docs/figures

model: $(READY)
	@$(BIN)/specdec pull smollm2-135m

# Our versions are pinned: an unpinned torch may pull a larger build than this project was tested with.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
