"""Where the attention of each head goes by distance: its mass, fitted curves, its class, and its positional part."""
