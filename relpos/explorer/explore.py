"""`relpos.explore`: the explorer from Python, and in a notebook."""

import html
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from relpos.encodings.registry import canonical, names
from relpos.explorer.explore_options import ExploreOptions
from relpos.explorer.scenes import ExplorerSubject
from relpos.maps import NO_ATTENTIONS
from relpos.maps.model_subject import ModelSubject, open_model
from relpos.maps.subject import EncodingSubject, TensorSubject, is_tensor
from relpos.system.errors import check_not_empty
from relpos.system.files import write_bytes
from relpos.system.options import takes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from relpos.explorer.server import Server
    from relpos.runs.run import Run

    What = str | Path | Run | Tensor | NDArray[Any]

HEIGHT = 760  # pixels of the frame in a notebook


class Exploration:
    """Something to explore. A notebook displays it; `save` writes it to a file, `serve` opens it in the browser."""

    def __init__(self, subjects: Sequence[ExplorerSubject]) -> None:
        self.subjects = list(subjects)
        self._server: Server | None = None
        self._page: str | None = None

    @property
    def url(self) -> str | None:
        """The address of the running server, if there is one."""
        return None if self._server is None else self._server.url

    def save(self, path: str | Path, progress: Callable[[float], None] = lambda done: None) -> Path:
        """Write one self-contained .html file, which needs no server and no network.

        Args:
            path: The file; its folder is created.
            progress: Called with the completed fraction.

        Raises:
            ValueError: The name does not end in .html, or there is nothing to show.
        """
        file = Path(path)
        if file.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"cannot export to {file.name!r}: the name must end in .html.")
        from relpos.explorer.exports import export_page

        page = export_page(self.subjects, progress=progress)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, page.encode())
        return file

    def serve(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        browser: bool = True,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ) -> None:
        """Serve until interrupted (Ctrl-C).

        Args:
            host: The address to listen on. Any other than this machine's own makes a token, which is part of the URL.
            port: The port; the next free one if it is taken.
            browser: Whether to open the page in a browser.
            say: Receives the address.
        """
        from relpos.explorer.server import Server

        check_not_empty("host", host)
        server = Server(self.subjects, host, port)
        if server.moved is not None:
            say(f"Port {server.moved} is taken; using {server.port}.")

        def ready() -> None:
            say(f"The explorer is at {server.url} (Ctrl-C stops it).")
            if browser:
                server.open_browser()

        server.run(ready)

    def start(self, port: int | None = None) -> str:
        """Serve in the background, for a notebook, until `stop`.

        Returns:
            The address.
        """
        from relpos.explorer.server import Server

        if self._server is None:
            self._server = Server(self.subjects, port=port, framed=True)
            self._server.start()
        return self._server.url

    def stop(self) -> None:
        """End the server that `start` began."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _repr_html_(self) -> str:
        size = f'style="width: 100%; height: {HEIGHT}px; border: 0" title="The explorer"'
        if self._server is not None:
            return f'<iframe src="{html.escape(self._server.url)}" {size}></iframe>'
        if self._page is None:
            from relpos.explorer.exports import IN_A_NOTEBOOK, export_page

            self._page = export_page(self.subjects, room=IN_A_NOTEBOOK)
        return f'<iframe srcdoc="{html.escape(self._page)}" sandbox="allow-scripts allow-downloads" {size}></iframe>'


@takes(ExploreOptions)
def explore(options: ExploreOptions) -> Exploration:
    """Look into every layer and head of encodings, models and tensors, in the browser or in a notebook.

    Returns:
        The exploration: a notebook displays it.

    Raises:
        ValueError: A name is unknown, or a model cannot be opened.
        TypeError: A module is not a model of transformers or relpos.
        FileNotFoundError: There is no such model.

    Example:
        >>> relpos.explore("kerple_log").save("kerple.html")
        PosixPath('kerple.html')
        >>> relpos.explore(["runs/cable", "runs/kerple"]).serve()
        >>> relpos.explore(model, tokenizer=tokenizer)  # in a notebook: the page, inline
        >>> relpos.explore(model(ids).attentions, show="weights", tokens=words).serve()
    """
    what = options.what
    if is_tensor(what):
        if options.length is not None or options.text is not None:
            raise ValueError("a tensor has its own tokens: leave length and text out.")
        subject = TensorSubject(what, options.show, options.tokens)
        exploration = Exploration([ExplorerSubject("0", subject)])
    elif options.show is not None or options.tokens is not None:
        hint = "" if what else f" {NO_ATTENTIONS}"
        raise ValueError(f"show and tokens are for a tensor: leave them out.{hint}")
    else:
        several: list[Any] = [what] if isinstance(what, str | Path) or not isinstance(what, Sequence) else list(what)
        models = [isinstance(item, nn.Module) for item in several]
        if options.tokenizer is not None and not any(models):
            raise ValueError("tokenizer is for a model that is open already: leave it out.")
        if any(models):
            from relpos.runs.run import run_of_model

            several = [
                run_of_model(item, options.tokenizer) if module else item
                for item, module in zip(several, models, strict=True)
            ]
        exploration = Exploration(open_subjects(several, options.length, options.text, options.bos))
    if options.server:
        exploration.start()
    return exploration


def open_subjects(
    what: "Sequence[What]", length: int | None = None, text: str | None = None, bos: bool = True
) -> list[ExplorerSubject]:
    """The subjects of the explorer: names of encodings, and models as `relpos.open` takes them, or open ones."""
    return [
        ExplorerSubject(str(place), EncodingSubject(canonical(item)), length)
        if isinstance(item, str) and canonical(item) in names()
        else ExplorerSubject(str(place), ModelSubject(open_model(item, bos)), length, text)  # type: ignore[arg-type]
        for place, item in enumerate(what)
    ]
