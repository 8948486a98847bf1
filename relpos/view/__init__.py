"""Pictures and the numbers behind them: `relpos.view.draw("alibi")`, `relpos.view.draw("runs/cable", layer="all")`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relpos.view.picture import Picture as Picture
    from relpos.view.picture import draw as draw

__all__ = ["Picture", "draw"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from relpos.view import picture

        return getattr(picture, name)
    raise AttributeError(f"module 'relpos.view' has no attribute {name!r}")
