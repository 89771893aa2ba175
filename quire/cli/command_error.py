"""The error that ends a subcommand with a message and exit code 1."""


class CommandError(Exception):
    """Ends a subcommand; the message is printed after the program's name."""
