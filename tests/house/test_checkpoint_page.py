"""The page on checkpoints lists every family, its use, and the checkpoints that are refused.

`python -m tests.house.test_checkpoint_page` writes its tables again from the records.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

from clearhead.checkpoints.hf import families, registry
from clearhead.checkpoints.hf.mapping.family import Family

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
TITLES = {"decoder": "Decoders", "encoder": "Encoders", "both": "Encoder-decoders"}
# Properties that the page describes once for all families, above the tables.
EVERYWHERE = {"is_causal", "use_bidirectional_attention"}


def stacks_of(record: Family) -> str:
    """Return the stacks of a family, derived from its tasks and the addresses of its tensors."""
    places = {address.split(".")[0] for rule in record.rules for address in rule.ours}
    if {"encoder", "decoder"} <= places:
        return "both"
    return "decoder" if "decoder" in places else "encoder"


def tables() -> str:
    """Return the tables of all families, one for each kind of stack."""
    kinds: dict[str, list[Family]] = {kind: [] for kind in TITLES}
    for record in registry.all_families().values():
        kinds[stacks_of(record)].append(record)
    return "\n".join(line for kind, records in kinds.items() for line in lines_of(TITLES[kind], records))


def lines_of(title: str, records: list[Family]) -> Iterator[str]:
    yield from (
        f"## {title}",
        "",
        "| `model_type` | tasks | config keys of which clearhead refuses some values |",
        "|---|---|---|",
    )
    for record in sorted(records, key=lambda record: record.model_type):
        uses = list(dict.fromkeys(variant.task for variant in record.variants))
        names_by_reason: dict[str, list[str]] = {}
        for key in record.fixed:
            if key.name not in EVERYWHERE:
                names_by_reason.setdefault(key.reason, []).append(f"`{key.name}`")
        refused = [f"{', '.join(names)}: {reason}" for reason, names in names_by_reason.items()]
        yield f"| {record.model_type} | {', '.join(uses)} | {'. '.join(refused)} |"
    yield ""


def test_the_tables_are_those_of_the_records() -> None:
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert table.strip() == tables().strip(), "run: python -m tests.house.test_checkpoint_page"


def test_every_record_has_a_source() -> None:
    names = [info.name for info in pkgutil.iter_modules(families.__path__)]
    assert names
    for name in names:
        text = importlib.import_module(f"{families.__name__}.{name}").__doc__ or ""
        assert re.search(r"Source:|arXiv", text), f"{name} does not say where its facts are from"


if __name__ == "__main__":
    front, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{front}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
