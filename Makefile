# Two commands do everything on a fresh machine with Python 3.11: `make study` and `make test`.
PYTHON ?= python3
EXTRAS ?= torch,jax,mlx,lab,tune,dev
BIN := .venv/bin
READY := .venv/.ready

.PHONY: study test test-all test-ray browser lint bench venv clean

study: $(READY)
	$(BIN)/kbeta study rare_trigger --preset paper --seeds 0-9 --optimizers kbeta,adam95,adam999 \
		--engine jax --workers 2 --out results/rare_trigger

test: $(READY) browser
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

# What the tests of the report in a real browser need beside Chromium itself: its driver and axe-core. Both are fetched
# once; where one cannot be had, its tests are skipped with the reason.
browser: $(READY)
	@if $(BIN)/python -c 'from tests.lab.browsing import CHROMIUM; raise SystemExit(CHROMIUM is None)'; then \
		$(BIN)/python -c "import playwright" 2>/dev/null || \
			$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt playwright || true; \
		test -e .venv/axe/node_modules/axe-core/axe.min.js || \
			npm install --silent --no-audit --no-fund --prefix .venv/axe axe-core@4.14.0 || true; \
	fi

# Triton, for the GPU kernel's tests in its interpreter. Not in constraints.txt: torch for GPUs brings its own.
test-all: $(READY) browser
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet triton==3.7.1
	$(BIN)/python -m pytest -n auto --dist worksteal

# Starts Ray clusters on this machine, kills parts of them, and takes about ten minutes.
test-ray: $(READY)
	$(BIN)/python -c "import ray" 2>/dev/null || $(BIN)/python -m pip install --quiet -c constraints.txt ray fsspec
	$(BIN)/python -m pytest tests/lab/test_ray.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/step_time.py

venv: $(READY)

# An interrupted install leaves no stamp, so the next call finishes it. Byte-compiling on all cores at once takes less
# time than pip on one, or than every test process on its own; some packages hold templates that do not compile.
$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/kourkoutas/_native/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m compileall -q -j 0 -x /tests/ .venv/lib >/dev/null 2>&1 || true
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
