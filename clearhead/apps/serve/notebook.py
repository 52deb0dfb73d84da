"""The live page in the output of a notebook's cell."""

from __future__ import annotations

import html
import threading

import uvicorn

from clearhead.apps.serve.app import listen, make_app
from clearhead.apps.serve.explorer import explorer_router
from clearhead.apps.serve.gate import Access
from clearhead.apps.serve.runs import Asked, Runs
from clearhead.apps.serve.work import Workers
from clearhead.base.arguments import checked
from clearhead.interpret.maps.attention_maps import NOTEBOOK_HEIGHT
from clearhead.interpret.maps.reading import ReadKwargs
from clearhead.model.facade import Model


@checked
class LivePage:
    """The attention explorer of a model, computed on demand in this process until `close`; a notebook shows it.

    The browser must run on the same machine.

    Args:
        model: the model.
        text, target, generate: what it reads at first, as for `Model.attention`.
        port: of this machine; 0: one that is free.

    Attributes:
        address: what a browser opens.

    Raises:
        InputError: the port is in use.
    """

    def __init__(self, model: Model, text: str, target: str | None = None, *, generate: int = 0, port: int = 0) -> None:
        listener, workers = listen(port), Workers()
        access = Access.of_page(listener.getsockname()[1])
        first = Asked(text=text, target=target, generate=generate)
        app = make_app(access, workers, [explorer_router(Runs(model, "live", ReadKwargs()), workers, first)])
        self.address: str = access.address
        self._server = uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="warning", ws="none"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._workers = workers
        self._thread.start()

    def close(self) -> None:
        """End the application, and what it computes."""
        self._workers.close()
        self._server.should_exit = True
        self._thread.join()

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {NOTEBOOK_HEIGHT}px; border: 0"
        return f'<iframe title="attention explorer" style="{style}" src="{html.escape(self.address)}"></iframe>'
