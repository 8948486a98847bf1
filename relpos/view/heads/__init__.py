"""Where the attention of each head goes by distance: its mass, curves fitted to it, its class, and its positional part."""
