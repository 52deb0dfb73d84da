"""A live page in headless Chromium: its edits equal those of `model.edit`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from clearhead.apps.serve.explorer import explorer_router, listen, make_app
from clearhead.apps.serve.gate import Access
from clearhead.apps.serve.page_computations import PageRequest, Runs
from clearhead.apps.serve.work import Workers
from tests.apps.serve.cases import model_of, text_of
from tests.interpret.view.explorer.browser import browser, layout_faults

ANSWERED = "() => document.documentElement.dataset.asking === '0'"
DRAWN = "() => document.documentElement.dataset.drawn === document.documentElement.dataset.update"


@pytest.fixture(scope="module")
def running(chromium: str) -> Iterator[Any]:
    with browser(chromium) as chromium_browser:
        yield chromium_browser


@contextmanager
def serve(name: str) -> Iterator[tuple[str, Runs]]:
    """Yield the address of a live page, and the runs of its model."""
    model, listener, workers = model_of(name), listen(0), Workers()
    access, runs = Access.of_page(listener.getsockname()[1]), Runs(model, name, {})
    app = make_app(access, workers, [explorer_router(runs, workers, PageRequest(text=text_of(model)))])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield access.address, runs
    finally:
        server.should_exit = True
        thread.join()


class LiveTab:
    def __init__(self, running: Any, address: str) -> None:
        self.tab, self.errors = running.new_page(viewport={"width": 1440, "height": 900}), list[str]()
        self.tab.set_default_timeout(240_000)  # many programs may share the machine
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.goto(address)
        self.wait_for_answer()

    def wait_for_answer(self) -> Any:
        self.tab.wait_for_function(ANSWERED)
        self.tab.wait_for_function(DRAWN)
        assert not self.errors, self.errors
        return self.tab

    def switch_off(self, stack: str, *, layer: int, head: int) -> None:
        form = self.tab.locator(".bench-form").get_by_label("Stack", exact=True)
        if form.count():
            assert form.input_value() == "decoder.memory", "the form begins with the stack that the page shows"
            form.select_option(stack)
        self.tab.get_by_label("Layer", exact=True).last.select_option(str(layer))
        self.tab.get_by_label("Head", exact=True).last.select_option(str(head))
        self.tab.get_by_role("button", name="Apply").click()
        self.tab.wait_for_function("() => document.querySelectorAll('.change').length > 0")
        self.wait_for_answer()


@pytest.mark.parametrize("name", ["bert", "gpt2", "marian"])
def test_a_head_is_switched_off(running: Any, name: str) -> None:
    with serve(name) as (address, runs):
        first, second = LiveTab(running, address), LiveTab(running, address)
        before = first.tab.locator(".candidates").inner_text()
        first.switch_off(runs.model.attention(text_of(runs.model)).stacks[0], layer=0, head=1)
        assert first.tab.locator(".pane").count() == 2 and first.tab.locator(".fault:visible").count() == 0
        check_weights(first, runs)
        first.tab.get_by_text("The same in Python").click()
        assert "model.edit" in first.tab.locator(".python").inner_text()
        first.tab.get_by_role("button", name="Undo").click()
        first.tab.wait_for_function("() => document.querySelectorAll('.change').length === 0")
        assert first.wait_for_answer().locator(".candidates").inner_text() == before
        assert second.wait_for_answer().locator(".pane").count() == 1, "pages do not see each other's changes"


def check_weights(tab: LiveTab, runs: Runs) -> None:
    """Check that the last layer's weights in the edited pane are those under `model.edit`."""
    maps, model = runs.model.attention(text_of(runs.model)), runs.model
    stack, layer = next(iter(maps.records))[0], 1
    address = maps.record(stack, 0).address

    def without(mixed: Any) -> Any:
        mixed = mixed.clone()
        mixed[:, 1] = 0
        return mixed

    with model.edit({f"{address}.mixed": without}):
        changed = maps.with_module(model.module)
    moved = (changed.weights(stack, layer, 0) - maps.weights(stack, layer, 0)).abs()
    query, key = divmod(int(moved.argmax()), moved.shape[1])
    link = f"view=matrix&sample=0&other=1&stack={stack}&layer={layer}&head=0&query={query}&key={key}"
    tab.tab.evaluate(f"location.hash = '{link}'")
    tab.tab.wait_for_function("() => document.querySelectorAll('.cell').length === 2")
    tab.wait_for_answer()
    shown = [
        float(value) for value in tab.tab.locator(".cell").evaluate_all("all => all.map(one => one.dataset.value)")
    ]
    expected = [float(run.weights(stack, layer, 0)[query, key]) for run in (maps, changed)]
    assert shown == pytest.approx(expected, abs=1e-6) and abs(expected[0] - expected[1]) > 1e-5


@pytest.mark.parametrize("name", ["gpt2", "marian"])
def test_the_page_fits_every_window_and_offers_one_thing_to_try(running: Any, name: str, screenshots: Path) -> None:
    with serve(name) as (address, _):
        live = LiveTab(running, address)
        assert live.tab.locator(".bench .do").all_inner_texts() == ["Read"], "one primary button"
        if name == "gpt2":
            live.tab.locator(".trial button").click()
            live.tab.wait_for_selector(".change")
            live.wait_for_answer()
            assert "The largest change, after “" in live.tab.locator(".trial").inner_text()
        assert not layout_faults(live.tab, f"live-{name}", screenshots)
        live.tab.close()


def test_two_outputs_are_compared(running: Any) -> None:
    """The page compares two tokens, and then undoes the comparison."""
    with serve("gpt2") as (address, runs):
        live = LiveTab(running, address)
        live.tab.get_by_label("The first output").fill("q")
        live.tab.get_by_label("The second output").fill("z")
        live.tab.get_by_role("button", name="Compare").click()
        live.tab.wait_for_selector(".difference")
        shown = live.wait_for_answer().locator(".difference").inner_text()
        maps = runs.model.attention(text_of(runs.model))
        outcome = maps.outcome(("q", "z"))
        logits = maps.module(maps.inputs.source, None).logits[0, outcome.logits_position]
        value = float(outcome.log_probability(logits.detach()))
        assert "'q' rather than 'z'" in shown
        assert float(shown.rpartition(" ")[2].replace("\u2212", "-")) == pytest.approx(value, abs=5e-3)
        live.tab.get_by_role("button", name="Stop comparing").click()
        live.tab.wait_for_selector(".difference", state="detached")
        assert live.wait_for_answer().locator(".fault:visible").count() == 0
