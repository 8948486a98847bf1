"""Train a model with any encoding. Calling `train` again with the same folder resumes an interrupted run."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
import yaml
from accelerate import PartialState
from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainingArguments, set_seed
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback

from relpos.model_catalogue import preset
from relpos.models.context import divide_sequences
from relpos.models.family import get_family
from relpos.runs.checkpoints import CLOCK, newest_undamaged, read_log, step_of
from relpos.runs.resolve import check_context, check_encoding
from relpos.runs.results import ABOUT, RESULT, About, RunResult, read_about
from relpos.runs.settings import FREE, Settings, flatten
from relpos.system.files import LOCK, Lock, read_json, write_text
from relpos.system.memory import check_memory
from relpos.system.versions import versions
from relpos.training.distributed import check_processes, context_group, make_collator
from relpos.training.finish import finish
from relpos.training.log import Clock, Log
from relpos.training.start import check_start, open_start
from relpos.training.trainer import RelposTrainer, cannot_write
from relpos.training.training_data import Data, open_data

ENDLESS = 10**9  # steps of a run that the clock ends
IN_USE = "{folder} is being trained by {holder}: wait for it, stop it, or choose another --out."


def train(settings: Settings, say: Callable[[str], None] = print) -> RunResult:
    """Train a model, or resume its training. Every process of a distributed run calls this.

    Args:
        settings: The settings; run.out is the run's folder.
        say: Receives the settings and messages at the start and the end. The progress line is always printed.

    Returns:
        The contents of result.json: steps, tokens, seconds and losses.

    Raises:
        ValueError: A setting is wrong, another process trains in the folder, or its run has other settings.
        OSError: A file could not be written.

    Example:
        >>> train(load_settings(None, {"model.encoding": "alibi", "run.steps": 100, "run.out": "runs/alibi"}))
    """
    assert settings.run.out is not None
    out = Path(settings.run.out)
    state = PartialState(cpu=not torch.cuda.is_available())
    check_processes(settings.run.context_parallel, state.num_processes)
    say = say if state.is_main_process else silent
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, and a run needs a folder: choose another --out.")
    with contextlib.ExitStack() as held:
        lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if state.is_main_process:
            lock = Lock(out, in_use=IN_USE)
        used = (out / LOCK).exists()
        if used:  # a process that trains there is noticed before the text is read
            held.enter_context(lock)
        prepared = _prepare(settings, out, state)
        if not used:  # nothing is written before everything is checked
            held.enter_context(lock)
        state.wait_for_everyone()
        return _train(settings, out, state, prepared, say)


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A run whose settings and data are checked, and which has written nothing yet."""

    model: PreTrainedModel
    data: Data
    about: dict[str, Any]  # for run.yaml


def _prepare(settings: Settings, out: Path, state: PartialState) -> _Prepared:
    run = settings.run
    # Settings are checked before the text is read and tokenized, which may take long.
    start = None
    groups = state.num_processes // run.context_parallel
    micro, _ = _shares(run.batch_size, run.micro_batch_size, groups)
    if settings.model.start is None:
        check_encoding(settings)
    else:
        start = open_start(settings)
        check_context(settings)  # its family is known now
    _check_before(settings, out)
    with state.main_process_first():  # the other processes use its cache
        data = open_data(settings, None if start is None else start.tokenizer)
    _eval_batch(len(data.heldout), micro, groups, run.context_parallel)
    model = build_model(settings, data.tokenizer) if start is None else start.model
    _check_step_memory(settings, model, micro)
    about: dict[str, Any] = {"versions": versions(), **data.about}
    if start is not None:
        about["start"] = start.about
    about["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    about["processes"] = state.num_processes
    about["threads"] = torch.get_num_threads()  # the number decides the order in which sums are added
    return _Prepared(model, data, about)


def _check_before(settings: Settings, out: Path) -> About | None:
    """Refuse a folder whose run has other settings; return what its run.yaml says about data and versions."""
    read_log(out)
    if not (out / ABOUT).exists():
        return None
    settings_before, about = read_about(out)
    _check_settings(settings, settings_before, out)
    return about


def _check_step_memory(settings: Settings, model: PreTrainedModel, micro: int) -> None:
    """Refuse windows whose activations alone are larger than the memory."""
    if torch.cuda.is_available():  # whose allocator says so itself
        return
    config, length = model.config, settings.data.length // settings.run.context_parallel
    layers = 1 if settings.model.gradient_checkpointing else int(config.num_hidden_layers)
    check_memory(
        f"a training step with {micro} windows of {length:,} tokens per process",
        4 * micro * length * int(config.hidden_size) * layers,
        "make data.length or run.micro_batch_size smaller",
    )


def _train(settings: Settings, out: Path, state: PartialState, prepared: _Prepared, say: Any) -> RunResult:
    run, model, data, about = settings.run, prepared.model, prepared.data, prepared.about
    about_before = _check_before(settings, out)  # again: only now no other process can write there
    set_seed(run.seed)
    if about_before is not None:
        _check_data(about, about_before, out)
        if "start" in about:
            check_start(about["start"], about_before, out)
    resolved = yaml.safe_dump({**dataclasses.asdict(settings), "about": about}, sort_keys=False, allow_unicode=True)
    if state.is_main_process:
        write_text(out / ABOUT, resolved)
    say(resolved)

    checkpoint = newest_undamaged(out, say)
    clock = Clock(run.minutes)
    if checkpoint is not None:
        clock.before = json.loads((checkpoint / CLOCK).read_text())["seconds"]
    if checkpoint is None or not _finished(step_of(checkpoint), clock, run.steps):
        say("starting" if checkpoint is None else f"resuming from {checkpoint}")
        trainer = _make_trainer(settings, out, state, model, data, clock, new=checkpoint is None)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except OSError as error:
            if error.errno is None:  # from `cannot_write`
                raise
            raise cannot_write(out, error.filename or "a file", error) from error
    else:
        say(f"{out} is already finished at step {step_of(checkpoint)}: to train on, give more steps or another --out.")
    if state.is_main_process:
        finish(settings, out, clock, say)
    state.wait_for_everyone()
    return cast(RunResult, read_json(out / RESULT))


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Create the model that the settings describe.

    With the same seed, the weights that two encodings have in common start with the same values: those of a model
    without an encoding.

    Args:
        settings: The settings of the run.
        tokenizer: The embedding has at least one row per entry of the tokenizer.

    Raises:
        ValueError: model.vocab_size is smaller than the tokenizer, or settings of the model contradict each other.
    """
    own = settings.model
    vocab_size = own.vocab_size or len(tokenizer)
    assert own.family is not None
    assert own.preset is not None
    family, size = get_family(own.family), preset(own.preset)
    if vocab_size < len(tokenizer):
        raise ValueError(f"model.vocab_size is {vocab_size}, but the tokenizer has {len(tokenizer)} entries.")
    check_memory(
        f"an embedding of model.vocab_size={vocab_size:,} rows, with its gradients and AdamW's two averages,",
        4 * 4 * vocab_size * size.width,
        "give fewer rows",
    )

    def build(position: Mapping[str, Any]) -> PreTrainedModel:
        set_seed(settings.run.seed)
        config = family.config(
            size,
            position,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            share_position=own.share_position,
            dropout=own.dropout or 0.0,
        )
        return family.model_class(config)

    model = build(own.position())
    model.load_state_dict(build({"name": "nope"}).state_dict(), strict=False)
    return model


def _make_trainer(
    settings: Settings,
    out: Path,
    state: PartialState,
    model: PreTrainedModel,
    data: Data,
    clock: Clock,
    new: bool,
) -> RelposTrainer:
    optimizer, run = settings.optimizer, settings.run
    groups = state.num_processes // run.context_parallel
    micro, accumulation = _shares(run.batch_size, run.micro_batch_size, groups)
    collator = make_collator(data.tokenizer, state, run.context_parallel)
    if run.context_parallel > 1:
        divide_sequences(model, context_group(run.context_parallel))
    gpu = torch.cuda.is_available()
    half = run.precision == "bfloat16" or (run.precision is None and gpu and torch.cuda.is_bf16_supported())
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=run.steps or ENDLESS,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=_eval_batch(len(data.heldout), micro, groups, run.context_parallel),
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=settings.model.gradient_checkpointing,
        optim="adamw_torch_fused",
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        max_grad_norm=optimizer.max_grad_norm,
        logging_steps=run.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=run.eval_every,
        eval_on_start=new,
        prediction_loss_only=True,
        save_strategy="steps",
        save_steps=run.save_every,
        train_sampling_strategy=data.order,
        seed=run.seed,
        data_seed=run.seed,
        use_cpu=not gpu,
        bf16=half,
        disable_tqdm=True,
        report_to=[],
        remove_unused_columns=False,
        ddp_backend=None if gpu or state.num_processes == 1 else "gloo",
        ddp_find_unused_parameters=False,
        fsdp=True if run.fsdp else None,
        fsdp_config={"version": 2, "state_dict_type": "FULL_STATE_DICT"} if run.fsdp else None,
        log_level="error",
        log_level_replica="error",
    )
    trainer = RelposTrainer(
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.heldout,
        processing_class=data.tokenizer,
        data_collator=collator,
        callbacks=[clock, Log(out, run.batch_size * settings.data.length, clock)],
        optimizer_settings=optimizer,
        clock=clock,
        steps=run.steps,
        keep=run.keep_checkpoints,
        context=run.context_parallel,
    )
    trainer.remove_callback(PrinterCallback)
    if state.is_main_process:
        trainer.add_callback(TensorBoardCallback(SummaryWriter(str(out / "tensorboard"))))
    return trainer


def _shares(batch: int, micro: int | None, processes: int) -> tuple[int, int]:
    """The windows per micro-batch of a process, and the number of its micro-batches per step."""
    if batch % processes:
        raise ValueError(f"a batch of {batch} windows cannot be shared by {processes} processes: give a multiple.")
    share = batch // processes
    micro = min(micro or share, share)
    if share % micro:
        raise ValueError(
            f"each process has {share} windows per step, which is not a multiple of run.micro_batch_size={micro}."
        )
    return micro, share // micro


def _eval_batch(windows: int, micro: int, processes: int, context: int) -> int:
    """The largest batch size that divides the windows evenly: Trainer counts windows twice to fill up a batch."""
    if context > 1 and windows % processes:  # and takes out what it counted twice by process, not by window
        raise ValueError(
            f"{windows} held-out windows cannot be shared evenly by {processes} groups of {context} processes: make "
            "run.eval_windows a multiple of the number of groups."
        )
    return next((size for size in range(micro, 1, -1) if windows % (size * processes) == 0), 1)


def _finished(step: int, clock: Clock, steps: int | None) -> bool:
    by_clock = clock.limit is not None and clock.seconds >= clock.limit
    return by_clock or (steps is not None and step >= steps)


def _check_settings(settings: Settings, before: Settings, out: Path) -> None:
    """Refuse to resume with other settings than those the run was started with."""
    old, new = (flatten(dataclasses.asdict(each)) for each in (before, settings))
    for key in new:
        if key not in FREE and key != "optimizer.warmup_steps" and old[key] != new[key]:
            raise ValueError(
                f"{out} was started with {key}={old[key]}, but {key}={new[key]} was requested: "
                "give the same settings to resume, or choose another --out."
            )
    settings.optimizer.warmup_steps = before.optimizer.warmup_steps


def _check_data(about: Mapping[str, Any], before: Mapping[str, Any], out: Path) -> None:
    """Refuse to resume with other data than that the run was started with."""
    source, kind = ("corpus", "the text of") if "corpus" in about else ("task", "the task")
    data_before = before.get(source)
    if not isinstance(data_before, dict) or data_before.get("hash") != about[source]["hash"]:
        raise ValueError(f"{kind} {about[source]['name']} has changed since {out} was started: choose another --out.")


def silent(text: str) -> None:
    """Print nothing: the `say` of all processes but the first."""
