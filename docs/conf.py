"""Configuration of the documentation, which `make docs` builds with Sphinx."""

import re
import sys
from pathlib import Path

from docutils import nodes
from pygments.formatters import HtmlFormatter
from sphinx.highlighting import PygmentsBridge

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent / "_ext")]

project = "lightning_tfm"
author = "the authors of lightning_tfm"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "generated",  # docs/_ext/generated.py
    "live",  # docs/_ext/live.py
]
html_theme = "furo"
html_title = "lightning_tfm"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_show_copyright = False
html_show_sphinx = False
exclude_patterns = ["_build"]
default_role = "py:obj"  # a name between single backticks is code, and a link if it is documented
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # a test runs the notebooks
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of Lightning and torch need their own roles
autodoc_default_options = {"members": True, "show-inheritance": True}
autosummary_generate = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
copybutton_prompt_text = "$ "


class CodeFormatter(HtmlFormatter):
    """Formatter that marks words with hyphens, such as options, as Sphinx does in inline code: they do not break."""

    def _format_lines(self, tokensource):
        for is_code, line in super()._format_lines(tokensource):
            yield is_code, re.sub(r"(<[^>]*>)|\w*(?:-+\w+)+", self._mark, line)

    @staticmethod
    def _mark(found):
        return found[1] or f'<span class="pre">{found[0]}</span>'


def skip_fields(app, what, name, member, skip, options):
    """Skip the fields of NamedTuples, which the docstrings of the classes describe."""
    return True if type(member).__name__ == "_tuplegetter" else None


def link_pictures(app, doctree):
    """Link pictures to their full size, as Sphinx does with those that have a scale: a phone shows them small."""
    for picture in doctree.findall(nodes.image):
        picture.setdefault("scale", 100)


def setup(app):
    """Connect the events, and replace the formatter of code blocks."""
    PygmentsBridge.html_formatter = CodeFormatter
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("doctree-read", link_pictures)
