"""DAPE V2: the adjusting network becomes a convolution along the keys."""

from torch import Tensor, nn
from torch.nn import functional as F

from relpos.encodings.dape import Dape


class DapeV2(Dape):
    """DAPE with convolutions over neighbouring keys, hidden keys masked before both.

    The official code masks before the first convolution only, so that its entry (i, i) reads the key after the query
    and changes when the sequence is cut there. All other entries are the same. With both masked, decoding with a cache
    gives the numbers of the whole sequence.
    """

    learns = "base + 9·units + 1 + units/H; by default base + 289 + 32/H"
    paper = "Zheng et al. 2024, arXiv 2410.04798"
    formula = (
        "logits = A + B + conv(mask(LeakyReLU(conv(mask([A; B])))));  kernels (1, 3) along the keys; the official code "
        "has the inner mask only, by which entry (i, i) reads the key after the query"
    )
    options = {
        "base": "name of the encoding whose bias is adapted",
        "base_options": "its options; the official code over fire has {'leak': 0.01}",
        "units": "channels between the convolutions",
    }

    def layers(self, inputs: int, units: int, outputs: int) -> tuple[nn.Module, nn.Module]:
        return nn.Conv2d(inputs, units, (1, 3), padding=(0, 1)), nn.Conv2d(units, outputs, (1, 3), padding=(0, 1))

    def adapt(self, stack: Tensor, visible: Tensor) -> Tensor:
        # Hidden before each convolution, what a query may not see cannot reach it through a neighbour, and a row comes
        # out the same whatever stands beyond it: while decoding, in a packed batch, or at the end of a sequence.
        units = F.leaky_relu(convolve(self.first, stack.masked_fill(~visible, 0.0)))
        return convolve(self.second, units.masked_fill(~visible, 0.0))


def convolve(layer: nn.Module, x: Tensor) -> Tensor:
    """A convolution in the dtype of x."""
    assert isinstance(layer, nn.Conv2d)
    assert layer.bias is not None
    return F.conv2d(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype), padding=(0, 1))
