import sys
from pathlib import Path

BENCH = Path(__file__).parents[3] / "bench"
# Benchmarks import each other from their own folder, as Python starts them.
sys.path.append(str(BENCH))
