#!/bin/sh
# Runs the tests and benchmarks that need an NVIDIA GPU, in three calls, each under ten minutes:
#
#   bench/gpu.sh [--wheels DIR] --call 1 [--out DIR] [--budget-s 560] [--only PART]
#
# Call 1 tests correctness, call 2 measures kernels and an 8B service, call 3 the rest. Give each a
# separate --out. Without --call, one run has all parts that the budget allows, in this order.
#
#   bench/gpu.sh --cpu-smoke             the same with tiny shapes on a CPU; measures nothing
#   bench/gpu.sh --collect-wheels DIR    fills DIR, on a machine with a network, for --wheels
#
# The GPU machine has torch for CUDA with Triton, and transformers. Other packages that it lacks come
# from the wheels in DIR; nothing is downloaded, and nothing is installed permanently.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
PYTHONPATH="$PWD/bench:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
if [ "${1:-}" = --collect-wheels ]; then
    exec "$PYTHON" bench/gpu/wheels.py collect "$2"
fi
if [ "${1:-}" = --wheels ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" bench/gpu/wheels.py install "$2" "$site"
    PYTHONPATH="$site:$PYTHONPATH"
    shift 2
fi
"$PYTHON" -m gpu.suite "$@"
