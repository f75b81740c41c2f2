# Two commands do all the set-up on a fresh machine: make demo, make test.

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
# Newest that is tested; tests of transformers' own expert parallelism run it beside the installed version, which is older.
TRANSFORMERS := 5.22.2
# Beside it lies what its models import, no more.
TORCHTITAN := 0.3.0

# Tests start hundreds of processes; each would compile the package's sources anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint types contracts megatron-versions transformers-versions clean

demo: $(KERNELS)
	$(PYTHON) -m equipoise.demo out/demo.html

test: $(STAMP) out/transformers-$(TRANSFORMERS) out/torchtitan-$(TORCHTITAN)
	$(MAKE) --jobs 2 $(KERNELS) lint types contracts
	$(PYTHON) -m pytest --minimum-tests -n 3 --dist loadgroup --no-loadscope-reorder

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell equipoise tests benchmarks examples docs *.md

types: $(STAMP)
	$(VENV)/bin/mypy

contracts: $(STAMP)
	$(VENV)/bin/lint-imports

# Before a release: tests of the Megatron adapter with newer versions than the installed one. They ask for Python 3.12, run on
# this one, and import triton, which the CPU build of torch does not bring.
MEGATRON := 0.17.1 0.18.2 0.19.2

megatron-versions: $(KERNELS) out/triton $(addprefix out/megatron-,$(MEGATRON))
	for version in $(MEGATRON); do MEGATRON_LAYOUTS=all PYTHONPATH=$(CURDIR)/out/megatron-$$version:$(CURDIR)/out/triton \
		$(PYTHON) -m pytest tests/megatron || exit 1; done

out/megatron-%: | $(STAMP)
	$(PYTHON) -m pip install --quiet --no-deps --ignore-requires-python --python-version 3.12 --only-binary=:all: \
		--target $@ megatron-core==$*

out/triton: | $(STAMP)
	$(PYTHON) -m pip install --quiet --no-deps --target $@ triton==3.9.0

# Before a release: transformers' own expert parallelism with older versions than the one that `make test` runs.
transformers-versions: $(KERNELS) out/transformers-5.20.2 out/transformers-5.21.1
	for version in 5.20.2 5.21.1; do TRANSFORMERS=$$version $(PYTHON) -m pytest tests/adapters/test_sharded.py || exit 1; done

out/transformers-%: | $(STAMP)
	$(PYTHON) -m pip install --quiet --no-compile --no-deps --target $@ transformers==$* accelerate==1.15.0

out/torchtitan-%: | $(STAMP)
	$(PYTHON) -m pip install --quiet --no-compile --no-deps --target $@ torchtitan==$* spmd_types==0.2.3 tyro==1.0.16 \
		docstring_parser==0.18.0

# One constraints file holds the tested versions; an edit of it or of pyproject.toml installs anew. Compiling all that is
# installed takes longer than compiling what is imported, which the first import does.
$(STAMP): pyproject.toml constraints.txt requirements-verl.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(PYTHON) -m pip install --quiet --no-compile --no-deps --requirement requirements-verl.txt
	touch $@

# numba keeps a compiled caller when only a callee in another file changed, so any change drops all compiled kernels.
# Compiled once here, as the last part of the installation: several planning processes that compile at once take longer than
# tests wait for.
$(KERNELS): $(STAMP) $(wildcard equipoise/*/*.py)
	find equipoise -name '*.nb[ic]' -delete
	$(VENV)/bin/equipoise analyze --demo > /dev/null
	touch $@

clean:
	rm -rf $(VENV) out
