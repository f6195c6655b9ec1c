# `make` lists the targets. Every target that needs .venv makes it first, from requirements.lock.

PYTHON ?=
UV ?=
DEMO ?=
EXTRA ?=
WORKERS ?= 2
CONFIG := configs/drope_laptop.py
ARGS ?=
QUICK ?=
ifneq ($(QUICK),)
DEMO := quick
endif
DEMO_RUN := runs/drope_laptop$(if $(DEMO),_$(DEMO))

PY := .venv/bin/python
STAMP := .venv/.installed

# Done is: the stamp says it was made for this directory, and the interpreter still starts. An extra is installed again.
ifneq ($(EXTRA)$(shell $(PY) -c '' 2>/dev/null && cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo docs wheel test test-hopper test-slow test-ci test-all fuzz gauntlet mutants lint format coverage lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install what is locked (PYTHON=..., UV=no, EXTRA=gpu, EXTRA=tpu)

$(STAMP): requirements.lock requirements-gpu.lock pyproject.toml launch/venv.sh
	@PYTHON='$(PYTHON)' UV='$(UV)' EXTRA='$(EXTRA)' sh launch/venv.sh

demo: $(STAMP) ## pretrain, drop in two stages, measure, show (QUICK=1: seconds; DEMO=full: and a NoPE baseline)
	$(PY) -m pe_lab.train --config=$(CONFIG)$(if $(DEMO),:$(DEMO)) --workdir=$(DEMO_RUN)
	$(PY) -m pe_lab.evaluate --from=$(DEMO_RUN)
	$(PY) -m pe_lab.report $(DEMO_RUN)
	@page="$(CURDIR)/$(DEMO_RUN)/report.html"; echo "the page: $$page"; \
	if [ -t 1 ] && [ -z "$$CI$$SSH_CONNECTION" ]; then \
	  for open in xdg-open open; do \
	    if command -v $$open >/dev/null 2>&1; then $$open "$$page" >/dev/null 2>&1 || true; break; fi; \
	  done; \
	fi

docs: $(STAMP) ## the documentation site in build/docs (LINKS=1: and ask the servers of external links)
	$(PY) docs/site/build.py $(if $(LINKS),--links)

wheel: $(STAMP) ## the wheel and the source distribution in dist
	$(PY) -m build --outdir=dist .

# Without the bytecode of pe_lab, each process that a test starts would compile it anew.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -n $(WORKERS)

# Two pytest workers share the cores: NumPy's threads would only get in each other's way.
test coverage: export OMP_NUM_THREADS = 1
test coverage: export OPENBLAS_NUM_THREADS = 1
FAST_TESTS = $(PYTEST) --dist worksteal -m "not slow"

test: $(STAMP) ## everything that is not slow (ARGS=... goes to pytest)
	$(FAST_TESTS) $(ARGS)

# The kernel for Hopper GPUs is interpreted by JAX 0.11 and later, which needs Python 3.12: an environment of its own, with
# the locked releases of what these tests import. Where .venv has Python 3.12, `make test` runs them too.
HOPPER := build/hopper
HOPPER_PACKAGES := jax flax numpy scipy jaxtyping ml-collections etils fsspec tokamax pytest pytest-xdist hypothesis beartype
HOPPER_TESTS := tests/attention/test_hopper.py tests/attention/test_hopper_gradient.py tests/attention/test_external.py
PYTHONS := python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3)
find-uv = uv=uv; uv --version >/dev/null 2>&1 || { uv=.venv/bin/uv; $$uv --version >/dev/null 2>&1 || $(PY) -m pip install -q uv; }

$(HOPPER)/.installed: $(STAMP) requirements.lock
	@for python in $(PYTHONS); do if $$python -c '' 2>/dev/null; then found=$$python; break; fi; done; \
	if [ -z "$$found" ]; then \
	  echo "error: the tests of the Hopper kernel need Python 3.12 (Debian, Ubuntu: apt-get install python3.12)" >&2; exit 2; \
	fi; \
	$(find-uv); rm -rf $(HOPPER) && $$uv venv -q --python $$found $(HOPPER) && \
	$$uv pip install -q --compile-bytecode --python $(HOPPER)/bin/python --constraints requirements.lock $(HOPPER_PACKAGES)
	@touch $@

test-hopper: $(HOPPER)/.installed ## the kernel for Hopper GPUs, interpreted under Python 3.12; 4 minutes (ARGS=...)
	$(HOPPER)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(HOPPER_TESTS) -k "not for_tpus" $(ARGS)

# A file of slow tests shares fixtures: it stays with one worker. pytest-xdist hangs after it restarts a worker.
SLOW_TESTS = $(PYTEST) --dist loadfile --max-worker-restart=0 -m slow

test-slow: $(STAMP) ## the slow tests (ARGS=... goes to pytest)
	$(SLOW_TESTS) $(ARGS)

# In seconds of one worker; two workers take 0.6 to 0.7 of it.
SLOW_BUDGET ?= 1250
test-ci: $(STAMP) ## the slow tests of what changed, and others in rotation, as many as SLOW_BUDGET seconds hold
	mkdir -p build
	$(PY) tests/slow_budget.py $(SLOW_BUDGET) > build/slow_tests
	$(SLOW_TESTS) $(ARGS) @build/slow_tests

test-all: $(STAMP) ## everything, by hand, before an issue is resolved; measures tests/slow_costs.json anew
	$(FAST_TESTS)
	$(MAKE) test-hopper
	$(SLOW_TESTS) --store-durations --clean-durations --durations-path=tests/slow_costs.json

fuzz: $(STAMP) ## damaged inputs for every reader of files, and a table (INPUTS=... SEED=...)
	$(PY) -m tests.fuzz --inputs=$(or $(INPUTS),10000) --seed=$(or $(SEED),0)

mutants: export OMP_NUM_THREADS = 1
mutants: $(STAMP) ## draw 200 one-token mutants of pe_lab; about an hour (COUNT=... SEED=...)
	mkdir -p build
	$(FAST_TESTS) --cov=pe_lab --cov-context=test --cov-report= --junitxml=build/junit.xml -o junit_family=xunit1
	mv .coverage build/coverage
	$(PY) tests/mutants.py --coverage=build/coverage --junit=build/junit.xml --count=$(or $(COUNT),200) --seed=$(or $(SEED),0)

gauntlet: $(STAMP) ## kills, damages, failing stores, full disks; 40 minutes, writes tests/gauntlet/RESULTS.md (ARGS=...)
	$(PY) -m tests.gauntlet --seed=0 --out=tests/gauntlet/RESULTS.md $(ARGS)

coverage: $(STAMP) ## the same tests, half as long again, and the lines they do not reach; at least 90% must be
	$(FAST_TESTS) --cov=pe_lab --cov-report=term-missing:skip-covered --cov-fail-under=90 $(ARGS)

lint: $(STAMP) ## ruff, and shellcheck where there is one
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@if command -v shellcheck >/dev/null 2>&1; then \
	  echo shellcheck; shellcheck launch/*.sh .ci/run; \
	else echo "shellcheck is not installed: shell scripts not checked"; fi

format: $(STAMP) ## let ruff lay out and sort the source
	$(PY) -m ruff check --fix-only --quiet .
	$(PY) -m ruff format .

# Python 3.11 and 3.12 get different JAX releases from one file. Index addresses stay out of it: they are each
# machine's own setting.
LOCK_ARGS := --quiet --universal --python-version 3.11 --fork-strategy requires-python --generate-hashes \
  --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)

# The second lock has what the extra `gpu` adds: the CUDA packages of the JAX releases in the first.
lock: $(STAMP) ## resolve requirements.lock and requirements-gpu.lock again (UPGRADE=1: to the newest releases)
	@$(find-uv); \
	$$uv pip compile $(LOCK_ARGS) --extra test --extra aot pyproject.toml -o requirements.lock && \
	$(PY) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['gpu'], sep='\n')" | \
	$$uv pip compile $(LOCK_ARGS) --constraints requirements.lock - -o requirements-gpu.lock

clean: ## remove caches and build products; .venv, data and runs stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
