"""The explorer on trained models: scenes, text, writing, overview, details, evaluations, pictures."""

import base64
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from explorer import client, get_tile, levels, make_scene, reduced_tile

import relpos
from relpos.explorer import exports
from relpos.explorer.scenes import ExplorerSubject
from relpos.maps.distance_profiles import rotation_kernel, token_means
from relpos.maps.layer import model_layers
from relpos.maps.model_subject import ModelSubject
from relpos.models import RelposGPT2Config, RelposGPT2ForCausalLM
from relpos.training.training import train

pytestmark = pytest.mark.heavy


LAYERS, HEADS = 2, 6


@pytest.fixture(scope="module")
def trained(settings, tmp_path_factory):
    """A trained run, and small models with other encodings in its place."""
    folder = tmp_path_factory.mktemp("explored") / "cable"
    train(settings(folder, run__steps=1, model__dropout=0.0))
    run = relpos.open(folder)
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": 8 * HEADS, "vocab_size": run.model.config.vocab_size}
    runs = {"cable": run}
    for name, options in (("rope", {}), ("kerple_log", {}), ("learned", {"length": 32})):
        config = RelposGPT2Config(**sizes, position={"name": name, **options})
        runs[name] = replace(run, model=RelposGPT2ForCausalLM(config).eval())
    return runs


@pytest.fixture(scope="module")
def web(trained):
    return client(*(ExplorerSubject(str(place), ModelSubject(run)) for place, run in enumerate(trained.values())))


def subject(trained, name):
    return str(list(trained).index(name))


def dense(run, ids, show, number, head):
    layer = model_layers(run.family, run.model, torch.tensor(ids), [number])[0]
    return layer.rows(show, 0, len(ids) - 1)[head - 1].double().numpy()


def token_ids(web, scene):
    return web.explorer.scene(scene["scene"]).view.shown.ids.tolist()


@pytest.mark.parametrize("name", ["cable", "rope", "kerple_log", "learned"])
def test_tiles_of_a_model_are_its_bias_scores_and_weights(web, trained, name):
    run = trained[name]
    text = "word4 and 3 word9 and 11 " * 12
    scene = make_scene(web, subject=subject(trained, name), length=16, input={"kind": "text", "text": text})
    ids = run.tokenizer(text)["input_ids"][:16]
    assert token_ids(web, scene) == ids
    assert ("bias" in scene["shows"]) == (name in ("cable", "kerple_log"))
    for show in {"bias", "scores", "weights"} & set(scene["shows"]):
        for level in levels(16):
            ours = get_tile(web, scene, show, 2, 3, level, 0, 0)
            np.testing.assert_allclose(ours, reduced_tile(dense(run, ids, show, 2, 3), level, 0, 0), atol=2e-5)


def test_the_first_scene_is_a_held_out_document(web, trained):
    start = web.get("/api/start").json()
    about = start["subjects"][0]
    assert about["kind"] == "model"
    assert about["encoding"] == "cable"
    assert about["documents"]
    scene = make_scene(web, subject="0")
    assert scene["request"] == about["default"]
    run = trained["cable"]
    tokens = run.heldout()
    assert token_ids(web, scene) == tokens.ids[: scene["length"]].astype(int).tolist()
    reply = web.get(f"/api/scenes/{scene['scene']}/tokens").json()
    assert "".join(reply["tokens"]) == run.tokenizer.decode(tokens.ids[: scene["length"]].astype(int).tolist())


def test_a_static_bias_does_not_run_the_model(web, trained, monkeypatch):
    scene = make_scene(web, subject=subject(trained, "kerple_log"), length=16)
    assert scene["static"]
    assert scene["uniformity"] == [[1.0] * HEADS] * LAYERS
    assert scene["context_dependence"] == [[0.0] * HEADS] * LAYERS
    kept = web.explorer.scene(scene["scene"])
    get_tile(web, scene, "bias", 1, 1, 0, 0, 0)
    assert "input" not in kept.view._computed
    get_tile(web, scene, "scores", 1, 1, 0, 0, 0)
    assert "input" in kept.view._computed


def test_a_static_bias_is_shown_far_beyond_the_text(web, trained):
    scene = make_scene(web, subject=subject(trained, "kerple_log"), length=65_536)
    assert scene["shows"] == ["bias", "flat"]
    assert "only the bias" in scene["notes"][0]
    position = trained["kerple_log"].family.layers(trained["kerple_log"].model)[1].position
    value = web.get(f"/api/scenes/{scene['scene']}/value/bias/2/5/65535/535").json()["value"]
    r1, r2 = (float(each(torch.float64)[4].detach()) for each in (position.r1, position.r2))
    assert value == pytest.approx(-r1 * np.log1p(r2 * 65_000), rel=1e-5)


def test_the_position_of_rope_is_the_kernel_of_the_means(web, trained):
    run = trained["rope"]
    scene = make_scene(web, subject=subject(trained, "rope"), length=16)
    layer = model_layers(run.family, run.model, torch.tensor(token_ids(web, scene)), [2])[0]
    expected = rotation_kernel([token_means(layer)]).total(torch.arange(16))[4]
    row = web.get(f"/api/scenes/{scene['scene']}/row/position/2/5/15").json()["mean"]
    assert row[::-1] == pytest.approx(expected.tolist(), abs=1e-6)


def test_the_position_of_learned_embeddings_does_not_depend_on_the_order_of_the_text(web, trained):
    scenes = [
        make_scene(web, subject=subject(trained, "learned"), length=8, input={"kind": "text", "text": text})
        for text in (" and and and 1 1", " 1 and 1 and and")
    ]
    ids = [sorted(token_ids(web, scene)) for scene in scenes]
    assert ids[0] == ids[1]
    tiles = [get_tile(web, scene, "position", 1, 1, 0, 0, 0)[1, :8, :8] for scene in scenes]
    np.testing.assert_allclose(*tiles, atol=1e-4)
    assert np.isfinite(tiles[0][np.tril_indices(len(ids[0]))]).all()


def test_the_overview_has_every_head_and_its_numbers(web, trained):
    scene = make_scene(web, subject="0", length=16)
    reply = web.get(f"/api/scenes/{scene['scene']}/overview?show=weights")
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert [line["layer"] for line in lines] == [1, 2, 3, 4]
    assert [head["head"] for head in lines[0]["heads"]] == list(range(1, 13))
    run, head = trained["cable"], lines[1]["heads"][4]
    weights = dense(run, token_ids(web, scene), "weights", 2, 5)
    seen = np.nan_to_num(weights)
    assert head["sink"] == pytest.approx(seen[:, 0].mean(), abs=1e-4)
    entropy = -(seen * np.log(np.maximum(seen, 1e-30))).sum(axis=1).mean()
    assert head["entropy"] == pytest.approx(entropy, rel=1e-4)
    assert head["high"] == pytest.approx(np.nanmax(weights), rel=1e-5)
    assert 0 < head["context_dependence"] <= 2
    cells = np.frombuffer(base64.b64decode(head["map"]), np.uint8).reshape(48, 48)
    assert cells[0, 47] == 0  # not seen
    assert cells[0, 0] == 255  # the first query sees the first key alone
    share = (np.log(max(weights[15, 7], 1e-4)) - np.log(head["low"])) / (np.log(head["high"]) - np.log(head["low"]))
    assert cells[46, 22] == pytest.approx(1 + 254 * np.clip(share, 0, 1), abs=1)
    only = web.get(f"/api/scenes/{scene['scene']}/overview?show=bias&layers=2-3").text.splitlines()
    assert [json.loads(line)["layer"] for line in only] == [2, 3]


def test_the_details_of_a_head(web, trained):
    scene = make_scene(web, subject="0", length=16)
    run = trained["cable"]
    details = web.get(f"/api/scenes/{scene['scene']}/head/3/2?show=scores").json()
    scores = dense(run, token_ids(web, scene), "scores", 3, 2)
    assert (details["low"], details["high"]) == pytest.approx((np.nanmin(scores), np.nanmax(scores)), rel=1e-4)
    without = scores[:, 1:]
    assert details["low_without_sink"] == pytest.approx(np.nanmin(without), rel=1e-4)
    weights = web.get(f"/api/scenes/{scene['scene']}/head/3/2?show=weights").json()
    smallest = np.nanmin(dense(run, token_ids(web, scene), "weights", 3, 2))
    assert weights["low"] == pytest.approx(smallest, rel=1e-4)  # also where it is below the first colour
    diagonal = np.array([scores[i, i - 4] for i in range(4, 16)])
    profile = details["profile"]
    assert profile["distance"] == list(range(16))
    expected = (diagonal.min(), diagonal.mean(), diagonal.max())
    assert [profile[name][4] for name in ("low", "mean", "high")] == pytest.approx(expected, rel=1e-4)
    assert details["class"]["kind"] in web.get("/api/start").json()["classes"]
    assert "head 2 in layer 3" in details["alt"]
    mass = details["mass"]
    weights = np.nan_to_num(dense(run, token_ids(web, scene), "weights", 3, 2))
    at_zero = np.mean([weights[i, i] for i in range(1, 16)]) * 15 / 16
    assert mass["mass"][0] == pytest.approx(at_zero, rel=1e-3)


def test_a_model_writes_on_greedily(web, trained):
    run = trained["cable"]
    scene = make_scene(web, subject="0", length=8, input={"kind": "text", "text": "word4 and 3 word9 and 11"})
    longer = web.post(f"/api/scenes/{scene['scene']}/write", json={"tokens": 3}).json()
    assert longer["from"] == scene["length"]
    ids = token_ids(web, scene)
    for _ in range(3):
        with torch.no_grad():
            ids.append(int(run.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert token_ids(web, longer) == ids
    assert make_scene(web, **longer["request"])["scene"] == longer["scene"] != scene["scene"]
    further = web.post(f"/api/scenes/{longer['scene']}/write", json={"tokens": 2}).json()
    assert token_ids(web, further)[: len(ids)] == ids
    assert further["length"] == len(ids) + 2


def test_the_curves_of_an_evaluation_are_those_of_its_file(web, trained):
    assert web.get("/api/subjects/0/evaluation").json()["curves"] == []
    result = relpos.evaluate(trained["cable"], lengths=[8, 16])
    rows = next(iter(result.results.values()))["rows"]
    reply = web.get("/api/subjects/0/evaluation").json()
    assert reply["trained_length"] == 16
    assert reply["curves"][0]["lengths"] == [8, 16]
    assert reply["curves"][0]["perplexity"] == [row["perplexity"] for row in rows]


def test_pictures_and_tables_of_what_is_shown(web, trained, monkeypatch):
    scene = make_scene(web, subject="0", length=16)
    base = f"/api/scenes/{scene['scene']}/export/2/3"
    png = web.get(f"{base}.png?show=weights")
    assert png.content.startswith(b"\x89PNG")
    svg = web.get(f"{base}.svg?show=scores&first_query=4&last_query=9&first_key=2&last_key=7&without_sink=1")
    assert svg.text.lstrip().startswith("<?xml")
    assert "Layer 2, head 3" in svg.text
    table = web.get(f"{base}.csv?show=bias&first_query=5&last_query=6&first_key=0&last_key=1").text.splitlines()
    bias = dense(trained["cable"], token_ids(web, scene), "bias", 2, 3)
    assert table[0] == "query,key,bias"
    numbers = [[float(x) for x in line.split(",")] for line in table[1:]]
    expected = [[i, j, bias[i, j]] for i in (5, 6) for j in (0, 1)]
    np.testing.assert_allclose(numbers, expected, rtol=1e-5, atol=1e-6)
    figures = []
    monkeypatch.setattr(exports, "write", lambda figure, suffix: figures.append(figure) or b"")
    monkeypatch.setattr(exports, "PIXELS", 4)  # cells of 2 × 2 entries
    exports.Region(web.explorer.scene(scene["scene"]), "bias", 2, 3, 5, 10, 2, 7).picture(False, ".png")
    image = figures[0].axes[0].images[0]
    assert image.get_extent() == [1.5, 7.5, 11.5, 3.5]  # keys 2 to 7, queries 4 to 11
    cells = bias[4:12, 2:8].reshape(4, 2, 3, 2).mean(axis=(1, 3))  # NaN on and above the diagonal
    np.testing.assert_allclose(image.get_array()[2:, :2], cells[2:, :2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("mistral", marks=pytest.mark.slow)])
def test_an_open_model_is_explored_and_left_as_it_was(kind, trained):
    sizes = {"vocab_size": trained["cable"].model.config.vocab_size, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, **sizes))
    else:
        more = {"num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 64}
        config = transformers.MistralConfig(num_hidden_layers=2, num_attention_heads=4, **more, **sizes)
        model = transformers.MistralForCausalLM(config)
    before = model.config.to_dict(), model.training, [id(parameter) for parameter in model.parameters()]
    exploration = relpos.explore(model, length=24)
    scene = exploration.subjects[0].scene(exploration.subjects[0].complete({}))
    assert before == (model.config.to_dict(), model.training, [id(parameter) for parameter in model.parameters()])
    model.eval().set_attn_implementation("eager")
    weights = model(scene.view.shown.ids[None], output_attentions=True).attentions[1][0, 2].detach()
    shown = scene.head_map("weights", 2, 3).values.block(0, 24, 0, 24)
    torch.testing.assert_close(shown.nan_to_num(0.0), weights, atol=1e-6, rtol=1e-5)
    assert "<iframe srcdoc=" in exploration._repr_html_()  # what a notebook shows


def test_a_model_without_a_tokenizer_reads_random_tokens_and_other_modules_are_refused(trained):
    exploration = relpos.explore(trained["kerple_log"].model, length=16)
    about = exploration.subjects[0].as_json()
    assert (about["reads_text"], about["documents"], about["encoding"]) == (False, [], "kerple_log")
    with pytest.raises(TypeError, match="can be explored as a tensor"):
        relpos.explore(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="tokenizer is for a model that is open"):
        relpos.explore("alibi", tokenizer=trained["cable"].tokenizer)


def test_attention_that_exists_already_is_explored():
    weights = torch.rand(2, 3, 20, 20).tril().softmax(dim=-1)
    subject = relpos.explore(weights, show="weights", tokens=[f"t{n}" for n in range(20)]).subjects[0]
    scene = subject.scene(subject.complete({}))
    assert scene.head_map("weights", 2, 3).value(7, 4) == pytest.approx(float(weights[1, 2, 7, 4]))
    assert scene.view.tokens[3] == "t3"
