"""`relpos.use` over every model type of transformers that predicts tokens: equal, refused, wrong, crashed.

    python benchmarks/model_types.py                        every causal, masked and seq2seq model type
    python benchmarks/model_types.py --types t5,bloom       these rows anew, the others as they are
    python benchmarks/model_types.py --by-name              with attn_implementation="relpos" in place of relpos.use

Each is a small random model: the type's default configuration with its sizes shrunk by their names, with one layer of
each kind, and with windows, chunks and top-k that are shorter than the 21 tokens of the inputs. "Equal": the logits of
the tokens that are not padding (none padded, padded on the right, padded on the left), all gradients, and the logits of
8 generated tokens after padding on the left are those of transformers' "eager" (of its default, where it has no
"eager"), to 1e-3 of the largest. "Refused": by `relpos.use`, with this sentence. Types are tried in a child process,
with a time limit each. By name, "refused" counts a model that is not built, or does not run, with a sentence that names
relpos.use(model), and "own code" one that runs, with the same numbers, without calling us.
Writes benchmarks/results/model_types.{json,md}; by name named_types.
"""

import argparse
import copy
import json
import logging
import queue
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, option_parser
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

import relpos
import relpos.models
from relpos.model_catalogue import PREFIX
from relpos.models.attention_interface import LISTENER

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from small_models import AUTO, KINDS, LENGTH, TOKENS, VOCABULARY, WINDOW, logits_and_gradients, shaken

MAPPINGS = {
    "decoder": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
SECONDS = 120  # of one type
WEIGHTS = 20_000_000  # of the largest model that counts as small
CLOSE = 1e-3  # relative to the largest logit, and to the largest gradient
REFERENCES = {"falcon": "sdpa"}  # its "eager" adds ALiBi twice
CACHE_IS_WRONG = {"recurrent_gemma"}  # with a cache and padding, transformers masks by the first token alone
UNPADDED = {"minimax_m3_vl_text"}  # generation: as it says, padding on the left moves its blocks; queries see nothing
EXACT = {  # sizes by name; only those that a configuration has, and only if it has more
    **{"head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "qk_head_dim": 12},
    **{"index_head_dim": 8, "index_n_heads": 2, "index_topk": 6, "index_topk_blocks": 2, "index_block_size": 4},
    **{"index_local_blocks": 1, "rotary_dim": 4, "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_head": 8},
    **{"mamba_head_dim": 8, "mamba_d_state": 8, "n_group": 1, "topk_group": 1, "num_expert_group": 1},
    **{"lru_width": 32, "image_size": 16, "patch_size": 4, "num_buckets": 8, "num_mel_bins": 8},
    **{"ngram": 2, "attention_window": WINDOW, "embedding_size": 32, "emb_dim": 32, "n_inner": 48},
    **{"moe_k": 2, "conv_dim": 32, "o_groups": 2, "o_lora_rank": 8, "word_embed_proj_dim": 32},
}
SPECIAL: dict[str, dict[str, Any]] = {  # what no name tells
    "bamba": {"attn_layer_indices": [1]},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    "hrm_text": {"num_layers_per_stack": None},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "deepseek_v4": {"index_topk": 2, "num_key_value_heads": 1},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"]},
    "esmc": {"num_key_value_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "xmod": {"default_language": "en_XX"},
    "deepseek_v2": {"num_experts_per_tok": 2},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"num_key_value_heads": 2},
}
PATTERNS = (  # sizes by part of the name, the first that fits
    (("vocab",), VOCABULARY),
    (("max_position", "n_positions", "max_seq", "max_source", "max_target", "n_ctx"), 64),
    (("per_tok", "top_k", "topk"), 2),
    (("experts",), 4),
    (("key_value_heads", "kv_heads", "query_groups", "linear_num_key_heads"), 2),
    (("heads", "n_head"), 4),
    (("layers", "n_layer", "num_blocks"), 2),
    (("window", "chunk", "local_attention"), WINDOW),
    (("radius", "block_size", "block_length"), 4),
    (("max_distance", "relative_positions", "extent"), 10),
    (("rank",), 16),
    (("head_dim", "d_kv", "key_dim", "value_dim", "state_size", "d_state"), 8),
    (("intermediate", "ffn", "mlp", "d_ff", "inner", "feed_forward"), 48),
    (("hidden_size", "d_model", "embed_dim", "n_embd", "hidden_dim", "dim", "embedding"), 32),
)


def small_value(name: str, value: Any) -> Any:
    """A smaller value for one entry of a configuration; the same where none is known."""
    if isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [2, 1, 1]}
    if isinstance(value, dict) and "compress" in name:
        return {key: min(each, 4) for key, each in value.items()}
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if "token_id" in name or "token_index" in name:
        return TOKENS.get(name, 3 if value >= VOCABULARY else value)
    sizes = (size for words, size in PATTERNS if any(word in name for word in words))
    return min(value, EXACT.get(name) or next(sizes, value))


def representatives(config: PreTrainedConfig) -> list[int]:
    """The indices of one layer of each kind, two at least."""
    depth = getattr(config, "num_hidden_layers", None)
    if not isinstance(depth, int):
        return []
    if isinstance(pattern := getattr(config, "block_types", None), list) and len(pattern) < depth:
        return list(range(len(pattern)))  # Recurrent Gemma's period
    lists = [x for x in vars(config).values() if isinstance(x, list) and len(x) == depth and depth > 2]
    kinds = {}
    for layer in range(depth):
        kinds.setdefault(tuple(str(each[layer]) for each in lists), layer)
    picks = list(kinds.values())[:6]
    return picks if len(picks) > 1 else [0, 1]


def small_settings(config: PreTrainedConfig, lists: bool) -> dict[str, Any]:
    """Settings that make a configuration of this class small.

    Args:
        config: The default one.
        lists: Whether entries with one value per layer are cut to one layer of each kind; else they are left out.
    """
    picks, depth = representatives(config), getattr(config, "num_hidden_layers", None)
    settings: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name in ("architectures", "dtype", "transformers_version", "id2label", "label2id"):
            continue
        if name in config.sub_configs and isinstance(value, PreTrainedConfig):
            settings[name] = type(value)(**small_settings(value, lists))
        elif isinstance(value, list) and picks and len(value) == depth:
            if lists:
                settings[name] = [value[i] for i in picks]
        elif (small := small_value(name, value)) != value:
            settings[name] = small
    if hasattr(config, "num_hidden_layers") and picks:
        settings["num_hidden_layers"] = len(picks)
    if hasattr(config, "qk_rope_head_dim"):  # latent attention: as many key heads, and head_dim is the rotary part's
        settings |= {"num_key_value_heads": settings.get("num_attention_heads", 4), "head_dim": 4}
    return settings


def candidates(kind: str, name: str) -> Iterator[dict[str, Any]]:
    """Settings for a small model of a type, the most telling first."""
    if name in KINDS[kind]:
        yield {**TOKENS, **KINDS[kind][name]}
    config = CONFIG_MAPPING[name]()
    extra = {name: value for name, value in TOKENS.items() if hasattr(config, name)}
    if kind == "decoder" and hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False):
        extra["is_decoder"] = True
    if kind == "seq2seq" and hasattr(config, "decoder_start_token_id"):
        extra["decoder_start_token_id"] = 2
    for lists in (True, False):
        settings = {**small_settings(config, lists), **extra, **SPECIAL.get(name, {})}
        if name == "prophetnet":
            settings.pop("num_hidden_layers", None)
        yield settings
        yield {name: value for name, value in settings.items() if name != "rope_parameters"}


def build(kind: str, name: str) -> PreTrainedModel:
    """A small model in evaluation mode that runs.

    Raises:
        ValueError: No candidate does, with the first reason.
    """
    reasons = []
    for settings in candidates(kind, name):
        for implementation in (REFERENCES.get(name, "eager"), None):
            try:
                torch.manual_seed(0)
                config = CONFIG_MAPPING[name](**copy.deepcopy(settings))
                with torch.device("meta"):
                    size = sum(p.numel() for p in AUTO[kind].from_config(copy.deepcopy(config)).parameters())
                if size > WEIGHTS:
                    raise ValueError(f"{size:,} weights")
                model = shaken(AUTO[kind].from_config(config, attn_implementation=implementation)).eval()
                with torch.no_grad():
                    model(**inputs(model, None))
            except Exception as error:  # models refuse settings in many ways
                reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            else:
                return model
    raise ValueError(reasons[0] if reasons else "no settings")


def inputs(model: PreTrainedModel, side: str | None) -> dict[str, Tensor]:
    """Three rows, of which two are padded on a side, if one is given."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(4, VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    if side is not None:
        for row, padded in ((1, 5), (2, 11)):
            where = slice(LENGTH - padded, None) if side == "right" else slice(None, padded)
            ids[row, where], mask[row, where] = 0, 0
    result = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        result["decoder_input_ids"] = torch.randint(4, VOCABULARY, (3, 13), generator=generator)
    return result


def measure(model: PreTrainedModel, kind: str, cache: bool | None = None) -> dict[str, Any]:
    """What is compared, by name: tensors, or the error with which it failed.

    Args:
        model: The model.
        kind: decoder, encoder or seq2seq.
        cache: Whether generation uses a cache; if None, as the model says.
    """
    results: dict[str, Any] = {}

    def attempt(name: str, compute: Any) -> None:
        torch.manual_seed(4)
        try:
            results[name] = compute()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

    def logits(side: str | None) -> Tensor:
        batch = inputs(model, side)
        with torch.no_grad():
            out = model(**batch).logits
        if "decoder_input_ids" in batch:
            return out
        return out[batch["attention_mask"].bool()] if out.shape[:2] == batch["attention_mask"].shape else out

    def gradients() -> list[Tensor]:
        return list(logits_and_gradients(model, inputs(model, "right"))[1].values())

    def generation() -> list[Tensor]:
        side = None if model.config.model_type in UNPADDED else "left"
        batch = {name: x for name, x in inputs(model, side).items() if name != "decoder_input_ids"}
        settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "num_beams": 1}
        if cache is not None:
            settings["use_cache"] = cache
        out = model.generate(**batch, **settings, return_dict_in_generate=True, output_logits=True)
        return list(out.logits)

    for side in (None, "right", "left"):
        attempt(f"logits, padding {side}", lambda side=side: [logits(side)])
    attempt("gradients", gradients)
    if kind != "encoder" and model.can_generate():
        attempt("generation", generation)
    return results


def off_by(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, relative to the largest value, where the values expected are finite."""
    largest = max((float(x[x.isfinite()].abs().max()) for x in theirs if x.isfinite().any()), default=1.0)
    gaps = [(a - b)[b.isfinite()].abs() for a, b in zip(ours, theirs, strict=True)]
    gap = max((float(x.max().nan_to_num(nan=float("inf"))) for x in gaps if x.numel()), default=0.0)
    return gap / (largest or 1.0)


def verdict(kind: str, name: str, by_name: bool = False) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"kind": kind, "type": name}
    try:
        model = build(kind, name)
    except Exception as error:
        return row | {"verdict": "not built", "reason": str(error)}
    row["weights"] = sum(p.numel() for p in model.parameters())
    cache = False if name in CACHE_IS_WRONG else None
    theirs, again = (measure(model, kind, cache) for _ in range(2))
    calls: list[str] = []
    try:
        model = built_by_name(model, calls) if by_name else relpos.use(model)
    except (ValueError, TypeError) as error:
        ours = "relpos.use(model)" in str(error) if by_name else str(error).startswith("relpos.use")
        return row | {"verdict": "refused" if ours else "crashed", "reason": str(error)}
    except Exception as error:
        return row | {"verdict": "crashed", "reason": f"{type(error).__name__}: {error}"}
    differences: dict[str, float] = {}
    for what, value in measure(model, kind).items():
        if isinstance(theirs[what], str):  # its own code fails here
            continue
        if isinstance(value, str):
            refused = by_name and "relpos.use(model" in value
            return row | {"verdict": "refused" if refused else "crashed", "reason": f"{what}: {value}"}
        if off_by(again[what], theirs[what]) > 0:
            row.setdefault("not deterministic", []).append(what)
            continue
        differences[what] = off_by(value, theirs[what])
    row["off by"] = differences
    wrong = [what for what, difference in differences.items() if not difference <= CLOSE]
    reason = ", ".join(f"{what}: {differences[what]:.1g}" for what in wrong)
    if by_name and not wrong and not calls:
        return row | {"verdict": "own code"}
    return row | ({"verdict": "wrong", "reason": reason} if wrong else {"verdict": "equal"})


def built_by_name(model: PreTrainedModel, calls: list[str]) -> PreTrainedModel:
    """The same model, built with `attn_implementation="relpos"`; the classes of layers that call us join `calls`."""
    named = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="relpos")
    named.load_state_dict(model.state_dict())
    for module in named.modules():
        vars(module)[LISTENER] = lambda layer, *_: calls.append(type(layer).__name__)
    return named.eval()


def work(by_name: bool) -> None:
    """The child: types from standard input, rows to standard output."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        kind, name = line.split()
        print(json.dumps(verdict(kind, name, by_name)), flush=True)


class Worker:
    """A child process that answers one type at a time."""

    def __init__(self, script: str = __file__, *options: str) -> None:
        command = [sys.executable, script, "--work", *options]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, **pipes)
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout:
            if line.startswith("{"):
                self.lines.put(line)
        self.lines.put("")

    def ask(self, kind: str, name: str) -> dict[str, Any] | None:
        """The row of a type; None if the child had to be ended."""
        self.process.stdin.write(f"{kind} {name}\n")
        self.process.stdin.flush()
        began = time.monotonic()
        try:
            line = self.lines.get(timeout=SECONDS)
        except queue.Empty:
            line = ""
        if line:
            return json.loads(line) | {"seconds": round(time.monotonic() - began, 1)}
        self.end()
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def report(rows: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    counts = Counter(row["verdict"] for row in rows)
    verdicts = [name for name in VERDICTS if name in counts or name != "own code"]
    lines = [
        f"Made by `benchmarks/model_types.py{' --by-name' * ('own code' in counts)}`, which says what is compared.",
        "",
        f"{len(rows)} model types: " + ", ".join(f"{counts[name]} {name}" for name in verdicts) + ".",
        "",
    ]
    for name in ("wrong", "crashed", "refused", "not built"):
        chosen = [row for row in rows if row["verdict"] == name]
        if chosen:
            lines += [f"## {name.capitalize()}", "", "| kind | type | reason |", "|---|---|---|"]
            for row in chosen:  # bars and brackets mean something in Markdown
                reason = row["reason"].replace("|", "/").replace("[", "\\[")
                lines.append(f"| {row['kind']} | {row['type']} | {reason} |")
            lines += [""]
    for verdict in ("own code", "equal"):
        if verdict in counts:
            lines += [f"## {verdict.capitalize()}", "", "| kind | types |", "|---|---|"]
            for kind in MAPPINGS:
                types = [row["type"] for row in rows if row["verdict"] == verdict and row["kind"] == kind]
                lines += [f"| {kind} | {', '.join(types)} |"] * bool(types)
            lines += [""]
    return "\n".join(lines)


VERDICTS = ("equal", "own code", "refused", "wrong", "crashed", "not built")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--types", help="model types, separated by commas")
    parser.add_argument("--by-name", action="store_true", help='attn_implementation="relpos"')
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.by_name)
        return
    everything = [(kind, name) for kind, names in MAPPINGS.items() for name in sorted(names)]
    everything = [(kind, name) for kind, name in everything if not name.startswith(PREFIX)]  # our own
    wanted = None if arguments.types is None else set(arguments.types.split(","))
    file = RESULTS / ("named_types.json" if arguments.by_name else "model_types.json")
    known = {(row["kind"], row["type"]): row for row in json.loads(file.read_text())} if file.exists() else {}
    worker: Worker | None = None
    for kind, name in everything:
        if wanted is not None and name not in wanted:
            continue
        worker = worker or Worker(__file__, *["--by-name"] * arguments.by_name)
        row = worker.ask(kind, name)
        if row is None:
            worker = None
            row = {"kind": kind, "type": name, "verdict": "not built", "reason": f"no answer in {SECONDS} seconds"}
        known[kind, name] = row
        print(json.dumps(row), flush=True)
        if not arguments.no_file:
            rows = [known[key] for key in everything if key in known]
            file.write_text(json.dumps(rows, indent=1))
            file.with_suffix(".md").write_text(report(rows))
    if worker is not None:
        worker.end()


if __name__ == "__main__":
    main()
