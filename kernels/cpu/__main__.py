"""Compiles the C kernels ahead of time into the package, for an image or a wheel.

The command makes a library for each kind of CPU in `kernels.cpu.targets` that has this machine's
architecture. A worker uses one of these libraries if it cannot compile the kernels for its own CPU.
The command needs gcc 11 or later.
"""

import platform
import sys

from kernels.cpu.build import SHIPPED, BuildError, build
from kernels.cpu.targets import targets_of


def main() -> None:
    """Compile the libraries, and print their paths."""
    machine = platform.machine()
    targets = targets_of(machine)
    if not targets:
        sys.exit(f"kernels.cpu: the architecture is {machine}; there are no libraries for it")
    SHIPPED.mkdir(exist_ok=True)  # readable by all users, unlike a cache
    try:
        for target in targets:
            sys.stdout.write(f"{build(SHIPPED, target)}\n")
    except BuildError as error:
        sys.exit(f"kernels.cpu: {error}")


if __name__ == "__main__":
    main()
