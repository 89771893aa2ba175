"""Stubs of the OpenEngine contract, generated from protos/quire/openengine by `make protos`."""
