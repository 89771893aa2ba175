import sys
from pathlib import Path

BENCH = Path(__file__).parents[3] / "bench"
# Python starts a benchmark with bench/ on its path, so that benchmarks can import each other.
sys.path.append(str(BENCH))
