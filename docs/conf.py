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

sys.path.append(str(Path(__file__).parent))
import search_index
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
html_css_files = ["../pagefind/pagefind-component-ui.css", "custom.css", "diagrams.css"]
html_js_files = ["../pagefind/pagefind-component-ui.js", "search.js", "filter.js"]
html_copy_source = False
# The search is pagefind's, without Sphinx' index of every word.
html_additional_pages = {"search": "search.html"}
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

# The page of a class begins with its example, which the page of its subject has under its name.
EXAMPLE = re.compile(r"^### (\w+)\n\n```python\n(.*?)```$", re.MULTILINE | re.DOTALL)
# The methods of Trainer, by what one does.
TRAINER = {
    "Train": "train hyperparameter_search tune set_initial_training_values",
    "Evaluate and predict": "evaluate predict",
    "Save and load": "save_model save_state checkpoint_objects output_dir"
    " push_to_hub hub_model_id push_in_progress init_hf_repo create_model_card",
    "Callbacks and logs": "add_callback pop_callback remove_callback callback_handler"
    " log log_metrics save_metrics metrics_format",
    "Look up": "get_learning_rates get_optimizer_group get_decay_parameter_names get_num_trainable_parameters"
    " get_total_train_batch_size num_examples num_tokens floating_point_ops store_flos"
    " current_gradient_accumulation_steps is_world_process_zero is_local_process_zero is_tp_enabled get_tp_size"
    " get_cp_size get_sp_size tokenizer compute_loss_func label_smoother accelerator deepspeed gather_function"
    " neftune_hook_handle",
    "Extend": "compute_loss training_step prediction_step evaluation_loop get_batch_samples call_model_init"
    " get_train_dataloader get_eval_dataloader get_test_dataloader create_optimizer create_scheduler"
    " create_optimizer_and_scheduler get_optimizer_cls_and_kwargs compute_loss_context_manager"
    " autocast_smart_context_manager model_accepts_loss_kwargs torch_jit_model_eval"
    " create_accelerator_and_postprocess propagate_args_to_deepspeed place_model_on_device",
}


def directive(name: str) -> str:
    """Return what autodoc calls a member of Trainer."""
    member = inspect.getattr_static(hftrain.Trainer, name, None)
    return "property" if isinstance(member, property) else "method" if inspect.isroutine(member) else "attribute"


GROUPED = {title: [(directive(name), name) for name in names.split()] for title, names in TRAINER.items()}
FORGOTTEN = {
    name
    for name in dir(hftrain.Trainer)
    if name[0] != "_" and directive(name) != "attribute" and inspect.getdoc(getattr(hftrain.Trainer, name))
}.difference(*(names.split() for names in TRAINER.values()))
if FORGOTTEN:
    raise ValueError(f"Name in TRAINER where the page of Trainer shows {FORGOTTEN}.")

# What the template of a class needs: its example and groups, whether it has bases, and where inherited members end.
autosummary_context = {
    "examples": dict(found for path in sorted(API.glob("*.md")) for found in EXAMPLE.findall(path.read_text("utf-8"))),
    "groups": {"hftrain.Trainer": GROUPED},
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
        text += "\n\n" + ", ".join(f"``{member.value!r}``" for member in value) + "\n"
    fields = [f":{found['title']}: {' '.join(found['text'].split())}" for found in SECTION.finditer(text)]
    lines[:] = [*SECTION.sub("\n", text).split("\n"), "", *fields, ""]


def leave_search_to_pagefind(app: Sphinx) -> None:
    """Build no index of Sphinx' own."""
    app.builder.search = False


def index_pages(app: Sphinx, exception: Exception | None) -> None:
    """Index the HTML for the search."""
    if exception is None and app.builder.name == "html":
        search_index.index(app.outdir, sorted(app.env.found_docs))


def setup(app: Sphinx) -> None:
    """Connect the functions above; that for docstrings comes before napoleon's."""
    app.connect("builder-inited", leave_search_to_pagefind)
    app.connect("build-finished", index_pages)
    app.connect("autodoc-process-bases", show_public_bases)
    app.connect("autodoc-process-docstring", edit_docstring, priority=400)
