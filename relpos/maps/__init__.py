"""The numbers behind every picture: layers, the values of their heads, pyramids, diagonals, classes of heads."""
