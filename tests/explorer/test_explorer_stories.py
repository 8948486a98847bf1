"""Every story, played in a real browser: each step shows what it says."""

import json
import math
import re
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from explorer_browser import FLAGS, browser_path, maps, read, rest
from playwright.sync_api import expect, sync_playwright

import relpos
from relpos.explorer.server import Server
from relpos.explorer.sliders import make_encoding, presets, sliders
from relpos.explorer.stories import STORIES, read_stories

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def address():
    server = Server([], port=0)
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def page(address):
    """A page that raises no error; it is closed before its server."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser_path(), args=FLAGS.split())
        page = chromium.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: message.type == "error" and problems.append(message.text))
        page.set_default_timeout(20_000)
        # Stories do not speak of the mass by distance, whose fits take most of the time at 8,192 tokens.
        page.route(
            re.compile(r"/head/\d+/\d+\?show=\w+$"), lambda route: route.continue_(url=f"{route.request.url}&mass=0")
        )
        yield page
        chromium.close()
    assert [text for text in problems if "status of 4" not in text] == []


def value_near(page, expected: float) -> float:
    """The value under the cursor, once it is the expected one, or as it is after a few seconds."""
    for _ in range(50):
        value = read(page, "value")
        if value == pytest.approx(expected, rel=2e-4, abs=1e-6):
            break
        page.wait_for_timeout(100)
    return value


def parsed(url: str) -> tuple[str, dict[str, str]]:
    """The path and the state of an address of the page."""
    path, _, state = url.partition("#")[2].partition("?")
    return path, dict(parse_qsl(state))


@pytest.mark.parametrize("story", read_stories(), ids=lambda story: story["name"])
def test_every_step_of_a_story_shows_what_it_says(page, address, story):
    assert 3 <= len(story["steps"]) <= 6
    page.goto(f"{address}#/")
    page.get_by_role("list").get_by_role("link", name=f"▶ {story['title']}", exact=True).first.click()
    for number, step in enumerate(story["steps"], 1):
        expect(page.locator(f"[data-story={story['name']}]")).to_have_text(step["text"])
        expect(page.locator("[data-step]")).to_have_attribute("data-step", str(number))
        path, state = parsed(page.url)
        assert (path, state.pop("story")) == (parsed(step["address"])[0], f"{story['name']}:{number}")
        assert state == parsed(step["address"])[1]
        if "refused" in step:
            expect(page.get_by_role("alert").first).to_contain_text(step["refused"])
        else:
            expect(page.get_by_role("alert")).to_have_count(0)
            expect(page.locator("[aria-busy=true]")).to_have_count(0)
            expect(maps(page).first).to_be_visible()
            place = dict(re.findall(r"[?&]([qk])=(\d+)", step["address"]))
            if place:
                assert [read(page, "query"), read(page, "key")] == [int(place["q"]), int(place["k"])]
            if "reads" in step:
                assert value_near(page, step["reads"]) == pytest.approx(step["reads"], rel=2e-4, abs=1e-6)
            if step.get("unseen"):
                expect(page.locator("[data-read=value]").first).to_have_text("not seen")
        if "play" in step:
            names = [one["label"] for one in sliders(story["encoding"], 12, 64) if one["name"] == step["play"]]
            expect(page.get_by_role("button", name=f"Play {names[0]}", exact=True)).to_be_visible()
        if number < len(story["steps"]):
            page.keyboard.press("PageDown") if number % 2 else page.get_by_role("button", name="Next ›").click()
    page.get_by_role("button", name="‹ Back").click()
    expect(page.locator("[data-step]")).to_have_attribute("data-step", str(len(story["steps"]) - 1))
    page.get_by_role("button", name="End the story").click()
    expect(page.locator("[data-story]")).to_have_count(0)


def test_the_numbers_of_the_stories_are_those_of_the_formulas():
    def said(name: str, step: int) -> float:
        return next(story for story in read_stories() if story["name"] == name)["steps"][step]["reads"]

    assert said("alibi", 0) == pytest.approx(-(2 ** (-8 / 12)) * 8, rel=1e-4)
    assert said("alibi", 1) == said("alibi", 2) == -(2.0**-8) * 1280
    assert said("kerple", 0) == pytest.approx(-math.log(1 + 0.1 * 10), rel=1e-3)
    assert said("kerple", 2) == pytest.approx(-4 * math.log(1 + 100), rel=1e-4)
    slowest = 10000 ** (-62 / 64)
    assert [round(slowest * length, 2) for length in (2048, 8192)] == [0.27, 1.09]  # as the story of rope says
    assert said("t5", 1) == said("t5", 2)
    assert said("fire", 0) == said("fire", 1) != said("fire", 2)


def test_a_slider_plays_until_it_is_stopped(page, address):
    page.goto(f"{address}#/encoding/kerple_log?q=400&k=300")
    rest(page)
    before = float(page.get_by_label("r1, as a number").input_value())
    page.get_by_role("button", name="Play r1").click()
    expect(page.locator("[data-read=value]").first).not_to_have_attribute("data-exact", "")
    page.wait_for_timeout(600)
    page.get_by_role("button", name="Stop r1").click()
    rest(page)
    page.mouse.move(0, 0)
    r1, r2 = (float(page.get_by_label(f"{name}, as a number").input_value()) for name in ("r1", "r2"))
    assert r1 > before
    assert read(page, "value") == pytest.approx(-r1 * math.log1p(r2 * 100), rel=1e-3)
    page.wait_for_timeout(200)
    assert float(page.get_by_label("r1, as a number").input_value()) == r1


def test_a_preset_sets_parameters_and_start_values_take_them_back(page, address):
    page.goto(f"{address}#/encoding/rope?length=8192&q=8000&k=1000")
    rest(page)
    before = read(page, "value")
    page.get_by_role("button", name="YaRN, × 4").click()
    rest(page)
    yarn = relpos.encoding("rope", 12, 64, scaling="yarn", factor=4)
    assert page.get_by_label("scaling").input_value() == "yarn"
    assert read(page, "value") > before
    assert yarn.rope.amplitude > 1
    page.get_by_role("button", name="Start values").click()
    rest(page)
    assert read(page, "value") == before


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_what_its_encoding_takes(name):
    for preset in presets()[name]:
        make_encoding(name, 12, 64, preset["parameters"])


def test_the_gallery_shows_every_encoding_in_its_group(page, address):
    page.goto(f"{address}#/")
    cards = page.locator("article")
    expect(cards).to_have_count(len(relpos.names()))
    expect(page.locator("article[aria-busy=true]")).to_have_count(0, timeout=60_000)
    for section, name in (("from the tokens", "cable"), ("rotated or scaled", "rope"), ("token embedding", "learned")):
        group = page.locator("section", has=page.get_by_role("heading", name=re.compile(section)))
        card = group.locator("article", has=page.get_by_role("link", name=name, exact=True))
        expect(card).to_have_count(1)
        expect(card.locator("math").first).to_be_visible()
        drawn = card.locator("canvas").evaluate(
            "map => new Set(map.getContext('2d').getImageData(0, 0, map.width, map.height).data).size"
        )
        assert drawn > 8  # colours
        assert card.locator("path").count() == 3
    page.get_by_role("link", name="fire", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("fire")


def test_stories_are_files_with_a_title_and_steps():
    files = sorted(STORIES.glob("*.json"))
    assert len(files) >= 12
    for file in files:
        story = json.loads(Path(file).read_text(encoding="utf-8"))
        assert set(story) == {"title", "encoding", "steps"}
        assert story["encoding"] in ("", *relpos.names())
        assert all({"text", "address"} <= set(step) for step in story["steps"])
