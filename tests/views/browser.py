"""What a reader does with a page in a browser: clicks, keys, and what is then to be read."""

from __future__ import annotations

from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By


class Page:
    """A page that is open in the browser, at a width and in a color scheme."""

    def __init__(self, driver: webdriver.Chrome, file: Path, width: int, scheme: str = "light") -> None:
        self.driver = driver
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        driver.get(file.as_uri())

    def text(self, id: str) -> str:
        return self.driver.find_element(By.ID, id).text

    def click(self, id: str) -> None:
        self.driver.find_element(By.ID, id).click()

    def node(self, words: str) -> str:
        """The id of the one node of the graph whose label has these words."""
        script = (
            "return cy.nodes().filter((node) => node.data('label').includes(arguments[0])).map((node) => node.id())"
        )
        (found,) = self.driver.execute_script(script, words)
        return str(found)

    def click_node(self, words: str) -> None:
        script = """
            const [node, graph] = [cy.getElementById(arguments[0]), document.getElementById("graph")];
            reveal(node);
            graph.scrollIntoView({ block: "center" });
            const { x, y } = node.renderedPosition();
            return [x - graph.clientWidth / 2, y - graph.clientHeight / 2].map(Math.round);
        """
        x, y = self.driver.execute_script(script, self.node(words))
        graph = self.driver.find_element(By.ID, "graph")
        ActionChains(self.driver).move_to_element_with_offset(graph, x, y).click().perform()

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    @property
    def nodes(self) -> int:
        return int(self.driver.execute_script("return cy.nodes().length"))

    @property
    def focus(self) -> str:
        return str(self.driver.switch_to.active_element.get_attribute("id"))
