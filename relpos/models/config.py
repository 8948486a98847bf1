"""What the configurations of all families share: encodings, presets, reading transformers' own configurations."""

from typing import TYPE_CHECKING, Any, Self

from relpos.forms.encoding import Encoding
from relpos.model_catalogue import PREFIX, preset
from relpos.models.family import get_family
from relpos.models.plan import Positions, layer_encodings, make_encoding, make_positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig as _Config
else:
    _Config = object


class PositionedConfig(_Config):
    """A configuration with the entries `position` and `share_position`; see `relpos.models.plan`.

    A family's configuration derives from this class and from transformers' own, and declares the two entries.
    """

    position: dict[str, Any] | str | None
    share_position: bool

    @classmethod
    def preset(cls, name: str, **entries: Any) -> Self:
        """Return the configuration of a named size.

        Args:
            name: nano, tiny, small, medium or large (`relpos.models.PRESETS`).
            **entries: Further entries, as `vocab_size` and `position`; they win over those of the size.

        Returns:
            The configuration.

        Raises:
            ValueError: There is no such size.

        Example:
            >>> RelposGPT2Config.preset("nano", vocab_size=4096, position={"name": "fire", "length": 512})
        """
        return cls(**{**get_family(cls.model_type.removeprefix(PREFIX)).sizes(preset(name)), **entries})

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a configuration; that of transformers' own model is read as a relpos model with the same encoding."""
        entries, rest = super().get_config_dict(*args, **kwargs)
        if entries.get("model_type") == cls.model_type.removeprefix(PREFIX):
            entries = {**entries, "model_type": cls.model_type}
        return entries, rest

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: transformers would copy the source of the class into every saved folder."""

    @property
    def size_of_head(self) -> int:
        """Size of a head."""
        own = getattr(self, "head_dim", None)
        return int(own or self.hidden_size // self.num_attention_heads)

    def make_positions(self) -> Positions:
        """New encodings for all of a model.

        Raises:
            ValueError: The entries contradict each other.
        """
        assert isinstance(self.position, dict)
        return make_positions(self.position, self.share_position, self.num_hidden_layers, *self._sizes())

    def make_position(self, layer: int = 1) -> Encoding:
        """A new encoding like that of one layer; 1 is the first."""
        assert isinstance(self.position, dict)
        return make_encoding(layer_encodings(self.position, self.num_hidden_layers)[layer - 1], *self._sizes())

    def _sizes(self) -> tuple[int, int, int]:
        return self.num_attention_heads, self.size_of_head, self.hidden_size
