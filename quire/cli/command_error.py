"""The error that ends a subcommand with a message and exit code 1."""


class CommandError(Exception):
    """The message is for a person; it is printed after the program's name."""
