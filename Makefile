# Two commands: `make demo` and `make test`. Each makes .venv and fetches the default model if need be.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Leaves out a notice of mkdocs-material about its successor.
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test cover lint types bench figures tables docs docs-serve model clean

demo: model
	$(BIN)/specdec demo

# Two processes of one thread each; one of them holds the real model.
test: model
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup

cover: model
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup --cov --cov-report=term

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

# Writes the figures of benchmarks/results into README and docs.
tables:
	$(PYTHON) benchmarks/tables.py

docs: .venv/.docs
	$(BIN)/mkdocs build --strict

docs-serve: .venv/.docs
	$(BIN)/mkdocs serve

model: $(READY)
	@$(BIN)/specdec pull smollm2-135m

# Our versions are pinned: an unpinned torch may pull a larger build than this project was tested with.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv site build dist *.egg-info
