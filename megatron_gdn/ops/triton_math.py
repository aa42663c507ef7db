"""Functions that several Triton kernels need, to be called inside of them."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter, which tests use on CPUs, has none of CUDA's own functions."""


@triton.jit
def exp(x):
    """e^x of fp32 to its last two bits; `tl.exp` loses one more for every doubling of x."""
    if INTERPRETED:
        return tl.exp(x)
    return libdevice.exp(x)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) of fp32, to 1e-6 relative for x > -10 and 1e-5 where it is more than 1e-37.

    `tl.sigmoid` guards both steps against numbers of less than 1e-38, at three more instructions each;
    kernels that move few bytes per number wait for those.
    """
    if INTERPRETED:
        return tl.sigmoid(x)
    return libdevice.fast_dividef(1.0, 1.0 + libdevice.exp2(x * -1.4426950408889634))
