"""`quire top`: a live view of a service."""
