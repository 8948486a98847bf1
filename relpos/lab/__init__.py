"""Corpora, tokens and training."""
