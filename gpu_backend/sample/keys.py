"""What kernels do with logits as numbers: an order that integers can search, masses that add up alike in any order.

GPU only: NumPy sorts.
"""

from __future__ import annotations

from gpu_backend.triton_support import INTERPRETED, tl, triton
from runner_api import SampleFault

LOWEST = tl.constexpr(-2139095041)  # the key of -inf
NO_NAN_IN_MAX = tl.constexpr(INTERPRETED)  # the interpreter's reductions leave NaN out, and know no other way
MASS_UNIT = tl.constexpr(4398046511104.0)  # 2^42 to the mass of a row's best token
NAN, NO_TOKEN = tl.constexpr(int(SampleFault.NAN)), tl.constexpr(int(SampleFault.NO_TOKEN))
WIDEST_VOCABULARY = 2**20  # the masses of a row of so many tokens add up to less than 2^63


@triton.jit
def to_key(x):
    """float32 to int32 in the same order; -0 is taken as 0, NaN must not come."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_key(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def divided(x, t):
    """x / t as IEEE division rounds. t broadcasts to x."""
    return tl.div_rn(x, t + tl.zeros_like(x))


@triton.jit
def mass_of(x, highest):
    """exp(x - highest) as int64, in units of 2^-42: sums of it do not depend on their order."""
    same = x == highest  # also where both are +inf, which have no difference
    share = tl.exp(tl.where(same, 0.0, x).to(tl.float64) - tl.where(same, 0.0, highest).to(tl.float64))
    return (share * MASS_UNIT + 0.5).to(tl.int64)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_or_nan(x, AXIS: tl.constexpr):
    """The largest along an axis; NaN if there is one."""
    if NO_NAN_IN_MAX:
        is_nan = tl.max((x != x).to(tl.int32), AXIS) > 0
        highest = tl.max(tl.where(x != x, float("-inf"), x), AXIS)
        highest = _larger(highest, tl.where(is_nan, float("nan"), float("-inf")))
    else:
        highest = tl.reduce(x, AXIS, _larger)
    return highest
