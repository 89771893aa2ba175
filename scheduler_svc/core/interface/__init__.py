"""The core's inputs and outputs: requests, configuration, events, errors."""
