"""Slurm on a machine that allows no namespaces: its nodes are daemons beside each other on one address."""

import socket

from cluster import RESOURCES, Cluster, wait_for


class Loopback(Cluster):
    """Good for what needs no nodes of its own: dependencies, time limits, requeues, the embedded engine."""

    has_namespaces = False

    def down(self):
        self.run("scancel", "--user=root", check=False)
        wait_for(lambda: not self.run("squeue", "-h", check=False).stdout.strip(), 30, "no job is left")
        super().down()

    def _places(self):
        host = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1"
        lines = [f"NodeName={n} {host} Port={17000 + i} {RESOURCES}" for i, n in enumerate(self.nodes)]
        return {"controller": f"{socket.gethostname()}(127.0.0.1)", "nodes": "\n".join(lines)}

    def _spawn(self, name, address):
        daemon = ["slurmctld", "-D", "-c"] if name == "ctl" else ["slurmd", "-D", "-N", name]
        self._spaces[name] = self._start(f"console.{name}", *daemon)

    def _enter(self, node):
        return []
