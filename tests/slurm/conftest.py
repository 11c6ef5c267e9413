import os
from pathlib import Path

import cluster
import loopback
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/slurm" in item.path.as_posix():
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A cluster of three nodes, for the whole session; NEMO_GRPO_SLURM=loopback: without namespaces."""
    if reason := cluster.missing():
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    own_nodes = os.environ.get("NEMO_GRPO_SLURM") != "loopback" and cluster.namespaces_are_allowed()
    kind = cluster.Cluster if own_nodes else loopback.Loopback
    source = os.environ.get("NEMO_RL_SRC")
    shared = [base, *([Path(source).absolute()] if source else [])]
    running = kind(tmp_path_factory.mktemp("slurm"), num_nodes=3, shared=shared)
    try:
        running.up()
        yield running
    finally:
        running.down()
