"""The connection with a Ray cluster: what Ray itself would wait for without end is refused in a sentence."""

import importlib
import os
import re
import socket
from typing import Any

RUNNING = "auto"  # the cluster that runs on this machine, or that of the variable RAY_ADDRESS
OWN = "local"  # a cluster of this machine alone, for as long as the command runs
ADDRESS = re.compile(r"auto|local|(?P<host>[\w.-]+|\[[\da-fA-F:]+\]):(?P<port>\d+)")
CONNECT = 5.0  # seconds to wait for an answer from the cluster's address
LOCAL_STORE = 256 * 2**20  # bytes of the object store of a cluster of our own: results of parts pass through it
NICENESS = "RAY_worker_niceness"  # Ray's own spelling


def import_ray() -> Any:
    """Ray, if it is installed.

    Raises:
        ModuleNotFoundError: It is not.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anyone
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns about a change to come
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError("--ray needs ray: pip install 'relpos[ray]'", name="ray") from None


def connect(ray: Any, address: str) -> None:
    """Connect this process with a cluster, or start one.

    Args:
        ray: Ray.
        address: HOST:PORT, "auto" or "local".

    Raises:
        ValueError: There is no cluster at this address.
    """
    if address.startswith("ray://"):
        raise ValueError(
            f"relpos does not go through Ray's client ({address}): run the command on a machine of the cluster, with "
            "--ray alone."
        )
    place = address if address != RUNNING else os.environ.get("RAY_ADDRESS", RUNNING)
    match = ADDRESS.fullmatch(place)
    if match is None:
        raise ValueError(f"{place!r} is not the address of a Ray cluster: it looks like 10.0.0.1:6379.")
    if match["host"]:
        _check_answer(match["host"].strip("[]"), int(match["port"]), place)  # ray.init would wait for ever
    _silence(ray)
    if place == OWN:
        os.environ.setdefault(NICENESS, "0")  # else Ray's workers yield to every other process
    own = {"include_dashboard": False, "object_store_memory": LOCAL_STORE} if place == OWN else {}
    try:
        ray.init(address=place, logging_level="ERROR", log_to_driver=False, **own)
    except ConnectionError:
        raise ValueError(
            "no Ray cluster runs on this machine: start one with ray start --head, give the address of one "
            "(--ray 10.0.0.1:6379), or start one for this command alone (--ray local)."
        ) from None


def _check_answer(host: str, port: int, address: str) -> None:
    try:
        socket.create_connection((host, port), timeout=CONNECT).close()
    except OSError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"no Ray cluster answers at {address} ({reason}): `ray status` on one of its machines prints the address."
        ) from None


def _silence(ray: Any) -> None:
    """Keep Ray from printing the log of a machine that was lost; a line of ours says that it was.

    Ray has no option for this. If the name of its function changes, its lines appear again.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *args, **kwargs: None
