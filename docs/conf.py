"""Builds the pages: ``make docs``. Markdown by MyST, the furo theme; nothing is fetched."""

from importlib.metadata import version as version_of

project = "qlora-sweep"
author = "the authors of qlora-sweep"
version = release = version_of("qlora-sweep")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
myst_heading_anchors = 3
myst_links_external_new_tab = True
add_module_names = False
exclude_patterns = ["skill"]  # for agents
html_theme = "furo"
html_title = f"qlora-sweep {version}"
html_copy_source = False
html_show_sphinx = html_show_copyright = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
