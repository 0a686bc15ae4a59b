"""How Sphinx reads what `make.py` staged: nothing is executed, nothing is fetched, a warning is an error."""

import importlib.metadata
import shutil
from pathlib import Path

from docutils import nodes

project, language = "minitrain", "en"
copyright = "minitrain, Apache 2.0"
extensions = ["myst_nb", "sphinx.ext.mathjax"]
exclude_patterns = ["static"]
suppress_warnings = [
    "myst.header",  # a chapter may skip a level
    "misc.highlighting_failure",  # a cell with a magic, a listing in pieces
    "ref.python",  # a type that two modules define
    "mystnb.unknown_mime_type",
]

nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"
nb_code_prompt_show = "Show the answer"
nb_code_prompt_hide = "Hide the answer"
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
myst_url_schemes = {"http": None, "https": None, "mailto": None, "site": None}
add_module_names = False
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"
html_title = "minitrain"
html_static_path = ["static"]
html_css_files = ["book.css"]
html_js_files = ["filter.js"]
html_copy_source = html_show_sourcelink = False
html_last_updated_fmt = None
mathjax_path = "tex-svg.js"
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "navigation_with_keys": True,
    "footer_content_items": ["copyright"],
    "navbar_persistent": [],  # the search box stands in the sidebar
    "pygments_light_style": "a11y-light",
    "pygments_dark_style": "a11y-dark",
}


def resolve(app, tree, docname):
    """Links with scheme `site:` lead to pages that Sphinx does not write: listings, explorers."""
    for node in tree.findall(nodes.reference):
        if node.get("refuri", "").startswith("site:"):
            node["refuri"] = "../" * docname.count("/") + node["refuri"].removeprefix("site:")
            node["internal"] = True


def mathjax(app):
    (script,) = (
        file for file in importlib.metadata.files("sphinx-mathjax-offline") if file.name == "tex-svg.js"
    )
    shutil.copy2(script.locate(), Path(app.srcdir, "static"))


def setup(app):
    app.connect("builder-inited", mathjax)
    app.connect("doctree-resolved", resolve)
