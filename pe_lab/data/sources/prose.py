"""The corpus `prose`: 146 MB of English from documentation packages of Debian 12, downloaded at its first use.

| package | licence | is |
|---|---|---|
| doc-rfc-... | RFCs may be copied freely, kept intact; therefore not in Debian's main section | 4,200 RFCs |
| anarchism | GFDL 1.1 or later | a book-length FAQ of political philosophy |
| debian-handbook | CC-BY-SA 3.0 or GPL 2 or later | a book on administration |
| debian-reference-en | GPL 2 or later | a reference for users |
| gimp-help-en | GFDL 1.2 or later | the manual of an image editor |

Their copyright files are in the packages.
"""

from __future__ import annotations

from pe_lab.data.sources.debian import Corpus, Package

PACKAGES = (
    Package(
        "non-free/d/doc-rfc/doc-rfc-informational_20230121-1_all.deb",
        "143e78778eda9f187548b74028e98acf64ed42e2ea075af0774ca3bbcb0c6d01",
        "*.txt.gz",
    ),
    Package(
        "non-free/d/doc-rfc/doc-rfc-others_20230121-1_all.deb",
        "2b36a22145dd3fcb380079706d1a39afa7714499018d0a607a32325ead292500",
        "*.txt.gz",
    ),
    Package(
        "non-free/d/doc-rfc/doc-rfc-experimental_20230121-1_all.deb",
        "bff38cd2d63f0f85ed7eaf954845f34bbaba56dfe3111c9e3e07624296889817",
        "*.txt.gz",
    ),
    Package(
        "non-free/d/doc-rfc/doc-rfc-fyi-bcp_20230121-1_all.deb",
        "d1db7332103b14ac2ce4e9e09188e38b3ade332bcc791990c7eb8064333a2b9e",
        "*.txt.gz",
    ),
    Package(
        "main/a/anarchism/anarchism_15.3-3_all.deb",
        "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948",
        "*/html/*.html",
    ),
    Package(
        "main/d/debian-handbook/debian-handbook_11.20220922_all.deb",
        "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa",
        "*/html/en-US/*.html",
    ),
    Package(
        "main/d/debian-reference/debian-reference-en_2.100_all.deb",
        "9f31d3a17df505de09689ca255512ea58c1fc47c59bb1b0c7bf1c23362e9743f",
        "*/debian-reference/*.html",
    ),
    Package(
        "main/g/gimp-help/gimp-help-en_2.10.34-2_all.deb",
        "a2deec76763aaf2fcdd197bac0736cdcb0770ba993d48d233329e1c92b0bfe36",
        "*/help/en/*.html",
    ),
)
PROSE = Corpus("prose", PACKAGES)
