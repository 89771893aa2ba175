"""A worker whose control group is a directory of the test's: what memory is left, the test says.

`python -m tests.e2e.worker_in_group`, with the directory in the variable CONTROL_GROUP. All else is
`quire-worker`, which looks at its memory more often here.
"""

import os
from pathlib import Path

from gpu_worker.__main__ import main
from gpu_worker.memory import available as memory
from gpu_worker.memory import watch as device_memory

if __name__ == "__main__":
    memory._CGROUP = Path(os.environ["CONTROL_GROUP"])
    device_memory._INTERVAL_S = 0.05
    main()
