"""The encodings: one file each, a registry, and the forms a bias can take."""

from relpos.encodings.registry import Card, card, encoding, names, register

__all__ = ["Card", "card", "encoding", "names", "register"]
