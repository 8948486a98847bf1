"""Models that other people trained: transformers' models on our attention."""
