"""A real Slurm of several nodes on this machine, for tests: needs root, Debian's Slurm packages, no systemd.

Every node is a network, process, mount and host name space: own address, own /tmp, own processes; the rest of
the disk is shared. GPUs are device nodes that do nothing.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv")
PACKAGES = "slurmctld slurmd slurm-client munge iproute2"
NETWORK = "10.77.0"
GPUS = 8
RESOURCES = f"CPUs=8 RealMemory=8000 Gres=gpu:{GPUS} State=UNKNOWN"
CONFIG = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation={state}/controller
SlurmdSpoolDir={state}/spool.%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd.%n.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=5
OverTimeLimit=0
MinJobAge=3600
JobRequeue=1
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing():
    """Why no Slurm can be started here; None: it can."""
    if os.geteuid() != 0:
        return "needs root, as Slurm's daemons do"
    absent = [program for program in PROGRAMS if shutil.which(program, path=search_path()) is None]
    return f"{', '.join(absent)} not found: apt-get install {PACKAGES}" if absent else None


def namespaces_are_allowed():
    """Whether this machine lets nodes have networks, mounts and processes of their own."""
    tried = ["unshare", "--net", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(tried, capture_output=True).returncode == 0


def search_path():
    """PATH with the folders of daemons."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def wait_for(condition, seconds, what):
    """Poll until the condition is true; fails with ``what`` after too many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


class Cluster:
    """Slurm with ``num_nodes`` nodes n1, n2... in namespaces; ``shared``: folders in /tmp for all of them."""

    has_namespaces = True

    def __init__(self, state, num_nodes, shared):
        self.state = state
        self.nodes = [f"n{i + 1}" for i in range(num_nodes)]
        prefixes = [Path(sys.prefix), Path(sys.base_prefix), *map(Path, sys.path)]
        outermost = []
        for path in sorted({state, ROOT, *shared, *(p for p in prefixes if p.is_dir())}):
            if path.is_dir() and not any(path.is_relative_to(other) for other in outermost):
                outermost.append(path)
        self.shared = outermost
        self.environment = {**os.environ, "SLURM_CONF": str(state / "slurm.conf"), "PATH": search_path()}
        self._spaces = {}
        self._munged = None

    def up(self):
        """Start everything and wait until all nodes are idle."""
        self._write_config()
        self._start_munge()
        self._spawn("ctl", f"{NETWORK}.1")
        for node in self.nodes:
            self.boot(node)
        wait_for(lambda: self.idle() == len(self.nodes), 30, "all nodes idle")

    def down(self):
        """End every process of the cluster."""
        for space in self._spaces.values():
            space.kill()
            space.wait()
        if self._munged is not None:
            self._munged.terminate()
            self._munged.wait()

    def _write_config(self):
        for folder in ("controller", "dev", *(f"spool.{node}" for node in self.nodes)):
            (self.state / folder).mkdir()
        for number in range(GPUS):
            os.mknod(self.state / f"dev/gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        (self.state / "gres.conf").write_text(f"Name=gpu File={self.state}/dev/gpu[0-{GPUS - 1}]\n")
        (self.state / "slurm.conf").write_text(CONFIG.format(state=self.state, **self._places()).lstrip())
        hosts = {"localhost": "127.0.0.1", "ctl": f"{NETWORK}.1", **{n: self.address(n) for n in self.nodes}}
        (self.state / "hosts").write_text("".join(f"{ip} {name}\n" for name, ip in hosts.items()))

    def _places(self):
        """The controller and the nodes in `CONFIG`."""
        nodes = f"NodeName=n[1-{len(self.nodes)}] {RESOURCES}"
        return {"controller": f"ctl({NETWORK}.1)", "nodes": nodes}

    def _start_munge(self):
        if subprocess.run(["munge", "-n"], capture_output=True).returncode == 0:
            return
        folder = Path("/run/munge")
        folder.mkdir(exist_ok=True)
        shutil.chown(folder, "munge", "munge")
        as_munge = ("--reuid=munge", "--regid=munge", "--clear-groups")  # runuser would die in its place
        self._munged = self._start("munged.log", *as_munge, "munged", "--foreground")
        wait_for(
            lambda: subprocess.run(["munge", "-n"], capture_output=True).returncode == 0, 20, "munged answers"
        )

    def _start(self, log, *command):
        with (self.state / log).open("ab") as file:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # nothing outlives the tests
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def _spawn(self, name, address):
        up = self.state / f"up.{name}"
        up.unlink(missing_ok=True)
        program = [str(Path(__file__).with_name("node.sh")), name, address, str(self.state)]
        namespaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._spaces[name] = self._start(
            f"console.{name}", "unshare", *namespaces, "bash", *program, *map(str, self.shared)
        )
        if name != "ctl":
            self._plug_in(name)
        wait_for(up.exists, 20, f"{name} is up; see console.{name}")

    def _plug_in(self, name):
        wait_for(lambda: self._children(self._spaces[name].pid), 10, f"process 1 of {name}")
        inside = ["nsenter", "-t", str(self.pid("ctl")), "-n", "ip", "link"]
        subprocess.run([*inside, "del", f"v{name}"], capture_output=True, env=self.environment)
        for action in (
            ["add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", str(self.pid(name))],
            ["set", f"v{name}", "master", "br0", "up"],
        ):
            subprocess.run([*inside, *action], check=True, env=self.environment)

    def address(self, node):
        return f"{NETWORK}.{10 + int(node[1:])}"

    def pid(self, name):
        """Process 1 of a node, as this machine numbers it."""
        return self._children(self._spaces[name].pid)[0]

    def boot(self, node):
        self._spawn(node, self.address(node))

    def power_off(self, node):
        """The node vanishes with all its processes."""
        os.kill(self.pid(node), signal.SIGKILL)
        self._spaces[node].wait()

    def kill(self, node, program):
        """Kill a program on a node, and nothing like it elsewhere."""
        self.run("pkill", "-9", "-x", program, node=node)

    def idle(self):
        shown = self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).stdout
        return len(set(shown.split()))  # a node has a line for each partition

    def run(self, *command, node="ctl", cwd=None, check=True, **environment):
        """Run a command on a node."""
        done = subprocess.run(
            [*self._enter(node), "env", "-C", str(cwd or self.state), *command],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done

    def _enter(self, node):
        return ["nsenter", "-t", str(self.pid(node)), "-m", "-u", "-n", "-p", "--"]

    @staticmethod
    def _children(pid):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
