"""Train a model with any encoding. Calling `train` again with the same folder resumes an interrupted run."""

import contextlib
import dataclasses
import filecmp
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed
import transformers
import yaml
from accelerate import PartialState
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedModel, TrainingArguments, default_data_collator, set_seed
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback

from relpos.model_catalogue import FAMILIES
from relpos.models.context import divide_sequences, slice_window
from relpos.models.saved import write_stub
from relpos.pictures.curves import draw_losses
from relpos.pictures.printed_page import save
from relpos.runs.checkpoints import CLOCK, LOSSES, newest_undamaged, read_log, step_of
from relpos.runs.resolve import check_context, check_encoding
from relpos.runs.results import ABOUT, RESULT, About, RunResult, read_about, write_card
from relpos.runs.settings import FREE, Settings, flatten
from relpos.system.files import LOCK, Lock, flush, read_json, write_text, writing
from relpos.system.memory import check_memory
from relpos.system.seal import SEAL
from relpos.system.versions import versions
from relpos.training.model_and_data import Data, build_model, open_data, open_start
from relpos.training.trainer import OPTIMIZER, UNLOGGED, Clock, Log, RelposTrainer, cannot_write

ENDLESS = 10**9  # steps of a run that the clock ends
IN_USE = "{folder} is being trained by {holder}: wait for it, stop it, or choose another --out."
STATE = {CLOCK, SEAL, UNLOGGED, OPTIMIZER, "trainer_state.json"}  # a checkpoint's files that are not the model's
MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".jinja")

Say = Callable[[str], None]


def train(settings: Settings, say: Say = print, verbose: bool = False) -> RunResult:
    """Train a model in the folder run.out, or resume its training. Every process of a distributed run calls this.

    `say` receives the settings (one line, or with `verbose` all of them) and messages at the start and the end. The
    progress line is always printed.
    """
    assert settings.run.out is not None
    out, context = Path(settings.run.out), settings.run.context_parallel
    state = PartialState(cpu=not torch.cuda.is_available())
    processes = state.num_processes
    if processes % context:
        raise ValueError(
            f"run.context_parallel={context} divides each window among {context} processes, and there "
            f"{'is 1' if processes == 1 else f'are {processes}'}: start a multiple of {context}, as in torchrun "
            f"--nproc-per-node {context} -m relpos.cli train …"
        )
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, and a run needs a folder: choose another --out.")
    with contextlib.ExitStack() as held:
        lock = Lock(out, in_use=IN_USE) if state.is_main_process else contextlib.nullcontext()
        used = (out / LOCK).exists()
        if used:  # a process that trains there is noticed before the text is read
            held.enter_context(lock)
        model, data, about = _prepare(settings, out, state)
        held.callback(data.close)
        if not used:  # nothing is written before everything is checked
            held.enter_context(lock)
        state.wait_for_everyone()
        _train(settings, out, state, model, data, about, say if state.is_main_process else silent, verbose)
        return cast(RunResult, read_json(out / RESULT))


def silent(text: str) -> None:
    """Print nothing: the `say` of all processes but the first."""


def _prepare(settings: Settings, out: Path, state: PartialState) -> tuple[PreTrainedModel, Data, About]:
    """Check settings and data; return the model, the data, and a description for run.yaml. Nothing is written yet."""
    # Settings are checked before the text is read and tokenized, which may take long.
    micro, _ = _shares(settings, state)
    model, tokenizer, about = None, None, About(versions=versions())
    if settings.model.start is None:
        check_encoding(settings)
    else:
        model, tokenizer, start = open_start(settings)
        check_context(settings)  # its family is known now
    _check_before(settings, out)
    with state.main_process_first():  # the other processes use its cache
        data = open_data(settings, tokenizer)
    _eval_batch(settings, state, len(data.heldout), micro)
    about |= data.about
    if model is None:
        model = build_model(settings, data.tokenizer)
    else:
        about["start"] = start
    _check_step_memory(settings, model, micro)
    about["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    about["processes"] = state.num_processes
    about["threads"] = torch.get_num_threads()  # the number decides the order in which sums are added
    return model, data, about


def _check_before(settings: Settings, out: Path) -> About | None:
    """Refuse a folder whose run has other settings; return what its run.yaml says about data and versions."""
    read_log(out)
    if not (out / ABOUT).exists():
        return None
    before, about = read_about(out)
    old, new = (flatten(dataclasses.asdict(values)) for values in (before, settings))
    for key in new:
        if key not in FREE and key != "optimizer.warmup_steps" and old[key] != new[key]:
            raise ValueError(
                f"{out} was started with {key}={old[key]}, but {key}={new[key]} was requested: "
                "give the same settings to resume, or choose another --out."
            )
    settings.optimizer.warmup_steps = before.optimizer.warmup_steps
    return about


def _check_sources(about: Mapping[str, object], before: Mapping[str, object], out: Path) -> None:
    """Refuse to resume with another text, task or model than the run was started with."""
    for source, name, mark, words in (
        ("corpus", "name", "hash", "the text of {} has"),
        ("heldout", "name", "hash", "the text of {} has"),
        ("task", "name", "hash", "the task {} has"),
        ("start", "model", "checksum", "the weights of {} have"),
    ):
        now, then = about.get(source), before.get(source)
        if isinstance(now, dict) and (not isinstance(then, dict) or then.get(mark) != now[mark]):
            raise ValueError(f"{words.format(now[name])} changed since {out} was started: choose another --out.")


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


def _train(
    settings: Settings,
    out: Path,
    state: PartialState,
    model: PreTrainedModel,
    data: Data,
    about: About,
    say: Say,
    verbose: bool,
) -> None:
    run = settings.run
    about_before = _check_before(settings, out)  # again: only now no other process can write there
    set_seed(run.seed)
    if about_before is not None:
        _check_sources(about, about_before, out)
    resolved = yaml.safe_dump({**dataclasses.asdict(settings), "about": about}, sort_keys=False, allow_unicode=True)
    if state.is_main_process:
        write_text(out / ABOUT, resolved)
    say(resolved if verbose else settings_line(settings, about))

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
        _finish(settings, out, clock, say)
    state.wait_for_everyone()


def settings_line(settings: Settings, about: About) -> str:
    """The settings that people look at, in one line; run.yaml has all of them."""
    model, data, run = settings.model, settings.data, settings.run
    family = FAMILIES[model.family].title if model.family in FAMILIES else str(model.family)
    size = model.preset if model.start is None else f"from {model.start}"
    text = data.source if data.task is None else f"the task {data.task}"
    steps = [f"{run.steps:,} steps"] if run.steps is not None else []
    minutes = [f"{run.minutes:g} minutes"] if run.minutes is not None else []
    parts = [
        f"{model.encoding} in {family} {size} ({about['parameters']:,} parameters)",
        f"{text}, {data.length:,} tokens × {run.batch_size} windows per step",
        " or ".join([*steps, *minutes]),
        f"lr {settings.optimizer.lr:g}",
        f"seed {run.seed}",
    ]
    return f"{', '.join(parts)}. All settings: {Path(run.out or '') / ABOUT}"


def _finished(step: int, clock: Clock, steps: int | None) -> bool:
    by_clock = clock.limit is not None and clock.seconds >= clock.limit
    return by_clock or (steps is not None and step >= steps)


def _make_trainer(
    settings: Settings, out: Path, state: PartialState, model: PreTrainedModel, data: Data, clock: Clock, new: bool
) -> RelposTrainer:
    optimizer, run, context = settings.optimizer, settings.run, settings.run.context_parallel
    micro, accumulation = _shares(settings, state)
    # All windows have one length. Trainer's own collator asks for a padding token, which many tokenizers lack.
    collator = default_data_collator if data.tokenizer.pad_token_id is None else None
    if context > 1:
        rank = state.process_index % context

        def collator(windows: list[Any]) -> dict[str, Tensor]:
            return slice_window(default_data_collator(windows), rank, context)

        divide_sequences(model, torch.distributed.new_subgroups(context)[0])  # type: ignore[no-untyped-call]
    gpu = torch.cuda.is_available()
    half = run.precision == "bfloat16" or (run.precision is None and gpu and torch.cuda.is_bf16_supported())
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=run.steps or ENDLESS,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=_eval_batch(settings, state, len(data.heldout), micro),
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
        settings=settings,
        clock=clock,
    )
    trainer.remove_callback(PrinterCallback)
    if state.is_main_process:
        trainer.add_callback(TensorBoardCallback(SummaryWriter(str(out / "tensorboard"))))
    return trainer


def _shares(settings: Settings, state: PartialState) -> tuple[int, int]:
    """The windows per micro-batch of a process, and the number of its micro-batches per step."""
    batch, groups = settings.run.batch_size, state.num_processes // settings.run.context_parallel
    if batch % groups:
        raise ValueError(f"a batch of {batch} windows cannot be shared by {groups} processes: give a multiple.")
    share = batch // groups
    micro = min(settings.run.micro_batch_size or share, share)
    if share % micro:
        raise ValueError(
            f"each process has {share} windows per step, which is not a multiple of run.micro_batch_size={micro}."
        )
    return micro, share // micro


def _eval_batch(settings: Settings, state: PartialState, windows: int, micro: int) -> int:
    """The largest batch size that divides the windows evenly: Trainer counts windows twice to fill up a batch."""
    context = settings.run.context_parallel
    groups = state.num_processes // context
    if context > 1 and windows % groups:  # and takes out what it counted twice by process, not by window
        raise ValueError(
            f"{windows} held-out windows cannot be shared evenly by {groups} groups of {context} processes: make "
            "run.eval_windows a multiple of the number of groups."
        )
    return next((size for size in range(micro, 1, -1) if windows % (size * groups) == 0), 1)


def _finish(settings: Settings, out: Path, clock: Clock, say: Say) -> None:
    """Copy the model of the last undamaged checkpoint into the run's folder, plot its losses, write the result."""
    last = newest_undamaged(out)
    if last is None:
        raise ValueError(f"{out} has no undamaged checkpoint, although one was just written: check the disk.")
    try:
        _copy_model(last, out, say)
        if _finished_step(out) == step_of(last):
            return
        result = _result(settings, out, step_of(last), clock)
        save(draw_losses(read_log(out), out.name), out / "loss.png")
        write_card(out, result)
        write_text(out / RESULT, json.dumps(result, indent=1))
    except OSError as error:
        raise cannot_write(out, "the trained model", error) from error
    loss, start, end = (
        "unknown" if value is None else f"{value:.4f}"
        for value in (result["loss"], result["heldout_at_start"], result["heldout"])
    )
    say(f"{out}: loss {loss}, held-out {start} → {end}")
    if "warning" in result:
        say(f"warning: {result['warning']}")


def _copy_model(checkpoint: Path, out: Path, say: Say) -> None:
    """Copy the files of the model that are missing or damaged."""
    files = [file for file in sorted(checkpoint.iterdir()) if file.suffix in MODEL_SUFFIXES and file.name not in STATE]
    changed = [file for file in files if not _same(file, out / file.name)]
    if changed and _finished_step(out) == step_of(checkpoint):
        say(f"{', '.join(file.name for file in changed)} in {out} was damaged: copied again from {checkpoint}.")
    for file in changed:
        temporary = out / f".{file.name}.part"
        with writing(out / file.name):
            shutil.copyfile(file, temporary)
            flush(temporary)
            temporary.replace(out / file.name)
    write_stub(out)


def _same(file: Path, other: Path) -> bool:
    """Whether two files are the same, except for what `write_stub` adds to config.json."""
    if not other.is_file():
        return False
    if file.name != "config.json":
        return filecmp.cmp(file, other, shallow=False)
    try:
        copy = read_json(other)
    except ValueError:
        return False
    copy.pop("auto_map", None)
    return copy == read_json(file)


def _finished_step(out: Path) -> int | None:
    """The step in result.json; None if the file does not exist or is damaged and has to be written again."""
    try:
        return int(read_json(out / RESULT)["step"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _result(settings: Settings, out: Path, step: int, clock: Clock) -> RunResult:
    losses: dict[str, list[float | None]] = {
        name: [entry[name] for entry in read_log(out) if name in entry] or [None] for name in LOSSES
    }
    result: RunResult = {
        "step": step,
        "tokens": step * settings.run.batch_size * settings.data.length,
        "seconds": round(clock.seconds, 1),
        "loss": losses["loss"][-1],
        "heldout": losses["heldout"][-1],
        "heldout_at_start": losses["heldout"][0],
    }
    minutes, steps, warmup = settings.run.minutes, settings.run.steps, settings.optimizer.warmup_steps or 0
    if minutes is not None and step <= max(warmup, 1) and (steps is None or step < steps):  # the clock was too early
        rises = f", and the learning rate rises over the first {warmup}" if warmup else ""
        result["warning"] = (
            f"{minutes:g} minutes were enough for {step} step{'' if step == 1 else 's'} only{rises}: the model has "
            "hardly been trained. Give more minutes, a smaller model or shorter windows."
        )
    return result
