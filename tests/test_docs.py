"""The documents say what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_a_document_names_exists(document):
    text = document.read_text()
    for name in re.findall(r"`([\w/]+\.(?:py|yaml|md|txt))`", text):
        assert (ROOT / name).exists() or (ROOT / "serve_app" / name).exists(), f"{document.name} names {name}"
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / link).exists(), f"{document.name} links to {link}"


def test_a_requests_life_is_told_in_ten_lines():
    numbered = re.findall(r"^(\d+)\. ", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert numbered == [str(i) for i in range(1, 11)]
