"""The site that ``make docs`` builds: the pages of this folder, and a reference made of docstrings.

Pages are written to be read as files too. What a site wants otherwise is changed while they are read: links to README
and CONTRIBUTING lead to their copies here, and links to a folder of the sources are none.
"""

import importlib
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final, Union, cast

from docutils import nodes
from pygments.lexers import JsonLexer, TextLexer
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc.mock import _MockObject as Mocked, mock
from sphinx.util.typing import stringify_annotation

DOCS: Final = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "src"))

autodoc_mock_imports = [
    *("torch", "triton", "transformers", "tokenizers", "safetensors"),
    *("jinja2", "matplotlib", "zmq"),
    *("blake3", "obstore", "redis", "xxhash"),
]
"""What extras bring: the reference is made of docstrings, for which none of it is needed."""

project = "pagedkv"
version = release = importlib.import_module(project).__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = f"pagedkv {version}"
html_show_copyright = False

myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

DOORS: Final = (
    "pagedkv",
    "pagedkv.space",
    "pagedkv.errors",
    "pagedkv.scheduling",
    "pagedkv.device",
    "pagedkv.attention",
    "pagedkv.engine",
    "pagedkv.engine.sampling",
    "pagedkv.engine.unfoldings",
    "pagedkv.models",
    "pagedkv.simulation",
    "pagedkv.simulation.cost",
    "pagedkv.simulation.planning",
    "pagedkv.report",
    "pagedkv.report.page",
    "pagedkv.tiers",
    "pagedkv.routing",
    "pagedkv.events",
    "pagedkv.warming",
    "pagedkv.plan_buffer",
    "pagedkv.fingerprint",
)
"""What the reference documents: the paths that users import."""

ALIASES: Final = {
    "pagedkv.contract.arguments": ("TokenIds", "Rows"),
    "pagedkv.contract.arrays": (
        *("BoolArray", "Float32Array", "Float64Array"),
        *("Int32Array", "Int64Array", "Uint32Array", "Uint8Array"),
    ),
    "pagedkv.plan_buffer": ("Buffer",),
    "pagedkv.engine.prompts": ("Prompt",),
    "numpy.typing": ("ArrayLike",),
}
"""Types that signatures show by their names: in full they would hide the rest."""
COPIED: Final = {"index": "README", "project/contributing": "CONTRIBUTING", "project/changelog": "CHANGELOG"}
"""Pages that begin with a file of the root."""
DECISIONS: Final = "decisions/README"
ALL_DECISIONS: Final = "\n\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"
PLACES: Final = {file: page for page, file in COPIED.items()}
ROOT_FILE: Final = re.compile(rf"\]\((?:\.\./)*({'|'.join(PLACES)})\.md")
LINK_UP: Final = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[\w/]*(?:\.md)?)\)")


def shown_paths() -> dict[str, str]:
    """Give the path under which each documented class or function is shown, by the one at which it is defined."""
    shown: dict[str, str] = {}
    for door in DOORS:
        module = importlib.import_module(door)
        for name in module.__all__:
            value = getattr(module, name)
            home = f"{getattr(value, '__module__', door)}.{getattr(value, '__qualname__', name)}"
            shown.setdefault(home, f"{door}.{name}")
    return shown


def names_of_types() -> dict[str, str]:
    """Give the name of each alias by what a signature has in its place, the longest first."""
    written = {
        stringify_annotation(getattr(importlib.import_module(module), name), "smart"): name
        for module, names in ALIASES.items()
        for name in names
    }
    return dict(sorted(written.items(), key=lambda each: -len(each[0])))


def shorten(names: Mapping[str, str], *told: object) -> tuple[str | None, str | None]:
    """Put the names of types into a signature: its parameters, and what it returns."""
    *_, parameters, returned = cast("tuple[str | None, ...]", told)
    for written, name in names.items():
        parameters = parameters and parameters.replace(written, name)
        returned = returned and returned.replace(written, name)
    return parameters, returned


def adapt(app: Sphinx, page: str, text: list[str]) -> None:
    """Put the files of the root in their places, and change the links that lead out of this folder."""
    up = "../" * page.count("/")
    if page in COPIED:
        file = DOCS.parent / f"{COPIED[page]}.md"
        app.env.note_dependency(str(file))
        text[0] = file.read_text(encoding="utf-8").replace("](docs/", f"]({up}") + text[0]
    changed = ROOT_FILE.sub(lambda link: f"]({up}{PLACES[link[1]]}.md", text[0])
    changed = changed.replace("decisions/)", "decisions/README.md)")

    def without_link(link: re.Match[str]) -> str:
        """A folder of the sources, or a page there, is no part of the site: its name stays."""
        is_here = (DOCS / page).parent.joinpath(link[2]).resolve().is_relative_to(DOCS)
        return link[0] if is_here else link[1]

    text[0] = LINK_UP.sub(without_link, changed) + (ALL_DECISIONS if page == DECISIONS else "")


def resolve_home(
    shown: Mapping[str, str], app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Link what a docstring names by the path at which it is defined to the path under which it is shown."""
    if node.get("refdomain") != "py":
        return None
    home, member = node["reftarget"], ""
    if home not in shown:
        home, _, member = home.rpartition(".")
    if home not in shown:
        return None
    target = shown[home] + (f".{member}" if member else "")
    python = env.get_domain("py")
    return python.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], target, node, content)


def setup(app: Sphinx) -> None:
    """Join what changes pages and links."""
    app.add_lexer("jsonl", JsonLexer)
    app.add_lexer("csv", TextLexer)
    app.connect("source-read", adapt)
    # Mocked types stand in annotations such as ``torch.Tensor | None``, which are evaluated.
    Mocked.__or__ = lambda self, other: Union[self, other]  # noqa: UP007 - it defines `|`
    Mocked.__ror__ = lambda self, other: Union[other, self]  # noqa: UP007 - as above
    with mock(autodoc_mock_imports):
        names, shown = names_of_types(), shown_paths()
    app.connect("autodoc-process-signature", partial(shorten, names))
    app.connect("missing-reference", partial(resolve_home, shown))
