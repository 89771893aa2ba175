#!/bin/sh
# One command that proves the GPU half on a machine with an NVIDIA GPU, in under ten minutes:
#
#   bench/gpu.sh [--wheels DIR] [--out DIR] [--budget-s 560] [--only PART]
#   bench/gpu.sh --cpu-smoke             the same with tiny shapes on a CPU; measures nothing
#   bench/gpu.sh --collect-wheels DIR    fills DIR, on a machine with a network, for --wheels
#
# That machine has torch for CUDA with Triton, and transformers. What else is missing there comes
# from the wheels in DIR; nothing is downloaded, and nothing is installed for good.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
if [ "${1:-}" = --collect-wheels ]; then
    exec "$PYTHON" bench/wheels.py collect "$2"
fi
if [ "${1:-}" = --wheels ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" bench/wheels.py install "$2" "$site"
    PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONPATH
    shift 2
fi
"$PYTHON" bench/gpu.py "$@"
