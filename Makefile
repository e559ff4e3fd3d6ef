# make run        the default job, from an empty machine to results/report/
# make test       all tests but the slow and SLURM's (those that need a GPU skip without one)
# make test-slow  ten runs that are stopped, killed and starved of memory at random
# make test-slurm the chain, its failures and two nodes on a real SLURM on this machine; as root
# make lint       what CI checks before the tests

VENV := .venv
READY := $(VENV)/installed
# Two processes where there is no GPU; all GPUs where there are some.
GPUS ?= $(shell n=$$(nvidia-smi -L 2>/dev/null | grep -c ^GPU); echo $$(( n > 0 ? n : 2 )))
# Jobs call `python`: it has to be the environment's own.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: run test test-slow test-slurm lint format schema pins install memory dag clean

run: $(READY)
	snakemake --profile workflow/profiles/local --resources gpu=$(GPUS)

test: $(READY)
	OMP_NUM_THREADS=1 pytest tests/unit -n 2
	OMP_NUM_THREADS=1 pytest tests/workflow -n 2 --dist loadfile
	pytest tests/end_to_end
	pytest tests/gpu # by themselves: no other test sees a GPU

test-slow: $(READY)
	pytest tests -m slow -s

test-slurm: $(READY)
	OMP_NUM_THREADS=1 pytest tests/slurm

# pytest cannot collect two files of one name; `test-slow` collects all folders, so that is seen here.
lint: $(READY)
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile workflow
	snakemake --lint
	pytest tests -m slow --collect-only -qq

format: $(READY)
	ruff check --fix .
	ruff format .
	snakefmt Snakefile workflow

schema: $(READY)
	python workflow/schemas/derive.py

install: $(READY)

$(READY): $(wildcard envs/*.txt)
	python3 -m venv $(VENV)
	pip install -r envs/requirements-dev.txt
	pip install --no-deps -r envs/requirements-example.txt
	touch $@

# After a change to pins.txt: derive the conda files.
pins:
	python envs/derive.py

clean:
	rm -rf results logs benchmarks .snakemake

# After a change to the memory formulas: the table in docs/memory.md.
memory: $(READY)
	PYTHONPATH=workflow/scripts python tests/truths.py

# The picture in the README. Needs graphviz.
dag: $(READY)
	snakemake --rulegraph dot | tred | dot -Grankdir=LR -Tsvg > docs/dag.svg
