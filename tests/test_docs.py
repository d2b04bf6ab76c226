"""What the documentation promises exists."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_named_as_a_proof_exists():
    named = re.findall(r"`([\w/]+\.py)?(?:::)?(test_\w+)?`", (TESTS.parent / "docs" / "guarantees.md").read_text())
    module, seen = "", 0
    for file, function in named:
        module = file or module
        source = (TESTS / module).read_text()
        assert not function or f"def {function}(" in source, f"{module}::{function}"
        seen += 1
    assert seen > 50


def test_files_that_the_readme_links_to_exist():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (TESTS.parent / "README.md").read_text())
    assert links
    for link in links:
        assert (TESTS.parent / link).exists(), link
