"""Runs the Triton kernels on the GPU, or without one in Triton's interpreter."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    if "triton" in sys.modules:
        # Triton reads the variable when it defines a kernel, and its library when it is imported.
        raise pytest.UsageError("set TRITON_INTERPRET=1: triton was imported without it")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
