"""A Ray cluster of two machines, both of them this one: each has one core and a store of its own."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

STORE = 80 * 2**20  # bytes, the least that Ray allows

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
NICENESS = "RAY_worker_niceness"  # Ray's own spelling
os.environ[NICENESS] = "0"  # else Ray's workers yield to every other process, and starve on a busy machine


class TwoMachines:
    """The head has no core, so that it runs no part and survives; the two others have one each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.machines = [self.add(), self.add()]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=STORE)

    def kill(self) -> None:
        """End one of the two at once, with all its processes, as if its power had failed."""
        self.cluster.remove_node(self.machines.pop(), allow_graceful=False)

    def repair(self) -> None:
        """Add machines until there are two again."""
        while len(self.machines) < 2:
            self.machines.append(self.add())


@contextlib.contextmanager
def two_machines() -> Iterator[TwoMachines]:
    cluster = TwoMachines()
    try:
        yield cluster
    finally:
        import ray

        ray.shutdown()
        cluster.cluster.shutdown()
