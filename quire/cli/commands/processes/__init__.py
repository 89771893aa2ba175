"""Commands that start, check and stop the processes of a service."""
