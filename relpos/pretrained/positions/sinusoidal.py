"""Sinusoidal positions: a fixed table of sines and cosines that is added to the embeddings."""

from torch import Tensor

from relpos.pretrained.positions.description import LayerPosition
from relpos.pretrained.positions.learned import table_of
from relpos.pretrained.positions.place import Place
from relpos.pretrained.positions.score_changes import sentence

FAMILIES = {"distilbert", "m2m_100", "marian", "nllb-moe", "pegasus", "whisper", "xglm"}

GROWING = ("m2m_100", "nllb-moe", "xglm")  # their table grows with the input


def describe(place: Place) -> LayerPosition | None:
    """The table that is added to the embedding; None where it is learned."""
    kind = place.config.model_type
    if kind == "whisper" and "Encoder" not in type(place.part).__name__:
        return None
    if kind == "distilbert" and not place.config.sinusoidal_pos_embds:
        return None
    table = grown_table(place) if kind in GROWING else table_of(place)
    if table is None:
        return None
    rows, first = table
    main = f"sinusoidal positions, {rows.shape[0]:,} × {rows.shape[1]:,}, added to the embedding"
    if first:
        main += f"; the first token has row {first}"
    return LayerPosition(place.name, "sinusoidal", sentence(main, place), table=rows)


def grown_table(place: Place) -> tuple[Tensor, int] | None:
    """The table of fairseq's kind, which is a buffer that grows with the input."""
    module = getattr(place.part, "embed_positions", None)
    if module is None:
        return None
    xglm = place.config.model_type == "xglm"
    first = module.offset if xglm else module.padding_idx + 1
    return module.weights[first : first + module.num_positions].detach(), int(first)
