"""The command line: starts, uses and inspects a service."""
