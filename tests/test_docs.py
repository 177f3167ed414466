"""What documents show is what the code does: their Python blocks run, and print what they say.

The blocks of a file run in order in one namespace. A comment behind a ``print`` that begins with a Python literal is
what must be printed there: several values as a tuple, and prose after a colon is for readers.
"""

import ast
import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
BLOCK: Final = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINT_COMMENT: Final = re.compile(r"^\s*print\(.*\)\s+# (.*)$")
LINK: Final = re.compile(r"\]\((?!https?:)([^)#]+)")
PAGES: Final = sorted(
    str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md"))
)
UNKNOWN: Final = object()


def python_blocks(text: str) -> list[tuple[int, str]]:
    """The Python blocks of a Markdown text, each with the number of lines before it."""
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in BLOCK.finditer(text)]


def literal(text: str) -> object:
    """A Python literal's value, or UNKNOWN."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return UNKNOWN


def claimed(comment: str) -> object:
    """The value that a comment claims, UNKNOWN where it claims none."""
    value = literal(comment)
    return value if value is not UNKNOWN else literal(comment.split(": ", maxsplit=1)[0])


@dataclass
class Document:
    """One Markdown file: what its comments claim, and what its blocks print, by line number."""

    text: str
    name: str = "document"
    claims: dict[int, object] = field(default_factory=dict)
    printed: dict[int, list[object]] = field(default_factory=dict)

    def run(self) -> None:
        """Run all blocks in one namespace."""
        namespace: dict[str, object] = {"__name__": "document", "print": self.print}
        for num_lines_before, block in python_blocks(self.text):
            for number, line in enumerate(block.splitlines(), num_lines_before + 1):
                comment = PRINT_COMMENT.match(line)
                if comment is not None:
                    self.claims[number] = claimed(comment.group(1))
            # As many empty lines first, so that a traceback names the line of the document.
            code = compile("\n" * num_lines_before + block, self.name, "exec")
            exec(code, namespace)  # noqa: S102 - our own documents

    def print(self, *values: object) -> None:
        """Stand in for print: note what is printed on which line."""
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        self.printed.setdefault(frame.f_back.f_lineno, []).append(values[0] if len(values) == 1 else values)

    def mistakes(self) -> list[str]:
        """Claims that what was printed does not bear out."""
        return [
            f"{self.name}:{number}: says {claim!r}, printed {self.printed.get(number)!r}"
            for number, claim in self.claims.items()
            if claim is not UNKNOWN and repr(self.printed.get(number)) != repr([claim])
        ]


@pytest.mark.parametrize(
    "name", ["README.md", "docs/guide.md", "docs/coming-from-vllm.md", "docs/device.md", "docs/engine.md"]
)
def test_what_documents_show_is_true(name: str) -> None:
    document = Document((ROOT / name).read_text(encoding="utf-8"), name)
    document.run()
    assert document.mistakes() == []
    assert any(claim is not UNKNOWN for claim in document.claims.values())


@pytest.mark.parametrize("name", ["docs/guide.md", "docs/coming-from-vllm.md", "docs/device.md"])
def test_every_print_of_a_guide_says_what_it_prints(name: str) -> None:
    document = Document((ROOT / name).read_text(encoding="utf-8"), name)
    document.run()
    assert document.printed.keys() == document.claims.keys()
    assert all(claim is not UNKNOWN for claim in document.claims.values())


def test_the_fifteen_lines_are_fifteen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (_, block), *_ = python_blocks(text)
    assert "## In fifteen lines" in text
    assert len([line for line in block.splitlines() if line.strip()]) == 15


def dead_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead nowhere."""
    return [target for target in LINK.findall(text) if not (page.parent / target).exists()]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    assert dead_links(ROOT / name, (ROOT / name).read_text(encoding="utf-8")) == []


def test_a_dead_link_is_found() -> None:
    text = "[a](docs/guide.md#1-a) [b](docs/gone.md) [c](https://example.org/gone)"
    assert dead_links(ROOT / "README.md", text) == ["docs/gone.md"]


def test_a_wrong_comment_is_found() -> None:
    text = "prose\n\n```python\nprint(1 + 1)  # 2: right\nprint(1 + 1)  # 3\nprint(2)  # prose\n```\n"
    document = Document(text)
    document.run()
    assert document.mistakes() == ["document:5: says 3, printed [2]"]


def test_a_print_that_never_ran_is_found() -> None:
    document = Document("```python\nif False:\n    print(1)  # 1\n```\n")
    document.run()
    assert document.mistakes() == ["document:3: says 1, printed None"]
