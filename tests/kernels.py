"""What the tests of Triton kernels share: the device, the dtypes that it is right in, and the tolerances.

Without a GPU the kernels run in Triton's interpreter, which is right in fp32 and fp16 and wrong in bf16 dots.
"""

import torch
from torch import Tensor

from tests.interpreter import make_faster

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    make_faster()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
ABSOLUTE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest difference to an fp32 reference of results of size 1; bf16 has a relative L2 bound besides."""
RELATIVE_L2 = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def assert_close(got: Tensor, want: Tensor) -> None:
    """Compare a kernel's result with a reference taken in fp32 or wider.

    Raises:
        AssertionError: it is off by more than its dtype's tolerance, or holds NaN.
    """
    got, want, dtype = got.double(), want.double(), got.dtype
    assert got.shape == want.shape
    assert not bool(got.isnan().any()), "NaN in the result"
    scale = max(1.0, float(want.abs().max()))
    worst = float((got - want).abs().max()) if got.numel() else 0.0
    assert worst <= ABSOLUTE[dtype] * scale, f"off by {worst:.2e} at a scale of {scale:.2e}"
    relative = float((got - want).norm() / want.norm().clamp(min=1e-30))
    assert relative <= RELATIVE_L2[dtype], f"relative L2 of {relative:.2e}"
