"""Sphinx's settings for the site, which build.py builds."""

import importlib.metadata
import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "pe_lab"
copyright = "the pe_lab authors"
version = release = importlib.metadata.version("pe-lab")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = "pe_lab"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False

myst_heading_anchors = 4
# A file of the repository that is no page: source0:PATH from a page at the top, source1:PATH from a directory.
myst_url_schemes = {
    "http": None,
    "https": None,
    "mailto": None,
    "source0": {"url": "source/{{path}}.html#{{fragment}}"},
    "source1": {"url": "../source/{{path}}.html#{{fragment}}"},
}
suppress_warnings = ["myst.header", "misc.highlighting_failure"]  # a log that starts at ##; an output that is no shell

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # a field that is a property too is described once
nitpicky = True
# Annotations name types of JAX, NumPy and jaxtyping, and types that have no entry of their own.
nitpick_ignore_regex = [
    ("py:.*", r"(?!pe_lab\.).*"),
    ("py:.*", r"pe_lab\.training\.stability\.History"),
    ("py:.*", r"pe_lab\.analysis\.losses\.Edit\w+"),
    ("py:.*", r"pe_lab\.(results\.findings\.Findings|checkpoints\.checkpoint\.Checkpoint)"),
    ("py:.*", r"pe_lab\.data\.tokenizers\.companions\.AddedToken"),
]

linkcheck_timeout = 20
linkcheck_ignore = [r"source\d:.*", r"(\.\./)*source/.*"]


class _Annotation:
    """An annotation as the source has it."""

    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


def _signature(app, what, name, obj, options, signature, returns):
    """Annotations as they are written, such as Float[Array, "B T"], instead of the objects they evaluate to."""
    if what == "exception":
        return None
    target = obj.__new__ if inspect.isclass(obj) and issubclass(obj, tuple) else obj
    target = obj.__init__ if inspect.isclass(obj) and target is obj else target
    try:
        found = inspect.signature(target)
    except (TypeError, ValueError):
        return None

    def written(annotation):
        return _Annotation(annotation) if isinstance(annotation, str) else annotation

    parameters = [one.replace(annotation=written(one.annotation)) for one in found.parameters.values()]
    if inspect.isclass(obj):
        parameters = parameters[1:]
    hidden = [one.replace(default=_Annotation("...")) if len(repr(one.default)) > 60 else one for one in parameters]
    text = str(found.replace(parameters=hidden, return_annotation=inspect.Signature.empty))
    returned = found.return_annotation
    shown = returned if isinstance(returned, str) and not inspect.isclass(obj) else None
    return text, shown


_CODE = re.compile(r"(`[^`]+`)")


def _docstring(app, what, name, obj, options, lines):
    """Docstrings are plain English with `code`: what reStructuredText would take for markup of its own is escaped."""
    joined = "\n".join(lines)
    parts = _CODE.split(joined)
    for i, part in enumerate(parts):
        if i % 2:
            inner = part.strip("`").replace("\n", " ")
            follows = parts[i + 1][:1] if i + 1 < len(parts) else ""
            parts[i] = f"``{inner}``" + ("\\ " if follows.isalnum() else "")
        else:
            part = re.sub(r"(?m)(?<!^)(?<!\n)([*|])(?![*\w]*:)", r"\\\1", part)
            part = re.sub(r"(?m): (\w)\.$", r": \\\1.", part)  # "N." alone would begin a list
            parts[i] = re.sub(r"(\w)_(?!\w)", r"\1\\_", part)
    lines[:] = "".join(parts).split("\n")


def _skip(app, what, name, obj, skip, options):
    """Fields of a named tuple have no docstring of their own: "Alias for field number 0"."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app):
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _docstring, priority=100)
