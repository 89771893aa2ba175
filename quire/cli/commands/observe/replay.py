"""`quire replay`: replays a recording of a scheduler, and explains its preemptions."""

from collections.abc import Sequence

from quire.cli.command_error import CommandError
from quire.cli.settings import ReplaySettings
from rpc.settings import parse_settings
from scheduler_svc.journal.entries import RecordingError
from scheduler_svc.journal.replay import replay
from scheduler_svc.journal.report import describe, plan_lines


def main(argv: Sequence[str]) -> int:
    """Run `quire replay`; return 1 if a replayed plan differs from the recorded one, else 0."""
    settings = parse_settings(ReplaySettings, "quire replay", argv)
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
        print(f"step {settings.step}:", *plan_lines(result.kept_plan), sep="\n")
    else:
        raise CommandError(
            f"--step: {settings.step}: it must be one of the steps 1 to {result.num_steps}"
        )
    return 0 if result.difference is None else 1
