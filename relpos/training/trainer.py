"""transformers' Trainer with parameter groups for encodings, our schedule, and checkpoints that are written atomically.

docs/training-loop.md says why it is a subclass of Trainer, and which version of transformers it is tested with;
tests/training/test_trainer_overrides.py notices when transformers changes what the overrides rely on.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from relpos.forms.encoding import Encoding
from relpos.runs.checkpoints import CLOCK, install, newest_undamaged
from relpos.runs.settings import OptimizerSettings
from relpos.system.files import read_json, why_not_written, write_text
from relpos.training import distributed
from relpos.training.distributed import share_windows
from relpos.training.log import Clock

SCHEDULER = "scheduler.pt"
UNLOGGED = "unlogged.json"  # the sum of the losses since the last line of the log, stored with a checkpoint
PICKLED = "training_args.bin"  # a pickle that Trainer writes into every checkpoint


class RelposTrainer(Trainer):
    """Trainer with our parameter groups, schedule and checkpoints.

    Args:
        optimizer_settings: Learning rates, weight decay and warm-up.
        clock: Counts the seconds of training; the schedule follows it if `steps` is None.
        steps: The number of steps; None if the clock ends the run.
        keep: How many checkpoints are kept.
        context: How many processes share each window; the data is divided among groups of this size.
        *args: As of Trainer, which also takes the remaining keyword arguments.
    """

    def __init__(
        self,
        *args: Any,
        optimizer_settings: OptimizerSettings,
        clock: Clock,
        steps: int | None,
        keep: int,
        context: int = 1,
        **kw: Any,
    ) -> None:
        self.optimizer_settings, self.clock, self.steps, self.keep = optimizer_settings, clock, steps, keep
        self.context = context
        self.optimizer: torch.optim.Optimizer | None
        self.lr_scheduler: LambdaLR | None
        self.is_fsdp_enabled: bool
        super().__init__(*args, **kw)
        self.add_callback(_UnloggedLoss(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Turn on FSDP on the CPU too, where accelerate silently replicates the model instead; share windows."""
        super().create_accelerator_and_postprocess()
        if self.context > 1:
            share_windows(self.accelerator, self.context)
        if self.args.fsdp_plugin_args is not None and not self.is_fsdp_enabled:
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            state.distributed_type, self.is_fsdp_enabled = DistributedType.FSDP, True

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            cls, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = cls(parameter_groups(model or self.model, self.optimizer_settings), **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        if self.lr_scheduler is None:
            share = schedule(self.optimizer_settings, self.steps, self.clock)
            self.lr_scheduler = LambdaLR(optimizer or self.create_optimizer(), share)
        return self.lr_scheduler

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint into a temporary folder, then rename it: a kill at any moment leaves no damaged one."""
        out, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        temporary = out / ".writing"
        writes = self.args.should_save  # true in the first process only
        try:
            if writes:
                shutil.rmtree(temporary, ignore_errors=True)
                (temporary / name).mkdir(parents=True)
                write_text(temporary / name / CLOCK, json.dumps({"seconds": self.clock.seconds}))
            unlogged = self.accelerator.reduce(self._tr_loss, "mean").item()  # all processes take part
            if writes:
                account = {"loss": unlogged, "last_logged": self._globalstep_last_logged}
                write_text(temporary / name / UNLOGGED, json.dumps(account))
            self.accelerator.wait_for_everyone()
            self.args.output_dir = str(temporary)  # where Trainer writes the folder checkpoint-N
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # until every process has written its random state
            if writes:
                (temporary / name / PICKLED).unlink(missing_ok=True)  # run.yaml holds the same settings as text
                install(temporary / name, out / name, self.keep)
            self.accelerator.wait_for_everyone()
        except Exception as error:
            raise cannot_write(out, name, error) from error
        finally:
            self.args.output_dir = str(out)
            if writes:
                shutil.rmtree(temporary, ignore_errors=True)

    # The four methods below differ from Trainer's for a sharded model only. Over gloo, Trainer's way of saving (the
    # first process alone calls save_pretrained) and accelerate's way of loading a full state dict both wait forever.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir)
        distributed.save_model(self.model, folder, self.args.should_save)
        if self.args.should_save:
            self.processing_class.save_pretrained(folder)
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        distributed.save_optimizer(self.model, self.optimizer, Path(output_dir), self.args.should_save)
        if self.args.should_save:
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            distributed.load_model(model or self.model, Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_fsdp_enabled or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        distributed.load_optimizer(self.model, self.optimizer, Path(checkpoint))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


class _UnloggedLoss(TrainerCallback):
    """Restores the sum of the losses between the last line of the log and the checkpoint that a run resumes from.

    Trainer starts this sum at zero, so that the first loss it logs would be the mean of the steps after the checkpoint
    only.
    """

    def __init__(self, trainer: RelposTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / UNLOGGED
        if state.global_step and file.exists():
            account = read_json(file)
            self.trainer._tr_loss += account["loss"]
            self.trainer._globalstep_last_logged = account["last_logged"]


def parameter_groups(model: nn.Module, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Divide the parameters of a model into groups for the optimizer.

    Args:
        model: Any model with relpos encodings.
        settings: Learning rates and weight decay.

    Returns:
        Up to four groups: matrices (with weight decay), other parameters (without), parameters of encodings, and tables
        of encodings (`Encoding.tables`).
    """
    encodings = [module for module in model.modules() if isinstance(module, Encoding)]
    own = {id(p) for module in encodings for p in module.parameters()}
    tables = {id(module.get_parameter(name)) for module in encodings for name in module.tables}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    others = [parameter for parameter in trained if id(parameter) not in own]
    rate = settings.lr if settings.position_lr is None else settings.position_lr
    table_rate = rate if settings.table_lr is None else settings.table_lr
    shared = {"weight_decay": settings.position_weight_decay}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": settings.weight_decay, "lr": settings.lr},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0, "lr": settings.lr},
        {"params": [p for p in trained if id(p) in own - tables], "lr": rate, **shared},
        {"params": [p for p in trained if id(p) in tables], "lr": table_rate, "eps": settings.table_eps, **shared},
    ]
    return [group for group in groups if group["params"]]


def schedule(settings: OptimizerSettings, steps: int | None, clock: Clock) -> Callable[[int], float]:
    """The learning rate schedule: a linear warm-up, then a cosine down to `final_lr_ratio`.

    Args:
        settings: Warm-up steps and the final ratio.
        steps: The number of steps of the run; None if the clock ends it.
        clock: Counts the time; used if `steps` is None.

    Returns:
        A function of the step that returns a factor of the learning rate, from 0 to 1.
    """
    warmup = settings.warmup_steps or 0

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = clock.fraction if steps is None else (step - warmup) / max(steps - warmup, 1)
        return settings.final_lr_ratio + (1 - settings.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    return share


def cannot_write(out: Path, what: str, error: BaseException) -> OSError:
    """The error for a file that could not be written, for example because the disk is full.

    Args:
        out: The run's folder.
        what: What could not be written.
        error: The error of the write.
    """
    checkpoint = newest_undamaged(out)
    last = f"The last complete checkpoint is {checkpoint.name}" if checkpoint else "There is no complete checkpoint yet"
    sentence = str(error)
    if not isinstance(error, OSError) or error.errno is not None:  # else `writing` has said which file, and why
        reason, advice = why_not_written(out / what, error)
        sentence = f"{what} could not be written to {out}: {reason}. {advice.capitalize()}."
    return OSError(f"{sentence} {last}; rerun the command to resume.")
