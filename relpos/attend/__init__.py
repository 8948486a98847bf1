"""Attention with any encoding: one operation."""

from relpos.attend.by_distance import Mass, mass
from relpos.attend.cache import Cache
from relpos.attend.operation import attention, scores

__all__ = ["Cache", "Mass", "attention", "mass", "scores"]
