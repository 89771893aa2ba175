"""Stubs of OpenEngine, the gRPC contract of the project `ai-dynamo/openengine`.

`make protos` generates them from protos/quire/openengine.
"""
