"""Running the explorer: a port on this machine, a token if others may reach it, and a clean end."""

import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence

import uvicorn

from relpos.explorer.app import make_app
from relpos.explorer.explorer import Explorer
from relpos.explorer.guard import is_loopback
from relpos.explorer.subjects import Subject
from relpos.system.memory import limit_arenas

PORT, TRIED = 8123, 20  # the first port, and how many are tried


def open_port(host: str, port: int | None) -> socket.socket:
    """Listen on a port: the one that is asked for, or else the next that is free.

    Args:
        host: The host to listen on.
        port: The first port; PORT if None, any free one if 0.

    Raises:
        OSError: The host is not this machine's, or no port is free.
    """
    first = PORT if port is None else port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in range(first, min(first + TRIED, 2**16)) if first else [0]:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
        except OSError as error:
            listening.close()
            if number == first + TRIED - 1 or isinstance(error, socket.gaierror):
                raise OSError(f"cannot listen on {host}, ports {first} to {number}: {error.strerror}.") from None
            if error.errno not in (98, 48, 13):  # in use on Linux and macOS; not allowed
                raise OSError(f"cannot listen on {host}: {error.strerror}. Give another --host.") from None
            continue
        listening.set_inheritable(True)
        return listening
    raise OSError(f"no port from {first} on is free: give another --port.")


class Server:
    """A server of the explorer.

    Args:
        subjects: What it shows.
        host: The host to listen on; loopback by default. Another host makes a token.
        port: The first port to try.
        framed: Whether a notebook on this machine may show the page in a frame.
    """

    def __init__(
        self, subjects: Sequence[Subject], host: str = "127.0.0.1", port: int | None = None, framed: bool = False
    ) -> None:
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)
        self.socket = open_port(host, port)
        self.port = int(self.socket.getsockname()[1])
        self.moved = port if port and port != self.port else None  # the port that was asked for and was taken
        shown = "127.0.0.1" if is_loopback(host) else host if host not in ("0.0.0.0", "::") else socket.gethostname()
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/"
        self.url += f"?token={self.token}" if self.token else ""
        self.explorer = Explorer(subjects)
        self.explorer.start()  # what the first view needs is computed before the address is known
        app = make_app(self.explorer, host, self.token, framed)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
            limit_concurrency=1000,
            h11_max_incomplete_event_size=64 * 1024,
        )
        self.uvicorn = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until interrupted (Ctrl-C).

        Args:
            ready: Called once the port is open.
        """
        self.explorer.own_process = True
        limit_arenas(2)  # so that what many clients needed is given back when they leave
        if ready is not None:
            ready()
        try:
            self.uvicorn.run(sockets=[self.socket])
        except KeyboardInterrupt:
            pass
        finally:
            self.socket.close()

    def start(self) -> None:
        """Serve in a thread of its own, for a notebook."""
        self._thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the server that `start` began."""
        self.uvicorn.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout=5)
        self.socket.close()

    def open_browser(self) -> None:
        """Show the page in the browser of this machine, without waiting for it."""
        threading.Thread(target=webbrowser.open, args=(self.url,), daemon=True).start()
