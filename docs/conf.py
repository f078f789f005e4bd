"""Configuration of the documentation, which `make docs` builds with Sphinx."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

project = "lightning_tfm"
author = "the authors of lightning_tfm"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "lightning_tfm"
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # a test runs the notebooks
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autosummary_generate = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
copybutton_prompt_text = "$ "
