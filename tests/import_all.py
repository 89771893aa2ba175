"""Imports every module of the processes, under whichever Python runs this.

GPU machines have another Python and another numpy than CI. Prints both versions, and how many
modules were imported. A module that needs a package which is not installed is named; without torch
that is most of the worker, of which then only the syntax is checked.
"""

import compileall
import importlib
import pkgutil
import sys
import warnings

import numpy as np

_PACKAGES = (
    *("contract", "gpu_worker", "kernels", "model_files", "quire", "router", "rpc"),
    *("scheduler_svc", "sim_worker"),
)
_OPTIONAL = {"fsspec", "nixl", "torch", "transformers", "triton", "zmq"}


def main() -> None:
    warnings.simplefilter("error", DeprecationWarning)
    num_modules, skipped = 0, []
    for package in _PACKAGES:
        root = importlib.import_module(package)
        if not compileall.compile_dir(root.__path__[0], quiet=1, force=True):
            sys.exit(f"{package} does not compile")
        for each in pkgutil.walk_packages(root.__path__, f"{package}."):
            if each.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(each.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in _OPTIONAL:
                    raise
                skipped.append(f"{each.name} (needs {error.name})")
            else:
                num_modules += 1
    python = ".".join(map(str, sys.version_info[:3]))
    sys.stdout.write(f"Python {python}, numpy {np.__version__}: imported {num_modules} modules\n")
    sys.stdout.writelines(f"not imported: {each}\n" for each in skipped)


if __name__ == "__main__":
    main()
