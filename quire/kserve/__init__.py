"""Stubs of the Open Inference Protocol, generated from protos/quire/kserve by `make protos`."""
