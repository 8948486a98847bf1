"""Text: corpora, documents, tokenizers, and files of token ids."""
