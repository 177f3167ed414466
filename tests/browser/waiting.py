"""Waits in a page, by JavaScript."""

from typing import Any, Final

from tests.browser.chromium import Tab

__all__ = ["until"]

UNTIL: Final = """
new Promise((done, failed) => {{
  const end = Date.now() + 60000;
  const look = () => {{
    const found = {};
    if (found) done(found);
    else if (Date.now() > end) failed(new Error('not within 60 s: ' + document.body.innerText));
    else requestAnimationFrame(look);
  }};
  look();
}})
"""


def until(tab: Tab, expression: str) -> Any:  # noqa: ANN401 - whatever JavaScript gives
    """Wait until an expression is true; return its value."""
    return tab.evaluate(UNTIL.format(expression))
