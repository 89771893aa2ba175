"""Compiles the native kernels ahead of time, into the package: for an image, or at installation.

It takes a C compiler and must run on a CPU of the kind that will run the library; on any other the
library is not used.
"""

import sys

from kernels.cpu.build import SHIPPED, BuildError, build


def main() -> None:
    """Compile, and print where to."""
    SHIPPED.mkdir(exist_ok=True)  # everybody's, unlike a cache, which is private to its user
    try:
        path = build(SHIPPED)
    except BuildError as error:
        sys.exit(f"kernels.cpu: {error}")
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
