"""The errors that explain why a model cannot be served."""


class ModelError(Exception):
    """A model cannot be served; the message names file, field and reason."""


class UnsupportedError(ModelError):
    """Quire knows the architecture, but does not implement something that the model needs."""
