"""What this package calls and reads of NeMo-RL, and what a rehearsal replaces; `hooks` has the rest.

`doctor` compares both with a NeMo-RL tree, `compat.check` with the one that is installed.
"""

from typing import NamedTuple

from nemo_grpo.nemorl.hooks import (
    CHECKPOINTS,
    CONTROLLER,
    ENVIRONMENT,
    GENERATION,
    GRPO,
    GRPO_SYNC,
    LOSSES,
    MEGATRON_TRAIN,
    MEGATRON_WORKER,
    POLICY,
    TQ_POLICY,
)
from nemo_grpo.nemorl.versions import (
    BOTH,
    DATA_PLANE,
    ENTROPIES,
    EVERY_RUN,
    HEAD,
    IMAGES,
    NEMO_GYM,
    OWN_DATA,
    REHEARSAL,
    SINGLE_CONTROLLER,
    STAGES,
    SUPERVISED,
)

SFT = "nemo_rl.algorithms.sft"
_ACTORS = "nemo_rl.distributed.ray_actor_environment_registry"
ACTOR_PYTHONS, ACTOR_PYTHON = f"{_ACTORS}:ACTOR_ENVIRONMENT_REGISTRY", f"{_ACTORS}:get_actor_python_env"
"""The interpreter of each actor, and the function that completes it."""
GYM_SETTINGS = "nemo_rl.environments.nemo_gym:setup_nemo_gym_config"
VIDEO_SETTINGS = "nemo_rl.models.generation.vllm.config:materialize_vllm_video_config"

BASE, VISION_BASE = "grpo_math_1B_megatron.yaml", "vlm_grpo_3B_megatron.yaml"
"""NeMo-RL's base configurations in ``examples/configs``, for text and for images."""


CONTROLLER_ACTOR = "nemo_rl.algorithms.single_controller:SingleControllerActor"
CONTROLLER_CONFIG = "nemo_rl.algorithms.single_controller_utils.config"

ELSEWHERE = (DATA_PLANE, SINGLE_CONTROLLER, ENTROPIES, STAGES, REHEARSAL)
"""Parts whose names the driver does not import; some need megatron-core or vLLM."""


class Use(NamedTuple):
    """One name of NeMo-RL that we call or read.

    Attributes:
        name: ``module:name`` or ``module:Class.method``.
        call: the arguments that we give, as ``(_, _, processor=_)``; a class is called by its fields.
        reads: names that we expect on it: attributes, members of an enumeration, keys of a table.
        versions: the tested versions that have it.
        returns: we unpack the result by position.
        ours: our subclass; it must define every abstract method.
        code: ours repeats what its code does, so that the code is compared, too.
        part: what needs it.
    """

    name: str
    call: str = ""
    reads: tuple[str, ...] = ()
    versions: tuple[str, ...] = BOTH
    returns: bool = False
    ours: str = ""
    code: bool = False
    part: str = EVERY_RUN

    @property
    def is_required(self) -> bool:
        """True if every tested version has it."""
        return self.versions == BOTH


LOSS_KEYS = (
    *("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "reference_policy_kl_penalty"),
    *("reference_policy_kl_type", "use_importance_sampling_correction", "sequence_level_importance_ratios"),
    *("truncated_importance_sampling_type", "truncated_importance_sampling_ratio"),
    *("truncated_importance_sampling_ratio_min", "force_on_policy_ratio"),
)
"""Keys of ``loss_fn`` that mean to NeMo-RL what they mean to every variant with a ratio."""

CONTROLLER_READS = (
    *("gen_handle", "trainer_handle", "env_handles", "train_cluster", "inference_cluster", "dataloader"),
    *("advantage_estimator", "loss_fn", "save_state"),
)
"""What we read of what NeMo-RL gives to its single controller, or put in its place."""

_TRAINER = ", ".join("_" * 12)

USES: tuple[Use, ...] = (
    Use(f"{GRPO}:MasterConfig", reads=("policy", "data", "env", "grpo", "logger", "checkpointing")),
    Use(f"{GRPO}:GRPOConfig"),
    Use(f"{GRPO}:setup", "(_, _, _, _, processor=_, policy_factory=_)", returns=True),
    Use(f"{GRPO}:grpo_train", f"({_TRAINER})"),
    Use(f"{GRPO}:async_grpo_train",
        f"({_TRAINER}, max_trajectory_age_steps=_, teacher_worker_groups=_, alias_to_group_alias=_)"),
    Use(f"{GRPO_SYNC}:grpo_train_sync", f"({_TRAINER})", part=DATA_PLANE),
    Use(TQ_POLICY, "(dp_cfg=_, **_)", part=DATA_PLANE),
    Use(f"{TQ_POLICY}.abort_train_step", "()", versions=(HEAD,), part=SINGLE_CONTROLLER),
    Use(f"{TQ_POLICY}.read_from_dataplane", "(_, select_fields=_)", versions=(HEAD,), part=SINGLE_CONTROLLER),
    Use(f"{CONTROLLER}:setup_single_controller", "(_, _)", versions=(HEAD,), returns=True,
        part=SINGLE_CONTROLLER),
    Use(f"{CONTROLLER}:SingleControllerActorArgs", reads=CONTROLLER_READS, versions=(HEAD,),
        part=SINGLE_CONTROLLER),
    Use(CONTROLLER_ACTOR, "(_, _, _)", ("run", "ping", "_logger", "_checkpointer", "_rollout_manager"),
        versions=(HEAD,), part=SINGLE_CONTROLLER),
    Use(f"{CONTROLLER_CONFIG}:validate_single_controller_config", "(_)", versions=(HEAD,),
        part=SINGLE_CONTROLLER),
    Use(f"{CONTROLLER_CONFIG}:MasterConfig", reads=("async_rl",), versions=(HEAD,), part=SINGLE_CONTROLLER),
    Use(f"{CONTROLLER_CONFIG}:WatchdogConfig", reads=("interval_s", "stall_timeout_s"), versions=(HEAD,),
        part=SINGLE_CONTROLLER),
    Use(f"{GRPO}:shutdown_environments", "(_, _)", versions=(HEAD,)),
    Use(f"{GRPO}:_create_advantage_estimator", code=True),
    Use(f"{GRPO}:dynamic_sampling", code=True),
    Use(f"{LOSSES}.interfaces:LossInputType", reads=("LOGPROB",)),
    Use(f"{LOSSES}.interfaces:LossType", reads=("TOKEN_LEVEL", "SEQUENCE_LEVEL")),
    Use(f"{LOSSES}.interfaces:MetricNormalizer", reads=("TOKENS", "SEQUENCES", "NONE"), versions=(HEAD,)),
    Use(f"{LOSSES}.interfaces:LossFunction", reads=("loss_type", "input_type")),
    Use(f"{LOSSES}.utils:prepare_loss_input", code=True),
    Use(f"{LOSSES}.loss_functions:ClippedPGLossConfig", reads=LOSS_KEYS),
    Use(f"{SFT}:MasterConfig", reads=("policy", "data", "sft", "logger", "checkpointing"), part=SUPERVISED),
    Use(f"{SFT}:setup", "(_, _, _, _)", returns=True, part=SUPERVISED),
    Use(f"{SFT}:sft_train", "(_, _, _, _, _, _, _, _, _)", part=SUPERVISED),
    Use(f"{SFT}:SFTConfig",
        "(max_num_steps=_, max_num_epochs=_, val_period=_, val_batches=_, val_global_batch_size=_, "
        "val_micro_batch_size=_, val_at_start=_, val_at_end=_, seed=_, only_unmask_final=_)",
        part=SUPERVISED),
    Use("nemo_rl.algorithms.utils:get_tokenizer", "(_, get_processor=_)"),
    Use("nemo_rl.data.interfaces:TaskDataSpec", "()", part=IMAGES),
    Use("nemo_rl.data.utils:setup_response_data", "(_, _, _, is_vlm=_)", returns=True, part=OWN_DATA),
    Use(GYM_SETTINGS, "(_, _)", part=NEMO_GYM),
    Use(VIDEO_SETTINGS, "(_, _)", versions=(HEAD,), part=NEMO_GYM),
    Use("nemo_rl.data.processors:vlm_hf_data_processor", "(_, _, _, _, _)", part=IMAGES),
    Use("nemo_rl.distributed.batched_data_dict:BatchedDataDict",
        reads=("size", "select_indices", "from_batches")),
    Use(ACTOR_PYTHONS, reads=("nemo_rl.environments.math_environment.MathEnvironment",)),
    Use(ACTOR_PYTHON, "(_)"),
    Use("nemo_rl.distributed.virtual_cluster:init_ray", "()"),
    Use(ENVIRONMENT, ours="nemo_grpo.nemorl.environments:TaskEnvironmentImpl"),
    Use("nemo_rl.environments.interfaces:EnvironmentReturn",
        "(observations=_, metadata=_, next_stop_strings=_, rewards=_, terminateds=_, answers=_)"),
    Use("nemo_rl.environments.utils:ENV_REGISTRY"),
    Use("nemo_rl.environments.utils:create_env", "(_, _)"),
    Use("nemo_rl.models.generation:configure_generation_config",
        "(_, _, has_refit_draft_weights=_, trains_mtp=_)"),
    Use(GENERATION, reads=("shutdown",)),
    Use(POLICY, "(worker_extension_cls_fqn=_, **_)", reads=("worker_group",)),
    Use("nemo_rl.models.policy.utils:get_megatron_checkpoint_dir", "()"),
    Use(CHECKPOINTS, reads=("get_latest_checkpoint_path",)),
    Use("nemo_rl.utils.config:load_config", "(_)"),
    Use("nemo_rl.utils.config:register_omegaconf_resolvers", "()"),
    Use("nemo_rl.utils.logger:get_next_experiment_dir", "(_)"),
    Use("nemo_rl.utils.venvs:DEFAULT_VENV_DIR"),
    Use("nemo_rl.utils.venvs:create_local_venv_on_each_node", "(_, _)"),
    Use(f"{MEGATRON_WORKER}:MegatronPolicyWorker", part=STAGES),
    Use(f"{MEGATRON_WORKER}:MegatronPolicyWorkerImpl", part=STAGES),
    Use(f"{MEGATRON_TRAIN}:LogprobsPostProcessor", reads=("cfg", "sampling_params"), part=ENTROPIES),
    Use(f"{MEGATRON_TRAIN}:LogprobsPostProcessor.__call__", code=True, part=ENTROPIES),
    Use(f"{MEGATRON_TRAIN}:apply_temperature_scaling", code=True, part=STAGES),
    Use("nemo_rl.distributed.model_utils:allgather_cp_sharded_tensor", "(_, _, _)", part=ENTROPIES),
    Use("nemo_rl.models.megatron.pipeline_parallel:broadcast_tensors_from_last_stage", "(_)", part=ENTROPIES),
    Use("nemo_rl.models.policy.utils:get_runtime_env_for_policy_worker", "(_)", part=STAGES),
    Use("nemo_rl.utils.nvml:get_device_uuid", part=REHEARSAL),
    Use("nemo_rl.utils.nvml:get_free_memory_bytes", part=REHEARSAL),
    Use("nemo_rl.models.policy.utils:get_handle_from_tensor", part=REHEARSAL),
    Use("nemo_rl.models.policy.utils:rebuild_cuda_tensor_from_ipc", part=REHEARSAL),
    Use("nemo_rl.models.generation.vllm.patches:_apply_vllm_patches", part=REHEARSAL),
    Use("nemo_rl.models.generation.vllm.quantization.fp8:is_fp8_model", part=REHEARSAL),
    Use("nemo_rl.models.generation.vllm.vllm_backend:VllmInternalWorkerExtension", part=REHEARSAL),
    Use("nemo_rl.models.megatron.community_import:export_model_from_megatron", "(_, _, _, _, overwrite=_)",
        part=REHEARSAL),
)  # fmt: skip

TEXTS: dict[str, tuple[str, ...]] = {
    GRPO: ("timing/train", "gen_kl_error"),
    GRPO_SYNC: ("timing/train", "gen_kl_error"),
    SFT: ("timing/train",),
    CONTROLLER_ACTOR.partition(":")[0]: ("timing/train",),
}
"""Texts that we look for at run time, and the modules that write them."""

METRICS_READ = (GRPO, GRPO_SYNC)
"""Trainers that read ``metrics[...]`` of the loss; ours must give every name."""

FILES = (f"examples/configs/{BASE}", f"examples/configs/{VISION_BASE}")
"""Files that we read, from the repository's root."""
