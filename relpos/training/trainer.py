"""transformers' Trainer with our parameter groups, schedule, clock and log; its checkpoints are written atomically.

docs/training-loop.md says why it is a subclass of Trainer, and which version of transformers it is tested with;
tests/training/test_trainer_overrides.py notices when transformers changes what the overrides rely on.
"""

import copy
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainerState

from relpos.forms.encoding import Encoding
from relpos.runs.checkpoints import CLOCK, FILE, LOSSES, WEIGHTS, install, newest_undamaged, read_log
from relpos.runs.settings import OptimizerSettings, Settings
from relpos.system.files import read_json, why_not_written, write_text
from relpos.system.progress import LiveLine, clock_time

SCHEDULER = "scheduler.pt"
OPTIMIZER = "optimizer.safetensors"  # of a sharded model
UNLOGGED = "unlogged.json"  # the sum of the losses since the last line of the log, stored with a checkpoint
PICKLED = "training_args.bin"  # a pickle that Trainer writes into every checkpoint
KEYS = {"loss": "loss", "eval_loss": "heldout", "learning_rate": "lr", "grad_norm": "gradient"}  # Trainer's names, ours


class RelposTrainer(Trainer):
    """Trainer with our parameter groups, schedule and checkpoints."""

    def __init__(self, *args: Any, settings: Settings, clock: "Clock", **options: Any) -> None:
        self.settings, self.clock = settings, clock
        self.optimizer: torch.optim.Optimizer | None
        self.lr_scheduler: LambdaLR | None
        self.is_fsdp_enabled: bool
        super().__init__(*args, **options)
        self.add_callback(_UnloggedLoss(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Turn on FSDP on the CPU too, where accelerate silently replicates the model instead; share windows."""
        super().create_accelerator_and_postprocess()
        if self.settings.run.context_parallel > 1:
            _share_windows(self.accelerator, self.settings.run.context_parallel)
        if self.args.fsdp_plugin_args is not None and not self.is_fsdp_enabled:
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            state.distributed_type, self.is_fsdp_enabled = DistributedType.FSDP, True

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            cls, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = cls(parameter_groups(model or self.model, self.settings.optimizer), **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        if self.lr_scheduler is None:
            share = schedule(self.settings.optimizer, self.settings.run.steps, self.clock)
            self.lr_scheduler = LambdaLR(optimizer or self.create_optimizer(), share)
        return self.lr_scheduler

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint into a temporary folder, then rename it: a kill at any moment leaves no damaged one."""
        out, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        temporary = out / ".writing"
        writes = self.args.should_save  # true in the first process only
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # gathered by an evaluation: the optimizer does not know those tensors
                module.reshard()
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
                install(temporary / name, out / name, self.settings.run.keep_checkpoints)
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
        folder, model = Path(output_dir or self.args.output_dir), self.model
        full = {name: _gather(parameter) for name, parameter in model.named_parameters()}  # all processes take part
        if self.args.should_save:
            with torch.device("meta"):
                complete = type(model)(copy.deepcopy(model.config))
            complete.load_state_dict(full, strict=False, assign=True)
            complete.tie_weights()
            complete.save_pretrained(folder)
            self.processing_class.save_pretrained(folder)
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        state = {
            f"{name}/{key}": _gather(value)
            for name, parameter in self.model.named_parameters()
            for key, value in sorted(self.optimizer.state[parameter].items())
        }
        if self.args.should_save:
            save_file(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        saved = load_file(Path(resume_from_checkpoint) / WEIGHTS)
        with torch.no_grad():
            for name, parameter in (model or self.model).named_parameters():
                parameter.copy_(_shard(saved[name], parameter))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_fsdp_enabled or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        parameters = dict(self.model.named_parameters())
        for entry, saved in load_file(Path(checkpoint) / OPTIMIZER).items():
            name, key = entry.rsplit("/", 1)
            parameter = parameters[name]
            is_sharded = saved.shape == parameter.shape  # all state but the number of steps
            self.optimizer.state[parameter][key] = _shard(saved, parameter) if is_sharded else saved
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


def _share_windows(accelerator: Accelerator, context: int) -> None:
    """Let the processes of a group read the same windows: accelerate counts the groups in place of the processes."""
    prepare = accelerator.prepare_data_loader

    def prepared(loader: Any, *args: Any, **options: Any) -> Any:
        fresh = not getattr(loader, "_is_accelerate_prepared", False)
        loader = prepare(loader, *args, **options)
        if fresh:
            shard = loader.batch_sampler  # gives each process its batches
            shard.num_processes, shard.process_index = shard.num_processes // context, shard.process_index // context
        return loader

    accelerator.prepare_data_loader = prepared


def _gather(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU, gathered from all processes if it is sharded. All processes must call this."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().contiguous()


def _shard(saved: Tensor, like: Tensor) -> Tensor:
    """This process's shard of `saved`, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return saved
    # Without a source rank nothing is sent: every process has read the same file.
    return distribute_tensor(saved.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


class _UnloggedLoss(TrainerCallback):
    """Restores the sum of the losses between the last line of the log and the checkpoint that a run resumes from.

    Trainer starts this sum at zero, so that the first loss it logs would be the mean of the steps after the checkpoint
    only.
    """

    def __init__(self, trainer: RelposTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / UNLOGGED
        if state.global_step and file.exists():
            account = read_json(file)
            self.trainer._tr_loss += account["loss"]
            self.trainer._globalstep_last_logged = account["last_logged"]


class Clock(TrainerCallback):
    """Counts the seconds of training; with a limit, it ends the run and drives the learning rate schedule.

    All processes follow the clock of the first process, because otherwise they would stop at different steps.
    """

    def __init__(self, minutes: float | None) -> None:
        self.limit = None if minutes is None else 60 * minutes
        self.before = 0.0  # seconds before the checkpoint that the run was resumed from
        self.started = time.monotonic()
        self.first_step = 0
        self.fraction = 0.0  # the share of the limit that has passed, after the last step

    @property
    def seconds(self) -> float:
        """The seconds trained so far."""
        return self.before + time.monotonic() - self.started

    def left(self, step: int, steps: int) -> float | None:
        """Estimate the seconds until the end of the run, whose last step is `steps`."""
        by_steps = None
        if step > self.first_step:
            by_steps = (steps - step) * (time.monotonic() - self.started) / (step - self.first_step)
        if self.limit is None:
            return by_steps
        by_clock = max(self.limit - self.seconds, 0.0)
        return by_clock if by_steps is None else min(by_clock, by_steps)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.started, self.first_step = time.monotonic(), state.global_step

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.limit is None:
            return
        fraction = torch.tensor(self.seconds / self.limit, device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(fraction, src=0)
        self.fraction = float(fraction)
        if self.fraction >= 1:
            control.should_training_stop = control.should_save = control.should_evaluate = control.should_log = True


class Log(TrainerCallback):
    """Writes log.jsonl into the run's folder and prints the live line; `tokens` are those of a step."""

    def __init__(self, out: Path, tokens: int, clock: Clock) -> None:
        self.out, self.tokens, self.clock = out, tokens, clock
        self.speed: float | None = None  # tokens per second
        self.losses: dict[str, tuple[float, int]] = {}  # the last loss of each kind, and its step
        self.mark = (0, time.monotonic())  # step and time of the last entry, to compute the speed
        self.line = LiveLine()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.mark = (state.global_step, time.monotonic())
        if state.is_world_process_zero:
            # A killed run may have logged steps after its last checkpoint, which are trained again now. A run that
            # starts from the beginning evaluates at step 0 again.
            before = [entry for entry in read_log(self.out) if 0 < state.global_step >= entry["step"]]
            for entry in before:
                self._remember(entry)
            write_text(self.out / FILE, "".join(json.dumps(entry) + "\n" for entry in before))

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True  # the last loss is always logged

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Mapping[str, float] | None = None, **kwargs: Any
    ) -> None:
        values = {KEYS[key]: value for key, value in (logs or {}).items() if key in KEYS}
        if not values or not state.is_world_process_zero:
            return
        step, now = state.global_step, time.monotonic()
        for name in LOSSES:
            if not math.isfinite(values.get(name, 0.0)):
                raise ValueError(
                    f"the {name} is {values[name]} at step {step}: the learning rate may be too high. "
                    "The checkpoints saved before are kept."
                )
        entry: dict[str, float] = {"step": step, "tokens": step * self.tokens, "seconds": round(self.clock.seconds, 2)}
        if "loss" in values:
            entry["tokens_per_second"] = round((step - self.mark[0]) * self.tokens / max(now - self.mark[1], 1e-9), 1)
            self.mark = (step, now)
        else:
            self.mark = (self.mark[0], self.mark[1] + float((logs or {}).get("eval_runtime", 0.0)))
        entry |= values
        with (self.out / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self.speed = entry.get("tokens_per_second", self.speed)
        self._remember(entry)
        self._show(state)

    def _remember(self, entry: Mapping[str, float]) -> None:
        self.losses |= {name: (entry[name], int(entry["step"])) for name in LOSSES if name in entry}

    def _show(self, state: TrainerState) -> None:
        """Print the live line; a loss of an earlier step is printed with its step."""
        step, left = state.global_step, self.clock.left(state.global_step, state.max_steps)
        words = [f"step {step}" + (f"/{state.max_steps}" if self.clock.limit is None else "")]
        for name, (loss, loss_step) in sorted(self.losses.items(), key=lambda item: LOSSES.index(item[0])):
            words.append(f"{name} {loss:.4f}" + ("" if loss_step == step else f" (step {loss_step})"))
        if self.speed is not None:
            words.append(f"{self.speed:,.0f} tokens/s")
        if left is not None:
            words.append(f"{clock_time(left)} left")
        self.line("  ".join(words))

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.line.end()


def parameter_groups(model: nn.Module, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Divide the parameters of a model with encodings into groups for the optimizer.

    There are up to five: matrices (with weight decay), other parameters (without), parameters of encodings, tables of
    encodings (`Encoding.tables`), and the parameters of encodings without weight decay if only matrices have it.
    """
    encodings = [module for module in model.modules() if isinstance(module, Encoding)]
    of_encodings = {id(parameter) for module in encodings for parameter in module.parameters()}
    tables = {id(module.get_parameter(name)) for module in encodings for name in module.tables}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    others = [parameter for parameter in trained if id(parameter) not in of_encodings]
    rate = settings.lr if settings.position_lr is None else settings.position_lr
    table_rate = rate if settings.table_lr is None else settings.table_lr
    flat = {id(p) for p in trained if settings.position_decay == "matrices" and p.dim() < 2} & of_encodings
    shared = {"weight_decay": settings.position_weight_decay}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": settings.weight_decay, "lr": settings.lr},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0, "lr": settings.lr},
        {"params": [p for p in trained if id(p) in of_encodings - tables - flat], "lr": rate, **shared},
        {"params": [p for p in trained if id(p) in tables], "lr": table_rate, "eps": settings.table_eps, **shared},
        {"params": [p for p in trained if id(p) in flat], "lr": rate, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def schedule(settings: OptimizerSettings, steps: int | None, clock: Clock) -> Callable[[int], float]:
    """The factor of the learning rate by step: a linear warm-up, then a cosine down to `final_lr_ratio`.

    The cosine follows the steps, or the clock if it ends the run (`steps` is None).
    """
    warmup = settings.warmup_steps or 0
    rises = warmup if settings.warmup_reaches_lr else warmup + 1

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / rises
        done = clock.fraction if steps is None else (step - warmup) / max(steps - warmup, 1)
        return settings.final_lr_ratio + (1 - settings.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    return share


def cannot_write(out: Path, what: str, error: BaseException) -> OSError:
    """The error for a file of a run that could not be written, for example because the disk is full."""
    checkpoint = newest_undamaged(out)
    last = f"The last complete checkpoint is {checkpoint.name}" if checkpoint else "There is no complete checkpoint yet"
    sentence = str(error)
    if not isinstance(error, OSError) or error.errno is not None:  # else `writing` has said which file, and why
        reason, advice = why_not_written(out / what, error)
        sentence = f"{what} could not be written to {out}: {reason}. {advice.capitalize()}."
    return OSError(f"{sentence} {last}; rerun the command to resume.")
