"""Take the pictures of this folder from the page of a result, in light and in dark.

    equipoise simulate --demo --ep 16 -o out/demo.json
    python docs/images/take.py out/demo.json

Shows the page from its top to the end of its second chart, and writes the figures it shows to report.json, so that a
text beside the picture can be held to them. Needs playwright and a Chromium.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from equipoise.report import write_report

HERE = Path(__file__).parent
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
COMMAND = "equipoise simulate --demo --ep 16 -o out/demo.json"
WIDTH = 1160
LAST = "#section-cost-parts .plot"


def take(result: Path) -> None:
    """Write report-light.png, report-dark.png and report.json."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page_file = Path(folder) / "report.html"
        shown = write_report(result, page_file, title="a generated step")
        figures = {figure.label: f"{figure.value}, {figure.text}" for figure in shown.figures}
        facts = {"command": COMMAND, "kind": shown.kind, "answer": shown.answer, "figures": figures}
        (HERE / "report.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme)
            page = context.new_page()
            page.goto(page_file.as_uri())
            page.wait_for_selector("body[data-ready=true]")
            end = page.locator(LAST).bounding_box()
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": end["y"] + end["height"] + 4}
            page.screenshot(path=HERE / f"report-{scheme}.png", clip=clip, full_page=True)
        browser.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]))
