"""The documents say what is there."""

import re
from pathlib import Path

import pytest

from serve_app.serve_file import check_file
from tests.families import FAMILIES, REFUSED

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


def test_the_families_that_are_tested_are_named():
    text = (ROOT / "docs" / "models.md").read_text()
    for config in [*FAMILIES.values(), *REFUSED.values()]:
        assert f"`{config().model_type}`" in text


def test_every_example_of_a_config_passes_the_check(tmp_path):
    examples = [
        block
        for document in DOCUMENTS
        for block in re.findall(r"```yaml\n(.*?)```", document.read_text(), re.DOTALL)
        if block.startswith("applications:")
    ]
    assert examples
    for example in examples:
        (tmp_path / "config.yaml").write_text(example)
        check_file(tmp_path / "config.yaml")
