"""T5's relative bias: one learned number per head and bucket of distances."""

import math

import torch
from torch import Tensor, nn

from relpos.encodings.call import Call
from relpos.encodings.encoding import Encoding, whole
from relpos.encodings.forms import Toeplitz


def bucket(distance: Tensor, causal: bool, buckets: int = 32, max_distance: int = 128) -> Tensor:
    """Bucket of each distance i − j: half of them exact, the rest logarithmic up to max_distance.

    In both directions, the first half of the buckets serves the past and the second half the future.
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
    """T5's bucketed relative bias."""

    place = "score"
    form = "Toeplitz"
    learns = "buckets; by default 32"
    directions = "both"
    paper = "Raffel et al. 2020, arXiv 1910.10683"
    formula = "B_ij = b_h[bucket(i − j)];  started at N(0, 1/width)"
    options = {
        "buckets": "number of buckets, a multiple of 4",
        "max_distance": "distance from which all share the last bucket",
    }

    def __init__(self, heads: int, head_dim: int, *, buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__(heads, head_dim)
        if whole("buckets", buckets, least=4) % 4:
            raise ValueError(f"buckets must be a multiple of 4, to be halved for two directions, not {buckets}.")
        if whole("max_distance", max_distance) <= buckets // 2:
            raise ValueError(f"max_distance must be over buckets / 2 = {buckets // 2}, not {max_distance}.")
        self.buckets, self.max_distance = buckets, max_distance
        self.table = nn.Parameter(torch.randn(heads, buckets) * self.width**-0.5)

    def bias(self, call: Call) -> Toeplitz:
        which = bucket(call.distances.long(), call.causal, self.buckets, self.max_distance)  # (distances,)
        return Toeplitz(self.table.to(call.dtype)[:, which], call.zero)
