"""Train a GPT-2 with any encoding. The same call in the same folder goes on where the last one stopped."""

import contextlib
import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from accelerate import PartialState
from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedTokenizerFast, TrainingArguments, set_seed
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback

from relpos.lab.atomic import flush, write_text
from relpos.lab.card import write_card
from relpos.lab.checkpoints import SEAL, checkpoints, newest_whole, step_of
from relpos.lab.clock import Clock
from relpos.lab.data import Data, open_data
from relpos.lab.lock import Lock
from relpos.lab.log import Log, plot_loss, read_log
from relpos.lab.runs import ABOUT, RESULT
from relpos.lab.settings import FREE, Settings, flatten
from relpos.lab.sharded import OPTIMIZER
from relpos.lab.stub import write_stub
from relpos.lab.trainer import CLOCK, RelposTrainer, cannot_write
from relpos.lab.versions import versions
from relpos.models.gpt2 import RelposGPT2ForCausalLM
from relpos.models.gpt2_config import RelposGPT2Config

STATE = {CLOCK, SEAL, OPTIMIZER, "trainer_state.json"}  # a checkpoint's files that are not the model's
ENDLESS = 10**9  # steps, for a run that the clock ends


def train(settings: Settings, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Train, and give what is in the folder's result.json. Run by every process of a distributed run alike.

    `say` is told the settings and how it begins and ends; the line of progress is printed in any case.
    """
    assert settings.run.out is not None
    out = Path(settings.run.out)
    state = PartialState(cpu=not torch.cuda.is_available())
    say = say if state.is_main_process else silent
    with Lock(out) if state.is_main_process else contextlib.nullcontext():
        state.wait_for_everyone()
        return _train(settings, out, state, say)


def _train(settings: Settings, out: Path, state: PartialState, say: Any) -> dict[str, Any]:
    run = settings.run
    with state.main_process_first():  # the others find the cache
        data = open_data(settings)
    model = build_model(settings, data.tokenizer)
    set_seed(run.seed)
    about: dict[str, Any] = {"versions": versions(), **data.about}
    about["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    about["processes"] = state.num_processes
    about["threads"] = torch.get_num_threads()  # sums are added up in another order with another number of them
    _check_same(settings, about, out)
    resolved = yaml.safe_dump({**dataclasses.asdict(settings), "about": about}, sort_keys=False, allow_unicode=True)
    if state.is_main_process:
        write_text(out / ABOUT, resolved)
    say(resolved)

    checkpoint = newest_whole(out, say)
    clock = Clock(run.minutes)
    if checkpoint is not None:
        clock.before = json.loads((checkpoint / CLOCK).read_text())["seconds"]
    if checkpoint is None or not _finished(step_of(checkpoint), clock, run.steps):
        say("starting" if checkpoint is None else f"going on from {checkpoint}")
        trainer = _make_trainer(settings, out, state, model, data, clock, new=checkpoint is None)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except OSError as error:
            if error.errno is None:  # a sentence already
                raise
            raise cannot_write(out, error.filename or "a file", error) from error
    else:
        say(f"{out} has finished at step {step_of(checkpoint)}: give more steps, or another --out.")
    if state.is_main_process:
        _finish(settings, out, clock, say)
    state.wait_for_everyone()
    return dict(json.loads((out / RESULT).read_text()))


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> RelposGPT2ForCausalLM:
    """A new model as the settings say.

    What two encodings have in common starts with the same numbers: those of a model without an encoding.
    """
    given = settings.model
    vocabulary = given.vocabulary or len(tokenizer)
    if vocabulary < len(tokenizer):
        raise ValueError(f"model.vocabulary is {vocabulary}, but the tokenizer has {len(tokenizer)} entries.")
    config = {
        "vocab_size": vocabulary,
        "share_position": given.share,
        "resid_pdrop": given.dropout,
        "embd_pdrop": given.dropout,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }

    def made(position: Mapping[str, Any]) -> RelposGPT2ForCausalLM:
        set_seed(settings.run.seed)
        return RelposGPT2ForCausalLM(RelposGPT2Config.preset(given.preset, position=position, **config))

    model = made({"name": given.encoding, **given.options})
    model.load_state_dict(made({"name": "nope"}).state_dict(), strict=False)
    return model


def _make_trainer(
    settings: Settings,
    out: Path,
    state: PartialState,
    model: RelposGPT2ForCausalLM,
    data: Data,
    clock: Clock,
    new: bool,
) -> RelposTrainer:
    optimizer, run = settings.optimizer, settings.run
    micro, accumulation = _shares(run.batch, run.micro, state.num_processes)
    gpu = torch.cuda.is_available()
    half = run.precision == "bfloat16" or (run.precision is None and gpu and torch.cuda.is_bf16_supported())
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=run.steps or ENDLESS,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=_eval_batch(len(data.heldout), micro, state.num_processes),
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=settings.model.checkpointing,
        optim="adamw_torch_fused",
        learning_rate=optimizer.rate,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        max_grad_norm=optimizer.clip,
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
        callbacks=[clock, Log(out, run.batch * settings.data.length, clock)],
        optimizer_settings=optimizer,
        clock=clock,
        steps=run.steps,
        keep=run.keep,
    )
    trainer.remove_callback(PrinterCallback)
    if state.is_main_process:
        trainer.add_callback(TensorBoardCallback(SummaryWriter(str(out / "tensorboard"))))
    return trainer


def _shares(batch: int, micro: int | None, processes: int) -> tuple[int, int]:
    """Windows a process takes at a time, and how often it does so in a step."""
    if batch % processes:
        raise ValueError(f"a batch of {batch} windows cannot be shared by {processes} processes: give a multiple.")
    share = batch // processes
    micro = min(micro or share, share)
    if share % micro:
        raise ValueError(f"each process has {share} windows a step, which is no multiple of run.micro={micro}.")
    return micro, share // micro


def _eval_batch(windows: int, micro: int, processes: int) -> int:
    """The largest batch that is full everywhere: of one that is not, Trainer would count some windows twice."""
    return next((size for size in range(micro, 1, -1) if windows % (size * processes) == 0), 1)


def _finished(step: int, clock: Clock, steps: int | None) -> bool:
    by_clock = clock.limit is not None and clock.seconds >= clock.limit
    return by_clock or (steps is not None and step >= steps)


def _check_same(settings: Settings, about: dict[str, Any], out: Path) -> None:
    """A folder goes on only with what it was begun with."""
    file = out / ABOUT
    if not file.exists():
        return
    before = yaml.safe_load(file.read_text(encoding="utf-8"))
    old = flatten({key: value for key, value in before.items() if key != "about"})
    new = flatten(dataclasses.asdict(settings))
    for key in new:
        if key not in FREE and key != "optimizer.warmup" and old.get(key) != new[key]:
            raise ValueError(
                f"{out} was begun with {key}={old.get(key)}, and is now asked for {key}={new[key]}: "
                "give the same settings to go on, or choose another --out."
            )
    source, told = ("corpus", "the text of") if settings.data.task is None else ("task", "the task")
    if before["about"][source]["hash"] != about[source]["hash"]:
        raise ValueError(f"{told} {about[source]['name']} has changed since {out} was begun: choose another --out.")
    settings.optimizer.warmup = old["optimizer.warmup"]


def _finish(settings: Settings, out: Path, clock: Clock, say: Any) -> None:
    """The last checkpoint's model where from_pretrained finds it, the plot, and the result in one file."""
    last = checkpoints(out)[0]
    result: dict[str, Any] = {
        "step": step_of(last),
        "tokens": step_of(last) * settings.run.batch * settings.data.length,
    }
    if (out / RESULT).exists() and json.loads((out / RESULT).read_text())["step"] == result["step"]:
        return
    losses = {name: [entry[name] for entry in read_log(out) if name in entry] for name in ("loss", "heldout")}
    result |= {"seconds": round(clock.seconds, 1), "loss": losses["loss"][-1] if losses["loss"] else None}
    result |= {"heldout": losses["heldout"][-1], "heldout_at_start": losses["heldout"][0]}
    try:
        for file in last.iterdir():
            if file.suffix in (".safetensors", ".json", ".txt") and file.name not in STATE:
                part = out / f".{file.name}.part"
                shutil.copyfile(file, part)
                flush(part)
                part.replace(out / file.name)
        plot_loss(out)
        write_stub(out)
        write_card(out, result)
        write_text(out / RESULT, json.dumps(result, indent=1))
    except OSError as error:
        raise cannot_write(out, "the trained model", error) from error
    say(f"{out}: loss {result['loss']:.4f}, held-out {result['heldout_at_start']:.4f} → {result['heldout']:.4f}")


def silent(text: str) -> None:
    """Processes beside the first say nothing."""
