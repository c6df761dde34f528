"""A headless Chromium, driven by Selenium."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def missing() -> str:
    """Why no browser test can run here, or an empty text."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return "no chromium and chromedriver on the path"
    return ""


@contextlib.contextmanager
def browsing(
    *, width: int = 1500, height: int = 1000, downloads: Path | None = None
) -> Iterator[Any]:
    """Yield a driver that logs the console and every request."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--force-device-scale-factor=1",
        f"--window-size={width},{height}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    if downloads is not None:
        wanted = {
            "download.default_directory": str(downloads),
            "profile.default_content_setting_values.automatic_downloads": 1,
        }
        options.add_experimental_option("prefs", wanted)
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


def open_plugin(driver: Any, address: str, run: str | None = None) -> None:
    """Open the GradGuard tab, step into its frame and wait for the first picture."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get("about:blank")  # a new hash alone would not load the page anew
    driver.get(f"{address}/#gradguard")
    frame = WebDriverWait(driver, 60).until(
        lambda d: next(
            (f for f in d.find_elements(By.TAG_NAME, "iframe") if "gradguard" in frame_source(f)),
            None,
        )
    )
    driver.switch_to.frame(frame)
    settle(driver)
    if run is not None:
        choose(driver, "Run", run)


def frame_source(frame: Any) -> str:
    return str(frame.get_attribute("src") or "")


def settle(driver: Any) -> None:
    """Wait until the page has nothing to fetch."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 60).until(
        lambda d: d.execute_script("return document.body.dataset.state") == "ready"
    )


def choose(driver: Any, label: str, value: str) -> None:
    """Pick an option of the select with this label, as a user's change event does."""
    driver.execute_script(
        """
        const [label, value] = arguments;
        const holder = [...document.querySelectorAll('label')]
          .find(l => l.firstChild && l.firstChild.textContent === label);
        const select = holder.querySelector('select');
        select.value = value;
        if (select.value !== value) throw new Error(`no option ${value}`);
        select.dispatchEvent(new Event('change'));
        """,
        label,
        value,
    )
    settle(driver)


def console_errors(driver: Any) -> list[str]:
    """Messages of the console that speak of an error."""
    return [e["message"] for e in driver.get_log("browser") if e["level"] == "SEVERE"]


def requested(driver: Any) -> set[str]:
    """Addresses that the page asked for, from the network log."""
    found = set()
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.add(message["params"]["request"]["url"])
    return found


def required() -> bool:
    """True where a missing browser is an error and not a reason to skip."""
    return os.environ.get("GRADGUARD_BROWSER") == "require"
