"""Lists of examples are written as JSON lines, which a form of the task names."""

from __future__ import annotations

from pathlib import Path

from clearhead.data.sources.examples import ListedExamples, json_lines, json_lines_entry
from clearhead.data.sources.run_file_tables import Filled, Form


class Rated(Form):
    """A form of another package."""

    rated: Filled
    number: Filled = "number"
    loud: bool = False


def test_the_entry_has_the_keys_of_the_form_that_name_fields() -> None:
    listed = ListedExamples(({"text": "text", "number": "stars"},), raw=("number",))
    examples = listed.parse([("good", 4.5), ("bad", 1)])
    assert json_lines(examples) == '{"text": "good", "stars": 4.5}\n{"text": "bad", "stars": 1}\n'
    assert json_lines_entry(examples, Path("a.jsonl"), Rated) == {"rated": "a.jsonl", "number": "stars"}
