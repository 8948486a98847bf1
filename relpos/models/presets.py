"""The sizes of GPT-2, by name. Nothing is imported here, so that the command line can list them."""

from relpos.errors import unknown

PRESETS = {  # name: layers, heads, width
    "nano": (4, 12, 192),  # for a laptop; 12 heads, so that its pictures look like those of small
    "tiny": (6, 8, 512),
    "small": (12, 12, 768),
    "medium": (24, 16, 1024),
    "large": (36, 20, 1280),
}


def sizes(preset: str) -> dict[str, int]:
    """The sizes of a preset, under GPT-2's own names."""
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    layers, heads, width = PRESETS[preset]
    return {"n_layer": layers, "n_head": heads, "n_embd": width}
