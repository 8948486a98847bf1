"""Twenty training steps of the CABLE authors' own code, repeated by our GPT-2 (tests/data/trajectories).

python tests/support/trajectories.py    prints the tables of docs/exactness.md
"""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from relpos.models.gpt2 import FAMILY, RelposGPT2Config, RelposGPT2ForCausalLM
from relpos.runs.settings import OptimizerSettings
from relpos.training.trainer import Clock, parameter_groups, schedule

FOLDER = Path(__file__).parents[1] / "data" / "trajectories"
FILE = json.loads((FOLDER / "trajectories.json").read_text(encoding="utf-8"))
CONFIG, THEIR_OPTIMIZER, METHODS = FILE["config"], FILE["optimizer"], FILE["methods"]
WIDTH = CONFIG["n_embd"]
FIRST = 256  # the first row of the T5-bias's table that causal attention reads: distance 0
WINDOWS = {64: ([0, 32, 63], 1), 160: ([158, 159], 1), 600: ([598, 599], 6)}  # rows of the logits, every n-th key


@dataclass(frozen=True)
class Twin:
    """What relpos computes a method of the authors' code with."""

    position: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)  # of GPT-2, beyond the sizes

    @property
    def title(self) -> str:
        name, *options = [*self.position.items(), *self.config.items()]
        return ", ".join([f"`{name[1]}`", *(f"{key}={value}" for key, value in options)])


TWINS = {
    "cable6": Twin({"name": "cable"}),
    "cable": Twin({"name": "cable_nw", "step": "softplus"}),
    "cable_gen1": Twin({"name": "cable_nw", "step": "softplus"}, {"scale_attn_weights": False}),
    "kcable": Twin({"name": "kcable", "step": "softplus"}),
    "kcable6": Twin({"name": "kcable", "weighted": True}),
    "kerple": Twin({"name": "kerple_log", "clamped": True}),
    "alibi": Twin({"name": "alibi"}),
    "fire": Twin({"name": "fire", "length": 512, "absolute": True, "initial_std": 0.02}),
    "t5bias": Twin({"name": "clipped", "divisor": "width"}),
    "rope": Twin({"name": "rope", "layout": "interleaved"}),
    "sinusoidal": Twin({"name": "sinusoidal", "amplitude": 0.1}),
    "learnable": Twin({"name": "learned", "length": CONFIG["block_size"]}),
}
SETTINGS = {
    "lr": THEIR_OPTIMIZER["schedule"]["max_lr"],
    "final_lr_ratio": THEIR_OPTIMIZER["schedule"]["min_lr"] / THEIR_OPTIMIZER["schedule"]["max_lr"],
    "warmup_steps": THEIR_OPTIMIZER["schedule"]["warmup_steps"],
    "warmup_reaches_lr": True,
    "weight_decay": THEIR_OPTIMIZER["weight_decay"],
    "position_weight_decay": THEIR_OPTIMIZER["weight_decay"],
    "position_decay": "matrices",
}
LAYERS = {  # linear layers of an encoding, by the authors' names
    "cable_layer": "steps",
    "h_attn": "steps",
    "cable_layer_scale": "weights",
    "mlp_fire.0": "inner",
    "mlp_fire.2": "outer",
}
VALUES = {"c": "c", "L_multiplier": "stretch", "bias_p": "r1", "bias_a": "r2"}  # parameters with a range
FLOOR = 0.01  # of Kerple's values in use
ALLOWED = {  # largest difference; correct implementations stay well below it, and an option of another value does not
    "logits, step 0": 2e-5,
    "losses": 1e-5,
    "gradient norms": 1e-5,
    "logits, step 20": 1e-4,
    "values": 2e-5,
    "bias, step 0": 2e-5,
    "bias, step 20": 2e-4,
}
NO_EFFECT = "mlp_fire.2.bias"  # is added to entire rows of scores: only rounding moves it


# What differs where an option has another value: method, the encoding, the optimizer's settings
DEVIATIONS: dict[str, tuple[str, Twin, dict[str, Any]]] = {
    "`clipped` with divisor=head_dim: q·k / √head_dim": ("t5bias", Twin({"name": "clipped"}), {}),
    "`kerple_log` with clamped=false: positive by construction": ("kerple", Twin({"name": "kerple_log"}), {}),
    "`fire` with absolute=false: positive by construction": ("fire", Twin({"name": "fire", "length": 512}), {}),
    "`cable_nw` with q·k / √head_dim": ("cable_gen1", TWINS["cable"], {}),
    "`cable` with position_weight_decay=0": ("cable6", TWINS["cable6"], {"position_weight_decay": 0.0}),
    "`cable` with position_decay=all": ("cable6", TWINS["cable6"], {"position_decay": "all"}),
    "`kerple_log` with position_weight_decay=0": ("kerple", TWINS["kerple"], {"position_weight_decay": 0.0}),
    "`fire` with position_decay=all": ("fire", TWINS["fire"], {"position_decay": "all"}),
    "`alibi` with warmup_reaches_lr=false": ("alibi", TWINS["alibi"], {"warmup_reaches_lr": False}),
}


@functools.cache
def numbers() -> dict[str, Tensor]:
    return load_file(FOLDER / "trajectories.safetensors")


def of_method(method: str, kind: str) -> dict[str, Tensor]:
    """The tensors of a method: those of `weights` and `trained` by parameter, those of `start` and `end` by window."""
    prefix = f"{method}/{kind}."
    return {key.removeprefix(prefix): value for key, value in numbers().items() if key.startswith(prefix)}


def start_weights() -> dict[str, Tensor]:
    """The transformer's start weights, drawn as the authors' code draws them: modules first, then all once more.

    `FILE["start"]` has sums and entries of them.
    """
    torch.manual_seed(FILE["seed"])
    nn.Embedding(CONFIG["vocab_size"], WIDTH)
    layers = range(CONFIG["n_layer"])
    sizes = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}  # in, out
    for _ in layers:
        for inputs, outputs in sizes.values():
            nn.Linear(inputs * WIDTH, outputs * WIDTH)
    nn.Linear(WIDTH, CONFIG["vocab_size"], bias=False)
    table = torch.empty(CONFIG["vocab_size"], WIDTH)
    weights = {"transformer.wte.weight": table}
    nn.init.normal_(table, std=0.02)
    for layer in layers:
        for name, (inputs, outputs) in sizes.items():
            weight = torch.empty(outputs * WIDTH, inputs * WIDTH)
            std = 0.02 * (2 * CONFIG["n_layer"]) ** -0.5 if name.endswith("c_proj") else 0.02
            weights[f"transformer.h.{layer}.{name}.weight"] = nn.init.normal_(weight, std=std)
    nn.init.normal_(table, std=0.02)  # as the output layer, whose weight it is
    return weights


@torch.no_grad()
def build(method: str, twin: Twin) -> RelposGPT2ForCausalLM:
    """Our model with the weights that the authors' code started with."""
    config = RelposGPT2Config(
        **{name: CONFIG[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")},
        layer_norm_epsilon=CONFIG["layer_norm_eps"],
        position=twin.position,
        **twin.config,
    )
    model = RelposGPT2ForCausalLM(config)
    for name, weight in start_weights().items():
        parameter = model.get_parameter(name)
        parameter.copy_(weight if name.endswith("wte.weight") else weight.T)  # GPT-2's other matrices are (in, out)
    for name, weight in of_method(method, "weights").items():
        write(model, name, weight)
    return model.train()


def trained_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """Our parameter under the name that the authors' code has for it."""
    owner, _, own = name.partition(".attn.")
    if not own:
        return model.get_parameter(name)
    position = model.get_submodule(f"{owner}.attn.position")
    if own in VALUES:
        return position.get_parameter(f"{VALUES[own]}.raw")
    module, _, last = own.rpartition(".")
    return position.get_parameter("table" if module == "t5_position" else f"{LAYERS[module]}.{last}")


def values_in_use(model: nn.Module, name: str) -> Tensor:
    """The values of a parameter of an encoding, in the authors' shape but for axes of size 1."""
    owner, _, own = name.partition(".attn.")
    if own in VALUES:
        return model.get_submodule(f"{owner}.attn.position.{VALUES[own]}")(torch.float32)
    parameter = trained_parameter(model, name)
    return parameter[:, FIRST:].T if own.startswith("t5_position") else parameter


def write(model: nn.Module, name: str, value: Tensor) -> None:
    """Set the values of a parameter of an encoding."""
    owner, _, own = name.partition(".attn.")
    if own in VALUES:
        model.get_submodule(f"{owner}.attn.position.{VALUES[own]}").assign(value.flatten())
    else:
        values_in_use(model, name).copy_(value)


def train(model: RelposGPT2ForCausalLM, changes: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Take the steps with our groups of parameters and schedule; returns the losses and the norms of the gradients."""
    settings = OptimizerSettings(**{**SETTINGS, **changes})
    betas, eps = tuple(THEIR_OPTIMIZER["betas"]), THEIR_OPTIMIZER["eps"]
    optimizer = torch.optim.AdamW(parameter_groups(model, settings), betas=betas, eps=eps, fused=True)
    rate = LambdaLR(optimizer, schedule(settings, FILE["steps"], Clock(None)))
    losses, norms = [], []
    for batch in numbers()["batches"].long():  # (windows, tokens)
        loss = model(batch[:, :-1], labels=batch).loss
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), THEIR_OPTIMIZER["max_grad_norm"]))
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(norms)


@torch.no_grad()
def outputs(model: RelposGPT2ForCausalLM, method: str, kind: str) -> dict[str, float]:
    """The largest differences of logits, and of the last layer's bias as a share of its largest entry."""
    differences: dict[str, list[float]] = {"logits": [], "bias": []}
    for key, theirs in of_method(method, kind).items():
        what, _, length = key.partition("_")
        rows, every = WINDOWS[int(length)]
        ids = numbers()["window"][: int(length)].long()
        if what == "logits":
            differences[what].append(largest(model(ids[None]).logits[0, rows], theirs))
        else:
            (call,) = FAMILY.calls(model, ids, [CONFIG["n_layer"]])
            hidden = call.arguments["hidden"] if call.position.needs_hidden else None
            bias = call.position.map(int(length), hidden=hidden)
            ours = (bias if hidden is None else bias[0])[:, -1:, ::every]
            # Softmax does not see a value that is added to an entire row.
            ours, expected = (x - x[..., -1:] for x in (ours, theirs))
            differences[what].append(largest(ours, expected) / expected.abs().max().item())
    return {what: max(values) for what, values in differences.items() if values}


def largest(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    assert ours.isfinite().all()
    return (ours - theirs).abs().max().item()


@torch.no_grad()
def trained_values(model: nn.Module, method: str) -> dict[str, float]:
    """The largest difference of the encoding's values in use, if it has any."""
    differences = []
    for name, theirs in of_method(method, "trained").items():
        if not name.endswith(NO_EFFECT):
            in_use = theirs.clamp(min=FLOOR) if name.rpartition(".")[2] in ("bias_p", "bias_a") else theirs
            differences.append(largest(values_in_use(model, name).reshape(theirs.shape), in_use))
    return {"values": max(differences)} if differences else {}


def compare(method: str, twin: Twin | None = None, changes: dict[str, Any] | None = None) -> dict[str, float]:
    """The largest difference of each quantity of `ALLOWED` that the method has."""
    model = build(method, twin or TWINS[method])
    before = outputs(model, method, "start")
    losses, norms = train(model, changes or {})
    after = outputs(model, method, "end")
    theirs = METHODS[method]
    found = {
        **{f"{what}, step 0": difference for what, difference in before.items()},
        "losses": largest(losses, torch.tensor(theirs["losses"])),
        "gradient norms": largest(norms, torch.tensor(theirs["grad_norms"])),
        **{f"{what}, step 20": difference for what, difference in after.items()},
        **trained_values(model, method),
    }
    return {quantity: found[quantity] for quantity in ALLOWED if quantity in found}


def excess(differences: dict[str, float]) -> tuple[str, float]:
    """The quantity that is farthest beyond what is allowed, and how many times."""
    return max(((quantity, found / ALLOWED[quantity]) for quantity, found in differences.items()), key=lambda x: x[1])


def table() -> str:
    """The two tables of docs/exactness.md."""
    lines = [f"| method | relpos | {' | '.join(ALLOWED)} |", f"|---|---|{'---:|' * len(ALLOWED)}"]
    for method, twin in TWINS.items():
        differences = compare(method)
        cells = [f"{differences[quantity]:.1g}" if quantity in differences else "–" for quantity in ALLOWED]
        lines.append(f"| {method} | {twin.title} | {' | '.join(cells)} |")
    lines.append(f"| allowed | | {' | '.join(f'{allowed:.0e}' for allowed in ALLOWED.values())} |")
    lines += ["", "| deviation | method | farthest beyond what is allowed | times |", "|---|---|---|---:|"]
    for deviation, (method, twin, changes) in DEVIATIONS.items():
        quantity, times = excess(compare(method, twin, changes))
        lines.append(f"| {deviation} | {method} | {quantity} | {times:,.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
