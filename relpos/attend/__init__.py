"""Attention with any encoding: one operation."""

from relpos.attend.operation import attention, scores

__all__ = ["attention", "scores"]
