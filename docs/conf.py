"""The site: these pages in Furo, links and anchors checked, formulas as MathML so that a page needs no network."""

from importlib import metadata
from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.application import Sphinx

project = "EAGLE-3 drafts"
copyright = "the authors; Apache-2.0"
release = metadata.version("eagle3")
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False


def _write_formula(display: str) -> Any:
    def write(translator: Any, node: Any) -> None:
        markup = convert(node.astext(), display=display)
        translator.body.append(f'<div class="formula">{markup}</div>' if display == "block" else markup)
        raise SkipNode

    return write


def setup(app: Sphinx) -> None:
    """Formulas as MathML."""
    app.add_html_math_renderer("mathml", (_write_formula("inline"), None), (_write_formula("block"), None))
    app.config.html_math_renderer = "mathml"
