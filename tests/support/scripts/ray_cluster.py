"""A Ray cluster on this machine, whose nodes are raylets: ``ray_cluster.py PORT CORES…``.

The head is first. It serves clients, whose addresses begin with ray://, at PORT; 0: it does not.

It prints its address, and the id and raylet's process of each node. For each line on its standard
input, which is a number of cores, it adds a node. It ends with its standard input.
"""

from __future__ import annotations

import sys

import ray
from ray.cluster_utils import Cluster

PORT, *CORES = map(int, sys.argv[1:])
QUICKLY_DEAD = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}


def add(cores: int, **options: object) -> None:
    node = cluster.add_node(
        num_cpus=cores,
        node_ip_address=ray.util.get_node_ip_address(),
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        **options,
    )
    print(node.node_id, node.all_processes["raylet"][0].process.pid, flush=True)


cluster = Cluster()
try:
    add(CORES[0], _system_config=QUICKLY_DEAD, ray_client_server_port=PORT or None)
    for cores in CORES[1:]:
        add(cores)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        add(int(line))
finally:
    cluster.shutdown()
