"""Pictures drawn by matplotlib over the numbers of `relpos.maps`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relpos.pictures.picture import Picture as Picture
    from relpos.pictures.picture import draw as draw

__all__ = ["Picture", "draw"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from relpos.pictures import picture

        return getattr(picture, name)
    raise AttributeError(f"module 'relpos.pictures' has no attribute {name!r}")
