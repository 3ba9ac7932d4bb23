#!/usr/bin/env bash
# Checks style and types, then runs the tests; arguments go to pytest:
#     ./run_tests.sh
#     ./run_tests.sh tests/test_samples.py -k bytes
set -euo pipefail

cd -- "$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
./run_local.sh --setup-only --with train,test

# The tests compare results with stored ones, so they run on the CPU unless told otherwise.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES--1}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL-2}

.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
.venv/bin/python -m mypy
if [[ $# == 0 ]]; then
    # Everything takes half an hour on two cores, so two processes share it, a file each. In the
    # order of the files, which has the longest ones first.
    set -- --numprocesses=2 --dist=loadfile --no-loadscope-reorder
fi
# Last, so that pytest's count is the last line, and its exit status that of this script.
exec .venv/bin/python -m pytest "$@"
