"""The tab and TensorBoard's own tabs in a real browser, on a real server."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from keras_gradguard.findings import Cause, Finding
from keras_gradguard.tensorboard.events import EventWriter

from . import browser, runs, server, stories

pytestmark = pytest.mark.skipif(
    bool(browser.missing()) and not browser.required(), reason=browser.missing() or "-"
)

IMG = "<img src=x onerror=window.top.pwned=1>"
QUOTED = "quote\"'`&amp;</script><script>window.top.pwned=1</script>"
HOSTILE = (IMG, QUOTED, "слой/ядро", "שכבה \u202egnp", "=1+1")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    logs = tmp_path_factory.mktemp("browser") / "logs"
    stories.write(logs / "dead", stories.dead, findings=[stories.DEAD])
    stories.write(logs / "healthy", stories.healthy, seed=1, steps=300)
    stories.write(
        logs / "hostile",
        stories.healthy,
        steps=100,
        paths=HOSTILE,
        findings=[
            Finding(
                symptom="non_finite",
                summary=IMG,
                where=HOSTILE,
                step=60,
                causes=(Cause(name="unknown", score=0.1, fix=QUOTED, source=IMG),),
            )
        ],
    )
    return logs


@pytest.fixture(scope="module")
def address(logs):
    with server.serving(logs) as address:
        yield address


@pytest.fixture(scope="module")
def shared_driver(tmp_path_factory):
    downloads = tmp_path_factory.mktemp("downloads")
    with browser.browsing(downloads=downloads) as driver:
        driver.downloads = downloads
        yield driver


@pytest.fixture
def driver(shared_driver):
    shared_driver.switch_to.default_content()
    browser.console_errors(shared_driver)
    browser.requested(shared_driver)
    return shared_driver


def geometry(driver: Any, pane: int = 0) -> dict[str, Any]:
    script = "return document.querySelectorAll('canvas.map')[arguments[0]].dataset.geometry"
    return json.loads(driver.execute_script(script, pane))


def color(driver: Any, row: int, step: int, pane: int = 0) -> list[int]:
    """Most frequent colour of a cell's pixels: hatching is drawn over some of them."""
    g = geometry(driver, pane)
    width = g["plot"] / (g["view"]["to"] - g["view"]["from"])
    x = g["gutter"] + (step + 0.5 - g["view"]["from"]) * width
    script = """
        const [pane, x, y, h] = arguments;
        const canvas = document.querySelectorAll('canvas.map')[pane];
        const ratio = canvas.width / parseFloat(canvas.style.width);
        const [left, top, high] = [x, y, h].map(v => Math.round(v * ratio));
        const data = canvas.getContext('2d').getImageData(left, top, 1, high).data;
        const seen = {};
        for (let i = 0; i < data.length; i += 4) {
          const key = data.slice(i, i + 3).join();
          seen[key] = (seen[key] || 0) + 1;
        }
        return Object.entries(seen).sort((a, b) => b[1] - a[1])[0][0].split(',').map(Number);
    """
    return driver.execute_script(script, pane, x, row * g["row"] + 3, g["row"] - 6)


def text(driver: Any, selector: str) -> str:
    return driver.execute_script(
        "return document.querySelector(arguments[0]).textContent", selector
    )


def wait(driver: Any, script: str) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, 30).until(lambda d: d.execute_script(script))


def click_cell(driver: Any, row: int, step: int) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    g = geometry(driver)
    width = g["plot"] / (g["view"]["to"] - g["view"]["from"])
    x, y = g["gutter"] + (step + 0.5 - g["view"]["from"]) * width, (row + 0.5) * g["row"]
    canvas = driver.find_element(By.CSS_SELECTOR, "canvas.map")
    size = canvas.size
    ActionChains(driver).move_to_element_with_offset(
        canvas, x - size["width"] / 2, y - size["height"] / 2
    ).click().perform()


def picked_step(driver: Any, name: str) -> int:
    """Step of the cell in the detail panel, once it is of the variable ``name``."""
    wait(driver, f"return document.querySelector('.detail').dataset.cell.startsWith('{name}@')")
    cell = driver.execute_script("return document.querySelector('.detail').dataset.cell")
    return int(cell.rpartition("@")[2])


ZERO = [224, 20, 76]


def clean(driver: Any, address: str) -> None:
    """No error in the console and no request to anyone but the server."""
    # Behind a path prefix TensorBoard's own page misses its fonts.
    assert [e for e in browser.console_errors(driver) if "/font-roboto/" not in e] == []
    host = address.split("/")[2]
    outside = [
        url
        for url in browser.requested(driver)
        if not url.startswith(("data:", "blob:", "about:", "chrome:")) and url.split("/")[2] != host
    ]
    # TensorBoard's own page may ask for its fonts; nothing of the tab's does.
    assert [u for u in outside if "fonts.g" not in u and "google-analytics" not in u] == []


def test_the_dead_layers_rows_turn_to_the_zero_colour_at_the_right_step(driver, address):
    browser.open_plugin(driver, address, "dead/gradguard")
    assert geometry(driver)["rows"] == list(stories.PATHS)
    for row in range(8):
        assert color(driver, row, 318) != ZERO
        assert color(driver, row, 322) == ZERO
        assert color(driver, row, 598) == ZERO
    for row in range(8, 12):
        assert color(driver, row, 598) != ZERO
    assert text(driver, "h1").startswith("dense_1/kernel, dense_1/bias: gradient is exactly zero")
    assert "since step 320" in text(driver, "h1")
    assert "Lower the learning rate" in text(driver, ".verdict p")
    clean(driver, address)


def test_a_click_gives_the_histogram(driver, address):
    browser.open_plugin(driver, address, "dead/gradguard")
    click_cell(driver, 8, 450)
    assert abs(picked_step(driver, "dense_2/kernel") - 450) <= 1  # a step is 1.6 pixels wide
    assert "at step 450" in text(driver, ".detail")
    assert "dense_2" in text(driver, ".detail h2")
    painted = driver.execute_script(
        """
        return [...document.querySelectorAll('.detail canvas')].map(canvas => {
          const {width, height} = canvas, colors = new Set();
          const data = canvas.getContext('2d').getImageData(0, 0, width, height).data;
          for (let i = 0; i < data.length; i += 4) {
            if (data[i + 3] > 200) colors.add(data.slice(i, i + 3).join());
          }
          return colors.size;
        })
        """
    )
    assert len(painted) == 2
    assert all(n > 2 for n in painted)
    click_cell(driver, 6, 500)
    assert abs(picked_step(driver, "dense_1/kernel") - 500) <= 1
    assert "100.0 %" in text(driver, ".detail")
    clean(driver, address)


def test_an_incident_jumps_to_its_place(driver, address):
    browser.open_plugin(driver, address, "dead/gradguard")
    card = text(driver, ".card")
    for words in ("since step 320, found at step 327", "units of a hidden ReLU", "64 of 64", "Fix"):
        assert words in card
    driver.execute_script("document.querySelector('.jump').click()")
    browser.settle(driver)
    view = geometry(driver)["view"]
    assert view["from"] <= 320 < 327 < view["to"]
    assert view["to"] - view["from"] < 100
    assert color(driver, 6, 319) != ZERO
    assert color(driver, 6, 320) == ZERO
    clean(driver, address)


def test_keys_move_zoom_and_open(driver, address):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.open_plugin(driver, address, "healthy/gradguard")
    assert text(driver, "h1").startswith("No incident")
    canvas = driver.find_element(By.CSS_SELECTOR, "canvas.map")
    driver.execute_script("document.querySelector('canvas.map').focus()")
    canvas.send_keys(Keys.HOME, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert text(driver, ".readout").startswith("conv/bias · step 2 ·")
    canvas.send_keys(Keys.ENTER)
    wait(driver, "return document.querySelector('.detail').dataset.cell === 'conv/bias@2'")
    canvas.send_keys("+")
    browser.settle(driver)
    view = geometry(driver)["view"]
    assert view["to"] - view["from"] == 150
    canvas.send_keys("]")
    browser.settle(driver)
    assert geometry(driver)["view"]["from"] > view["from"]
    canvas.send_keys("0")
    browser.settle(driver)
    assert geometry(driver)["view"] == {"from": 0, "to": 300}
    clean(driver, address)


def test_filter_order_and_layers(driver, address):
    browser.open_plugin(driver, address, "dead/gradguard")
    browser.choose(driver, "Rows", "layer")
    assert geometry(driver)["rows"] == list(stories.LAYERS)
    browser.choose(driver, "Rows", "variable")
    browser.choose(driver, "Order", "trouble")
    assert geometry(driver)["rows"][:2] == ["dense_1/kernel", "dense_1/bias"]
    assert set(geometry(driver)["rows"][8:]) == set(stories.PATHS[8:])
    driver.execute_script(
        "const f = document.querySelector('input[type=search]'); f.value = 'HEAD'; "
        "f.dispatchEvent(new Event('input'))"
    )
    assert geometry(driver)["rows"] == ["head/kernel", "head/bias"]
    for metric in ("zero_fraction", "update_ratio", "nonfinite", "median"):
        browser.choose(driver, "Show", metric)
        assert text(driver, ".error") == ""
    clean(driver, address)


def test_two_runs_side_by_side(driver, address):
    browser.open_plugin(driver, address, "dead/gradguard")
    browser.choose(driver, "Compare with", "healthy/gradguard")
    assert color(driver, 0, 280, pane=0) != ZERO
    assert color(driver, 0, 580, pane=0) == ZERO
    assert color(driver, 0, 280, pane=1) != ZERO
    assert geometry(driver, 0)["view"] == geometry(driver, 1)["view"] == {"from": 0, "to": 600}
    clean(driver, address)


def test_hostile_names_are_shown_and_inert(driver, address):
    browser.open_plugin(driver, address, "hostile/gradguard")
    assert IMG in geometry(driver)["rows"]
    card = text(driver, ".card")
    assert IMG in card
    assert QUOTED in card
    click_cell(driver, 0, 50)
    wait(
        driver,
        "return document.querySelector('.detail h2').textContent === arguments[0]".replace(
            "arguments[0]", json.dumps(IMG)
        ),
    )
    assert driver.execute_script("return document.querySelectorAll('img').length") == 0
    assert driver.execute_script("return document.querySelectorAll('main script').length") == 0
    assert driver.execute_script("return window.top.pwned") is None
    clean(driver, address)


def test_dark_mode_follows_tensorboard(driver, address):
    browser.open_plugin(driver, address, "dead/gradguard")
    before = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    driver.execute_script("window.parent.document.body.classList.toggle('dark-mode')")
    wait(driver, "return document.documentElement.dataset.theme === 'dark'")
    after = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert before != after
    clean(driver, address)


def test_picture_and_data_are_saved(driver, address):
    browser.open_plugin(driver, address, "hostile/gradguard")
    for name in ("PNG", "CSV"):
        driver.execute_script(
            "[...document.querySelectorAll('button')]"
            ".find(b => b.textContent === arguments[0]).click()",
            name,
        )
    png, csv = driver.downloads / "gradguard.png", driver.downloads / "gradguard_norm.csv"
    deadline = time.monotonic() + 30
    while not (png.exists() and csv.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert png.stat().st_size > 5000
    lines = csv.read_text().splitlines()
    assert len(lines) == 101
    assert lines[0].endswith('"\'=1+1"')
    assert lines[5].startswith('"hostile/gradguard",4,4,')


@pytest.mark.parametrize(
    ("tab", "words"),
    [
        ("scalars", ["gradient_norm", "gradient_zero_fraction", "update_ratio"]),
        ("histograms", ["gradient_log10"]),
        ("distributions", ["gradient_log10"]),
        ("custom_scalars", ["GradGuard", "Update ratio by variable", "Gradient size by layer"]),
        ("text", ["gradguard/incidents", "dense_1/kernel, dense_1/bias", "Gradient is exactly"]),
    ],
)
def test_tensorboards_own_tabs_show_the_runs(driver, address, tab, words):
    driver.get(f"{address}/?darkMode=false#{tab}")
    driver.refresh()
    script = """
        const walk = node => [...node.childNodes].map(n => n.nodeType === 3 ? n.textContent
          : walk(n) + (n.shadowRoot ? walk(n.shadowRoot) : '')).join(' ');
        return walk(document.body);
    """
    deadline = time.monotonic() + 40
    shown = ""
    while time.monotonic() < deadline and not all(w in shown for w in words):
        shown = driver.execute_script(script)
        time.sleep(0.2)
    for word in words:
        assert word in shown
    assert driver.execute_script("return window.pwned") is None
    assert browser.console_errors(driver) == []


def test_a_run_still_being_written_grows_on_the_page(driver, tmp_path):
    logs = tmp_path / "logs"
    writer = EventWriter(logs, flush_secs=0)
    writer.write_rows(runs.table(), runs.rows(0, 100))
    with server.serving(logs, fast=True, prefix="/behind/proxy") as address:
        browser.open_plugin(driver, address)
        assert geometry(driver)["view"]["to"] == 100
        writer.write_rows(runs.table(), runs.rows(100, 250))
        writer.write_finding(stories.DEAD.replace(where=("dense/kernel",), step=249))
        wait(driver, "return document.querySelectorAll('.card').length === 1")
        wait(driver, "return document.querySelector('canvas.map').dataset.geometry.includes('250')")
        assert geometry(driver)["view"]["to"] == 250
        writer.close()
        clean(driver, address)
