"""The site of clearhead: `make docs` builds it into build/site, without a network and without a warning."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS / "lessons"), str(DOCS.parent)]

from clearhead.version import __version__  # noqa: E402

project = "clearhead"
author = "The clearhead authors"
project_copyright = author
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "contents",
    "lesson_cells",
    "llms",
    "mathml",
    "reference",
    "repository_links",
    "tables",
    "browser_page",
]
root_doc = "index"
exclude_patterns = [
    "conf.py",
    "_ext",
    "_jupyter",
    "browser",
    "check_*.py",
    "make_pictures.py",
    "lessons/shared.py",
    "**/.ipynb_checkpoints",
]

# Pages are Markdown; a lesson is one Python file in jupytext's percent format, which is executed when it is read.
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "force"
nb_execution_timeout = 3600  # seconds of a cell by the clock: some train models, and other programs may use the machine
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_render_image_options = {"class": "picture"}
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
# The kernels are of this Python, import this clearhead, and say only what is an error.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(DOCS.parent), os.environ.get("PYTHONPATH")]))
os.environ["JUPYTER_PATH"] = str(DOCS / "_jupyter")

myst_enable_extensions = ["dollarmath", "deflist", "attrs_inline", "attrs_block", "colon_fence", "tasklist"]
myst_heading_anchors = 4
myst_dmath_double_inline = True

# Docstrings are plain text with `code` in single backticks.
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
add_module_names = False
maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "clearhead"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_last_updated_fmt = None
# A page that is opened from disk may not read another one, so the search shows titles without excerpts.
html_show_search_summary = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": "clearhead"},
    "show_prev_next": True,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
