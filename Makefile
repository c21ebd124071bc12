# Two commands: `make demo` and `make test`. Each makes .venv and fetches the default model if need be.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test cover lint types bench figures model clean

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

model: $(READY)
	@$(BIN)/specdec pull smollm2-135m

# Our versions are pinned: an unpinned torch may pull a larger build than this project was tested with.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
