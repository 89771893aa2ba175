"""The command line: start, try and inspect the service."""
