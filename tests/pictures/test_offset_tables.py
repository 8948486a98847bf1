"""`relpos draw` of Swin and BEiT: their tables over 2-D offsets, from the weights alone."""

import numpy as np
import pytest
import torch
from small_models import shaken
from transformers import BeitConfig, BeitModel, SwinConfig, SwinModel
from typer.testing import CliRunner

import relpos
from relpos.cli import app

SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
BEIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
BEIT = {**BEIT, "image_size": 24, "patch_size": 4, "use_relative_position_bias": True}


def saved(folder, model):
    torch.manual_seed(0)
    shaken(model).save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def swin(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "swin", SwinModel(SwinConfig(**SWIN)))


def test_swin_shows_the_bias_of_each_offset(swin, monkeypatch):
    folder, model = swin
    monkeypatch.setattr(SwinModel, "forward", lambda *_, **__: pytest.fail("the model ran"))
    picture = relpos.draw(folder, layer=3)
    shown = picture.maps[0].mean  # (heads, 7, 7)
    bias = model.encoder.layers[1].blocks[0].attention.relative_position_bias()[0].detach().numpy()  # (heads, 16, 16)
    assert shown.shape == (4, 7, 7)
    np.testing.assert_array_equal(picture.arrays["layer3.offset_bias"], shown)
    for query in range(16):
        for key in range(16):
            down, across = query // 4 - key // 4, query % 4 - key % 4
            np.testing.assert_allclose(shown[:, down + 3, across + 3], bias[:, query, key])
    assert picture.numbers["shows"] == "offsets"
    assert "by offset of two patches" in picture.caption
    assert "windows of 4 × 4 patches" in picture.caption


def test_the_axes_are_offsets(swin, tmp_path):
    out = tmp_path / "swin.png"
    result = CliRunner().invoke(app, ["draw", str(swin[0]), "--layer", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    panel = relpos.draw(swin[0], layer=1).figure.axes[0]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["−3", "−2", "−1", "0", "1", "2", "3"]
    assert panel.get_ylabel() == "rows, query − key"


def test_the_bias_of_a_window_is_that_of_the_model(swin):
    folder, model = swin
    picture = relpos.draw(folder, layer=3, show="bias")
    expected = model.encoder.layers[1].blocks[0].attention.relative_position_bias()[0].detach().numpy()
    np.testing.assert_allclose(picture.maps[0].mean, expected, rtol=1e-6)


def test_all_layers_of_beit_are_a_contact_sheet(tmp_path):
    folder, model = saved(tmp_path / "beit", BeitModel(BeitConfig(**BEIT)))
    picture = relpos.draw(folder, layer="all")
    assert [each.layer for each in picture.maps] == [1, 2]
    table = model.layers[1].relative_position_bias.relative_position_bias_table
    expected = table[:-3].detach().T.reshape(4, 11, 11).numpy()  # the last three are those of the class token
    np.testing.assert_allclose(picture.maps[1].mean, expected)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layer": "all"}, "have 2 to 4 heads: give one layer"),
        ({"show": "weights"}, "SwinModel reads pixel_values, not text: only its bias can be drawn"),
        ({"show": "mass"}, "SwinModel reads pixel_values, not text"),
        ({"text": "words"}, "SwinModel reads pixel_values, not text"),
    ],
)
def test_what_needs_an_image_or_one_layer_is_refused(swin, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        relpos.draw(swin[0], **options)
