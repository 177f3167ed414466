"""What documents show is what the code does: their Python blocks run, and print what they say.

The blocks of a file run in order in one namespace. The comment behind a ``print`` is the line that is printed, letter
for letter; prose for readers may follow it after a colon and a blank.
"""

import inspect
import re
from contextlib import chdir
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
BLOCK: Final = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINT_COMMENT: Final = re.compile(r"^\s*print\(.*\)\s+# (.*)$")
CODE: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TABLE_ROW: Final = re.compile(r"^\|.*$", re.MULTILINE)
LINK: Final = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
PATH: Final = re.compile(r"`((?:[a-z_]+/)+(?:[a-z_0-9]+(?:\.[a-z]+)?)?|[a-z_0-9]+\.py)`")
OTHERS: Final = ("vllm/", "aphrodite/", "reused.py")
FILES: Final = {path.name for room in ("src", "tests") for path in ROOT.joinpath(room).rglob("*.py")}
HEADING: Final = re.compile(r"^#+ (.*)$", re.MULTILINE)
PAGES: Final = sorted(
    str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md"))
)
ROLES: Final = tuple(
    f"docs/{page}.md"
    for page in ("for-engine-builders", "coming-from-vllm", "for-memory-planners", "for-cache-researchers")
)
README: Final = (ROOT / "README.md").read_text(encoding="utf-8")


def python_blocks(text: str) -> list[tuple[int, str]]:
    """The Python blocks of a Markdown text, each with the number of lines before it."""
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in BLOCK.finditer(text)]


def read_blocks(name: str) -> list[tuple[int, str]]:
    """The Python blocks of a page."""
    return python_blocks((ROOT / name).read_text(encoding="utf-8"))


def num_words(text: str) -> int:
    """Words of a Markdown text outside code blocks and tables; the sign of a heading is none."""
    return sum(any(map(str.isalnum, word)) for word in TABLE_ROW.sub("", CODE.sub("", text)).split())


def says(comment: str, line: str) -> bool:
    """Whether a comment is what was printed, alone or with prose behind a colon."""
    return comment == line or comment.startswith(f"{line}: ")


@dataclass
class Document:
    """One Markdown file: what its comments say is printed, and what its blocks print, by line number."""

    text: str
    name: str = "document"
    comments: dict[int, str] = field(default_factory=dict)
    printed: dict[int, list[str]] = field(default_factory=dict)

    def run(self) -> None:
        """Run all blocks in one namespace."""
        namespace: dict[str, object] = {"__name__": "document", "print": self.print}
        for num_lines_before, block in python_blocks(self.text):
            for number, line in enumerate(block.splitlines(), num_lines_before + 1):
                comment = PRINT_COMMENT.match(line)
                if comment is not None:
                    self.comments[number] = comment.group(1)
            # As many empty lines first, so that a traceback names the line of the document.
            code = compile("\n" * num_lines_before + block, self.name, "exec")
            exec(code, namespace)  # noqa: S102 - our own documents

    def print(self, *values: object) -> None:
        """Stand in for print: note what is printed on which line."""
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        text = StringIO()
        print(*values, file=text, end="")
        self.printed.setdefault(frame.f_back.f_lineno, []).append(text.getvalue())

    def mistakes(self) -> list[str]:
        """Comments that are not what was printed, and lines that printed and have none."""
        return [
            f"{self.name}:{number}: says {comment}, printed {'; '.join(lines) or 'nothing'}"
            for number in sorted(self.comments.keys() | self.printed.keys())
            for comment, lines in [(self.comments.get(number, "nothing"), self.printed.get(number, []))]
            if len(lines) != 1 or not says(comment, lines[0])
        ]


PLAIN_ONLY = {"docs/for-cache-researchers.md"}
"""Pages that use several eviction policies, each of which has loops to be compiled."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.plain_only if name in PLAIN_ONLY else ())
        for name in PAGES
        if read_blocks(name)
    ],
)
def test_what_documents_show_is_what_is_printed(name: str) -> None:
    document = Document((ROOT / name).read_text(encoding="utf-8"), name)
    with chdir(ROOT):  # pages name files of the checkout
        document.run()
    assert document.mistakes() == []


def test_documents_show_something() -> None:
    """Or the test above would pass on nothing."""
    shown = {name for name in PAGES if "print(" in "".join(block for _, block in read_blocks(name))}
    assert shown >= {"README.md", "docs/device.md", "docs/engine.md", "docs/guide.md", *ROLES}


@pytest.mark.parametrize("name", ROLES)
def test_a_page_for_a_role_begins_with_a_block_that_runs(name: str) -> None:
    """Before its second heading."""
    beginning, _, _ = (ROOT / name).read_text(encoding="utf-8").partition("\n## ")
    assert python_blocks(beginning)
    assert f"({name})" in README


@pytest.mark.parametrize(("heading", "length"), [("## In fifteen lines", 15), ("## An engine in ten lines", 10)])
def test_the_blocks_of_the_readme_are_as_long_as_it_says(heading: str, length: int) -> None:
    section = README.partition(f"{heading}\n")[2].partition("\n## ")[0]
    ((_, block),) = python_blocks(section)
    assert len([line for line in block.splitlines() if line.strip()]) == length


def test_the_readme_has_at_most_800_words() -> None:
    """Those of code blocks and tables do not count."""
    assert 300 <= num_words(README) <= 800


def test_words_are_counted_outside_code_and_tables() -> None:
    assert num_words("# One two\n\n```\nx = 1\n```\nthree\n\n| a | b |\n|---|---|\n\n```python\ny\n```\n") == 3


def anchors(text: str) -> set[str]:
    """What links may name behind a #: the headings of a page, without signs, in small letters."""
    headings = HEADING.findall(CODE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead nowhere: no such file, or no such heading in it."""
    dead = []
    for target, anchor in LINK.findall(CODE.sub("", text)):
        path = page.parent / target if target else page
        if not path.exists():
            dead.append(target)
        elif anchor and anchor not in anchors(text if path == page else path.read_text(encoding="utf-8")):
            dead.append(f"{target}#{anchor}")
    return dead


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    assert dead_links(ROOT / name, (ROOT / name).read_text(encoding="utf-8")) == []


def dead_paths(text: str) -> list[str]:
    """Files and folders that a page names and that are not there. It begins with a room, at the root, or nowhere."""
    named = sorted({path for path in PATH.findall(text) if not path.startswith(OTHERS)})
    places = (ROOT / "src" / "pagedkv", ROOT)
    return [path for path in named if path not in FILES and not any((each / path).exists() for each in places)]


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", *(name for name in PAGES if name.startswith("docs/"))])
def test_paths_that_pages_name_are_there(name: str) -> None:
    assert dead_paths((ROOT / name).read_text(encoding="utf-8")) == []


def test_a_dead_path_is_found() -> None:
    there = "`blocks/life_cycle.py` `life_cycle.py` `tests/space` `vllm/not_ours.py`"
    text = f"{there} `memory/tables/growing.py` `blocks/gone.py` `gone.py`"
    assert dead_paths(text) == ["blocks/gone.py", "gone.py", "memory/tables/growing.py"]


def test_the_index_of_decisions_has_them_all_in_order() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\d+) \| \[.*\]\((\d{4})(-[\w-]+\.md)\) \| .+ \|$", index, re.MULTILINE)
    assert [f"{number}{rest}" for _, number, rest in listed] == sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert all(int(number) == int(shown) for shown, number, _ in listed)
    skipped = set(range(1, int(listed[-1][0]) + 1)) - {int(shown) for shown, _, _ in listed}
    assert f"{' and '.join(map(str, sorted(skipped)))} were skipped" in index


def test_a_dead_link_is_found() -> None:
    wrong = "[a](docs/guide.md#1-a) [b](docs/gone.md)"
    text = f"{wrong} [c](https://example.org/gone) [d](docs/limits.md#limits) [e](#e)\n\n# E"
    assert dead_links(ROOT / "README.md", text) == ["docs/guide.md#1-a", "docs/gone.md"]


@pytest.mark.parametrize("comment", ["2", "2: right", "2: as they say: right"])
def test_a_right_comment_is_right(comment: str) -> None:
    document = Document(f"```python\nprint(1 + 1)  # {comment}\n```\n")
    document.run()
    assert document.mistakes() == []


@pytest.mark.parametrize("comment", ["3", "(2)", "2 is right", "2.0", "'2'", "right: 2"])
def test_a_wrong_comment_is_found(comment: str) -> None:
    document = Document(f"prose\n\n```python\nx = 1\nprint(1 + 1)  # {comment}\n```\n")
    document.run()
    assert document.mistakes() == [f"document:5: says {comment}, printed 2"]


def test_several_values_are_told_as_they_are_printed() -> None:
    document = Document("```python\nprint(3, 'a', [1])  # 3 a [1]\nprint(3, 'a')  # (3, 'a')\n```\n")
    document.run()
    assert document.mistakes() == ["document:3: says (3, 'a'), printed 3 a"]


def test_a_print_without_a_comment_is_found() -> None:
    document = Document("```python\nprint(1)\n```\n")
    document.run()
    assert document.mistakes() == ["document:2: says nothing, printed 1"]


def test_a_print_that_never_ran_is_found() -> None:
    document = Document("```python\nif False:\n    print(1)  # 1\n```\n")
    document.run()
    assert document.mistakes() == ["document:3: says 1, printed nothing"]


def test_every_page_is_in_the_contents_of_the_site() -> None:
    contents = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.stem not in {"index", *contents}] == []
