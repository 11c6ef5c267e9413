"""Every place where this package puts something of its own into NeMo-RL.

NeMo-RL's source is not changed: the driver and the workers rebind its names while they run. `HOOKS` is the
whole list; `install` and `placed` are the only code that rebinds, and `doctor` compares the list with a
NeMo-RL tree.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from nemo_grpo.errors import UserError
from nemo_grpo.nemorl.versions import (
    BOTH,
    DATA_PLANE,
    ENTROPIES,
    EVERY_RUN,
    HEAD,
    SINGLE_CONTROLLER,
    STAGES,
    tested,
)

GRPO, GRPO_SYNC = "nemo_rl.algorithms.grpo", "nemo_rl.algorithms.grpo_sync"
CONTROLLER = "nemo_rl.algorithms.single_controller_utils.setup"
CHECKPOINTS = "nemo_rl.utils.checkpoint:CheckpointManager"
GENERATION = "nemo_rl.models.generation.vllm.vllm_generation:VllmGeneration"
POLICY = "nemo_rl.models.policy.lm_policy:Policy"
TQ_POLICY = "nemo_rl.models.policy.tq_policy:TQPolicy"
MEGATRON_TRAIN = "nemo_rl.models.megatron.train"
MEGATRON_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"
ENVIRONMENT = "nemo_rl.environments.interfaces:EnvironmentInterface"
LOSSES = "nemo_rl.algorithms.loss"

_OURS = "nemo_grpo.nemorl"
_POLICY, _WORKER = (
    f"{_OURS}.policy:policy_factory.ExchangingPolicy",
    f"{_OURS}.worker:EntropyPolicyWorkerImpl",
)


class Hook(NamedTuple):
    """One name of NeMo-RL behind which something of ours runs.

    Attributes:
        target: ``module:function`` or ``module:Class.method``, NeMo-RL's.
        ours: what runs there, in the same form; NeMo-RL's calls must fit its signature.
        how: ``replaced``: NeMo-RL's own code does not run. ``wrapped``: ours calls it and passes on every
            argument. ``overridden``: a method of a subclass, which does the same.
        why: what it is for.
        versions: the tested versions that have it.
        also: further modules that import the target by name; each is rebound.
        called: how NeMo-RL's source calls it, if that is not the target's own name: ``policy.train`` is the
            method of anything whose name ends in ``policy``.
        guard: only calls under an ``if`` that names this class count.
        within: modules whose calls count, by prefix.
        returns: NeMo-RL unpacks the result, so its length counts.
        part: what needs it.
    """

    target: str
    ours: str
    how: Literal["replaced", "wrapped", "overridden"]
    why: str
    versions: tuple[str, ...] = BOTH
    also: tuple[str, ...] = ()
    called: str = ""
    guard: str = ""
    within: str = "nemo_rl"
    returns: bool = False
    part: str = EVERY_RUN

    @property
    def is_required(self) -> bool:
        """True if every tested version has it."""
        return self.versions == BOTH


HOOKS: dict[str, Hook] = {
    # The driver: what a step computes.
    "estimator": Hook(f"{GRPO}:_create_advantage_estimator",
        f"{_OURS}.run_grpo:install.create_advantage_estimator", "replaced",
        "the variant's advantages and everything else that spans sequences", also=(GRPO_SYNC, CONTROLLER)),
    "advantages": Hook("nemo_rl.algorithms.advantage_estimator:GRPOAdvantageEstimator.compute_advantage",
        f"{_OURS}.advantage:VariantEstimator.compute_advantage", "replaced", "the estimator's only method"),
    "sampling": Hook(f"{GRPO}:dynamic_sampling", f"{_OURS}.sampling:dynamic_sampling_for.dynamic_sampling",
        "replaced", "keeps whole groups with signal, and GPG's threshold", returns=True),
    "loss": Hook(f"{LOSSES}.loss_functions:ClippedPGLossFn.__call__", f"{_OURS}.loss:ObjectiveLoss.__call__",
        "replaced", "the variant's token loss", called="loss_fn", within=f"{LOSSES}.wrapper", returns=True),
    "environment step": Hook(f"{ENVIRONMENT}.step", f"{_OURS}.environments:TaskEnvironmentImpl.step",
        "replaced", "rewards and turns of the recipe's task", called="step.remote",
        within="nemo_rl.experience"),
    "environment metrics": Hook(f"{ENVIRONMENT}.global_post_process_and_metrics",
        f"{_OURS}.environments:TaskEnvironmentImpl.global_post_process_and_metrics", "replaced",
        "the task's means in NeMo-RL's evaluation", returns=True),
    # The policy, on the driver.
    "policy": Hook(f"{POLICY}.__init__", f"{_OURS}.policy:policy_factory.make", "wrapped",
        "makes the subclass with the following methods, and our workers", called="_make_policy", within=GRPO),
    "policy logprobs": Hook(f"{POLICY}.get_logprobs", f"{_POLICY}.get_logprobs", "overridden",
        "takes the entropies out of what the workers return", called="policy.get_logprobs"),
    "policy train": Hook(f"{POLICY}.train", f"{_POLICY}.train", "overridden",
        "adds the loss's tensors; no update for a step without gradient", called="policy.train"),
    "data plane write": Hook(f"{TQ_POLICY}.write_to_dataplane", f"{_POLICY}.write_to_dataplane", "overridden",
        "sees the step's advantages", called="policy.write_to_dataplane", within=GRPO_SYNC, part=DATA_PLANE),
    "data plane train": Hook(f"{TQ_POLICY}.train_from_meta", f"{_POLICY}.train_from_meta", "overridden",
        "no update for a step without gradient; the estimator's metrics", called="policy.train_from_meta",
        within=GRPO_SYNC, part=DATA_PLANE),
    "controller policy": Hook(f"{CONTROLLER}:TQPolicy", f"{_OURS}.policy:policy_factory.make", "replaced",
        "makes the subclass with the following methods, and our workers", versions=(HEAD,),
        part=SINGLE_CONTROLLER),
    "controller data": Hook(f"{CONTROLLER}:setup_response_data", f"{_OURS}.single_controller:set_up.given",
        "replaced", "a task's problems and environments; prompts' files where NeMo-RL's recipes name them",
        versions=(HEAD,), part=SINGLE_CONTROLLER),
    "controller rollout": Hook("nemo_rl.experience.rollout_manager:RolloutManager.run_rollout",
        f"{_OURS}.single_controller:cut_prompts_left_out.keeping.run_rollout", "wrapped",
        "keeps a prompt's loss_multiplier", versions=(HEAD,), called="self.run_rollout",
        within="nemo_rl.experience.rollout_manager", part=SINGLE_CONTROLLER),
    "controller rows": Hook("nemo_rl.experience.payload:record_to_train_batch",
        f"{_OURS}.single_controller:cut_prompts_left_out.masking.record_to_train_batch", "wrapped",
        "responses to a prompt that was cut do not train, as with NeMo-RL's other trainers", versions=(HEAD,),
        also=("nemo_rl.algorithms.async_utils.replay_buffer",), part=SINGLE_CONTROLLER),
    "controller chunk": Hook(f"{TQ_POLICY}.train_microbatches_from_meta",
        f"{_OURS}.single_controller:streaming.StreamingPolicy.train_microbatches_from_meta", "overridden",
        "keeps a step's responses for train_data_stepN.jsonl", versions=(HEAD,), part=SINGLE_CONTROLLER),
    "controller step": Hook(f"{TQ_POLICY}.finish_train_step",
        f"{_OURS}.single_controller:streaming.StreamingPolicy.finish_train_step", "overridden",
        "no update for a step without gradient; the estimator's metrics", versions=(HEAD,),
        part=SINGLE_CONTROLLER),
    # The run: logs, checkpoints, its end.
    "metrics": Hook("nemo_rl.utils.logger:Logger.log_metrics",
        f"{_OURS}.observers:LoggerObserver.log_metrics", "wrapped",
        "metrics.jsonl, the check of gen_kl_error, the last finished step", called="logger.log_metrics"),
    "checkpoint begun": Hook(f"{CHECKPOINTS}.init_tmp_checkpoint",
        f"{_OURS}.checkpoints:save_side_files.adding.init_tmp_checkpoint", "wrapped",
        "tokenizer, configuration and the variant's statistics go into every checkpoint"),
    "resume": Hook(f"{CHECKPOINTS}.get_resume_paths",
        f"{_OURS}.resume:resume_with_optimizer.find.get_resume_paths", "wrapped",
        "finds the optimizer in checkpoints of newer megatron-core", returns=True),
    "stop": Hook("nemo_rl.utils.timer:TimeoutChecker.check_save",
        f"{_OURS}.stopping:stop_after_step.asked.check_save", "wrapped",
        "a signal ends the training after its step, with a checkpoint"),
    "threshold": Hook(f"{GRPO}:_validation_early_stop_message",
        f"{_OURS}.stopping:stop_after_step.noticed.message", "wrapped",
        "tells a run that reached its goal from one that failed", versions=(HEAD,), also=(GRPO_SYNC,)),
    # The Megatron workers.
    "temperature": Hook(f"{MEGATRON_TRAIN}:apply_temperature_scaling", f"{_OURS}.worker:scale_logits_only",
        "wrapped", "an earlier pipeline stage returns hidden states, which must not be scaled", part=STAGES),
    "worker": Hook(f"{MEGATRON_WORKER}:MegatronPolicyWorkerImpl.__init__",
        f"{_OURS}.worker:PolicyWorkerImpl.__init__", "overridden",
        "installs the above in the worker's process", called="MegatronPolicyWorkerImpl.__init__",
        part=STAGES),
    "worker logprobs": Hook(f"{MEGATRON_WORKER}:MegatronPolicyWorkerImpl.get_logprobs",
        f"{_WORKER}.get_logprobs", "overridden", "returns entropies beside logprobs",
        called="self.get_logprobs", within=MEGATRON_WORKER, part=ENTROPIES),
    "worker reference": Hook(f"{MEGATRON_WORKER}:MegatronPolicyWorkerImpl.get_reference_policy_logprobs",
        f"{_WORKER}.get_reference_policy_logprobs", "overridden", "the reference's entropies are not needed",
        called="self.get_reference_policy_logprobs", within=MEGATRON_WORKER, part=ENTROPIES),
    "post-processor": Hook(f"{MEGATRON_WORKER}:LogprobsPostProcessor",
        f"{_OURS}.worker:collected_entropies.Keeping", "replaced", "scores with `EntropyPostProcessor`",
        within=MEGATRON_WORKER, part=ENTROPIES),
    "post-processor call": Hook(f"{MEGATRON_TRAIN}:LogprobsPostProcessor.__call__",
        f"{_OURS}.worker:EntropyPostProcessor.__call__", "overridden",
        "the entropies of each token's distribution", called="post_processing_fn",
        guard="LogprobsPostProcessor", within=MEGATRON_TRAIN, part=ENTROPIES),
}  # fmt: skip


def places(hook: Hook) -> list[tuple[Any, str]]:
    """(owner, attribute) wherever this NeMo-RL binds the hook's name.

    Raises: UserError: nowhere, and every tested version has it.
    """
    module, _, path = hook.target.partition(":")
    *outer, name = path.split(".")
    found = []
    for place in (module, *hook.also):
        try:
            owner = importlib.import_module(place)
            for part in outer:
                owner = getattr(owner, part)
            getattr(owner, name)
        except (ImportError, AttributeError):
            continue
        found.append((owner, name))
    if not found and hook.is_required:
        raise UserError(f"NeMo-RL has no {hook.target}; use a tested version: {tested()}")
    return found


Make = Callable[[Any], Any]
"""NeMo-RL's object -> what stands in its place."""


def install(key: str, make: Make, owner: Any = None) -> Callable[[], None]:
    """Put ``make(theirs)`` in a hook's place, wherever NeMo-RL binds it.

    Args:    key: of `HOOKS`.  owner: one object, whose method alone is replaced.
    Returns: a function that puts everything back.
    Raises:  UserError: NeMo-RL has no such name.
    """
    hook = HOOKS[key]
    where = places(hook) if owner is None else [(owner, hook.target.rpartition(".")[2])]
    before = [(holder, name, vars(holder).get(name, getattr(holder, name))) for holder, name in where]
    for holder, name in where:
        setattr(holder, name, make(getattr(holder, name)))

    def undo() -> None:
        for holder, name, theirs in before:
            setattr(holder, name, theirs)

    return undo


@contextmanager
def placed(key: str, make: Make, owner: Any = None) -> Iterator[None]:
    """`install` for the length of a block."""
    undo = install(key, make, owner)
    try:
        yield
    finally:
        undo()
