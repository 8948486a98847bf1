"""Every encoding against numbers that its authors' own code computed (tests/data/golden).

    python tests/support/golden.py    prints the table of docs/exactness.md

A comparison takes a file's content and yields pairs: what relpos computes in float64 and what the file says, a number
that is not there (a key after the query) as NaN in the file and −inf in ours.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import golden_forms
import torch
from golden_forms import Content, Pairs, number
from torch import Tensor

import relpos
from relpos.forms.call import Call
from relpos.forms.encoding import Encoding

FOLDER = Path(__file__).parents[1] / "data" / "golden"
DOUBLE = 1e-8  # the code ran in float64; the files have 9 digits
SINGLE = 1e-6  # parts of the code compute in float32 whatever they receive; FIRE's adds 1e-6 to a denominator


def read(name: str) -> Content:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def fill(parameter: Tensor, values: object) -> None:
    with torch.no_grad():
        parameter.copy_(number(values) if isinstance(values, list) else values)


def make(name: str, sizes: Content, **options: object) -> Encoding:
    """An encoding in float64, of a file's heads and head_dim (a bias of the distance has none: any will do)."""
    return relpos.encoding(name, sizes["heads"], sizes.get("head_dim", 8), **options).double()


@torch.no_grad()
def bias(position: Encoding, length: int, causal: bool = True, hidden: Tensor | None = None) -> Tensor:
    """The bias in float64 (heads, length, length): the scores of queries and keys that are all 0."""
    zero = torch.zeros(1, position.heads, length, position.head_dim, dtype=torch.float64)
    return relpos.scores(zero, zero, position, hidden=hidden, causal=causal)[0]


@torch.no_grad()
def logits(position: Encoding, content: Content, causal: bool = True, positions: Tensor | None = None) -> Tensor:
    """The scores of the file's queries and keys: (heads, length, length)."""
    q, k = (number(content["inputs"][name])[None] for name in ("q", "k"))
    return relpos.scores(q, k, position, causal=causal, positions=positions)[0]


def rows(ours: Tensor, outputs: Content, key: str) -> tuple[Tensor, Tensor]:
    """Our rows and the file's, of the queries that the file keeps."""
    return ours[:, outputs["rows"]], number(outputs[key])


# Biases of the distance


def set_kerple(position: Encoding, sizes: Content) -> None:
    names = ("bias_a", "bias_p") if isinstance(position, relpos.encodings.KerplePower) else ("bias_p", "bias_a")
    for parameter, name in zip((position.r1, position.r2), names, strict=True):
        parameter.assign(number(sizes[name]))


def kerple(content: Content, name: str) -> Pairs:
    position = make(name, content["parameters"])
    set_kerple(position, content["parameters"])
    yield rows(bias(position, content["parameters"]["length"]), content["outputs"], "bias")


def set_fire(position: Encoding, network: Content, case: Content) -> None:
    position.c.assign(number([network["c"]]))
    position.stretch.assign(number([case["L_multiplier"]]))
    fill(position.inner.weight[:, 0], network["inner_weight"])
    fill(position.inner.bias, network["inner_bias"])
    fill(position.outer.weight, network["outer_weight"])
    fill(position.outer.bias, network["outer_bias"])


def fire(content: Content) -> Pairs:
    sizes = content["parameters"]
    for case in ("inside", "beyond"):
        position = make("fire", sizes, length=sizes[case]["init_L"])
        set_fire(position, sizes, sizes[case])
        yield rows(bias(position, sizes[case]["length"]), content["outputs"][case], "bias")


def t5(content: Content) -> Pairs:
    sizes, outputs = content["parameters"], content["outputs"]
    causal = not sizes["bidirectional"]
    position = make("t5", sizes, buckets=sizes["buckets"], max_distance=sizes["max_distance"])
    fill(position.table, number(sizes["table"]).T.tolist())
    yield rows(bias(position, sizes["length"], causal), outputs, "bias")
    far = outputs["far"]
    yield bias(position, far["keys"], causal)[:, far["query"]][far["heads"]], number(far["bias"])


def from_first_key(x: Tensor) -> Tensor:
    """Without the value of the first key, which softmax does not see: it is the same in the entire row."""
    return x - x[..., :1]


def alibi(content: Content) -> Pairs:
    sizes, outputs = content["parameters"], content["outputs"]
    ours, theirs = rows(bias(make("alibi", sizes, slopes="press"), sizes["length"]), outputs, "mask")
    yield from_first_key(ours), from_first_key(theirs)
    for heads, slopes in {sizes["heads"]: outputs["slopes"], **outputs["slopes_by_heads"]}.items():
        position = make("alibi", {"heads": int(heads)}, slopes="press")
        yield -bias(position, 2)[:, 1, 0], number(slopes)


def bloom_alibi(content: Content) -> Pairs:
    sizes, outputs = content["parameters"], content["outputs"]
    last = bias(make("alibi", sizes, slopes="press"), sizes["length"])[:, -1]  # the query that sees every key
    yield from_first_key(last), from_first_key(number(outputs["alibi"]))
    seen = slice(content["inputs"]["left_padding"], None)  # what stands at padding is never seen
    yield from_first_key(last[:, seen]), from_first_key(number(outputs["left_padded"])[:, seen])


def mpt_alibi(content: Content) -> Pairs:
    sizes = content["parameters"]
    yield bias(make("alibi", sizes, slopes="press"), sizes["length"])[:, -1], number(content["outputs"]["alibi"])


# Rotations


def rotation(position: Encoding, content: Content, causal: bool, positions: Tensor | None = None) -> Pairs:
    outputs = content["outputs"]
    yield rows(logits(position, content, causal, positions), outputs, "logits")
    q, k = (number(content["inputs"][name])[None] for name in ("q", "k"))
    turned = position.rotate(q, k, Call(q.shape[2], q.shape[2], dtype=torch.float64, token_positions=positions))
    for ours, key in zip(turned, ("turned_q", "turned_k"), strict=True):
        yield rows(ours[0], outputs, key)


def rotary(content: Content, name: str, *options: str) -> Pairs:
    sizes = content["parameters"]
    position = make(name, sizes, **{option: sizes[option] for option in options})
    yield from rotation(position, content, causal=not position.bidirectional)


def mrope(content: Content, order: str) -> Pairs:
    sizes = content["parameters"]
    options = {"base": float(sizes["rope_theta"]), "sections": sizes["mrope_section"], "section_order": order}
    positions = torch.tensor(content["inputs"]["positions"])[None]
    yield from rotation(make("rope", sizes, **options), content, causal=False, positions=positions)


# Factors of the queries


def factors(position: Encoding, length: int) -> Tensor:
    """The factor of the query at each position: (length,)."""
    return position.query_factor(Call(length, length, dtype=torch.float64))[0, 0, :, 0]


def llama4_temperature(content: Content) -> Pairs:
    sizes, outputs = content["parameters"], content["outputs"]
    options = {"rule": "llama4", "length": sizes["floor_scale"], "strength": sizes["attn_scale"]}
    position = make("temperature", sizes, **options)
    yield factors(position, sizes["length"]), number(outputs["scale"])
    scores = logits(position, content)
    yield rows(scores.softmax(-1).masked_fill(scores == -torch.inf, -torch.inf), outputs, "weights")


def ministral3_temperature(content: Content) -> Pairs:
    sizes, positions = content["parameters"], content["inputs"]["positions"]
    options = {"length": sizes["original_max_position_embeddings"], "strength": sizes["beta"]}
    position = make("temperature", {"heads": 1}, rule="ministral3", **options)
    yield factors(position, len(positions)), number(content["outputs"]["scale"])


# Biases from the input and the scores


def cable_nw(content: Content) -> Pairs:
    sizes = content["parameters"]
    position = make("cable_nw", sizes, step=sizes["step"])
    fill(position.steps.weight, sizes["h_attn_weight"])
    fill(position.steps.bias, sizes["h_attn_bias"])
    hidden = number(content["inputs"]["hidden"])[None]
    yield rows(bias(position, sizes["length"], hidden=hidden), content["outputs"], "bias")


def cope(content: Content, **options: object) -> Pairs:
    sizes = content["parameters"]
    position = make("cope", sizes, npos=sizes["npos"], **options)
    fill(position.table, number(sizes["pos_emb"]).T.tolist())
    yield rows(logits(position, content), content["outputs"], "logits")


def set_network(position: Encoding, sizes: Content) -> None:
    """The two layers of DAPE, or the two convolutions of DAPE V2."""
    for layer, name in ((position.first, "first"), (position.second, "second")):
        fill(layer.weight, number(sizes[f"{name}_weight"]).view_as(layer.weight).tolist())
        fill(layer.bias, sizes[f"{name}_bias"])


def dape_alibi(content: Content) -> Pairs:
    position = make("dape", content["parameters"], base="alibi", base_options={"slopes": "press"})
    yield number(position.base.slopes), number(content["parameters"]["slopes"])
    set_network(position, content["parameters"])
    yield rows(logits(position, content), content["outputs"], "logits")


def dape_kerple(content: Content) -> Pairs:
    position = make("dape", content["parameters"], base="kerple_log")
    set_kerple(position.base, content["parameters"])
    set_network(position, content["parameters"])
    yield rows(logits(position, content), content["outputs"], "logits")


def dape_fire(content: Content, leak: float = 0.01) -> Pairs:
    for case in ("non_negative", "general"):
        sizes = content["parameters"][case]
        base_options = {"length": sizes["init_L"], "leak": leak}
        position = make("dape", content["parameters"], base="fire", base_options=base_options)
        set_fire(position.base, sizes, sizes)
        set_network(position, sizes)
        yield rows(logits(position, content), content["outputs"][case], "logits")


def dapev2_everywhere(content: Content) -> Pairs:
    sizes = content["parameters"]
    position = make("dapev2", sizes, base="kerple_log", units=sizes["units"])
    set_kerple(position.base, sizes)
    set_network(position, sizes)
    yield rows(logits(position, content), content["outputs"], "logits")


def dapev2_kerple(content: Content) -> Pairs:
    """But for the entries (i, i) of all rows but the last: there the official code reads the key after the query."""
    ours, theirs = next(dapev2_everywhere(content))
    for row, query in enumerate(content["outputs"]["rows"]):
        keys = query + 1 if query == content["parameters"]["length"] - 1 else query
        if keys:
            yield ours[:, row, :keys], theirs[:, row, :keys]


COMPARISONS: dict[str, tuple[Callable[[Content], Pairs], float, str]] = {  # file: comparison, allowed, the encoding
    "kerple_log": (partial(kerple, name="kerple_log"), DOUBLE, "`kerple_log`"),
    "kerple_power": (partial(kerple, name="kerple_power"), DOUBLE, "`kerple_power`"),
    "fire": (fire, SINGLE, "`fire`"),
    "t5_causal": (t5, DOUBLE, "`t5`"),
    "t5_bidirectional": (t5, DOUBLE, "`t5`"),
    "alibi": (alibi, DOUBLE, "`alibi`, slopes=press"),
    "bloom_alibi": (bloom_alibi, SINGLE, "`alibi`, slopes=press"),
    "mpt_alibi": (mpt_alibi, SINGLE, "`alibi`, slopes=press"),
    "xpos": (lambda content: rotary(content, "xpos", "base", "scale_base"), SINGLE, "`xpos`"),
    "rope_half": (lambda content: rotary(content, "rope", "base", "layout"), SINGLE, "`rope`"),
    "mrope_qwen2_vl": (partial(mrope, order="blocks"), SINGLE, "`rope` with sections"),
    "mrope_qwen3_vl": (partial(mrope, order="interleaved"), SINGLE, "`rope` with sections, section_order=interleaved"),
    "llama4_temperature": (llama4_temperature, SINGLE, "`temperature`"),
    "ministral3_temperature": (ministral3_temperature, SINGLE, "`temperature`, rule=ministral3"),
    "dape_alibi": (dape_alibi, DOUBLE, "`dape`, base=alibi, slopes=press"),
    "dape_kerple": (dape_kerple, DOUBLE, "`dape`"),
    "dape_fire": (dape_fire, SINGLE, "`dape`, base=fire, leak=0.01"),
    "dapev2_kerple": (dapev2_kerple, DOUBLE, "`dapev2`, but for entries (i, i)"),
    "cope": (cope, DOUBLE, "`cope`"),
    "cable_nw": (cable_nw, DOUBLE, "`cable_nw`, step=softplus"),
    "deberta_v2": (golden_forms.deberta_v2, SINGLE, "the form Projected, on both sides"),
    "conformer_relative": (golden_forms.conformer_relative, SINGLE, "the form Projected"),
    "transformer_xl": (golden_forms.transformer_xl, SINGLE, "the form Projected"),
    "swin": (golden_forms.swin, DOUBLE, "what `relpos draw` shows of Swin"),
}


DEVIATIONS: dict[str, tuple[str, Callable[[Content], Pairs]]] = {  # another setting: file, comparison
    "`cope` with scaled=false: gates on q·k, as the paper's formula reads": ("cope", partial(cope, scaled=False)),
    "`dape` over `fire` with leak=0: ReLU, as in the FIRE paper": ("dape_fire", partial(dape_fire, leak=0.0)),
    "`dapev2` with its entries (i, i)": ("dapev2_kerple", dapev2_everywhere),
}


def largest_difference(pairs: Pairs) -> float:
    """The largest |ours − theirs| of all pairs, each as a share of the largest |theirs|."""
    differences = []
    for ours, theirs in pairs:
        there = ~theirs.isnan()
        if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), there):
            raise ValueError(f"{tuple(ours.shape)} and {tuple(theirs.shape)} do not hold numbers at the same places.")
        differences.append((ours - theirs)[there].abs().max() / theirs[there].abs().max())
    return float(max(differences))


def table() -> str:
    """The two tables of docs/exactness.md."""
    lines = ["| golden file | relpos | computed by | largest difference | allowed |", "|---|---|---|---:|---:|"]
    for name, (compare, allowed, encoding) in COMPARISONS.items():
        content = read(name)
        difference = largest_difference(compare(content))
        lines.append(f"| {name} | {encoding} | {content['source']} | {difference:.1g} | {allowed:.0e} |")
    lines += ["", "| deviation | golden file | largest difference |", "|---|---|---:|"]
    for deviation, (name, compare) in DEVIATIONS.items():
        lines.append(f"| {deviation} | {name} | {largest_difference(compare(read(name))):.1g} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
