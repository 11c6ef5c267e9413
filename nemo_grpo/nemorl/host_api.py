"""Every name of NeMo-RL that this package calls, reads or replaces, with who needs it and why.

NeMo-RL's source is not changed: `compat.rebind` rebinds names while a run lasts, and nothing else does.
`doctor` compares `HOST_API` with a NeMo-RL tree, `compat.check` with the installed one.
"""

from typing import Any, Literal, NamedTuple

from nemo_grpo.recipe.schema import HEAD as HEAD
from nemo_grpo.recipe.schema import V0_7_0 as V0_7_0

TESTED = {V0_7_0: "the release 0.7.0", HEAD: "the commit 7ea279abf"}
"""The package's version number is no guide: HEAD calls itself 0.6.0."""
BOTH = (V0_7_0, HEAD)

EVERY_RUN = "every run"
ENTROPIES = "variants with entropies"
STAGES = "pipeline stages at a temperature other than 1"
SUPERVISED = "supervised training"
IMAGES = "tasks with images"
OWN_DATA = "recipes with NeMo-RL's own data"
NEMO_GYM = "recipes with NeMo-Gym's environments"
DATA_PLANE = "recipes with data_plane.enabled"
SINGLE_CONTROLLER = "recipes with async_rl"
REHEARSAL = "rehearsals"
"""Part of the package that needs a name."""
ELSEWHERE = (DATA_PLANE, SINGLE_CONTROLLER, ENTROPIES, STAGES, REHEARSAL)
"""Parts whose names the driver does not import; some need megatron-core or vLLM."""


def tested() -> str:
    """Name the tested versions, for a message."""
    return " or ".join(TESTED.values())


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
SFT = "nemo_rl.algorithms.sft"
CONTROLLER_ACTOR = "nemo_rl.algorithms.single_controller:SingleControllerActor"
CONTROLLER_CONFIG = "nemo_rl.algorithms.single_controller_utils.config"
_ACTORS = "nemo_rl.distributed.ray_actor_environment_registry"
ACTOR_PYTHONS, ACTOR_PYTHON = f"{_ACTORS}:ACTOR_ENVIRONMENT_REGISTRY", f"{_ACTORS}:get_actor_python_env"
"""The interpreter of each actor, and the function that completes it."""
GYM_SETTINGS = "nemo_rl.environments.nemo_gym:setup_nemo_gym_config"
VIDEO_SETTINGS = "nemo_rl.models.generation.vllm.config:materialize_vllm_video_config"

BASE, VISION_BASE = "grpo_math_1B_megatron.yaml", "vlm_grpo_3B_megatron.yaml"
"""NeMo-RL's base configurations in ``examples/configs``, for text and for images."""

_OURS = "nemo_grpo.nemorl"
_POLICY, _WORKER = f"{_OURS}.policy:policy_factory.VariantPolicy", f"{_OURS}.worker:EntropyPolicyWorkerImpl"


class Name(NamedTuple):
    """One name of NeMo-RL.

    Attributes:
        key: its key in the records and for `compat.rebind`.
        name: ``module:function`` or ``module:Class.method``.
        how: ``used``: we call or read it. ``repeated``: ours repeats its code, which is compared, too.
            ``replaced``, ``wrapped``: ours is bound in its place; a wrapper calls NeMo-RL's with every
            argument. ``implemented``: NeMo-RL takes our object. ``overridden``: a method of a subclass.
        ours: our code in its place, in the same form, whose signature must take NeMo-RL's calls; of a used
            name our subclass, which must define every abstract method.
        why: purpose of the replacement.
        versions: the tested versions that have it.
        part: who needs it.
        returns: the result is unpacked by position.
        call: our arguments, as ``(_, _, processor=_)``; a class is called by its fields.
        reads: names that we expect on it: attributes, members of an enumeration, keys of a table.
        also: further modules that import the name; each is rebound.
        called: how NeMo-RL's source calls it, unless by its own name: ``policy.train`` is the method of
            anything whose name ends in ``policy``.
        guard: only calls under an ``if`` that names this class count.
        within: modules whose calls count, by prefix.
    """

    key: str
    name: str
    ours: str = ""
    how: Literal["used", "repeated", "replaced", "wrapped", "implemented", "overridden"] = "used"
    why: str = ""
    versions: tuple[str, ...] = BOTH
    part: str = EVERY_RUN
    returns: bool = False
    call: str = ""
    reads: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    called: str = ""
    guard: str = ""
    within: str = "nemo_rl"

    @property
    def is_required(self) -> bool:
        """True if every tested version has it."""
        return self.versions == BOTH

    @property
    def is_used(self) -> bool:
        """True if nothing of ours stands in its place."""
        return self.how in ("used", "repeated")


def _used(name: str, call: str = "", reads: tuple[str, ...] = (), **further: Any) -> Name:
    return Name(name, name, call=call, reads=reads, **further)


def _repeated(name: str, part: str = EVERY_RUN) -> Name:
    return Name(f"{name} (code)", name, how="repeated", part=part)


LOSS_KEYS = (
    *("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "reference_policy_kl_penalty"),
    *("reference_policy_kl_type", "use_importance_sampling_correction", "sequence_level_importance_ratios"),
    *("truncated_importance_sampling_type", "truncated_importance_sampling_ratio"),
    *("truncated_importance_sampling_ratio_min", "force_on_policy_ratio"),
)
"""Keys of ``loss_fn`` that mean to NeMo-RL what they mean to every variant with a ratio."""

_TRAINER = ", ".join("_" * 12)
_CONTROLLER: Any = {"versions": (HEAD,), "part": SINGLE_CONTROLLER}

_REHEARSED = (
    "nemo_rl.utils.nvml:get_device_uuid",
    "nemo_rl.utils.nvml:get_free_memory_bytes",
    "nemo_rl.models.policy.utils:get_handle_from_tensor",
    "nemo_rl.models.policy.utils:rebuild_cuda_tensor_from_ipc",
    "nemo_rl.models.generation.vllm.patches:_apply_vllm_patches",
    "nemo_rl.models.generation.vllm.quantization.fp8:is_fp8_model",
    "nemo_rl.models.generation.vllm.vllm_backend:VllmInternalWorkerExtension",
)
_NAMES: tuple[Name, ...] = (
    # The driver: what a step computes.
    Name("estimator", f"{GRPO}:_create_advantage_estimator",
        f"{_OURS}.run_grpo:install.create_advantage_estimator", "replaced",
        "the variant's advantages and everything else that spans sequences", also=(GRPO_SYNC, CONTROLLER)),
    Name("advantages", "nemo_rl.algorithms.advantage_estimator:GRPOAdvantageEstimator.compute_advantage",
        f"{_OURS}.advantage:VariantEstimator.compute_advantage", "implemented",
        "the estimator's only method"),
    Name("sampling", f"{GRPO}:dynamic_sampling", f"{_OURS}.sampling:dynamic_sampling_for.dynamic_sampling",
        "replaced", "keeps whole groups with signal, and GPG's threshold", returns=True),
    Name("loss", f"{LOSSES}.loss_functions:ClippedPGLossFn.__call__", f"{_OURS}.loss:ObjectiveLoss.__call__",
        "implemented", "the variant's token loss", called="loss_fn", within=f"{LOSSES}.wrapper",
        returns=True),
    Name("environment step", f"{ENVIRONMENT}.step", f"{_OURS}.environments:TaskEnvironmentImpl.step",
        "implemented", "rewards and turns of the recipe's task", called="step.remote",
        within="nemo_rl.experience"),
    Name("environment metrics", f"{ENVIRONMENT}.global_post_process_and_metrics",
        f"{_OURS}.environments:TaskEnvironmentImpl.global_post_process_and_metrics", "implemented",
        "the task's means in NeMo-RL's evaluation", returns=True),
    # The policy, on the driver.
    Name("policy", f"{POLICY}.__init__", f"{_OURS}.policy:policy_factory.make", "overridden",
        "makes the subclass with the following methods, and our workers", called="_make_policy", within=GRPO),
    Name("policy logprobs", f"{POLICY}.get_logprobs", f"{_POLICY}.get_logprobs", "overridden",
        "takes the entropies out of what the workers return", called="policy.get_logprobs"),
    Name("policy train", f"{POLICY}.train", f"{_POLICY}.train", "overridden",
        "adds the loss's tensors; no update for a step without gradient", called="policy.train"),
    Name("data plane write", f"{TQ_POLICY}.write_to_dataplane", f"{_POLICY}.write_to_dataplane", "overridden",
        "sees the step's advantages", called="policy.write_to_dataplane", within=GRPO_SYNC, part=DATA_PLANE),
    Name("data plane train", f"{TQ_POLICY}.train_from_meta", f"{_POLICY}.train_from_meta", "overridden",
        "no update for a step without gradient; the estimator's metrics", called="policy.train_from_meta",
        within=GRPO_SYNC, part=DATA_PLANE),
    Name("controller policy", f"{CONTROLLER}:TQPolicy", f"{_OURS}.policy:policy_factory.make", "replaced",
        "makes the subclass with the following methods, and our workers", **_CONTROLLER),
    Name("controller data", f"{CONTROLLER}:setup_response_data", f"{_OURS}.single_controller:set_up.given",
        "replaced", "a task's problems and environments; prompts' files where NeMo-RL's recipes name them",
        **_CONTROLLER),
    Name("controller rollout", "nemo_rl.experience.rollout_manager:RolloutManager.run_rollout",
        f"{_OURS}.single_controller:cut_prompts_left_out.keeping.run_rollout", "wrapped",
        "keeps a prompt's loss_multiplier", called="self.run_rollout",
        within="nemo_rl.experience.rollout_manager", **_CONTROLLER),
    Name("controller rows", "nemo_rl.experience.payload:record_to_train_batch",
        f"{_OURS}.single_controller:cut_prompts_left_out.masking.record_to_train_batch", "wrapped",
        "responses to a prompt that was cut do not train, as with NeMo-RL's other trainers",
        also=("nemo_rl.algorithms.async_utils.replay_buffer",), **_CONTROLLER),
    Name("controller chunk", f"{TQ_POLICY}.train_microbatches_from_meta",
        f"{_OURS}.single_controller:streaming.StreamingPolicy.train_microbatches_from_meta", "overridden",
        "keeps a step's responses for train_data_stepN.jsonl", **_CONTROLLER),
    Name("controller step", f"{TQ_POLICY}.finish_train_step",
        f"{_OURS}.single_controller:streaming.StreamingPolicy.finish_train_step", "overridden",
        "no update for a step without gradient; the estimator's metrics", **_CONTROLLER),
    # The run: logs, checkpoints, its end.
    Name("metrics", "nemo_rl.utils.logger:Logger.log_metrics",
        f"{_OURS}.callbacks:calling_back.log.log_metrics", "wrapped",
        "metrics.jsonl, the check of gen_kl_error, the last finished step", called="logger.log_metrics"),
    Name("checkpoint begun", f"{CHECKPOINTS}.init_tmp_checkpoint",
        f"{_OURS}.callbacks:calling_back.begin.init_tmp_checkpoint", "wrapped",
        "tokenizer, configuration and the variant's statistics go into every checkpoint"),
    Name("resume", f"{CHECKPOINTS}.get_resume_paths",
        f"{_OURS}.checkpoints:resume_with_optimizer.find.get_resume_paths", "wrapped",
        "finds the optimizer in checkpoints of newer megatron-core", returns=True),
    Name("stop", "nemo_rl.utils.timer:TimeoutChecker.check_save",
        f"{_OURS}.exit_status:stop_after_step.asked.check_save", "wrapped",
        "a signal ends the training after its step, with a checkpoint"),
    # The Megatron workers.
    Name("temperature", f"{MEGATRON_TRAIN}:apply_temperature_scaling", f"{_OURS}.worker:scale_logits_only",
        "wrapped", "an earlier pipeline stage returns hidden states, which must not be scaled", part=STAGES),
    Name("worker", f"{MEGATRON_WORKER}:MegatronPolicyWorkerImpl.__init__",
        f"{_OURS}.worker:PolicyWorkerImpl.__init__", "overridden",
        "installs the above in the worker's process", called="MegatronPolicyWorkerImpl.__init__",
        part=STAGES),
    Name("worker logprobs", f"{MEGATRON_WORKER}:MegatronPolicyWorkerImpl.get_logprobs",
        f"{_WORKER}.get_logprobs", "overridden", "returns entropies beside logprobs",
        called="self.get_logprobs", within=MEGATRON_WORKER, part=ENTROPIES),
    Name("worker reference", f"{MEGATRON_WORKER}:MegatronPolicyWorkerImpl.get_reference_policy_logprobs",
        f"{_WORKER}.get_reference_policy_logprobs", "overridden", "the reference's entropies are not needed",
        called="self.get_reference_policy_logprobs", within=MEGATRON_WORKER, part=ENTROPIES),
    Name("post-processor", f"{MEGATRON_WORKER}:LogprobsPostProcessor",
        f"{_OURS}.worker:collected_entropies.Keeping", "replaced", "scores with `EntropyPostProcessor`",
        within=MEGATRON_WORKER, part=ENTROPIES),
    Name("post-processor call", f"{MEGATRON_TRAIN}:LogprobsPostProcessor.__call__",
        f"{_OURS}.worker:EntropyPostProcessor.__call__", "overridden",
        "the entropies of each token's distribution", called="post_processing_fn",
        guard="LogprobsPostProcessor", within=MEGATRON_TRAIN, part=ENTROPIES),
    # Called and read.
    _used(f"{GRPO}:MasterConfig", reads=("policy", "data", "env", "grpo", "logger", "checkpointing")),
    _used(f"{GRPO}:GRPOConfig"),
    _used(f"{GRPO}:setup", "(_, _, _, _, processor=_, policy_factory=_)", returns=True),
    _used(f"{GRPO}:grpo_train", f"({_TRAINER})"),
    _used(f"{GRPO}:async_grpo_train",
        f"({_TRAINER}, max_trajectory_age_steps=_, teacher_worker_groups=_, alias_to_group_alias=_)"),
    _used(f"{GRPO_SYNC}:grpo_train_sync", f"({_TRAINER})", part=DATA_PLANE),
    _used(TQ_POLICY, "(dp_cfg=_, **_)", part=DATA_PLANE),
    _used(f"{TQ_POLICY}.abort_train_step", "()", **_CONTROLLER),
    _used(f"{TQ_POLICY}.read_from_dataplane", "(_, select_fields=_)", **_CONTROLLER),
    _used(f"{CONTROLLER}:setup_single_controller", "(_, _)", returns=True, **_CONTROLLER),
    _used(f"{CONTROLLER}:SingleControllerActorArgs",
        reads=("gen_handle", "trainer_handle", "env_handles", "train_cluster", "inference_cluster",
            "dataloader", "advantage_estimator", "loss_fn", "save_state"), **_CONTROLLER),
    _used(CONTROLLER_ACTOR, "(_, _, _)", ("run", "_logger", "_checkpointer", "_rollout_manager"),
        **_CONTROLLER),
    _used(f"{CONTROLLER_CONFIG}:validate_single_controller_config", "(_)", **_CONTROLLER),
    _used(f"{CONTROLLER_CONFIG}:MasterConfig", reads=("async_rl",), **_CONTROLLER),
    _used(f"{CONTROLLER_CONFIG}:WatchdogConfig", reads=("interval_s", "stall_timeout_s"), **_CONTROLLER),
    _used(f"{GRPO}:shutdown_environments", "(_, _)", versions=(HEAD,)),
    _repeated(f"{GRPO}:_create_advantage_estimator"),
    _repeated(f"{GRPO}:dynamic_sampling"),
    _used(f"{LOSSES}.interfaces:LossInputType", reads=("LOGPROB",)),
    _used(f"{LOSSES}.interfaces:LossType", reads=("TOKEN_LEVEL", "SEQUENCE_LEVEL")),
    _used(f"{LOSSES}.interfaces:MetricNormalizer", reads=("TOKENS", "SEQUENCES", "NONE"), versions=(HEAD,)),
    _used(f"{LOSSES}.interfaces:LossFunction", reads=("loss_type", "input_type")),
    _repeated(f"{LOSSES}.utils:prepare_loss_input"),
    _used(f"{LOSSES}.loss_functions:ClippedPGLossConfig", reads=LOSS_KEYS),
    _used(f"{SFT}:MasterConfig", reads=("policy", "data", "sft", "logger", "checkpointing"), part=SUPERVISED),
    _used(f"{SFT}:setup", "(_, _, _, _)", returns=True, part=SUPERVISED),
    _used(f"{SFT}:sft_train", "(_, _, _, _, _, _, _, _, _)", part=SUPERVISED),
    _used(f"{SFT}:SFTConfig",
        "(max_num_steps=_, max_num_epochs=_, val_period=_, val_batches=_, val_global_batch_size=_, "
        "val_micro_batch_size=_, val_at_start=_, val_at_end=_, seed=_, only_unmask_final=_)",
        part=SUPERVISED),
    _used("nemo_rl.algorithms.utils:get_tokenizer", "(_, get_processor=_)"),
    _used("nemo_rl.data.interfaces:TaskDataSpec", "()", part=IMAGES),
    _used("nemo_rl.data.utils:setup_response_data", "(_, _, _, is_vlm=_)", returns=True, part=OWN_DATA),
    _used(GYM_SETTINGS, "(_, _)", part=NEMO_GYM),
    _used(VIDEO_SETTINGS, "(_, _)", versions=(HEAD,), part=NEMO_GYM),
    _used("nemo_rl.data.processors:vlm_hf_data_processor", "(_, _, _, _, _)", part=IMAGES),
    _used("nemo_rl.distributed.batched_data_dict:BatchedDataDict",
        reads=("size", "select_indices", "from_batches")),
    _used(ACTOR_PYTHONS, reads=("nemo_rl.environments.math_environment.MathEnvironment",)),
    _used(ACTOR_PYTHON, "(_)"),
    _used("nemo_rl.distributed.virtual_cluster:init_ray", "()"),
    _used(ENVIRONMENT, ours="nemo_grpo.nemorl.environments:TaskEnvironmentImpl"),
    _used("nemo_rl.environments.interfaces:EnvironmentReturn",
        "(observations=_, metadata=_, next_stop_strings=_, rewards=_, terminateds=_, answers=_)"),
    _used("nemo_rl.environments.utils:ENV_REGISTRY"),
    _used("nemo_rl.environments.utils:create_env", "(_, _)"),
    _used("nemo_rl.models.generation:configure_generation_config",
        "(_, _, has_refit_draft_weights=_, trains_mtp=_)"),
    _used(GENERATION, reads=("shutdown",)),
    _used(POLICY, "(worker_extension_cls_fqn=_, **_)", reads=("worker_group",)),
    _used("nemo_rl.models.policy.utils:get_megatron_checkpoint_dir", "()"),
    _used(CHECKPOINTS, reads=("get_latest_checkpoint_path",)),
    _used("nemo_rl.utils.config:load_config", "(_)"),
    _used("nemo_rl.utils.config:register_omegaconf_resolvers", "()"),
    _used("nemo_rl.utils.logger:get_next_experiment_dir", "(_)"),
    _used("nemo_rl.utils.venvs:DEFAULT_VENV_DIR"),
    _used("nemo_rl.utils.venvs:create_local_venv_on_each_node", "(_, _)"),
    _used(f"{MEGATRON_WORKER}:MegatronPolicyWorker", part=STAGES),
    _used(f"{MEGATRON_WORKER}:MegatronPolicyWorkerImpl", part=STAGES),
    _used(f"{MEGATRON_TRAIN}:LogprobsPostProcessor", reads=("cfg", "sampling_params"), part=ENTROPIES),
    _repeated(f"{MEGATRON_TRAIN}:LogprobsPostProcessor.__call__", ENTROPIES),
    _repeated(f"{MEGATRON_TRAIN}:apply_temperature_scaling", STAGES),
    _used("nemo_rl.distributed.model_utils:allgather_cp_sharded_tensor", "(_, _, _)", part=ENTROPIES),
    _used("nemo_rl.models.megatron.pipeline_parallel:broadcast_tensors_from_last_stage", "(_)",
        part=ENTROPIES),
    _used("nemo_rl.models.policy.utils:get_runtime_env_for_policy_worker", "(_)", part=STAGES),
    *(_used(name, part=REHEARSAL) for name in _REHEARSED),
    _used("nemo_rl.models.megatron.community_import:export_model_from_megatron", "(_, _, _, _, overwrite=_)",
        part=REHEARSAL),
)  # fmt: skip

HOST_API = {name.key: name for name in _NAMES}
"""Key -> name, in the order of `nemo-grpo doctor`."""
