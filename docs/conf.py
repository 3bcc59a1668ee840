"""How Sphinx builds the HTML; the pages are plain Markdown."""

from __future__ import annotations

import inspect
import re
import sys
from enum import Enum
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Generic

from sphinx.application import Sphinx

import hftrain

sys.path.insert(0, str(Path(__file__).parent))
from notebooks import write_notebooks

project = "hftrain"
author = copyright = "The hftrain authors"
version = release = installed_version("hftrain")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
# Only contributors need these, who read them in the repository.
exclude_patterns = ["_build", *(f"design/{name}.md" for name in ("decisions", "contradictions", "argument_readers"))]
templates_path = ["_templates"]
# Dashes and ellipses are set, quotes stay as they are typed: many of them hold values of settings.
smartquotes_action = "De"
# In docstrings, `name` links to a public name and is plain code otherwise.
default_role = "py:obj"

html_theme = "furo"
html_title = "hftrain"
html_favicon = html_logo = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["custom.css", "diagrams.css"]
html_js_files = ["filter.js"]
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "a11y-light"
pygments_dark_style = "github-dark"

# Headings can be linked to as on GitHub: page.md#a-heading.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "fieldlist"]

# Pages of examples offer notebooks, which are made of the pages and their scripts.
write_notebooks(Path(__file__).parent / "_build" / "notebooks")

# A copied session or shell command has no prompt and no output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
# One parameter a line where a signature is long.
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Public classes by name; the others are parts of these, and their members are shown as those of the public ones.
PUBLIC = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (hftrain, hftrain.loggers, hftrain.loops, hftrain.strategies)
    for name in package.__all__
    if inspect.isclass(getattr(package, name))
}
# Public names that are neither class, function nor module have no docstring of their own.
DATA = {
    "hftrain.PREFIX_CHECKPOINT_DIR": "The name of a checkpoint's folder without the step, as in ``checkpoint-500``.",
    "hftrain.precisions": "The registry of precisions. Its methods are the functions of `hftrain.strategies`.",
}
# The project's own docstring sections: a paragraph, or the end of one.
SECTION = re.compile(r"(?:(?<=\. )|^)(?P<title>Shapes|Units|Source):(?P<text>.*\n?(?:.*\S.*\n?)*)", re.MULTILINE)


def public_bases(kind: type) -> list[type]:
    """Return a class's bases with private ones replaced by their own bases, without `object`."""
    bases = ([base] if is_public(base) else public_bases(base) for base in kind.__bases__)
    return [*dict.fromkeys(each for some in bases for each in some if each not in (object, Generic))]


def is_public(kind: type) -> bool:
    """Tell whether a class has a page, or is another package's."""
    return kind in PUBLIC.values() or not kind.__module__.startswith("hftrain.")


# The pages of docs/api list the public names; the page of each name is written at build time, and ignored by git.
API = Path(__file__).parent / "api"
autosummary_generate = [f"api/{path.name}" for path in sorted(API.glob("*.md"))]
# Sphinx would warn of a page that an earlier build has left and that no list names now.
LISTED = {name for path in API.glob("*.md") for name in path.read_text(encoding="utf-8").split()}
for page in API.glob("*.rst"):
    if page.stem.removeprefix("hftrain.") not in LISTED:
        page.unlink()

# What the template of a class needs: whether it has bases, and those at which inherited members end.
autosummary_context = {
    "bases": {name: len(public_bases(kind)) for name, kind in PUBLIC.items()},
    "ends": {
        name: ", ".join(each.__name__ for each in kind.__mro__[1:] if is_public(each)) for name, kind in PUBLIC.items()
    },
}


def show_public_bases(app: Sphinx, name: str, kind: type, options: object, bases: list[type]) -> None:
    """Name the public bases of a class."""
    bases[:] = public_bases(kind)


def edit_docstring(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Make fields of the project's own sections, at the end; Google's sections are left to napoleon."""
    text = DATA[name] if what == "data" else "\n".join(lines)
    if isinstance(value, type) and issubclass(value, Enum):
        # As members they would fill the search: "EMA" would find ADEMAMIX.
        text += "\n\n" + ", ".join(f"``{member.value!r}``" for member in value) + "\n"
    fields = [f":{found['title']}: {' '.join(found['text'].split())}" for found in SECTION.finditer(text)]
    lines[:] = [*SECTION.sub("\n", text).split("\n"), "", *fields, ""]


def setup(app: Sphinx) -> None:
    """Connect the functions above; that for docstrings comes before napoleon's."""
    app.connect("autodoc-process-bases", show_public_bases)
    app.connect("autodoc-process-docstring", edit_docstring, priority=400)
