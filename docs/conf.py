"""How Sphinx builds the HTML; the pages are plain Markdown."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "hftrain"
author = "The hftrain authors"
version = release = installed_version("hftrain")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "hftrain"
html_favicon = html_logo = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "a11y-light"
pygments_dark_style = "github-dark"

# Headings can be linked to as on GitHub: page.md#a-heading.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "fieldlist"]

# A copied session or shell command has no prompt and no output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# The project's own docstring sections, next to Google's.
napoleon_custom_sections = ["Shapes", "Units", "Source"]
