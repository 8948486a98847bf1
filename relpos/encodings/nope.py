"""No positional encoding: a causal model can infer positions from the causal mask alone."""

from relpos.forms.encoding import Encoding


class Nope(Encoding):
    """NoPE: no positional encoding."""

    paper = "Kazemnejad et al. 2023, arXiv 2305.19466"
    formula = "B_ij = 0"

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads, head_dim)
