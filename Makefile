# Needs only make, a POSIX shell and a Python >= 3.12: see `make help`.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint format bench clean

# pyright is complete once installed; without this it asks for news each time.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Run as modules: the scripts in .venv/bin break when a checkout is moved.
python := .venv/bin/python

# The stamp is written last, by a rename, and is named for what it vouches for:
# the pins, the package's metadata, the place of the checkout and PYTHON.
# While an install runs, or after one was interrupted, .venv/.installing stands.
key := $(firstword $(shell \
  { cat requirements-dev.txt setup.cfg; pwd; echo '$(PYTHON)'; } | cksum))
stamp := .venv/.installed-$(key)

# A Python that runs and is new enough, in an install that was not interrupted.
# Otherwise .venv is made again, even if its stamp stands.
sound := $(shell [ ! -e .venv/.installing ] && $(python) -c 'import pip, sys; \
  print(sys.version_info >= (3, 12))' 2>/dev/null)
ifneq ($(sound),True)
.PHONY: $(stamp)
endif

$(stamp):
	@set -eu; \
	if [ '$(sound)' != True ] || [ -n '$(PYTHON)' ]; then \
	  base=$$(PYTHON='$(PYTHON)' sh tools/find_python.sh); \
	  echo "Making .venv with $$base"; \
	  rm -rf .venv/bin/python .venv; mkdir .venv; : > .venv/.installing; \
	  "$$base" -m venv .venv; \
	fi; \
	rm -f .venv/.installed-*; : > .venv/.installing; \
	echo "Installing the pinned dependencies, once; this may take minutes"; \
	pip="$(python) -m pip --disable-pip-version-check --quiet"; \
	$$pip install --requirement requirements-dev.txt; \
	$$pip install --no-deps --no-build-isolation --editable .; \
	mv .venv/.installing $@

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
	  while IFS='|' read -r target text; do \
	    printf 'make %-7s %s\n' "$$target" "$$text"; \
	  done

demo: $(stamp) ## simulate a kernel, then compile it for every chip
	$(python) -m examples.demo

test: lint ## lint, then run the tests
	$(python) -m pytest -n 2

lint: $(stamp) ## check the format, the style and the types
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m pyright

format: $(stamp) ## rewrite the files in the project's format
	$(python) -m ruff check --fix-only .
	$(python) -m ruff format .

bench: $(stamp) ## run the benchmarks; results go to benchmarks/out
	$(python) -m benchmarks

clean: ## remove caches and built files; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis \
	  benchmarks/out
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune \
	  -exec rm -rf {} +
