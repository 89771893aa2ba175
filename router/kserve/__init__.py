"""The KServe API: the Open Inference Protocol, version 2, over gRPC."""
