"""A model that leaves: its card, and what the real client of the hub uploads and loads again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import markdown_it
import pytest
from huggingface_hub import ModelCard

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.checkpoints.weights.files import save_tensors
from clearhead.model.saving import find_training_facts
from tests.checkpoints.hf.files.fake_hub import COMMITS, TOKEN, Hub, job, serving

SAMPLE = Path(__file__).parents[1] / "formats" / "samples" / "run"


@pytest.fixture(scope="module")
def model() -> ch.Model:
    return ch.load(SAMPLE, device="cpu", precision="fp32")


def test_a_pushed_model_is_loaded_by_its_name_and_the_token_is_never_shown(tmp_path: Path) -> None:
    with serving(Hub({}, {"someone/refused": (403, ""), "someone/broken": (500, "")})) as (hub, endpoint):
        done = job(endpoint, tmp_path, "tests.checkpoints.hf.files.upload_job", str(SAMPLE))
        assert done.returncode == 0, done.stderr
    assert f"Bearer {TOKEN}" in hub.tokens
    assert TOKEN not in done.stdout + done.stderr
    assert f"/someone/own/commit/{COMMITS['main']}" in done.stdout
    for sentence in (
        "someone/refused -> someone/refused: the Hugging Face hub refuses it: set HF_TOKEN",
        "someone/broken -> someone/broken: the Hugging Face hub answers with the error 500",
        "own -> 'own' is no repository of the Hugging Face hub; expected OWNER/NAME",
        "someone/own@main -> 'someone/own@main' is no repository",
        "someone/new -> someone/new: the Hugging Face hub needs a token that may write: set HF_TOKEN",
    ):
        assert sentence in done.stdout
    ours, theirs = (hub.files[name, COMMITS["main"]] for name in ("someone/own", "someone/theirs"))
    card = ModelCard(theirs["README.md"].decode())
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "translation"
    assert 'MarianMTModel.from_pretrained("someone/theirs")' in card.text and 'ch.load("someone/theirs")' in card.text
    assert "validation BLEU" in card.text and "`clearhead train run.toml`" in card.text
    assert theirs["architecture.svg"].startswith(b"<svg") and "config.json" not in ours
    int8 = hub.files["someone/int8", COMMITS["main"]]
    assert b"before they were rounded to fewer bits" in int8["README.md"] and b"clearhead" in int8["format.json"]
    listed = json.loads(ours["manifest.json"])["files"]
    assert "weights.safetensors" in listed and "README.md" not in listed, "people edit cards on the hub"
    copy = hub.files["someone/copy", COMMITS["main"]]
    assert copy["README.md"] == ours["README.md"].replace(b"someone/own", b"someone/copy").replace(b"# own", b"# copy")


def test_a_card_keeps_paths_and_tricks_of_names_to_itself(model: ch.Model, tmp_path: Path) -> None:
    run = tmp_path / "secret-home" / "run"
    for path in SAMPLE.rglob("*"):
        if path.is_file():
            copy = run / path.relative_to(SAMPLE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    text = (run / "run.toml").read_text("utf-8").replace('"train.de"', f'"{tmp_path}/secret-home/train.de"')
    (run / "run.toml").write_text(text.replace('init = ""', 'init = "```evil"'), encoding="utf-8")
    ch.load(run, device="cpu").save(tmp_path / "a [b](c)")
    card = (tmp_path / "a [b](c)" / "README.md").read_text("utf-8")
    assert "secret-home" not in card and 'source = "train.de"' in card
    assert "[b](c)" not in card and "````toml" in card


def test_a_model_made_in_memory_has_a_card_that_says_so(model: ch.Model, tmp_path: Path) -> None:
    model.with_module(model.module).save(tmp_path / "bare")
    card = ModelCard.load(tmp_path / "bare" / "README.md")
    assert card.text.count("without a run that knows it") == 3 and not (tmp_path / "bare" / "card.json").exists()
    ch.load(tmp_path / "bare", device="cpu")
    (tmp_path / "bare" / "README.md").write_text("mine")
    ch.load(tmp_path / "bare", device="cpu")
    save_tensors(tmp_path / "weights.safetensors", {})
    assert find_training_facts(tmp_path / "weights.safetensors") is None


def test_nothing_is_written_where_the_hub_is_switched_off(model: ch.Model) -> None:
    with pytest.raises(InputError, match=r"^a/b: the Hugging Face hub is switched off by HF_HUB_OFFLINE: unset that$"):
        model.push_to_hub("a/b")


TRICKS = """<script>alert(1)</script> <img src=x onerror=y> ![](http://evil.example/x.png) [a](javascript:b) | cell |
# title
http://evil.example www.evil.example ` ``` {{ title }} <!-- &lt; **b** ~~~
"""


def test_what_a_stranger_wrote_into_a_card_is_shown_as_it_is(model: ch.Model, tmp_path: Path) -> None:
    """Every text of card.json is text in README.md: no HTML, no link, no cell, no heading, no end of a code block."""
    model.save(tmp_path / "saved")
    known = json.loads((tmp_path / "saved" / "card.json").read_text())
    known["step"] = TRICKS
    known["measured"] = [{"name": TRICKS, "value": 3.0, "command": TRICKS}]
    known["recipe"] += f"\n# {TRICKS.splitlines()[0]}\n# ```\n# ````\n"
    (tmp_path / "saved" / "card.json").write_text(json.dumps(known))
    (tmp_path / "saved" / "manifest.json").unlink()
    ch.load(tmp_path / "saved", device="cpu").save(tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    page = markdown_it.MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(card.split("---", 2)[2])
    plain = (tmp_path / "saved" / "README.md").read_text()
    usual = markdown_it.MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(plain.split("---", 2)[2])
    for tag in ("<script", "<img", "<a ", "<h1", "<h2", "<strong", "<!--", "<td", "<table"):
        assert page.count(tag) <= usual.count(tag), tag
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "{{ title }}" in page
    assert not re.search(r"(?<!\\)(http:|www\.)", card.split("## Metrics")[1].split("`")[0])


@pytest.mark.parametrize("recipe", ["", "x = [", "task = 3\ndata = 4", "[task]\nkind = 'x'", "data = []\n[task]"])
def test_a_recipe_that_is_no_run_file_is_left_out(model: ch.Model, tmp_path: Path, recipe: str) -> None:
    model.save(tmp_path / "saved")
    known = json.loads((tmp_path / "saved" / "card.json").read_text())
    (tmp_path / "saved" / "card.json").write_text(json.dumps({**known, "recipe": recipe}))
    (tmp_path / "saved" / "manifest.json").unlink()
    ch.load(tmp_path / "saved", device="cpu").save(tmp_path / "again")
    assert "saved without a run that knows it" in (tmp_path / "again" / "README.md").read_text()
