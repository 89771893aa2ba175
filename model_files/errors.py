"""The error that says why a model cannot be served."""


class ModelError(Exception):
    """A model cannot be served; the message names file, field and reason."""
