"""Environment variables that make NCCL and Gloo fail or crawl on a node."""

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

Problem = tuple[bool, str]
"""(the run would fail, a sentence with value, rule and remedy)"""

FATAL, SLOW = True, False


def nccl_problems(facts: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of a node's environment.

    Args: facts: as `node_facts.collect` returns them.
    """
    return [problem for rule in RULES for problem in rule(facts, facts["environment"])]


def interface_exists(facts: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[Problem]:
    """NCCL_SOCKET_IFNAME takes prefixes (= exact names, ^ excluded ones); Gloo's takes one exact name."""
    interfaces = facts["interfaces"]
    for key, exact in (("NCCL_SOCKET_IFNAME", False), ("GLOO_SOCKET_IFNAME", True)):
        value = env.get(key, "")
        if not value or value.startswith("^"):
            continue
        names = value.removeprefix("=").split(",")
        exact = exact or value.startswith("=")
        matched = [i for i in interfaces for name in names if i == name or (not exact and i.startswith(name))]
        if not matched:
            there = ", ".join(interfaces)
            yield FATAL, f"{key}={value}: {facts['node']} has only {there}; name one of these or unset it"
        elif all(name == "lo" for name in matched):
            yield FATAL, f"{key}={value} reaches this node only; name the cluster's interface or unset it"


def adapter_exists(facts: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[Problem]:
    """NCCL_IB_HCA names adapters by prefix, as name:port; ^ excludes."""
    value = env.get("NCCL_IB_HCA", "")
    if not value or value.startswith("^"):
        return
    patterns = [name.split(":")[0] + "*" for name in value.lstrip("=").split(",")]
    if not any(fnmatch.fnmatch(hca, pattern) for hca in facts["hcas"] for pattern in patterns):
        there = ", ".join(facts["hcas"]) or "no InfiniBand adapter"
        yield FATAL, f"NCCL_IB_HCA={value}: {facts['node']} has {there}; name one of its adapters or unset it"


def fast_paths_are_used(facts: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[Problem]:
    """InfiniBand, NVLink and shared memory are not switched off."""
    if env.get("NCCL_IB_DISABLE") == "1" and facts["hcas"]:
        yield SLOW, "NCCL_IB_DISABLE=1 on nodes with InfiniBand: traffic goes over TCP; unset it"
    for key, path in (("NCCL_P2P_DISABLE", "NVLink"), ("NCCL_SHM_DISABLE", "shared memory")):
        if env.get(key) == "1":
            yield SLOW, f"{key}=1: GPUs of a node do not use {path}; unset it"


def memory_can_be_pinned(facts: Mapping[str, Any], _env: Mapping[str, str]) -> Iterator[Problem]:
    """InfiniBand registers buffers, which `ulimit -l` bounds."""
    if facts["hcas"] and facts["memlock"] != -1:
        limit = f"{facts['node']}: ulimit -l is {facts['memlock'] // 1024} KiB"
        yield SLOW, f"{limit}; InfiniBand may fail to register buffers, ask for unlimited"


def logs_stay_readable(_facts: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[Problem]:
    """NCCL_DEBUG=TRACE writes a line for every call."""
    if env.get("NCCL_DEBUG", "").upper() == "TRACE":
        yield SLOW, "NCCL_DEBUG=TRACE writes gigabytes; INFO says which interfaces and adapters are used"


RULES = (interface_exists, adapter_exists, fast_paths_are_used, memory_can_be_pinned, logs_stay_readable)
