"""Stubs generated from protos/quire/v1 by `make protos`."""
