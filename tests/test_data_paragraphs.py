"""The paragraphs of each format of documentation. 1 s."""

import json

import pytest

from pe_lab.data.sources.paragraphs import is_english_prose, is_prose, paragraphs_of

SENTENCE = "The quick brown fox jumps over the lazy dog near the river bank every day."
HTML = f"""<html><head><title>No</title><style>p {{}}</style></head><body><nav>{SENTENCE}</nav>
<h1>A heading</h1><p class="a > b">{SENTENCE} <b>Bold</b> &amp; <a href='x'
title="more">more</a> words that stay<br/>{SENTENCE}</p>
<pre>code code code code code code code code code</pre></body></html>"""
MAN = r"""'\" t
.\" A comment that has enough words to be a paragraph of the page.
.TH NAME 1 "a date"
.de Sp
A definition of a macro, which is no text of the page at all.
..
.SH DESCRIPTION
\fBname\fP reads a file \- the one that is named by
.I file ,
as in
.BR open (2).
It\(aqs \(lqgood\(rq.
.PP
.nf
an example of code with quite a few of the words that are in sentences
.fi
The option
.B \-\-all
is for all of them.\c
"""
MDOC = """.Dd May 1, 2020
.Sh DESCRIPTION
The
.Nm name
utility reads
.Ar file
as described in
.Xr open 2 .
.Bd -literal
code code code code code code code code code
.Ed
.Pp
The other paragraph.
"""
INFO = f"""This is x.info, produced by makeinfo.

\x1f
File: x.info,  Node: Top,  Next: Other,  Up: (dir)

1 Title
*******

{SENTENCE}
{SENTENCE}
"""
RST = """Title
=====

.. note:: left out, as each directive is

See :ref:`the page <label>` and `this one <http://a.b/c>`_ for ``code`` and *more* of it::

    x
"""
PROGRAM = f"""/* SPDX-License-Identifier: GPL-2.0 */
/**
 * name - what it does
 *
 * {SENTENCE}
 * {SENTENCE}
 */
int name(void);  // not a comment of its own

	// A line of it,
	// and the next one.
"""
SERVICE = {
    "shapes": [{"documentation": "<p>The one.</p><p>The <i>other</i>.</p>"}],
    "description": "The last.",
    "x": "no",
}


@pytest.mark.parametrize(
    "file,text,wanted",
    [
        ("a/x.html", HTML, ["A heading", f"{SENTENCE} Bold & more words that stay", SENTENCE]),
        (
            "usr/share/man/man1/name.1",
            MAN,
            [
                'name reads a file - the one that is named by file , as in open(2). It\'s "good".',
                "The option --all is for all of them.",
            ],
        ),
        (
            "usr/share/man/man8/name.8",
            MDOC,
            ["The name utility reads file as described in open 2 .", "The other paragraph."],
        ),
        (
            "usr/share/info/x.info-1",
            INFO,
            ["This is x.info, produced by makeinfo.", "1 Title *******", f"{SENTENCE} {SENTENCE}"],
        ),
        ("a/x.rst", RST, ["See the page and this one for code and more of it:", "x"]),
        (
            "a/x.dict",
            "word\n   what {it} means\n\n   and more\nother\n   x",
            ["word what it means", "and more", "other x"],
        ),
        (
            "a/x.c",
            PROGRAM,
            [
                "SPDX-License-Identifier: GPL-2.0",
                "name - what it does",
                f"{SENTENCE} {SENTENCE}",
                "A line of it, and the next one.",
            ],
        ),
        (
            "usr/share/sword/modules/comments/zcom/x/ot",
            f"<w lemma='x'>{SENTENCE}</w><div/>And more.",
            [SENTENCE, "And more."],
        ),
        ("a/x.json", json.dumps(SERVICE), ["The one.", "The other.", "The last."]),
        ("a/x.txt", f"{SENTENCE}\n{SENTENCE}\n\na    b\nc    d\n\nend", [f"{SENTENCE} {SENTENCE}", "end"]),
    ],
)
def test_paragraphs_are_the_sentences_without_code_and_marks(file, text, wanted):
    read = paragraphs_of(file)
    assert read and [one for one in read(text) if one] == wanted


def test_a_file_of_another_format_has_no_paragraphs():
    assert paragraphs_of("usr/share/doc/x/picture.png") is None


@pytest.mark.parametrize(
    "paragraph,prose,english",
    [
        (SENTENCE, True, True),
        ("Too few words.", False, False),
        ("for (i = 0; i < 10; ++i) { a[i] = *b++ + c[i - 1]; } // the 0x1234", False, False),
        ("1. Introduction . . . . . . . . . . . . . . . . . . . . . . . . . . . of the 2", False, False),
        ("Der schnelle braune Fuchs springt jeden Tag am Ufer über den faulen Hund.", True, False),
        ("Methods inherited from class Object clone equals finalize notify toString", True, False),
        ("Definition at line a of the file that is named here and there", True, False),
    ],
)
def test_english_prose_is_sentences_with_function_words(paragraph, prose, english):
    assert (is_prose(paragraph), is_english_prose(paragraph)) == (prose, english)
