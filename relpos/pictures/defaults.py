"""The defaults of a picture. Imports nothing: `relpos draw --help` prints these values."""

LENGTH, HEADS, HEAD_DIM = 512, 12, 64  # of an untrained encoding
MOST_LABELS = 64  # tokens that can be named on the axes
COLUMNS = 2  # of a printed page: the width of a picture
