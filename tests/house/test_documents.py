"""README, CONTRIBUTING and docs/ stay true: commands, links and files that they name exist."""

from __future__ import annotations

import ast
import itertools
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import typer

import clearhead as ch
from tests.house.agents import write_instructions
from tests.house.code_lines import code_lines
from tests.house.source import ROOT, package_sources, repository_files

DOCUMENTS = [path for path in repository_files() if path.suffix == ".md"]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(path: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(path.read_text("utf-8")) if kind == language]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = ["".join(groups).split("#")[0] for groups in LINK.findall(path.read_text("utf-8"))]
    local = [target for target in targets if target and "://" not in target]
    missing = [target for target in local if not (path.parent / target).exists()]
    assert not missing, f"{path.name} links to what is not there: {missing}"


def test_every_guide_stands_in_the_index_with_its_title_and_its_purpose() -> None:
    folder = ROOT / "docs" / "guides"
    entries = re.findall(r"^- \[(.+)\]\((.+\.md)\): [a-z].{20,}\.$", (folder / "index.md").read_text("utf-8"), re.M)
    titles = {path.name: path.read_text("utf-8").partition("\n")[0] for path in folder.glob("*.md")}
    reference = {"index.md", "run-directory.md"}
    assert sorted((page, f"# {title}") for title, page in entries) == sorted(
        item for item in titles.items() if item[0] not in reference
    )


def test_every_command_stands_in_one_group_of_the_reference() -> None:
    from clearhead.apps.cli.main import make_app

    page = (ROOT / "docs" / "reference" / "command-line.md").read_text("utf-8")
    names = " ".join(re.findall(r"^```\{commands\} (.+)$", page, re.M)).split()
    assert sorted(names) == sorted(typer.main.get_command(make_app()).commands)


def test_every_exercise_with_a_solution_has_a_number_and_a_title() -> None:
    for path in (ROOT / "docs" / "lessons").glob("[0-9]*.py"):
        text = path.read_text("utf-8")
        numbers = re.findall(r"^# \*\*(\d+) · [^*]+ \(\d+ minutes, (?:easy|medium|hard)\)\.\*\*", text, re.M)
        assert len(numbers) == text.count('"solution"]'), path.name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_examples_parse(path: Path) -> None:
    for text in blocks(path, "python"):
        ast.parse(text)


@pytest.mark.usefixtures("quick_trainings")
def test_the_python_of_documents_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code blocks in order and in one namespace, with a small run in place of the reader's run."""
    monkeypatch.chdir(tmp_path)
    sentences = ["Ein Hund läuft.", "Ein Hund läuft über die Wiese.", "Zwei Hunde laufen."]
    tables = {
        "task": {"kind": "translate"},
        "data": {"valid": 0.3},
        "tokenizer": {"kind": "character"},
        "model": {"layers": 2, "width": 16, "heads": 2, "feedforward": 16},
        "train": {"run": "runs/de-en", "steps": 2},
    }
    ch.train(tables, data={"train": [(sentence, sentence) for sentence in sentences * 4]})
    shutil.copytree("runs/de-en", "runs/demo")
    for document in ("README.md", "docs/guides/activations.md", "docs/guides/tour.md"):
        names: dict[str, object] = {}
        for text in blocks(ROOT / document, "python"):
            exec(compile(text, document, "exec"), names)
    assert names["result"].step == 100


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(path: Path) -> None:
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = set(re.findall(r"^make ([\w-]+)", "\n".join(blocks(path, "sh")), re.MULTILINE))
    named |= set(re.findall(r"`make ([\w-]+)", path.read_text("utf-8")))
    assert named <= rules


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(path: Path) -> None:
    from clearhead.apps.cli.main import make_app

    known = set(typer.main.get_command(make_app()).commands)
    named = set(re.findall(r"^clearhead ([a-z]+)", "\n".join(blocks(path, "sh")), re.MULTILINE))
    named |= set(re.findall(r"`clearhead ([a-z]+)\\b", path.read_text("utf-8")))
    assert named <= known, f"{path.name} names commands that do not exist"


def installs_from_an_index(text: str) -> list[str]:
    """Return the commands that would look for clearhead in a package index, which does not have it."""
    commands = re.findall(r"pip3? install [^\n`]*", text)
    return [command for command in commands if re.search(r"(?<!/)\bclearhead\b", command) and "dist/" not in command]


def test_no_text_installs_clearhead_from_an_index() -> None:
    texts = [path for path in repository_files() if path.suffix in {".md", ".toml"} and path.parts[-2] != "clearhead"]
    assert [path.name for path in texts if installs_from_an_index(path.read_text("utf-8"))] == []
    assert installs_from_an_index("sudo pip install 'clearhead[serve]'") and installs_from_an_index(
        "pip install clearhead"
    )


def test_every_line_of_the_guide_that_installs_is_proved() -> None:
    from tests.prove_install import blocks

    proved = [line for lines in blocks() for line in lines]
    guide = (ROOT / "docs" / "guides" / "install.md").read_text("utf-8")
    assert len(blocks()) == 4 and sum(" pip install " in line for line in proved) == 12
    assert [line for line in guide.splitlines() if " pip install " in line and line not in proved] == []


def test_the_architecture_page_draws_every_door_with_its_size() -> None:
    drawing = (ROOT / "docs" / "architecture.md").read_text("utf-8").partition("```text")[2].partition("```")[0]
    sizes = {name: int(number.replace(",", "")) for name, number in re.findall(r"^ *(\w+) .* ([\d,]+)$", drawing, re.M)}
    counts: Counter[str] = Counter()
    for source in package_sources():
        counts[source.package] += code_lines(source.text)
    doors = set(counts) - {"__init__", "__main__", "version"}
    assert doors == set(sizes)
    assert {
        door: counts[door] for door in doors if abs(sizes[door] - counts[door]) > max(100, counts[door] // 10)
    } == {}


def test_the_architecture_is_one_page() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text("utf-8").split()) <= 1200


def test_a_decision_is_short() -> None:
    sections = (ROOT / "docs" / "decisions.md").read_text("utf-8").split("\n## ")[1:]
    words = {text.partition("\n")[0]: len(re.sub(r"^\|.*$", "", text, flags=re.M).split()) for text in sections}
    assert len(words) > 30
    assert {heading: number for heading, number in words.items() if number > 120} == {}


def test_the_architecture_page_shows_the_one_equation() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert "x <- out( x + sum_b scale_b * dropout( post_b( f_b( pre_b( pre(x) ) ) ) ) )" in text


def test_the_readme_says_what_was_measured() -> None:
    """Check that every measured number is in the results, and that each proof names its peer and ratio."""
    readme, results = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/results.md"))
    proofs, instead = (rows_below(readme, head) for head in ("| work | clearhead |", "| instead of |"))
    numbers = re.findall(r"\d{1,3}(?:,\d{3})+|\d+\.\d+", "\n".join([*proofs, *instead]))
    assert len(proofs) == 4 and 1 <= len(instead) <= 6 and len(numbers) >= 12
    # Ratios are rounded quotients of two numbers that stand in the results.
    assert not [number for number in numbers if number not in results and number not in {row[-6:-2] for row in proofs}]
    for row in proofs:
        _, _, ours, peer, ratio, _ = map(str.strip, row.split("|"))
        theirs = float(peer.rpartition(": ")[2].replace(",", ""))
        assert abs(float(ours.replace(",", "")) / theirs - float(ratio)) <= 0.06
    assert len(readme.splitlines()) <= 45


def rows_below(text: str, head: str) -> list[str]:
    """Return the rows of the table whose first line begins with `head`."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head)) + 2
    return list(itertools.takewhile(lambda line: line.startswith("|"), lines[start:]))


def test_the_instructions_for_agents_are_those_of_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert (ROOT / "AGENTS.md").read_text("utf-8") == write_instructions(text), "run python -m tests.house.agents"
    assert write_instructions(text.replace("bit for bit", "roughly")) != write_instructions(text)
