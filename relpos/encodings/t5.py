import math

import torch
from torch import Tensor, nn

from relpos.forms.bias import Toeplitz
from relpos.forms.call import Call
from relpos.forms.checks import integer_at_least
from relpos.forms.encoding import Encoding


def bucket(distance: Tensor, causal: bool, buckets: int = 32, max_distance: int = 128) -> Tensor:
    """Bucket of each distance i − j: half of the buckets hold one distance each, the rest grow logarithmically.

    In both directions, the first half of the buckets serves the past, the second the future.
    """
    offset = torch.zeros_like(distance)
    if not causal:
        buckets //= 2
        offset = torch.where(distance < 0, buckets, 0)
        distance = distance.abs()
    distance = distance.clamp(min=0)
    exact = buckets // 2
    # float32, as in T5: the bucket borders are where this rounding puts them.
    fraction = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    coarse = (exact + (fraction * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, coarse)


class T5(Encoding):
    """T5's bias: a learned value per head and logarithmic bucket of distances (CABLE's "T5-bias" is `clipped`).

    Args:
        buckets: Number of buckets, a multiple of 4. The table is (heads, buckets).
        max_distance: Distance from which all distances share the last bucket.
    """

    paper = "Raffel et al. 2020, arXiv 1910.10683"
    formula = (
        "B_ij = b_h[bucket(i − j)],  bucket(r) = r if r < 16, else min(31, 16 + ⌊16·ln(r/16) / ln(8)⌋);  "
        "of 32 buckets up to distance 128; b starts at N(0, 1/width)"
    )

    def __init__(self, heads: int, head_dim: int, *, buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__(heads, head_dim)
        if integer_at_least("buckets", buckets, least=4) % 4:
            raise ValueError(f"buckets must be a multiple of 4, so that both directions get half, not {buckets}.")
        if integer_at_least("max_distance", max_distance) <= buckets // 2:
            raise ValueError(f"max_distance must be over buckets / 2 = {buckets // 2}, not {max_distance}.")
        self.buckets, self.max_distance = buckets, max_distance
        self.table = nn.Parameter(torch.randn(heads, buckets) * self.width**-0.5)

    def bias(self, call: Call) -> Toeplitz:
        which = bucket(call.distances.long(), call.causal, self.buckets, self.max_distance)  # (distances,)
        ends = (-self.max_distance, self.max_distance)
        return Toeplitz(self.table.to(call.dtype)[:, which], call.zero, ends=ends)
