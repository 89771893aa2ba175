"""A worker whose control group is a directory, in which a test sets the free memory.

`python -m tests.e2e.worker_in_group`, with the directory in the variable CONTROL_GROUP. Otherwise
it is `quire-worker`, but it reads its memory more often.
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
