"""The configuration of GPT-2 with any positional encoding."""

from typing import Any, Self

from huggingface_hub.dataclasses import strict
from transformers import GPT2Config

from relpos.encodings.encoding import Encoding
from relpos.encodings.registry import encoding
from relpos.models.presets import sizes


@strict
class RelposGPT2Config(GPT2Config):
    """GPT-2's configuration, with one entry more: which encoding.

    position        {"name": "kerple_log", …options}; None is what GPT-2 has, learned positions up to n_positions
    share_position  one encoding for all layers, and not one a layer (encodings of the embedding are always one)
    """

    model_type = "relpos_gpt2"

    n_positions: int = 1024  # of learned positions; no other encoding has a limit
    position: dict[str, Any] | str | None = None
    share_position: bool = False
    # The paper trains without dropout. Attention never writes its weights out, so there are none to drop.
    resid_pdrop: float | int = 0.0
    embd_pdrop: float | int = 0.0
    attn_pdrop: float | int = 0.0
    bos_token_id: int | None = None  # whatever the tokenizer says
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, auto_map: object = None, **kwargs: Any) -> None:
        # auto_map is for people without relpos, and belongs to the folder that holds its module: a copy saved elsewhere
        # would name a file that is not there.
        super().__post_init__(**kwargs)
        position = self.position
        if position is None:
            position = {"name": "learned", "length": self.n_positions}
        elif isinstance(position, str):
            position = {"name": position}
        if not isinstance(position.get("name"), str):
            raise ValueError(f'position must name an encoding, as in {{"name": "kerple_log"}}, not {position!r}.')
        if self.n_embd % self.n_head:
            raise ValueError(f"the width {self.n_embd} (n_embd) is no multiple of the {self.n_head} heads (n_head).")
        if self.add_cross_attention:
            raise ValueError("this GPT-2 has no cross-attention: leave add_cross_attention at False.")
        if position["name"] == "learned":
            # transformers' GPT-2 reads the size of the table here.
            position = {"length": self.n_positions, **position}
            self.n_positions = position["length"]
        self.position = dict(position)

    @classmethod
    def preset(cls, name: str, **entries: Any) -> Self:
        """The configuration of a named size: nano, tiny, small, medium or large."""
        return cls(**{**sizes(name), **entries})

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """A folder of transformers' GPT-2 is one of ours with learned positions."""
        found, rest = super().get_config_dict(*args, **kwargs)
        if found.get("model_type") == GPT2Config.model_type:
            found = {**found, "model_type": cls.model_type}
        return found, rest

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: the class is relpos's own, and its source is not copied into the folders that it saves."""

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return int(self.n_embd) // int(self.n_head)

    def make_position(self) -> Encoding:
        """A new encoding as this configuration names it."""
        assert isinstance(self.position, dict)
        options = {key: value for key, value in self.position.items() if key != "name"}
        return encoding(self.position["name"], self.n_head, self.head_dim, **options)
