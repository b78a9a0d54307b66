"""The page of an artifact in a browser: clicks, keys, search, at three widths, without a word on the console."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from torch import nn

from tests.long import some
from tests.needs import needs
from tests.runtime.commands import call
from tests.views.artifacts import LAYERS, Cached, Mixed, Tower, Unknown, ids, one_step, saved
from tests.views.browser import Page
from tests.views.opened import advise_artifact, artifact_html

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = needs("chromium", "chromedriver")
WIDTHS = some([360, 900, 1600], 3)


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tower.html`, `mixed.html`, `unknown.html`, `cached.html`, `uneven.html`, `hostile.html`, of which the manifest
    has tags in a text, and `difference.html`."""
    folder = tmp_path_factory.mktemp("pages")
    saved(folder / "tower", Tower(), ids(), LAYERS)
    saved(folder / "unknown", Unknown(), torch.zeros(4, 8), {"up": "colwise"})
    saved(folder / "mixed", Mixed(), torch.zeros(4, 8), {"up": "colwise", "out": "colwise_gather_output"})
    shutil.copytree(folder / "mixed", folder / "hostile")
    manifest = json.loads((folder / "hostile/manifest.json").read_text())
    manifest["collectives"][0]["reason"] = HOSTILE
    (folder / "hostile/manifest.json").write_text(json.dumps(manifest))
    saved(folder / "cached", Cached(), one_step(), LAYERS)
    uneven = nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 8))
    saved(folder / "uneven", uneven, torch.zeros(4, 8), {"0": "colwise", "2": "rowwise"})
    for name in ("tower", "mixed", "hostile", "unknown", "cached", "uneven"):
        advice = advise_artifact(folder / name)
        (folder / f"{name}.html").write_text(artifact_html(folder / name, advice=advice), encoding="utf-8")
    saved(folder / "other", Tower(), ids(), OTHER)
    (folder / "slow.yaml").write_text(SLOW, encoding="utf-8")
    words = ("diff", folder / "tower", folder / "other", "--html", folder / "difference.html")
    assert call(*words, "--machine", folder / "slow.yaml").exit_code == 1
    return folder


SLOW = """\
flops: 1.25e+11
memory_bandwidth: 1.0e+10
memory: 1.0e+9
links:
  - {latency: 2.0e-5, bandwidth: 1.0e+9}
  - {collective: all_reduce, latency: 1.0e-3, bandwidth: 1.0e+9}
"""
OTHER = {"layers.*.up": "colwise_gather_output", "embed": "embedding_rowwise"}


HOSTILE = '</script><script>document.title = "run"</script><img src=x onerror="document.title = 1"><!--'


@pytest.fixture(autouse=True)
def quiet(chromium: webdriver.Chrome) -> Iterator[None]:
    yield
    assert chromium.get_log("browser") == []  # type: ignore[no-untyped-call]


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_click_and_unfold(chromium: webdriver.Chrome, pages: Path, width: int) -> None:
    page = Page(chromium, pages / "tower.html", width)
    folded = page.nodes
    page.click_node("layers.* x 3")
    assert page.text("details").startswith("layers.* x 3\n")
    assert page.nodes == folded + 5
    page.click_node("all_reduce  P(sum)")
    details = page.text("details")
    for words in (
        "all_reduce over tp",
        "inherent: it adds up the partial results",
        'asked by the plan ("layers.*.down": "rowwise")',
        "384 B that each rank sends (384 bytes)",
        "artifacts.py:",
        "Stands for 3 calls",
    ):
        assert words in details
    page.driver.find_element(By.CSS_SELECTOR, "#details .link").click()  # of the op that it was placed by
    assert page.text("details").startswith("layers.0.down: linear\n")
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
    page.click("fold")
    assert page.nodes == folded


@pytest.mark.parametrize("width", WIDTHS)
def test_search_by_keys(chromium: webdriver.Chrome, pages: Path, width: int) -> None:
    page = Page(chromium, pages / "tower.html", width)
    page.press("/")
    assert page.focus == "search"
    page.press("layers.2.down weight")
    assert page.text("found") == "parameter layers.2.down.weight"
    page.press(Keys.ENTER)
    details = page.text("details")
    assert details.startswith("layers.2.down.weight\n")
    assert "Global\nf32[8, 16]\nOn rank 0\nf32[8, 8]" in details
    assert "rank 1 [8, 8] [:, 8:16]" in details
    drawn = page.driver.find_elements(By.CSS_SELECTOR, "#details .slabs rect")
    assert [(rect.get_attribute("x"), rect.get_attribute("width")) for rect in drawn] == [("0", "130"), ("130", "130")]
    assert page.driver.execute_script("return cy.$('.current').data('label')").startswith("down  linear")
    page.press("/", "collective layers.1", Keys.ARROW_UP, Keys.ENTER)
    assert "Node\nall_reduce_1" in page.text("details")
    page.press("/", "no such thing")
    assert page.text("found") == "nothing found"
    page.press(Keys.ESCAPE)
    assert (page.focus, page.text("found")) == ("graph", "")


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_keys_reach_all_of_it(chromium: webdriver.Chrome, pages: Path, width: int) -> None:
    page = Page(chromium, pages / "tower.html", width)
    for _ in range(10):
        page.press(Keys.TAB)
        if page.focus == "graph":
            break
    page.press(Keys.ARROW_DOWN)
    assert page.text("details").startswith("input: ids") or page.text("details").startswith("ids\n")
    page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    said = page.driver.find_element(By.ID, "said").get_attribute("textContent")
    assert said == "folded layers.* x 3, each: 1 all_reduce, 384 B on the wire"
    folded = page.nodes
    page.press(Keys.ENTER)
    assert page.nodes == folded + 5
    page.press(Keys.ENTER)
    assert page.nodes == folded
    page.press(Keys.ARROW_UP, Keys.ENTER)
    assert page.focus == "details"
    page.press(Keys.ESCAPE)
    assert page.focus == "graph"
    page.press(Keys.ESCAPE)
    assert page.text("details").startswith("Summary\n")
    before = page.driver.execute_script("return cy.zoom()")
    page.press("+")
    assert page.driver.execute_script("return cy.zoom()") > before
    page.driver.find_element(By.ID, "tab-details").send_keys(Keys.ARROW_RIGHT)
    assert (page.focus, page.text("cost").splitlines()[1]) == (
        "tab-cost",
        "3 all_reduce. Each rank sends 1.15 kB (1,152 bytes).",
    )
    page.press(Keys.ARROW_RIGHT)
    said = "Machine ideal, by its file: 989 TFLOP/s, memory 3.35 TB/s. A kernel takes its floor"
    assert said in page.text("timeline")
    assert len(page.driver.find_elements(By.CSS_SELECTOR, "#timeline .bar")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_what_differs_is_marked(chromium: webdriver.Chrome, pages: Path, width: int) -> None:
    page = Page(chromium, pages / "difference.html", width)
    assert page.driver.title == "tower → other: mesh tp=2, rank 0"
    marked = "return cy.nodes('.differs').map((node) => node.data('label').split('\\n')[0])"
    assert page.driver.execute_script(marked) == ["embed  embedding", "new: all_reduce  P(sum) → R", "▸ layers.* x 3"]
    tables = page.text("difference")
    for words in (
        "sent by a rank in a call 1.15 kB 1.54 kB",
        "layers.*.down.weight x 3 parameter S(1) R",
        "embed all_reduce, inherent 0 → 1 0 B → 384 B",
        "layers.*.down x 3 all_reduce, inherent 1 → 0 384 B → 0 B",
        "embed: embedding R P(sum)",
    ):
        assert words in tables.replace("\n", " ")
    page.click_node("layers.* x 3")
    assert "It was\n1 all_reduce, 384 B on the wire" in page.text("details")
    assert page.driver.execute_script(marked)[2:] == [
        "new: all_gather  S(2) → R",
        "relu",
        "down  linear",
        "gone: all_reduce  P(sum) → R",
    ]
    page.click_node("down  linear")
    assert "Placement\nR: whole on every rank\nIt was\nP(sum)" in page.text("details")
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_a_difference_leads_to_its_node(chromium: webdriver.Chrome, pages: Path, width: int) -> None:
    page = Page(chromium, pages / "difference.html", width)

    def follow(text: str) -> str:
        page.click("tab-difference")
        page.driver.find_element(By.XPATH, f"//*[@id='difference']//button[.='{text}']").click()
        current = page.driver.execute_script("return cy.$('.current').data('label')")
        graph = page.driver.find_element(By.ID, "graph")
        in_view = (
            "const { top, bottom } = arguments[0].getBoundingClientRect(); return top > -1 && bottom <= innerHeight"
        )
        assert page.driver.execute_script(in_view, graph)
        return str(current)

    assert follow("layers.*.down x 3").startswith("gone: all_reduce  P(sum) → R\n384 B over tp")
    details = page.text("details")
    assert details.startswith("all_reduce over tp, which is gone\n")
    assert "It followed\nlayers.0.down linear" in details
    assert "Stands for 3 calls" in details
    assert follow("embed").startswith("new: all_reduce")
    assert page.text("details").startswith("all_reduce over tp, which is new\n")
    assert follow("embed.weight").startswith("embed  embedding")
    assert page.text("details").startswith(
        "embed.weight\nKind\nparameter\nPlacement\nS(0): dim 0 cut over tp\nIt was\nR\n"
    )
    assert follow("layers.0: relu").startswith("relu\nR  f32[2, 6, 16]\nwas S(2)")


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_it_opens_on_the_summary(chromium: webdriver.Chrome, pages: Path, width: int) -> None:
    page = Page(chromium, pages / "mixed.html", width)
    said = page.text("details").replace("\n", " ")
    for words in (
        "Summary Rank 0 holds 608 B of 1.18 kB of weights and buffers (51%). In a call it sends 256 B in 2 all_gather.",
        "1 fallback: gathers that no plan entry asked for all_gather in the model: 256 B. sort: it needs the dim of 64",
        "To avoid it: change 'up' from colwise to replicate (each rank sends 128 B less per call",
        "Collectives by layer",
        "outside of modules all_gather fallback 1 256 B 128 B",
        "up.weight f32[16, 8] S(0)",
    ):
        assert words in said
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
    page.driver.find_element(By.XPATH, "//*[@id='details']//button[.='all_gather in the model']").click()
    assert page.text("details").startswith("all_gather over tp\n")
    assert "To avoid it\nchange 'up' from colwise" in page.text("details")
    page = Page(chromium, pages / "tower.html", width)
    assert "No fallbacks: the plan asked for every gather." in page.text("details")


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_another_rank_is_chosen(chromium: webdriver.Chrome, pages: Path, width: int) -> None:
    """In place where the ranks run one graph; else with the graph of that rank."""
    page = Page(chromium, pages / "tower.html", width)
    page.click_node("layers.* x 3")
    page.click_node("up  linear")
    nodes = page.nodes
    assert "Value on rank 0\nf32[2, 6, 8]" in page.text("details")
    Select(page.driver.find_element(By.ID, "rank")).select_by_visible_text("rank 1")
    assert (page.nodes, page.driver.title) == (nodes, "tower: mesh tp=2, rank 1")
    assert "Value on rank 1\nf32[2, 6, 8]" in page.text("details")
    assert "Rank 1 holds 2.37 kB of 4 kB." in page.text("summary")

    page = Page(chromium, pages / "uneven.html", width)
    assert "relu" in page.driver.execute_script("return cy.nodes().map((node) => node.data('label')).join()")
    Select(page.driver.find_element(By.ID, "rank")).select_by_visible_text("rank 1")
    page.click_node("relu\nS(1)  f32[4, 7]")
    assert "Value on rank 1\nf32[4, 7]" in page.text("details")
    assert "Rank 1 holds 508 B" in page.text("summary")
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_caches_are_drawn_where_they_are_written(chromium: webdriver.Chrome, pages: Path) -> None:
    page = Page(chromium, pages / "cached.html", 900)
    labels = page.driver.execute_script("return cy.nodes().map((node) => node.data('label'))")
    assert [label.split("\n")[0] for label in labels if label.startswith("output")] == ["output  output"]
    page.click_node("layers.* x 3")
    page.click_node("writes cache_0")
    assert "Writes\ncache_0\n" in page.text("details")
    page.driver.find_element(By.XPATH, "//*[@id='details']//button[.='cache_0']").click()
    assert page.text("details").startswith("cache_0\nKind\nbuffer\nPlacement\nS(2): dim 2 cut over tp\n")


@pytest.mark.slow
def test_everything_has_a_name(chromium: webdriver.Chrome, pages: Path) -> None:
    page = Page(chromium, pages / "tower.html", 900)
    page.click_node("head")
    controls = page.driver.find_elements(By.CSS_SELECTOR, "button, input, [role], svg")
    assert len(controls) > 15
    assert [
        c.get_attribute("outerHTML") for c in controls if c.is_displayed() and not (c.accessible_name or c.text)
    ] == []


@pytest.mark.slow
def test_a_fallback_says_why(chromium: webdriver.Chrome, pages: Path) -> None:
    page = Page(chromium, pages / "mixed.html", 900)
    assert page.text("legend").splitlines() == [
        "S(0): dim 0 cut over tp",
        "S(1): dim 1 cut over tp",
        "R: whole on every rank",
        "collective: ranks exchange data",
        "fallback: a collective that no plan entry asked for",
        "critical path: the slowest chain of steps",
    ]  # fmt: skip
    page.click_node("fallback: sort")
    assert "fallback: an op needs the value whole" in page.text("details")
    assert "Reason\nsort: it needs the dim of 64 whole" in page.text("details")


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_the_costs_and_the_timeline_say_what_they_leave_out(
    chromium: webdriver.Chrome, pages: Path, width: int
) -> None:
    page = Page(chromium, pages / "unknown.html", width)
    page.click("tab-cost")
    told = page.text("cost").replace("\n", " ")
    assert "What this page does not know What Of Why FLOPs 2 _trilinear, 1 cond torch's counter does not" in told
    assert "global shape 1 topk it is not one tensor of plain sizes" in told
    page.click("tab-timeline")
    assert "Left out: 2 _trilinear, 1 cond, which may multiply matrices" in page.text("timeline")
    page.click_node("topk")
    assert "Global shape\nnot known: it is not one tensor of plain sizes" in page.text("details")
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
    page = Page(chromium, pages / "tower.html", width)
    assert "does not know" not in page.driver.find_element(By.ID, "cost").get_attribute("textContent")


@pytest.mark.slow
def test_texts_of_files_stay_texts(chromium: webdriver.Chrome, pages: Path) -> None:
    page = Page(chromium, pages / "hostile.html", 900)
    page.click_node("fallback")
    assert HOSTILE in page.text("details")
    assert page.driver.title == "hostile: mesh tp=2, rank 0"
    assert page.driver.find_elements(By.TAG_NAME, "img") == []
