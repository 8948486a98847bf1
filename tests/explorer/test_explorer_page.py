"""The page of the explorer in a real browser, against a real server: what a person sees is what relpos computes."""

import math
import re

import pytest
from explorer_browser import FLAGS, at, browser_path, maps, read, rest, visit
from playwright.sync_api import expect, sync_playwright

import relpos
from relpos.explorer.explore import explore, open_subjects
from relpos.explorer.server import Server
from relpos.explorer.sliders import make_encoding
from relpos.training.training import train

pytestmark = pytest.mark.heavy

HOSTILE = '<img src=x onerror="window.harm=1"><script>window.harm=1</script> \u202e&lt;b&gt; {{7*7}} ${7*7}'
WIDE, HIGH = 1280, 900
SLOPE = 2.0**-2  # of the third of ALiBi's twelve heads


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser_path(), args=FLAGS.split())
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def run(world, settings):
    train(settings(world / "run", optimizer__position_lr=0.1, run__steps=3), lambda text: None)
    return world / "run"


@pytest.fixture(scope="module")
def address(run):
    server = Server(open_subjects(["alibi", "kerple_log", str(run)]), port=0)
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def page(browser):
    """A page that raises no error, and asks no one but its own server."""
    context = browser.new_context(viewport={"width": WIDE, "height": HIGH}, reduced_motion="reduce")
    page = context.new_page()
    problems, hosts = [], set()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: message.type == "error" and problems.append(message.text))
    page.on("request", lambda request: hosts.add(request.url.split("/")[2].split(":")[0]))
    page.set_default_timeout(20_000)
    yield page
    context.close()
    assert [text for text in problems if "status of 4" not in text] == []  # refusals are shown as sentences
    assert hosts <= {"127.0.0.1", ""}


def test_a_token_among_65536_is_zoomed_to_and_its_value_read(page, address):
    visit(page, f"{address}#/subject/0/head/1/3?length=65536")
    at(page, 0.4, 0.7)
    query, key = read(page, "query"), read(page, "key")
    assert query > key
    assert read(page, "value") == -SLOPE * (query - key)
    for _ in range(14):
        page.mouse.wheel(0, -600)
        page.wait_for_timeout(120)
    rest(page)
    entry = 1 / float(maps(page).first.get_attribute("data-resolution"))
    assert entry > 20  # pixels: single tokens
    box = maps(page).first.bounding_box()
    at(page, 0.4, 0.7)
    first, value = read(page, "key"), read(page, "value")
    assert value == -SLOPE * (read(page, "query") - first)
    assert read(page, "distance") == read(page, "query") - first
    page.mouse.move(box["x"] + 0.4 * box["width"] + entry, box["y"] + 0.7 * box["height"])  # one token further
    assert read(page, "key") == first + 1
    assert read(page, "value") == value + SLOPE
    expect(page.locator("main")).to_contain_text(f"The row of query {int(read(page, 'query'))}")


def test_the_address_holds_what_is_shown(page, address, browser):
    visit(page, f"{address}#/subject/1/head/1/2")
    at(page, 0.4, 0.7)
    page.mouse.down()
    page.mouse.up()
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="Position only").click()
    page.get_by_label("Colours without the first token").check()
    page.get_by_role("button", name="Next head").click()
    rest(page)
    page.mouse.move(0, 0)
    shown = [read(page, name) for name in ("query", "key", "value")]
    expect(page).to_have_url(re.compile(r"head/1/3\?show=flat&sink=0&q=\d+&k=\d+&x="))
    other = browser.new_page(viewport={"width": WIDE, "height": HIGH})
    other.goto(page.url)
    assert [read(other, name) for name in ("query", "key", "value")] == shown
    expect(other.get_by_label("Colours without the first token")).to_be_checked()
    zoom = maps(page).get_attribute("data-resolution")[:5]
    expect(maps(other)).to_have_attribute("data-resolution", re.compile(f"^{zoom}"))
    other.close()
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_contain_text("head 2")
    page.go_back()
    expect(page.get_by_label("Colours without the first token")).not_to_be_checked()
    page.go_forward()
    expect(page.get_by_label("Colours without the first token")).to_be_checked()


def test_all_heads_are_shown_sorted_and_opened(page, address):
    page.goto(f"{address}#/subject/0")
    heads = page.get_by_role("link", name=re.compile("^Layer 1, head"))
    expect(heads).to_have_count(12)
    page.get_by_label("Sort by").select_option("half_distance")
    order = [int(re.search(r"half-distance ([\d,]+)", heads.nth(n).get_attribute("aria-label"))[1]) for n in range(12)]
    assert order == sorted(order)
    assert len(set(order)) > 4  # slopes from 2^−1 to 2^−8
    page.get_by_role("button", name="Mass by distance").click()
    assert heads.first.locator("path").get_attribute("d").startswith("M0.0,")
    heads.nth(11).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("head 12")  # the smallest slope reaches farthest


def test_a_text_is_changed_and_the_numbers_are_those_of_the_figures(page, address, run):
    visit(page, f"{address}#/subject/2/head/1/2?length=48")
    page.get_by_text("Change the input").click()
    text = "word5 and 3 word7 and 9 and then some"
    page.get_by_label("Your text").fill(text)
    page.get_by_role("button", name="Read this text").click()
    tokens = page.locator("[data-position]")
    rest(page)
    assert "".join(tokens.all_inner_texts()).startswith(text)
    at(page, 0.45, 0.7)
    query, key, value = (read(page, name) for name in ("query", "key", "value"))
    assert query > key
    (drawn,) = relpos.draw(run, show="bias", layer=1, text=text).maps
    assert value == pytest.approx(float(drawn.mean[1, int(query), int(key)]), rel=1e-4, abs=1e-6)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".written").first).to_be_visible()  # what the model wrote is marked
    expect(page).to_have_url(re.compile(r"text=word5.*written=\d+:16"))


def test_two_encodings_are_compared_with_linked_cursors_and_a_difference(page, address):
    visit(page, f"{address}#/subject/0/head/1/2")
    page.get_by_label("Compare with").select_option("1")
    expect(maps(page)).to_have_count(2)
    page.get_by_label("Difference map A − B").check()
    expect(maps(page)).to_have_count(3)
    rest(page)
    at(page, 0.3, 0.8, place=1)
    query, key = int(read(page, "query")), int(read(page, "key"))
    alibi = relpos.encoding("alibi", heads=12, head_dim=64).map(512)[1, query, key].item()
    assert read(page, "value", 0) == pytest.approx(alibi)
    kerple = read(page, "value", 1)
    assert kerple != alibi
    assert read(page, "difference") == pytest.approx(alibi - kerple, rel=1e-4)
    resolution = maps(page).nth(0).get_attribute("data-resolution")
    page.mouse.wheel(0, -500)
    expect(maps(page).nth(2)).not_to_have_attribute("data-resolution", resolution)
    moved = maps(page).nth(2).get_attribute("data-resolution")
    expect(maps(page).nth(0)).to_have_attribute("data-resolution", moved)  # they move together


def test_every_head_that_is_compared_is_saved(page, address):
    page.goto(f"{address}#/subject/0/head/1/2?compare=1:1:3&length=64")
    expect(maps(page)).to_have_count(2)
    rest(page)
    alibi = relpos.encoding("alibi", heads=12, head_dim=64).map(64)[1]
    saved = []
    page.on("download", lambda file: saved.append(file))  # noqa: PLW0108 - playwright cannot mark a built-in method
    for kind, start in (("PNG", b"\x89PNG"), ("SVG", b"<?xml"), ("CSV", b"query,key,bias")):
        saved.clear()
        page.get_by_role("button", name=kind).click()
        while len(saved) < 2:
            page.wait_for_event("download")
        files = list(saved)
        assert [file.suggested_filename.rsplit("-", 1)[1] for file in files] == [
            f"head2.{kind.lower()}",
            f"head3.{kind.lower()}",
        ]
        assert all(file.path().read_bytes().startswith(start) for file in files)
    lines = files[0].path().read_text().splitlines()[1:]
    rows = [line.split(",") for line in lines]
    assert len(rows) == 64 * 65 // 2
    for query, key, value in rows:
        assert float(value) == pytest.approx(alibi[int(query), int(key)].item(), abs=1e-5)


def test_a_slider_redraws_the_map(page, address):
    visit(page, f"{address}#/encoding/kerple_log?q=100&k=40")
    page.mouse.move(0, 0)
    before = read(page, "value")
    slider = page.get_by_label("r1 of head 1", exact=True)
    r1, r2 = (float(page.get_by_label(f"{name}, as a number").input_value()) for name in ("r1", "r2"))
    assert before == pytest.approx(-r1 * math.log1p(r2 * 60), rel=1e-3)
    slider.focus()
    for _ in range(5):
        page.keyboard.press("PageUp")
    expect(page.locator("[data-read=value]").first).not_to_have_attribute("data-exact", str(before))
    rest(page)
    more = float(page.get_by_label("r1, as a number").input_value())
    assert more > r1 + 1
    assert read(page, "value") == pytest.approx(-more * math.log1p(r2 * 60), rel=1e-3)
    expect(page).to_have_url(re.compile(r"p\.r1=\["))
    expect(page.get_by_role("link", name="Chi et al. 2022")).to_have_attribute("href", re.compile("2205.09921"))


def test_an_exported_file_needs_no_server_and_no_network(page, run, tmp_path):
    file = explore(["kerple_log", str(run)]).save(tmp_path / "page.html")
    page.context.set_offline(True)
    page.goto(file.as_uri())
    expect(maps(page)).to_have_count(2)  # several are compared at first
    page.get_by_role("link", name="kerple_log").first.click()
    page.get_by_role("link", name=re.compile("^Layer 1, head 3:")).click()
    rest(page)
    at(page, 0.4, 0.8)
    query, key = int(read(page, "query")), int(read(page, "key"))
    table = make_encoding("kerple_log", 12, 64, {}).map(512)[2]
    seen = table[table.isfinite()]
    step = (seen.max() - seen.min()).item() / 254  # of 8 bits
    assert read(page, "value") == pytest.approx(table[query, key].item(), abs=step)
    with page.expect_download() as download:
        page.get_by_role("button", name="PNG").click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    lines = download.value.path().read_text().splitlines()
    assert lines[0] == "query,key,value"


def test_a_notebook_shows_it_in_a_frame(page):
    page.set_content(f"<p>a notebook</p>{explore('alibi')._repr_html_()}")
    inside = page.frame_locator("iframe")
    inside.get_by_role("link", name=re.compile("^Layer 1, head 2:")).click()
    expect(inside.get_by_role("heading", level=1)).to_contain_text("head 2")
    expect(page.locator("p")).to_have_text("a notebook")


def test_the_keyboard_is_enough(page, address):
    page.goto(f"{address}#/subject/0")
    expect(page.get_by_role("link", name=re.compile("^Layer 1, head"))).to_have_count(12)
    press = page.keyboard.press
    press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    focused = "() => document.activeElement.getAttribute('aria-label') || ''"
    for _ in range(40):
        press("Tab")
        if page.evaluate(focused).startswith("Layer 1, head 3:"):
            break
    assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") != "none"  # the focus is seen
    press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("head 3")
    rest(page)
    for _ in range(40):
        press("Tab")
        if page.evaluate("() => document.activeElement.getAttribute('role')") == "application":
            break
    press("ArrowDown")  # puts the cursor into the middle
    press("Enter")  # zooms to single tokens there
    rest(page)
    before = read(page, "query"), read(page, "key")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        press(key)
    expect(page.locator("[data-read=query]")).to_have_text(str(int(before[0]) + 2))
    assert read(page, "key") == before[1] + 1
    assert read(page, "value") == -SLOPE * (read(page, "query") - read(page, "key"))
    expect(page.get_by_role("status")).to_contain_text(f"Query {int(before[0]) + 2}")  # said aloud
    press("]")
    expect(page.get_by_role("heading", level=1)).to_contain_text("head 4")
    expect(maps(page)).to_have_attribute("aria-label", re.compile("Heat map of the additive bias of head 4"))
    press("o")
    expect(page.get_by_role("link", name=re.compile("^Layer 1, head"))).to_have_count(12)


def test_hostile_text_is_shown_as_text(page, address):
    visit(page, f"{address}#/subject/2/head/1/1?show=weights&length=256")
    page.get_by_text("Change the input").click()
    page.get_by_label("Your text").fill(HOSTILE)
    page.get_by_role("button", name="Read this text").click()
    expect(page.locator("[data-position]").first).to_have_text("<")
    at(page, 0.4, 0.7)
    rest(page)
    shown = "".join(page.locator("[data-position]").all_inner_texts())
    assert shown.startswith('<img src=x onerror="window.harm=1"><script>window.harm=1</script>')
    assert page.evaluate("() => [window.harm, document.querySelectorAll('main img, main script').length]") == [None, 0]
    page.reload()  # the text is in the address
    expect(page.locator("[data-position]").first).to_have_text("<")
    assert page.evaluate("() => window.harm") is None


def test_what_the_server_refuses_is_said_in_a_sentence(page, address):
    page.goto(f"{address}#/subject/0/head/1/1?length=99999999")
    expect(page.get_by_role("alert")).to_contain_text("65")
    page.goto(f"{address}#/subject/7/head/1/1")
    expect(page.get_by_role("alert")).to_contain_text("There is no subject 7")
    page.goto(f"{address}#/encoding/nonsense")
    expect(page.get_by_role("alert")).to_contain_text("no encoding called nonsense")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 3840])
def test_nothing_is_wider_than_the_window(browser, address, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    for place in ("#/", "#/subject/0", "#/subject/0/head/1/2?compare=1:1:2&difference=1", "#/encoding/rope"):
        page.goto(address + place)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        page.wait_for_load_state("networkidle")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    dark = page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor") == "rgb(21, 23, 26)"
    assert dark == (scheme == "dark")
    context.close()


def test_what_is_compared_has_a_kind_of_values_in_common(page, address):
    visit(
        page, f"{address}#/subject/0/head/1/3?compare=rope:1:3&difference=1&q=200&k=150"
    )  # one has a bias, one scores
    expect(maps(page)).to_have_count(3)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("button", name="Position only")).to_have_attribute("aria-pressed", "true")
    assert read(page, "difference") == pytest.approx(read(page, "value", 0) - read(page, "value", 1), rel=1e-3)


def test_length_and_address_agree_and_a_longer_document_is_offered(page, address):
    document = page.request.get(f"{address}api/start").json()["subjects"][2]["documents"][0]
    page.goto(f"{address}#/subject/2/head/1/1?length=4096&text=word5%20and%203")
    offer = page.get_by_text("The input has")
    expect(offer).to_contain_text("fewer than 4,096.")
    tokens = int(re.search(r"has ([\d,]+) tokens", offer.inner_text())[1].replace(",", ""))
    assert tokens < document["tokens"] < 4096
    expect(page).to_have_url(re.compile(rf"[?&]length={tokens}&text="))
    expect(page.get_by_label("Length").locator("option:checked")).to_have_text(f"{tokens:,}")
    offer.get_by_role("button", name=f"({document['tokens']:,} tokens)").click()
    expect(page).to_have_url(re.compile(rf"length={document['tokens']}&doc={document['id']}"))
    expect(page.get_by_label("Length").locator("option:checked")).to_have_text(f"{document['tokens']:,}")


def test_a_map_that_takes_long_dims_the_old_one_and_can_be_cancelled(page, address):
    visit(page, f"{address}#/encoding/alibi/3?q=400&k=300")
    page.route(re.compile("/head/"), lambda route: None)  # the server does not answer
    page.route(re.compile("/api/tasks/[^/]+-head$"), lambda route: route.fulfill(json={"done": 0.42}))
    page.get_by_role("button", name="Next head").click()
    expect(page.get_by_text("Computing 42 %").first).to_be_visible()
    assert float(page.locator(".matrix").first.evaluate("map => getComputedStyle(map).opacity")) < 0.5
    page.unroute(re.compile("/head/"))
    page.get_by_role("button", name="Cancel").first.click()
    expect(page).to_have_url(re.compile("alibi/3"))
    rest(page)
    assert read(page, "value") == -SLOPE * 100


def test_on_a_phone_the_map_stays_in_sight_while_sliders_move(browser, address):
    context = browser.new_context(viewport={"width": 390, "height": 844}, reduced_motion="reduce")
    page = context.new_page()
    visit(page, f"{address}#/encoding/rope")
    page.get_by_label("section order").scroll_into_view_if_needed()
    assert page.evaluate("() => scrollY") > 300
    expect(maps(page).first).to_be_in_viewport(ratio=0.9)
    context.close()
