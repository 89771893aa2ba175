"""Compares how a scheduler core serves a recording's requests under its policy and another one.

Shows side by side the recording, a simulation of the recorded policy, and a simulation of the other
policy: queue times, times to the first token and to the end, preemptions, and which sequences
finish in another order. Record with `quire-scheduler --record DIR`; policies and their arguments
are those of `quire-scheduler --policy`. `policy/study.py` lists the assumptions.
"""

import argparse
import sys
from pathlib import Path

from policy.report import describe_study
from policy.study import study

from scheduler_svc.core.policies.arguments import split_arguments
from scheduler_svc.core.policies.make_policy import make_policy
from scheduler_svc.journal.entries import RecordingError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a recording, *.quirerec")
    parser.add_argument("--policy", required=True, help="such as priority+fair")
    parser.add_argument("--policy-arg", default="", help="such as aging_s=30,weight_out=3")
    options = parser.parse_args()
    try:
        arguments = split_arguments(options.policy_arg)
        make_policy(options.policy, arguments)
        with options.file.open("rb") as file:
            for line in describe_study(study(file, options.policy, arguments)):
                print(line)
    except (OSError, RecordingError) as error:
        sys.exit(f"{options.file}: {error}")
    except ValueError as error:
        sys.exit(f"--policy, --policy-arg: {error}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
