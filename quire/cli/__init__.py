"""The command line: starts, uses and inspects a service."""

import sys

if sys.argv[0] == "-m" and not sys.flags.safe_path:  # while `python -m quire.cli` starts
    # A file http.py in the working directory must not shadow the standard library's.
    sys.path.append(sys.path.pop(0))
