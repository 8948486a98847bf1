from torch import Tensor, nn
from torch.nn import functional as F

from relpos.encodings.dape import Dape, Layer, in_dtype


class DapeV2(Dape):
    """DAPE V2: any bias, adapted to the scores by convolutions along the keys.

    Keys that a query may not see are masked before both convolutions. The official code masks before the first only:
    there, entry (i, i) reads the key after the query, and changes when the sequence is cut at the query. All other
    entries are the same. With both masks, decoding with a cache gives the same numbers as one pass over the sequence.

    Args:
        units: Channels between the two convolutions.
    """

    paper = "Zheng et al. 2024, arXiv 2410.04798"
    formula = (
        "logits = A + B + conv(mask(LeakyReLU(conv(mask([A; B])))));  kernels (1, 3) along the keys; the official code "
        "has the inner mask only, so that its entry (i, i) reads the key after the query"
    )

    def layers(self, inputs: int, units: int, outputs: int) -> tuple[Layer, Layer]:
        return nn.Conv2d(inputs, units, (1, 3), padding=(0, 1)), nn.Conv2d(units, outputs, (1, 3), padding=(0, 1))

    def adapt(self, stack: Tensor, visible: Tensor) -> Tensor:
        # Masked before each convolution, a key that a query may not see cannot reach it through a neighbour. A row is
        # then the same whatever comes after it: while decoding, in a packed batch, or at the end of a sequence.
        units = F.leaky_relu(in_dtype(self.first, stack.masked_fill(~visible, 0.0)))
        return in_dtype(self.second, units.masked_fill(~visible, 0.0))
