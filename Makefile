# Two commands do everything on a fresh machine with Python 3.11, 3.12 or 3.13: `make study` and `make test`.
PYTHON ?= python3
EXTRAS ?= torch,jax,mlx,state,lab,dev
BIN := .venv/bin
STUDY := .venv/.study
READY := .venv/.ready
PIP := -m pip install --quiet --disable-pip-version-check
PYTEST := -m pytest -n auto --dist worksteal
# `make test DEVICE=cuda` also runs the tests of the Triton kernels, on a real GPU.
DEVICE ?= cpu
export KBETA_DEVICE := $(DEVICE)
INPUTS := pyproject.toml constraints.txt setup.py $(wildcard src/kourkoutas/_native/*.[ch])

# On Linux pip's own choice of torch brings gigabytes of CUDA. For the CPU build set TORCH_CPU_INDEX to the address of
# PyTorch's index for CPUs, which PyTorch's install page names: `make test TORCH_CPU_INDEX=...`.
ifneq ($(TORCH_CPU_INDEX),)
export PIP_EXTRA_INDEX_URL := $(PIP_EXTRA_INDEX_URL) $(TORCH_CPU_INDEX)
endif

.PHONY: study test test-all test-integrations test-gpu test-floors test-ray test-sanitize coverage mutate browser lint bench pictures docs dist venv clean

# Needs JAX and the laboratory only, so the first answer does not wait for torch and MLX.
study: $(STUDY)
	$(BIN)/kbeta study rare_trigger --preset paper --seeds 0-9 --optimizers kbeta,adam95,adam999 \
		--engine jax --workers 2 --out results/rare_trigger

# OpenBLAS, from which JAX has its QR, would start threads that wait for those of the other test processes.
test test-all test-integrations: export OPENBLAS_NUM_THREADS := 1

test: $(READY) browser
	$(BIN)/python $(PYTEST) -m "not slow" --ignore=tests/integrations

# What the tests of the report in a real browser need beside Chromium itself: its driver and axe-core. Both are fetched
# once; where one cannot be had, its tests are skipped with the reason.
browser: $(READY)
	@if $(BIN)/python -c 'from tests.lab.showing.browsing import CHROMIUM; raise SystemExit(CHROMIUM is None)'; then \
		$(BIN)/python -c "import playwright" 2>/dev/null || \
			$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt playwright || true; \
		test -e .venv/axe/node_modules/axe-core/axe.min.js || \
			npm install --silent --no-audit --no-fund --prefix .venv/axe axe-core@4.14.0 || true; \
	fi

test-all: $(READY) browser
	$(BIN)/python $(PYTEST) --ignore=tests/integrations

# Keras has one backend per process. test_rivals has tests of rivals whose packages are not in .venv.
test-integrations: .venv-integrations/.ready
	.venv-integrations/bin/python $(PYTEST) tests/integrations tests/lab/optimizers/test_rivals.py
	KERAS_BACKEND=torch .venv-integrations/bin/python $(PYTEST) tests/integrations/test_keras.py
	KERAS_BACKEND=jax .venv-integrations/bin/python $(PYTEST) tests/integrations/test_keras.py

# The Triton kernels without a GPU: first in Triton's interpreter, against the oracle, then compiled for three kinds of GPU.
test-gpu: .venv-gpu/.ready
	TRITON_INTERPRET=1 KBETA_DEVICE=cpu .venv-gpu/bin/python $(PYTEST) tests/gpu
	KBETA_DEVICE=cpu .venv-gpu/bin/python $(PYTEST) tests/gpu

# The oldest versions that pyproject.toml allows, in environments of their own; with FLOORS=--pinned those of
# constraints.txt, for trying another PYTHON.
test-floors:
	$(PYTHON) release/floors.py $(FLOORS)

# Starts Ray clusters on this machine, kills parts of them, and takes about ten minutes.
test-ray: $(READY)
	$(BIN)/python -c "import ray" 2>/dev/null || $(BIN)/python -m pip install --quiet -c constraints.txt ray fsspec
	$(BIN)/python -m pytest tests/lab/running/test_ray.py

# Each pass takes some minutes; Linux with GCC only.
test-sanitize: $(READY)
	$(BIN)/python release/sanitize.py

# Branch coverage of what a result depends on. Keras has one backend per process.
COVERAGE := --cov --cov-branch
coverage: $(READY)
	$(BIN)/python -c "import keras" 2>/dev/null || $(BIN)/python $(PIP) -c constraints.txt keras
	$(BIN)/python $(PYTEST) -m "not slow" $(COVERAGE) --cov-report= \
		tests/test_rule.py tests/test_warmup.py tests/test_buckets.py tests/conformance tests/properties tests/state \
		tests/old_state tests/torch_frontend tests/torch_sharded tests/optax tests/mlx_frontend tests/lab/results \
		tests/lab/running/test_train.py \
		$(addprefix tests/lab/judging/test_,comparing.py hypothesis_tests.py analysis.py deciding.py)
	KERAS_BACKEND=torch $(BIN)/python -m pytest $(COVERAGE) --cov-append --cov-report= tests/integrations/test_keras.py
	KERAS_BACKEND=jax $(BIN)/python -m pytest $(COVERAGE) --cov-append --cov-report= tests/integrations/test_keras.py
	$(BIN)/coverage combine --append --quiet || true  # of processes that ended after their tests
	$(BIN)/coverage report --show-missing --skip-covered --fail-under=95

# Changes one operator or number at a time and prints what no test notices.
mutate: $(READY)
	$(BIN)/python release/mutate.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/step_time.py

# Every picture of README and docs, from the tables beside docs/pictures/make.py and the records in archive/ and benchmarks/.
# The screenshot of a report needs Chromium, and stays as it is without.
pictures: $(STUDY)
	$(BIN)/python docs/pictures/make.py

# The site, into site/. KaTeX sets the formulas; its files are copied into the site, which then asks for nothing outside.
# Without --quiet, which would also keep --strict from seeing warnings.
docs: .venv-docs/.ready
	.venv-docs/bin/python -m doctest docs/site/docstrings.py
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# sdist and wheel into dist/, checked, and tried in fresh environments with one framework each.
dist: $(READY) .venv-dist/.ready
	rm -rf dist
	.venv-dist/bin/python -m build
	.venv-dist/bin/twine check --strict dist/*
	$(PYTHON) release/try_dist.py dist

venv: $(READY)

# An interrupted install leaves no stamp, so the next call finishes it. Byte-compiling on all cores at once takes less
# time than pip on one, or than every test process on its own; some packages hold templates that do not compile.
COMPILE = $(BIN)/python -m compileall -q -j 0 -x /tests/ .venv/lib >/dev/null 2>&1 || true
KERNELS = import kourkoutas._native as n; n.step and n.taylor or print(\
	"No C compiler: PyTorch steps on the CPU and the Heat3D testbed run without their C kernels, and take longer.")

$(STUDY): $(INPUTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) --no-compile -c constraints.txt -e '.[jax,lab]'
	$(COMPILE)
	@$(BIN)/python -c '$(KERNELS)'
	touch $@

$(READY): $(INPUTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	$(COMPILE)
	@$(BIN)/python -c '$(KERNELS)'
	touch $(STUDY) $@

# The index has torchvision, which timm needs, for CUDA only. Beside a CPU build of torch that one cannot be imported;
# 0.15.2 is the last that can be without its compiled part, which nothing here uses. torchphysics asks for numpy below 2 and
# for Jupyter, and works without either. PhysicsNeMo asks for a newer torchvision, and for readers of formats that its
# models do not use: the second line has what importing an FNO needs.
.venv-integrations/.ready: $(INPUTS)
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python $(PIP) -c constraints.txt -e '.[torch,jax,lab,dev,integrations]'
	.venv-integrations/bin/python -c "import torchvision" 2>/dev/null || \
		.venv-integrations/bin/python $(PIP) --no-deps torchvision==0.15.2
	.venv-integrations/bin/python $(PIP) -c constraints.txt --no-deps torchphysics nvidia-physicsnemo
	.venv-integrations/bin/python $(PIP) -c constraints.txt einops importlib-metadata jaxtyping nvtx omegaconf requests s3fs \
		tensordict tqdm warp-lang
	touch $@

.venv-gpu/.ready: $(INPUTS)
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python $(PIP) -c constraints.txt -e '.[torch,gpu,dev]'
	touch $@

.venv-docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python $(PIP) -c constraints.txt $$($(PYTHON) release/requirements.py docs)
	npm install --silent --no-audit --no-fund --prefix .venv-docs/katex katex@0.19.1
	touch $@

.venv-dist/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python $(PIP) -c constraints.txt $$($(PYTHON) release/requirements.py dist)
	touch $@

clean:
	rm -rf .venv .venv-* build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
