"""The subcommands of `quire`, one module each, in a folder for each kind of subcommand."""
