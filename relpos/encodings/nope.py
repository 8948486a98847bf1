"""No positional encoding: causality alone tells where a token stands."""

from relpos.encodings.encoding import Encoding


class Nope(Encoding):
    """No positional encoding."""

    place = "nowhere"
    form = "none"
    learns = "0"
    directions = "both"
    paper = "Kazemnejad et al. 2023, arXiv 2305.19466"
    formula = "B_ij = 0"

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads, head_dim)
