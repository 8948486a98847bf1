"""Part 1: what must hold for any model, without a reference.

Causality, caches, padding, packing, batches and shifts: two ways to the same numbers.
"""

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from relpos.checking.capture import AttentionCall
from relpos.checking.check_subject import (
    ABSOLUTE,
    RELATIVE,
    ModelSubject,
    ModuleSubject,
    NotApplicableError,
    NotTestableError,
    Subject,
    as_model,
    cast,
    first_tensor,
)
from relpos.checking.outcomes import ATTEMPTS, Outcome, Test, compared, difference
from relpos.checking.rotations import cached_positions

PADDED = 5  # tokens of padding
CROPPED = 4
STEPS = 24  # tokens that are decoded one by one, at most
SHIFT = 7  # tokens by which all positions are moved
UNMOVED = 1e-5  # relative change that counts as none
BY_LENGTH = ("dynamic", "longrope")  # scalings by which a shift changes the frequencies


# -- Masks


def mask_kind(subject: Subject) -> Outcome:
    """No boolean may be added to the scores: it hides nothing."""
    added: dict[str, bool] = {}

    def listen(call: AttentionCall) -> None:
        added[call.layer] = added.get(call.layer, False) or call.boolean

    ids = subject.tokens(2, subject.length, 0)
    inputs = {}
    if subject.padding:  # a mask that hides nothing may be left out
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][1, -PADDED:] = 0
    with subject.captured(listen):
        subject.run(ids, **inputs)
    if not added:
        raise NotTestableError("its attention could not be seen")
    wrong = [name for name, boolean in added.items() if boolean]
    if wrong:
        where = f"{wrong[0]}, and {len(wrong) - 1} more" if len(wrong) > 1 else wrong[0]
        return Outcome(True, 1.0, "a boolean is added to the scores", where)
    return Outcome(False, 0.0, f"to the scores of {len(added)} layers")


# -- Causality


def least_moved(subject: Subject, place: int, end: int) -> Tensor:
    """How far each output moves, (length,), if the tokens from `place` to `end` are others.

    Of several texts, the one whose outputs before `place` move least: a choice of experts may flip by rounding.
    """
    best: Tensor | None = None
    for seed in range(ATTEMPTS):
        ids = subject.tokens(1, subject.length, seed)
        others = subject.tokens(1, 64 + subject.length, seed + 50)[0]
        changed = ids.clone()
        changed[:, place:end] = others[: end - place]
        changed[:, place] = others[others != ids[0, place]][0]
        output = subject.run(ids)[0]
        if len(output) != subject.length:
            raise NotTestableError("its outputs do not belong to single tokens")
        gap = difference(subject.run(changed)[0], output)
        if best is None or float(gap[:place].max()) < float(best[:place].max()):
            best = gap
        if float(best[:place].max()) <= UNMOVED:
            break
    assert best is not None
    return best


def causality(subject: Subject) -> Outcome:
    """A changed token must change nothing before it; in a bidirectional model, it must."""
    length = subject.length
    place = 2 * length // 3
    gap = least_moved(subject, place, place + 1)
    before = float(gap[:place].max())
    if float(gap[place:].max()) <= UNMOVED:
        raise NotTestableError("a changed token changes no output at all")
    moved = (gap > UNMOVED).nonzero().flatten()
    if subject.causal is None:
        behind, ahead = int(moved.max()) - place, place - int(moved.min())
        if ahead > 0 and (ahead == place or behind <= ahead):  # everything, or as far to both sides
            subject.causal = False
            raise NotTestableError("it is bidirectional, and nothing says that it must not be")
        subject.causal = True
    if subject.causal:
        if before <= UNMOVED:  # also if everything after an earlier token changes
            place = length // 3
            gap = least_moved(subject, place, length)
            before = float(gap[:place].max())
        ahead = place - int((gap[:place] > UNMOVED).nonzero()[0]) if before > UNMOVED else 0
        words = f"changes by {before:.2g}" if before > UNMOVED else "no output depends on later tokens"
        begins = f"{ahead} {'token' if ahead == 1 else 'tokens'} before" if ahead else ""
        evidence = {"ahead": ahead, "visible": visibility(subject)} if ahead else {}
        return Outcome(before > UNMOVED, before, words, begins, evidence)
    blind = before <= UNMOVED
    words = "no output depends on later tokens" if blind else "outputs depend on tokens on both sides"
    return Outcome(blind, before, words, "the first token" if blind else "")


def visibility(subject: Subject, length: int | None = None) -> dict[str, Tensor]:
    """Which keys each query sees, per layer of self-attention: boolean (queries, keys)."""
    seen: dict[str, Tensor] = {}
    length = subject.length if length is None else length

    def listen(call: AttentionCall) -> None:
        if call.q is not None and call.layer not in seen:
            visible = call.visible()
            if visible.shape == (length, length):
                seen[call.layer] = visible

    with subject.captured(listen):
        subject.run(subject.tokens(1, length, 0))
    return seen


# -- Caches


def decoded(
    subject: ModelSubject,
    ids: Tensor,
    pieces: list[int],
    static: bool = False,
    crop: bool = False,
    positions: bool = False,
) -> Tensor:
    """The outputs of all pieces of a text but the first, with a cache: the model's own, or a static one.

    With `positions`, the model is told them.
    """
    cache: Any = subject.static_cache(ids.shape[1] + 3) if static else None
    outputs, done = [], 0
    for number, piece in enumerate(pieces):
        if crop and number == 1:  # other tokens are read, and removed again
            if not all(getattr(layer, "is_croppable", True) for layer in getattr(cache, "layers", ())):
                raise NotTestableError("its cache cannot be cropped")
            if hasattr(cache, "activate_past_recording"):
                cache.activate_past_recording()
            subject.run(subject.tokens(len(ids), CROPPED, 77), past_key_values=cache)
            cache.crop(-CROPPED)
        told = {"position_ids": torch.arange(done, done + piece)[None].to(ids.device)} if positions else {}
        output = subject.output(ids[:, done : done + piece], past_key_values=cache, use_cache=True, **told)
        cache = getattr(output, "past_key_values", None) if cache is None else cache
        if cache is None:
            raise NotTestableError("it returns no cache of keys and values")
        outputs.append(first_tensor(output))
        done += piece
    return torch.cat([output[0] for output in outputs[1:]])


def steps_of(subject: ModelSubject) -> list[int]:
    """A first piece, and then single tokens that cross the border of a window if there is one."""
    length = subject.length
    if not subject.only_attention:  # recurrent layers and convolutions begin with a prompt
        return [length // 2, *[1] * min(STEPS, length - length // 2)]
    if length <= 2 * STEPS:
        return [1] * length
    window = subject.window or length
    first = max(1, min(window - 4, length - STEPS))
    return [first, *[1] * STEPS]


def no_selection(model: ModelSubject) -> None:
    """Refuse a test in which layers select keys: equal scores may fall either way."""
    if model.selected is not None and model.selected < model.length:
        raise NotTestableError(f"its layers select {model.selected} keys, and equal scores may fall either way")


def with_cache(subject: Subject, pieces: list[int] | None, **how: Any) -> Outcome:
    """Compare decoding with a cache with the whole sequence."""
    if isinstance(subject, ModuleSubject) and subject.decode is not None:
        return with_own_cache(subject, subject.decode, pieces is None)
    model = as_model(subject)
    if not model.causal:
        raise NotApplicableError
    if not model.cache:
        raise NotTestableError("it has no cache of keys and values")
    no_selection(model)
    if pieces is not None and not model.only_attention:
        raise NotTestableError("layers other than attention keep states, which need not be read in pieces")
    if how.get("static") and not model.ours and not getattr(model.model, "_can_compile_fullgraph", False):
        raise NotTestableError("transformers does not support a static cache for it")
    chosen = pieces or steps_of(model)
    total = sum(chosen)

    def pairs(seed: int, positions: bool = False) -> list[tuple[Tensor, Tensor, int]]:
        ids = model.tokens(1, total, seed)
        text = decoded(model, ids, chosen, positions=positions, **how)
        return [(text, model.run(ids)[0, chosen[0] :], chosen[0])]

    outcome = compared(pairs)
    if outcome.wrong:
        how_read = {
            "pieces": chosen,
            "window": model.window,
            "uncounted": model.positions and not compared(lambda seed: pairs(seed, positions=True)).wrong,
            **cached_positions(model, lambda ids: decoded(model, ids, chosen, **how), total),
        }
        return replace(outcome, evidence={**outcome.evidence, **how_read})
    return outcome


def with_own_cache(subject: ModuleSubject, decode: Callable[[Tensor], Any], steps: bool) -> Outcome:
    """Compare a module's own decoding, step by step, with the whole sequence."""
    if not steps:
        raise NotTestableError("its own decoding is made step by step")
    length = subject.length

    def pairs(seed: int) -> list[tuple[Tensor, Tensor, int]]:
        ids = subject.tokens(1, length, seed)
        return [(first_tensor(decode(ids))[0], subject.run(ids)[0], 0)]

    outcome = compared(pairs)
    if not outcome.wrong:
        return outcome
    seen = {"pieces": [1] * length, "uncounted": False, **cached_positions(subject, decode, length)}
    return replace(outcome, evidence={**outcome.evidence, **seen})


def pieces_of(length: int) -> list[int]:
    """Pieces of several sizes, a single token among them."""
    first = length // 4
    return [first, 3, 1, length // 5, length - first - 4 - length // 5]


# -- Padding, packing, batches


def padding(subject: Subject, side: str) -> Outcome:
    """A row with padding must give what it gives alone."""
    if not subject.padding:
        raise NotTestableError("it takes no attention_mask")
    model = as_model(subject)
    if side == "left" and (model.two_stacks or model.causal is False or not model.model.can_generate()):
        raise NotApplicableError  # an encoder is padded on the right
    if side == "left" and not model.restarts and not model.kinds <= set(RELATIVE):
        raise NotTestableError("it takes no position_ids, and padding on the left may move its positions")
    no_selection(model)
    length = subject.length
    real = length - PADDED
    pad = getattr(model.model.config.get_text_config(), "pad_token_id", None)
    pad = pad if isinstance(pad, int) and pad >= 0 else 0
    kept = slice(0, real) if side == "right" else slice(PADDED, None)

    def pairs(seed: int, given: bool = False) -> list[tuple[Tensor, Tensor, int]]:
        ids = model.tokens(2, length, seed)
        alone = ids[1:, :real]
        padded = torch.full_like(ids[1:], pad)
        padded[:, kept] = alone
        batch = torch.cat([ids[:1], padded])
        mask = torch.ones_like(batch)
        mask[1] = 0
        mask[1, kept] = 1
        inputs: dict[str, Tensor] = {"attention_mask": mask}
        if given:
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)  # as generate makes them
        if model.two_stacks:
            return [(_with_source(model, batch, mask)[1], _with_source(model, alone, None)[0], 0)]
        return [(model.run(batch, **inputs)[1, kept], model.run(alone)[0], 0)]

    outcome = compared(lambda seed: pairs(seed, given=side == "left" and model.positions))
    if outcome.wrong and side == "left" and model.positions:  # RoBERTa's positions begin after its padding
        without = compared(pairs)
        outcome = without if not without.wrong else outcome
    if not outcome.wrong:
        return outcome
    seen: list[bool] = []

    def listen(call: AttentionCall) -> None:
        visible = call.visible()
        if visible.shape[-1] == length:
            hidden = visible[..., real:] if side == "right" else visible[PADDED:, :PADDED]
            seen.append(bool(hidden[..., : real if side == "right" else None, :].any()))

    ids = model.tokens(1, length, 0)
    mask = torch.zeros_like(ids)
    mask[:, kept] = 1
    with model.captured(listen):
        _ = _with_source(model, ids, mask) if model.two_stacks else model.run(ids, attention_mask=mask)
    return replace(
        outcome, evidence={**outcome.evidence, "seen": any(seen), "absolute": bool(model.kinds & set(ABSOLUTE))}
    )


def _with_source(model: ModelSubject, source: Tensor, mask: Tensor | None) -> Tensor:
    """The outputs of a decoder for different texts of its encoder."""
    ids = model.tokens(1, 9, 5).expand(len(source), -1)
    more = {} if mask is None else {"attention_mask": mask}
    output = model.model(input_ids=source, decoder_input_ids=ids, use_cache=False, **more)
    logits: Tensor = output.logits
    return logits.float()


def packing(subject: Subject) -> Outcome:
    """Documents packed in one row, by positions that begin again at 0, must give what they give alone."""
    model = as_model(subject)
    if not model.causal or model.two_stacks:
        raise NotApplicableError
    if not model.restarts:
        raise NotTestableError("documents are packed by position_ids, which it does not take")
    if not separates_documents(model):
        raise NotTestableError("its code makes its mask without position_ids: packed documents see each other")
    no_selection(model)
    if not model.only_attention:
        raise NotTestableError("layers other than attention carry states from one document to the next")
    sizes = [model.length // 2, model.length - model.length // 2]

    def pairs(seed: int) -> list[tuple[Tensor, Tensor, int]]:
        ids = model.tokens(1, model.length, seed)
        positions = torch.cat([torch.arange(size) for size in sizes])[None].to(ids.device)
        packed = model.run(ids, position_ids=positions)[0]
        starts = [0, sizes[0]]
        alone = [
            model.run(ids[:, start : start + size], position_ids=torch.arange(size)[None].to(ids.device))[0]
            for start, size in zip(starts, sizes, strict=True)
        ]
        return [(packed, torch.cat(alone), 0)]

    return compared(pairs, border=sizes[0])


def separates_documents(model: ModelSubject) -> bool:
    """Whether the code of a model hands positions to transformers' masks, which then separate packed documents."""
    if model.ours:
        return True
    source = inspect.getsource(sys.modules[type(model.model).__module__])
    calls = re.findall(r"(?:create_causal_mask\(|mask_function\(|mask_kwargs = {)(?!\*)([^)}]*)", source)
    return any("position_ids" in arguments for arguments in calls)


def batches(subject: Subject) -> Outcome:
    """Each row of a batch must give what it gives alone."""

    def pairs(seed: int) -> list[tuple[Tensor, Tensor, int]]:
        ids = subject.tokens(3, subject.length, seed)
        together = subject.run(ids)
        return [(together[row], subject.run(ids[row : row + 1])[0], 0) for row in range(3)]

    return compared(pairs)


def kernel(subject: Subject) -> Outcome:
    """Our own models run on kernels, which must give what the definition of attention gives in float64."""
    if not isinstance(subject, ModelSubject) or not subject.ours:
        raise NotApplicableError

    def pairs(seed: int) -> list[tuple[Tensor, Tensor, int]]:
        ids = subject.tokens(1, subject.length, seed)
        with cast(subject.model, (torch.float32,), torch.float64):
            exact = subject.run(ids)[0]
        return [(subject.run(ids)[0], exact, 0)]

    return compared(pairs)


# -- Shifts


def shift(subject: Subject) -> Outcome:
    """Positions that all move by one amount change nothing in a relative model, and something in an absolute one."""
    if not isinstance(subject, ModelSubject):
        return constant(subject)
    if not subject.positions or subject.two_stacks:
        order = "its positions follow from the order of the tokens"
        raise NotTestableError(order if subject.ours else "it takes no position_ids")
    kinds = subject.kinds
    if not kinds:
        raise NotTestableError("it has no attention that relpos can see")
    scalings = {str(position.rotary.scaling.get("rope_type")) for position in subject.known.values() if position.rotary}
    if scalings & set(BY_LENGTH):
        raise NotTestableError("its frequencies depend on the length")
    tables = any(position.table is not None for position in subject.known.values())
    if not kinds <= {*RELATIVE, *ABSOLUTE} or (tables and not kinds & set(ABSOLUTE)):
        raise NotTestableError("it is not known whether its positions are relative")
    length = min(subject.length, subject.limit - SHIFT)
    if length < 4:
        raise NotTestableError(f"it has too few positions for a shift of {SHIFT}")
    positions = torch.arange(length)[None].to(subject.device)

    def pairs(seed: int) -> list[tuple[Tensor, Tensor, int]]:
        ids = subject.tokens(1, length, seed)
        still, moved = (subject.run(ids, position_ids=positions + by)[0] for by in (0, SHIFT))
        return [(moved, still, 0)]

    outcome = compared(pairs)
    if not kinds & set(ABSOLUTE):
        return outcome
    if outcome.wrong:
        return Outcome(False, outcome.amount, f"absolute: a shift changes the outputs by {outcome.amount:.2g}")
    if outcome.amount is not None and outcome.amount > UNMOVED:
        return Outcome(False, outcome.amount, f"absolute: a shift changes the outputs by {outcome.amount:.1g}")
    return Outcome(True, outcome.amount, "a shift of absolute positions changes nothing", "", {"absolute": True})


def constant(subject: Subject) -> Outcome:
    """A token that is repeated gives the same output everywhere, if positions are relative."""
    ids = subject.tokens(1, 1, 0).expand(1, subject.length)
    output = subject.run(ids)[0]
    amount = float(difference(output, output[:1].expand_as(output)).max())
    if amount > 1e-3:
        raise NotTestableError("the outputs for a repeated token change with its position: positions are absolute")
    return Outcome(False, amount, "a repeated token has the same output everywhere")


TESTS = (
    Test("mask", "no boolean mask is added", mask_kind, "A boolean mask is added to the scores."),
    Test(
        "causality",
        "causality",
        causality,
        "Outputs depend on later tokens, or, in an encoder, do not. If the masks are right, tensors of different "
        "positions are mixed elsewhere: look for a view or reshape with its axes in another order.",
    ),
    Test(
        "cache",
        "cached, step by step = whole",
        lambda subject: with_cache(subject, None),
        "Decoding with a cache gives other numbers than reading the whole text: positions, masks or keys in the cache "
        "are wrong.",
    ),
    Test(
        "pieces",
        "cached, in pieces = whole",
        lambda subject: with_cache(subject, pieces_of(subject.length)),
        "Reading a text in pieces gives other numbers than reading it at once: the positions or the mask of the later "
        "pieces are wrong.",
    ),
    Test(
        "crop",
        "cached, after a crop = whole",
        lambda subject: with_cache(subject, pieces_of(subject.length), crop=True),
        "After tokens are removed from the cache, positions or keys are not those of the tokens that are left.",
    ),
    Test(
        "static cache",
        "static cache = whole",
        lambda subject: with_cache(subject, pieces_of(subject.length), static=True),
        "A cache of a fixed size gives other numbers: empty slots are seen, or positions are those of the slots.",
    ),
    Test(
        "left padding",
        "padded on the left = alone",
        lambda subject: padding(subject, "left"),
        "Padding on the left changes the numbers: it is seen, or it is counted in the positions.",
    ),
    Test(
        "right padding",
        "padded on the right = alone",
        lambda subject: padding(subject, "right"),
        "Padding on the right changes the numbers: it is seen, or it is counted in the positions.",
    ),
    Test(
        "packing",
        "packed documents = separate",
        packing,
        "Documents in one row see each other, or their positions do not begin again.",
    ),
    Test(
        "kernel",
        "fast attention = its definition",
        kernel,
        "The kernel of relpos gives other numbers on this machine than the definition of attention in float64.",
        "Report it with the output of relpos doctor.",
    ),
    Test("batch", "a batch = one at a time", batches, "The rows of a batch are not independent of each other."),
    Test(
        "shift",
        "shifted positions",
        shift,
        "The numbers depend on where a text stands, though its positions are relative; or do not, though they are "
        "absolute.",
    ),
)
