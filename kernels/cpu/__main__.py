"""Compiles the C kernels ahead of time into the package, for an image or at installation.

It needs a C compiler, and must run on the same kind of CPU as the worker. A worker on another kind
of CPU does not use the library.
"""

import sys

from kernels.cpu.build import SHIPPED, BuildError, build


def main() -> None:
    """Compile, and print the library's path."""
    SHIPPED.mkdir(exist_ok=True)  # readable by all users, unlike a cache
    try:
        path = build(SHIPPED)
    except BuildError as error:
        sys.exit(f"kernels.cpu: {error}")
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
