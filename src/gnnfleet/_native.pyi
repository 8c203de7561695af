# The compiled kernels take tensors and numpy arrays alike and check dtype and shape themselves; csrc/bind.cpp says how.
from typing import Any

def __getattr__(name: str) -> Any: ...
