"""How Sphinx makes a site of these pages: `make docs`. It reads this checkout and asks nobody else.

The pages are Markdown that GitHub shows as well: their links are relative, and nothing in them is for Sphinx alone but
the directives of api.md. The navigation is read from the tables of index.md, so there is one list of pages.
"""

from __future__ import annotations

import re
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django
from django.conf import settings
from pygments.lexers.sql import PostgresLexer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent
sys.path.insert(0, str(PROJECT))

import django_advisory_lock  # noqa: E402 - this checkout, whatever is installed

# The apps that the documented modules belong to. No database: nothing here sends a query.
settings.configure(
    INSTALLED_APPS=[
        "django.contrib.admin",
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django_advisory_lock",
    ],
    USE_TZ=True,
)
django.setup()

# -- The project ------------------------------------------------------------------------------------------------------

metadata = ConfigParser()
metadata.read(PROJECT / "setup.cfg", encoding="utf-8")

project = "django_advisory_lock"
author = metadata["metadata"]["author"]
release = version = metadata["metadata"]["version"]

# -- Pages ------------------------------------------------------------------------------------------------------------

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
exclude_patterns = ["_build"]
# GitHub gives each heading an anchor, and the links of the pages go there.
myst_heading_anchors = 4
nitpicky = True
smartquotes = False  # the pages have the quotes that they mean

# Pages of the site that stand for files beside docs/.
BESIDE = {"tour": "README.md", "changelog": "CHANGELOG.md"}
LINK = re.compile(r"(?<=\]\()(?P<path>[\w./-]+)(?=[#)])")


def read_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the files beside docs/ into their pages, lead the links to them there, and give the index a navigation."""
    here = HERE
    if name in BESIDE:
        here = PROJECT
        app.env.note_dependency(str(PROJECT / BESIDE[name]))
        source[0] = (PROJECT / BESIDE[name]).read_text(encoding="utf-8")
    source[0] = LINK.sub(lambda link: site_path((here / link["path"]).resolve(), link["path"]), source[0])
    if name == root_doc:
        source[0] += "".join(navigation(source[0]))


def site_path(target: Path, path: str) -> str:
    """Return where the site has what a link leads to."""
    for page, file in BESIDE.items():
        if target == PROJECT / file:
            return f"{page}.md"
    return target.name if target.parent == HERE else path


def navigation(index: str) -> list[str]:
    """Return a table of contents for each section of the index: its pages in their order, under the names it gives."""
    trees = []
    for section in re.split("^## ", index, flags=re.MULTILINE)[1:]:
        caption, _, text = section.partition("\n")
        pages = re.findall(r"^\| \[([^\]]+)\]\(([\w-]+)\.md\)", text, flags=re.MULTILINE)
        lines = "\n".join(f"{title} <{page}>" for title, page in pages)
        trees.append(f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```")
    return trees


# -- The reference ----------------------------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"KeyLike": "KeyLike", "Scope": "Scope"}
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
# Names in the docstrings: a link where they are documented, else code. Other types are those of Python, Django and
# psycopg, whose lists of names would have to be fetched.
default_role = "py:obj"
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    ("py:.*", r"(?!django_advisory_lock\b).*"),
    ("py:class", r".*\.[A-Z]"),  # variables of types
    ("py:class", r".*\.PeriodicLock"),  # what periodic_lock() returns: a decorator, and nothing else
]


def find_name(app: Sphinx, env: Any, node: Any, text: Any) -> Any:
    """Look for a name of a docstring, such as `advisory_lock()`, in the facade, whatever module it stands in."""
    target = node.get("reftarget", "").removesuffix("()")
    if node.get("refdomain") != "py" or target.partition(".")[0] not in django_advisory_lock.__all__:
        return None
    name = f"{django_advisory_lock.__name__}.{target}"
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, text)


# -- The site ---------------------------------------------------------------------------------------------------------

html_theme = "furo"
html_title = f"{metadata['metadata']['name']} {release}"
html_copy_source = False
html_show_copyright = False  # LICENSE has it
html_show_sourcelink = False


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_lexer("sql", PostgresLexer)  # the plain one does not know $$
    app.connect("source-read", read_page)
    app.connect("missing-reference", find_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
