"""DeBERTa: scores with terms of content with relative position, in one or both directions."""

from relpos.pretrained.positions.description import LayerPosition
from relpos.pretrained.positions.learned import table_of
from relpos.pretrained.positions.place import Place
from relpos.pretrained.positions.score_changes import sentence

FAMILIES = {"deberta", "deberta-v2"}
TERMS = {"c2p": "content to position", "p2c": "position to content"}


def describe(place: Place) -> LayerPosition | None:
    """The terms of one layer. They depend on the content, so that there is no bias by distance alone."""
    layer, config = place.layer, place.config
    terms = [TERMS[term] for term in layer.pos_att_type if term in TERMS] if layer.relative_attention else []
    added = table_of(place) if config.position_biased_input else None
    parts = []
    if terms:
        span, buckets = layer.max_relative_positions, getattr(layer, "position_buckets", -1)
        spacing = f"{2 * buckets} log-spaced buckets" if buckets > 0 else "one embedding per distance"
        shared = "projected as the content is" if getattr(layer, "share_att_key", False) else "own projections"
        parts.append(f"DeBERTa, {' and '.join(terms)}: {spacing} up to distance {span:,}, {shared}")
    if added is not None:
        parts.append(f"learned positions, {added[0].shape[0]:,} × {added[0].shape[1]:,}, added to the embedding")
    main = "; and ".join(parts) or "no position"
    kind = "deberta" if terms else "none" if added is None else "learned"
    return LayerPosition(place.name, kind, sentence(main, place), table=None if added is None else added[0])
