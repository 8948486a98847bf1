"""The numbers behind every picture and behind the explorer: layers, the values of their heads, maps and measures."""

LENGTH, HEADS, HEAD_DIM = 512, 12, 64  # of an untrained encoding, unless others are asked for
