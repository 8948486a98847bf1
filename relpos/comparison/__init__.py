"""Training and measuring several encodings in the same way."""
