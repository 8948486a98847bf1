"""Settings: defaults, a file, dotted overrides; and a sentence for what they cannot be."""

import dataclasses
import math
import subprocess
import sys

import pytest
import yaml

from relpos.runs.settings import RECIPES, Settings, flatten, load_settings, parse_overrides


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "data: {length: 64}\noptimizer: {weight_decay: 0.2}\nmodel: {options: {slopes: press}, encoding: alibi}"
    )
    settings = load_settings(str(file), {"optimizer.weight_decay": 0.3})
    assert (settings.data.length, settings.optimizer.weight_decay, settings.run.batch_size) == (64, 0.3, 8)
    assert settings.model.options == {"slopes": "press"}


def test_a_saved_run_is_a_configuration(tmp_path):
    settings = load_settings(None, {"model.encoding": "fire", "run.steps": 7, "run.out": "x"})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**dataclasses.asdict(settings), "about": {"versions": {"torch": "1"}}}))
    assert load_settings(str(file), {}) == settings


def test_values_on_the_command_line_are_yaml_and_typed():
    found = parse_overrides(
        ["optimizer.lr=1e-3", "run.steps=1e2", "data.separate_documents=true", "optimizer.position_lr=null"]
    )
    assert found == {
        "optimizer.lr": 1e-3,
        "run.steps": 100.0,
        "data.separate_documents": True,
        "optimizer.position_lr": None,
    }
    assert parse_overrides(["base=5e5", "name=3e"]) == {"base": 5e5, "name": "3e"}
    settings = load_settings(None, found)
    assert settings.optimizer.lr == 0.001
    assert settings.run.steps == 100
    assert isinstance(settings.run.steps, int)
    assert settings.data.separate_documents is True
    assert settings.optimizer.position_lr is None


def test_tokens_are_steps():
    assert load_settings(None, {"run.tokens": 1e6, "run.batch_size": 8, "data.length": 512}).run.steps == math.ceil(
        1e6 / 4096
    )


def test_encodings_that_ask_for_the_trained_length_get_it():
    for name, options in (("learned", {}), ("fire", {}), ("rope", {})):
        assert load_settings(None, {"model.encoding": name, "data.length": 77}).model.options == {
            **options,
            "length": 77,
        }
    assert load_settings(None, {"model.encoding": "fire", "model.options.length": 9}).model.options == {"length": 9}
    over_fire = load_settings(None, {"model.encoding": "dape", "model.options.base": "fire", "data.length": 77})
    assert over_fire.model.options["base_options"] == {"length": 77}
    parts = {"model.encoding": "sum", "model.options.parts": ["fire", "alibi"], "data.length": 77}
    assert load_settings(None, parts).model.options["part_options"] == {"fire": {"length": 77}}


def test_the_trained_length_is_not_written_into_the_callers_options():
    options = {"parts": ["fire"], "part_options": {"fire": {"c": 1.0}}}
    settings = load_settings(None, {"model.encoding": "sum", "model.options": options, "data.length": 77})
    assert settings.model.options["part_options"] == {"fire": {"length": 77, "c": 1.0}}
    assert options == {"parts": ["fire"], "part_options": {"fire": {"c": 1.0}}}


def test_the_paper_recipe_is_the_papers():
    settings = load_settings("paper-small", {"model.encoding": "cable"})
    assert settings.run.steps == 19_073
    assert settings.run.batch_size * settings.data.length == 524_288
    assert (settings.optimizer.lr, settings.optimizer.lr * settings.optimizer.final_lr_ratio) == (
        6e-4,
        pytest.approx(6e-5),
    )
    assert (settings.optimizer.beta1, settings.optimizer.beta2, settings.optimizer.max_grad_norm) == (0.9, 0.95, 1.0)
    assert (settings.optimizer.warmup_steps, settings.optimizer.weight_decay, settings.model.vocab_size) == (
        715,
        0.1,
        50_304,
    )


@pytest.mark.parametrize("recipe", sorted(file.stem for file in RECIPES.glob("*.yaml")))
def test_every_recipe_can_be_read(recipe):
    assert load_settings(recipe, {}).model.preset == recipe.rsplit("-", 1)[1]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"model.encodig": "fire"}, "Did you mean 'model.encoding'?"),
        ({"model.encoding": "fyre"}, "Did you mean 'fire'?"),
        ({"model.preset": "nanoo"}, "Did you mean 'nano'?"),
        ({"data.length": "long"}, "data.length must be a number"),
        ({"data.length": 1.5}, "data.length must be int"),
        ({"data.length": 1}, "at least 2"),
        ({"data.separate_documents": 3}, "data.separate_documents must be bool"),
        ({"run.steps": 3, "run.tokens": 3}, "steps or tokens, not both"),
        ({"run.steps": 0}, "run.steps must be at least 1"),
        ({"run.batch_size": 0}, "run.batch_size must be at least 1"),
        ({"optimizer.lr": -1.0}, "optimizer.lr must be at least 0 and finite, not -1"),
        ({"optimizer.table_eps": 0.0}, "optimizer.table_eps must be above 0"),
        ({"run.precision": "float8"}, "unknown precision"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(overrides, sentence):
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        load_settings(None, overrides)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is not valid YAML"),
        ("- 1", "must hold a mapping"),
        ("", "is empty"),
        ("datta: {length: 3}", "Did you mean"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, text, sentence):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        load_settings(str(tmp_path / "a.yaml"), {})
    with pytest.raises(ValueError, match=r"unknown recipe 'papr-small'\. Did you mean 'paper-small'"):
        load_settings("papr-small", {})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--encoding", "kerpel_log"], "Did you mean 'kerple_log'?"),
        (["data.lenght=3"], "Did you mean 'data.length'?"),
        (["lenght"], "key=value"),
    ],
)
def test_the_command_refuses_before_anything_heavy_is_imported(arguments, sentence):
    code = f"""
import sys
from relpos.cli import main
sys.argv[1:] = ["train", *{arguments!r}]
try: main()
finally: assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert sentence in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_settings_name_every_field_once():
    assert len(flatten(dataclasses.asdict(Settings()))) == sum(
        len(dataclasses.fields(section.default_factory)) for section in dataclasses.fields(Settings)
    )
