#!/bin/sh
# Runs the tests and benchmarks that need an NVIDIA GPU, in three calls, each under nine minutes:
#
#   bench/gpu.sh [--wheels DIR] --call 1 [--out DIR] [--budget-s 530] [--only PART]
#
# Call 1 tells whether all results are right, call 2 how fast Quire is, and call 3 runs the other
# parts. Each call prints its plan, stops parts that take longer than planned, and leaves at most
# six files in --out, which should be a separate directory for each call. Without --call, one run
# has all parts.
#
#   bench/gpu.sh --cpu-smoke             runs all parts with tiny shapes on a CPU; measures nothing
#   bench/gpu.sh --collect-wheels DIR    fills DIR, on a machine with a network, for --wheels
#   bench/gpu.sh --sizes DIR             whether the checkout and DIR are small enough to be carried
#
# The GPU machine has torch for CUDA with Triton, and transformers. Other packages that it lacks come
# from the wheels in DIR; nothing is downloaded, and nothing is installed permanently. build/gpu keeps
# the measured ceilings and the compiled kernels for the next call; QUIRE_BENCH_KEPT names another
# folder for them.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
PYTHONPATH="$PWD/bench:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
case ${1:-} in
    --collect-wheels) exec "$PYTHON" bench/gpu/wheels.py collect "$2" ;;
    --sizes) exec "$PYTHON" bench/gpu/wheels.py sizes "$2" ;;
esac
if [ "${1:-}" = --wheels ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" bench/gpu/wheels.py install "$2" "$site"
    PYTHONPATH="$site:$PYTHONPATH"
    shift 2
fi
"$PYTHON" -m gpu.suite "$@"
