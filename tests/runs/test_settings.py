"""Settings: defaults, a file, dotted overrides; and a sentence for what they cannot be."""

import dataclasses
import math
import subprocess
import sys

import pytest
import yaml

from relpos.runs.settings import RECIPES, Settings, flatten, known_settings, load_settings, parse_overrides


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "data: {length: 64}\noptimizer: {weight_decay: 0.2}\nmodel: {options: {slopes: press}, encoding: alibi}"
    )
    settings = load_settings(str(file), {"optimizer.weight_decay": 0.3})
    assert (settings.data.length, settings.optimizer.weight_decay, settings.run.batch_size) == (64, 0.3, 8)
    assert settings.model.options == {"slopes": "press"}
    assert set(flatten(dataclasses.asdict(Settings()))) == set(known_settings())


def test_a_saved_run_is_a_configuration(tmp_path):
    settings = load_settings(None, {"model.encoding": "fire", "run.steps": 7, "run.out": "x"})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**dataclasses.asdict(settings), "about": {"versions": {"torch": "1"}}}))
    assert load_settings(str(file), {}) == settings


def test_values_on_the_command_line_are_yaml_and_typed():
    pairs = ["optimizer.lr=1e-3", "run.steps=1e2", "data.separate_documents=true", "optimizer.position_lr=null"]
    overrides = parse_overrides(pairs)
    assert list(overrides.values()) == [1e-3, 100.0, True, None]
    assert parse_overrides(["base=5e5", "name=3e"]) == {"base": 5e5, "name": "3e"}
    settings = load_settings(None, overrides)
    assert (settings.optimizer.lr, settings.run.steps, settings.optimizer.position_lr) == (0.001, 100, None)
    assert isinstance(settings.run.steps, int)
    assert settings.data.separate_documents is True


def test_tokens_are_steps():
    overrides = {"run.tokens": 1e6, "run.batch_size": 8, "data.length": 512}
    assert load_settings(None, overrides).run.steps == math.ceil(1e6 / 4096)


PARTS = {"parts": ["fire"], "part_options": {"fire": {"c": 1.0}}}


@pytest.mark.parametrize(
    ("encoding", "options", "filled"),
    [
        ("fire", {}, {"length": 77}),
        ("sum", PARTS, {"parts": ["fire"], "part_options": {"fire": {"length": 77, "c": 1.0}}}),
    ],
)
def test_encodings_that_ask_for_the_trained_length_get_it(encoding, options, filled):
    settings = load_settings(None, {"model.encoding": encoding, "model.options": options, "data.length": 77})
    assert settings.model.options == filled
    by_key = {f"model.options.{key}": value for key, value in options.items()}
    assert load_settings(None, {"model.encoding": encoding, **by_key, "data.length": 77}) == settings
    assert PARTS["part_options"] == {"fire": {"c": 1.0}}  # the caller's options are not changed


def test_the_paper_recipe_is_the_papers():
    settings = load_settings("paper-small", {"model.encoding": "cable"})
    optimizer = settings.optimizer
    assert settings.run.steps == 19_073
    assert settings.run.batch_size * settings.data.length == 524_288
    assert (optimizer.lr, optimizer.lr * optimizer.final_lr_ratio) == (6e-4, pytest.approx(6e-5))
    assert (optimizer.beta1, optimizer.beta2, optimizer.max_grad_norm) == (0.9, 0.95, 1.0)
    assert (optimizer.warmup_steps, optimizer.weight_decay, settings.model.vocab_size) == (715, 0.1, 50_304)


@pytest.mark.parametrize("recipe", sorted(file.stem for file in RECIPES.glob("*.yaml")))
def test_every_recipe_can_be_read(recipe):
    assert load_settings(recipe, {}).model.preset == recipe.rsplit("-", 1)[1]


COUNT = "at least 1 and at most 1,000,000,000"
SHARE = "at least 0 and below 1"
SEED = "at least 0 and below 4,294,967,296"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"model.encodig": "fire"}, r"unknown setting 'model\.encodig'\. Did you mean 'model\.encoding'\?"),
        ({"model.encoding": "fyre"}, r"Did you mean 'fire'\?"),
        ({"model.preset": "nanoo"}, r"Did you mean 'nano'\?"),
        ({"run.precision": "float8"}, "unknown precision"),
        ({"data.length": "long"}, "data.length must be a number, not 'long'"),
        ({"data.length": 1.5}, "data.length must be int, not 1.5"),
        ({"data.separate_documents": 3}, "data.separate_documents must be bool, not 3"),
        ({"run.steps": 3, "run.tokens": 3}, "steps or tokens, not both"),
        ({"run.tokens": 1e30}, r"run\.tokens=1e\+30 are .* steps; at most 1,000,000,000"),
        *[
            ({key: value}, f"^{key} must be {allowed}, not ")
            for key, value, allowed in (
                ("optimizer.beta1", 2, SHARE),
                ("optimizer.beta2", 1, SHARE),
                ("optimizer.lr", -1, "at least 0 and finite"),
                ("optimizer.lr", float("inf"), "at least 0 and finite"),
                ("optimizer.weight_decay", -0.1, "at least 0 and finite"),
                ("optimizer.final_lr_ratio", 2, "at least 0 and at most 1"),
                ("optimizer.table_eps", 0, "above 0 and finite"),
                ("model.dropout", 1, SHARE),
                ("run.steps", 1e30, COUNT),
                ("run.steps", 0, COUNT),
                ("run.batch_size", 0, COUNT),
                ("run.minutes", 0, "above 0 and finite"),
                ("run.micro_batch_size", 0, COUNT),
                ("run.seed", 99999999999999999999999, SEED),
                ("run.seed", -1, SEED),
                ("run.context_parallel", 0, COUNT),
                ("data.length", 1, "at least 2 and finite"),
            )
        ],
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(overrides, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        load_settings(None, overrides)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is not valid YAML"),
        ("- 1", "must hold a mapping"),
        ("", "is empty"),
        ("datta: {length: 3}", "Did you mean"),
        ("data: 3", "unknown setting 'data'"),
        (None, r"unknown recipe 'papr-small'\. Did you mean 'paper-small'"),
    ],
)
def test_a_file_without_settings_is_named(tmp_path, text, sentence):
    file = tmp_path / "a.yaml"
    file.write_text(text or "")
    with pytest.raises(ValueError, match=sentence):
        load_settings("papr-small" if text is None else str(file), {})


REFUSED = {  # commands, and what is said of them
    "train --encoding kerpel_log": "Did you mean 'kerple_log'?",
    "train data.lenght=3": "Did you mean 'data.length'?",
    "train lenght": "key=value",
    "train --task passkeys": "Did you mean 'passkey'?",
    "train --task copy --data sotu": "a task or on text",
    "ls --tasks flipflop": "Did you mean 'flip_flop'?",
}


def test_wrong_settings_are_refused_before_anything_heavy_is_imported():
    code = f"""
import sys, relpos
from relpos.cli import main
for words in {list(REFUSED)!r}:
    sys.argv[1:] = words.split()
    try: main()
    except SystemExit as ended: assert ended.code == 2
try: relpos.train("kerpel_log")
except ValueError as error: print(error, file=sys.stderr)
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for line, sentence in zip(run.stderr.splitlines(), [*REFUSED.values(), "Did you mean 'kerple_log'"], strict=True):
        assert sentence in line
