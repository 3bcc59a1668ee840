"""How Sphinx builds the HTML; the pages are plain Markdown."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "hftrain"
author = "The hftrain authors"
version = release = installed_version("hftrain")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_title = "hftrain"
html_theme = "alabaster"

# Headings can be linked to as on GitHub: page.md#a-heading.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# The project's own docstring sections, next to Google's.
napoleon_custom_sections = ["Shapes", "Units", "Source"]
