"""Start a run from a trained model: its weights, with the positions that the settings name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from relpos.forms.encoding import Encoding
from relpos.models.family import Family, family_of
from relpos.pretrained.transplant import ORIGINALS, merge_position, transplant
from relpos.runs.resolve import check_window, fill_length
from relpos.runs.run import Run, open_run
from relpos.runs.settings import ModelSettings, Settings


@dataclass(frozen=True)
class Start:
    """What a run starts from.

    Attributes:
        model: The model with its new positions, in float32.
        tokenizer: Its tokenizer.
        about: Where it comes from, and the checksum of its weights before; for run.yaml.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    about: dict[str, Any]


def source_model(what: str) -> Run:
    """Open the model that a run starts from: a folder, or whatever else `relpos.open` takes."""
    return open_run(what)


def open_start(settings: Settings) -> Start:
    """Open the model that the settings name, and replace its positions.

    Args:
        settings: With model.start. The family and the encoding of the model are filled in.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: It is of another family than the settings say, or of one that cannot be started from; or the
            encoding is not valid.
    """
    own = settings.model
    assert own.start is not None
    source = source_model(own.start)
    family = source.family
    if not isinstance(family, Family):
        raise ValueError(f"{own.start} is a {family.title}: training can start from {' and '.join(ORIGINALS)} only.")
    if own.family not in (None, family.name):
        raise ValueError(f"{own.start} is a {family.title}, but model.family={own.family} was requested: leave it out.")
    _fill_position(own, source.model.config.position, settings.data.length)
    if own.dropout is not None:
        for entry, value in family.dropout(own.dropout).items():
            setattr(source.model.config, entry, value)
    share = own.share_position or None
    model = transplant(source, own.position(), share_position=share, seed=settings.run.seed).float()
    _check_generation(own.start, model)
    positions = [module for module in model.modules() if isinstance(module, Encoding)]
    check_window(settings, positions, int(model.config.hidden_size))
    own.family, own.share_position = family_of(model).name, model.config.share_position
    return Start(model, source.tokenizer, {"model": str(Path(own.start)), "checksum": source.checksum})


def _fill_position(own: ModelSettings, before: Mapping[str, Any], length: int) -> None:
    """Fill in the encoding of the model, or the options of a new one that depend on the trained length."""
    if own.encoding not in (None, before["name"]):
        fill_length(own, length)
        return
    own.encoding = before["name"]
    position = merge_position(before, own.position())
    own.plan = position.pop("plan", [])
    window = position.pop("window", None)  # a setting of layers only
    if window is not None:
        own.plan = [{"every": 1, "window": window}, *own.plan]
    own.options = {key: value for key, value in position.items() if key != "name"}


def _check_generation(start: str, model: PreTrainedModel) -> None:
    """Refuse now what would be refused when the first checkpoint is saved."""
    try:
        if model.generation_config is not None:
            model.generation_config.validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the generation_config.json of {start} cannot be saved again: {reason} Mend it.") from None


def check_start(about: Mapping[str, Any], before: Mapping[str, Any], out: Path) -> None:
    """Refuse to resume from another model than the one that the run was started from.

    Args:
        about: The entry `start` of the run now.
        before: The whole entry `about` in the folder's run.yaml.
        out: The run's folder.

    Raises:
        ValueError: The checksums differ.
    """
    recorded = before.get("start")
    if not isinstance(recorded, dict) or recorded.get("checksum") != about["checksum"]:
        raise ValueError(f"the weights of {about['model']} have changed since {out} was started: choose another --out.")
