"""The error that ends a subcommand with a message and exit code 1."""


class CommandError(Exception):
    """An error that ends a subcommand; the user sees its message after the program's name."""
