"""The device on which kernels of GPUs are tested."""

import os

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device that the kernels run on: interpreted on a CPU, compiled on a GPU."""
    if (request.param == "cpu") != ("TRITON_INTERPRET" in os.environ):
        pytest.skip("Triton interprets where there is no GPU, and compiles where there is one")
    return str(request.param)
