"""`quire replay`: checks a recording of a scheduler, and explains what happened in it."""

from collections.abc import Sequence

from quire.cli.command_error import CommandError
from quire.cli.settings import ReplaySettings
from rpc.settings import parse_settings
from scheduler_svc.core.policies.arguments import split_arguments
from scheduler_svc.core.policies.loading import make_policy
from scheduler_svc.journal.frames import RecordingError
from scheduler_svc.journal.policy_report import describe_study
from scheduler_svc.journal.policy_study import study
from scheduler_svc.journal.replay import replay
from scheduler_svc.journal.replay_report import describe, describe_plan


def main(argv: Sequence[str]) -> int:
    """Run `quire replay`; return the exit code: 1 if a plan differs."""
    settings = parse_settings(ReplaySettings, "quire replay", argv)
    if settings.policy:
        return _study(settings)
    try:
        with settings.file.open("rb") as file:
            result = replay(file, settings.step)
    except OSError as error:
        raise CommandError(f"{settings.file}: {error.strerror}") from None
    except RecordingError as error:
        raise CommandError(f"{settings.file}: {error}") from None
    if settings.step is None:
        for line in describe(result):
            print(line)
    elif result.kept_plan is not None:
        print(f"step {settings.step}:", *describe_plan(result.kept_plan), sep="\n")
    else:
        raise CommandError(
            f"--step: {settings.step}: is not in it; it has steps 1 to {result.num_steps}"
        )
    return 0 if result.difference is None else 1


def _study(settings: ReplaySettings) -> int:
    """Show what would have been under another policy."""
    try:
        policy_args = split_arguments(settings.policy_arg)
        make_policy(settings.policy, policy_args)
    except ValueError as error:
        raise CommandError(f"--policy, --policy-arg: {error}") from None
    try:
        with settings.file.open("rb") as file:
            result = study(file, settings.policy, policy_args)
    except OSError as error:
        raise CommandError(f"{settings.file}: {error.strerror}") from None
    except RecordingError as error:
        raise CommandError(f"{settings.file}: {error}") from None
    for line in describe_study(result):
        print(line)
    return 0
