"""Corpora, documents, tokenizers, and files of token ids."""
