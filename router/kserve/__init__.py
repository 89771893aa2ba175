"""The KServe face: the Open Inference Protocol, version 2, over gRPC."""
