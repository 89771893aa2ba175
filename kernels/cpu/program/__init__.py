"""Runs the layers of a decoder like Llama's as one program of C kernels."""
