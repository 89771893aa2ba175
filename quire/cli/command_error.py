"""What ends a subcommand with a message and exit code 1."""


class CommandError(Exception):
    """The message is for a person; the program's name comes before it."""
