"""The error that says why a model cannot be served."""


class ModelError(Exception):
    """A model cannot be served; the message names file, field and reason."""


class UnsupportedError(ModelError):
    """Our own implementation of the architecture lacks something that the model asks for."""
