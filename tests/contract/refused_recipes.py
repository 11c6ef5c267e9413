"""Thirty recipes as a user might write them, each with the sentence that refuses it."""

REFUSED: dict[str, tuple[str, str]] = {
    "misspelt key": (
        """
defaults: nemo_grpo://quickstart.yaml
grpo:
  max_num_stps: 5
""",
        "grpo.max_num_stps=5: grpo.max_num_stps is not a key of grpo; did you mean 'max_num_steps'?",
    ),
    "NeMo-RL's key for the aggregation": (
        """
defaults: nemo_grpo://quickstart.yaml
loss_fn:
  token_level_loss: true
""",
        "loss_fn.token_level_loss=true is not supported: use loss_fn.aggregation=token_mean or sequence_mean",
    ),
    "no policy": (
        """
defaults: nemo_grpo://quickstart.yaml
policy:
  model_name: null
""",
        "policy.model_name=null: no model; name a folder or a Hub model, or, to train a new one on "
        "demonstrations (loss_fn.variant=sft), give its sizes in nemo_grpo.new_model",
    ),
    "updates that do not divide the step": (
        """
defaults: nemo_grpo://quickstart.yaml
grpo:
  num_prompts_per_step: 2
  num_generations_per_prompt: 4
policy:
  train_global_batch_size: 3
  train_micro_batch_size: 1
""",
        "policy.train_global_batch_size=3 does not divide grpo.num_prompts_per_step x "
        "grpo.num_generations_per_prompt = 2 x 4 = 8; use 2 or 4",
    ),
    "groups of one": (
        """
defaults: nemo_grpo://quickstart.yaml
grpo:
  num_generations_per_prompt: 1
policy:
  train_micro_batch_size: 1
""",
        "grpo.num_generations_per_prompt=1: a group of one has no advantage for grpo; use 8",
    ),
    "no room for the prompt": (
        """
defaults: nemo_grpo://quickstart.yaml
policy:
  max_total_sequence_length: 40
  generation:
    max_new_tokens: 40
""",
        "policy.generation.max_new_tokens=40 is not below policy.max_total_sequence_length=40: it leaves no "
        "room for the prompt; lower one or raise the other",
    ),
    "ranks that hold half a model": (
        """
defaults: nemo_grpo://quickstart.yaml
policy:
  megatron_cfg:
    tensor_model_parallel_size: 2
cluster:
  gpus_per_node: 3
""",
        "cluster.gpus_per_node x cluster.num_nodes, less separate rollouts, = 3 is not a multiple of 2 (TP "
        "x PP x CP): use a multiple, or smaller sizes in policy.megatron_cfg",
    ),
    "a learning rate that rises to its minimum": (
        """
defaults: nemo_grpo://quickstart.yaml
policy:
  megatron_cfg:
    optimizer:
      lr: 1.0e-5
      min_lr: 1.0e-4
""",
        "policy.megatron_cfg.optimizer.min_lr=0.0001 exceeds policy.megatron_cfg.optimizer.lr=1e-05: lower "
        "it",
    ),
    "warm-up as long as the decay": (
        """
defaults: nemo_grpo://quickstart.yaml
policy:
  megatron_cfg:
    scheduler:
      lr_warmup_iters: 50
      lr_decay_iters: 50
""",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=50 is not below "
        "policy.megatron_cfg.scheduler.lr_decay_iters=50: it counts from the first update; change one of "
        "them",
    ),
    "a metric without its value": (
        """
defaults: nemo_grpo://quickstart.yaml
grpo:
  stop_at_validation_metric: accuracy
""",
        "grpo.stop_at_validation_threshold=null: the value of grpo.stop_at_validation_metric at which the "
        "run ends is missing; set both or neither",
    ),
    "a misspelt metric": (
        """
defaults: nemo_grpo://quickstart.yaml
checkpointing:
  metric_name: val:acuracy
""",
        "checkpointing.metric_name: validation has no metric 'validation/acuracy'; did you mean "
        "'validation/accuracy'?",
    ),
    "two groups' averages in one update": (
        """
defaults: nemo_grpo://quickstart.yaml
grpo:
  num_prompts_per_step: 2
  num_generations_per_prompt: 4
loss_fn:
  aggregation: group_token_mean
policy:
  train_global_batch_size: 2
  train_micro_batch_size: 1
""",
        "policy.train_global_batch_size=2 is not a multiple of grpo.num_generations_per_prompt=4: "
        "loss_fn.aggregation=group_token_mean averages whole groups; use a multiple, or token_mean",
    ),
    "a reward that the task lacks": (
        """
defaults: nemo_grpo://quickstart.yaml
nemo_grpo:
  rewards:
    iou: 1.0
""",
        "nemo_grpo.rewards.iou=1.0: task 'knights_knaves' has no such reward component; valid: accuracy, "
        "format",
    ),
    "both backends": (
        """
defaults: nemo_grpo://cluster-quickstart.yaml
policy:
  dtensor_cfg:
    enabled: true
""",
        "policy.dtensor_cfg.enabled=true: policy.megatron_cfg.enabled=true, and one of the two backends "
        "trains; set one to false",
    ),
    "filtered rollouts on the embedded engine": (
        """
defaults: nemo_grpo://quickstart.yaml
policy:
  generation:
    top_p: 0.9
""",
        "policy.generation.top_p=0.9: not supported by the embedded engine; rollouts are scored over all "
        "tokens; use 1.0, and val_top_p to filter validation",
    ),
    "asynchronous training on the embedded engine": (
        """
defaults: nemo_grpo://quickstart.yaml
grpo:
  async_grpo:
    enabled: true
""",
        "grpo.async_grpo.enabled=true: not supported by the embedded engine; remove it; only the cluster "
        "engine supports it",
    ),
    "experts over ranks on the embedded engine": (
        """
defaults: nemo_grpo://quickstart.yaml
policy:
  megatron_cfg:
    expert_model_parallel_size: 2
""",
        "policy.megatron_cfg.expert_model_parallel_size=2: not supported by the embedded engine; use 1",
    ),
    "images on the embedded engine": (
        """
defaults: nemo_grpo://quickstart.yaml
nemo_grpo:
  task: {_override_: true, name: vision_counting}
""",
        "nemo_grpo.task.name=vision_counting: its images need the cluster engine (NeMo-RL), whose processor "
        "encodes them; set nemo_grpo.target=cluster",
    ),
    "demonstrations without a task": (
        """
defaults: nemo_grpo://base/cluster.yaml
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 1, max_num_steps: 2}
loss_fn: {variant: sft}
policy: {model_name: some/model, max_total_sequence_length: 64, generation: {max_new_tokens: 16}}
data: {train: {dataset_name: gsm8k, env_name: math}}
env: {math: {num_workers: 1}}
nemo_grpo: {run_name: x, target: cluster}
""",
        "loss_fn.variant=sft: it trains on the demonstrations of nemo_grpo.task; set one, or use NeMo-RL's "
        "own supervised recipes",
    ),
    "two samples of one demonstration": (
        """
defaults: nemo_grpo://quickstart-sft.yaml
grpo:
  num_generations_per_prompt: 2
""",
        "grpo.num_generations_per_prompt=2: sft trains on one demonstration per prompt; use 1",
    ),
    "a new model for reinforcement": (
        """
defaults: nemo_grpo://quickstart.yaml
policy:
  model_name: null
nemo_grpo:
  new_model: {}
""",
        "nemo_grpo.new_model={..}: a new model gives no response that a reward could tell apart; train it "
        "with loss_fn.variant=sft first, and name its export in policy.model_name",
    ),
    "validation at another temperature": (
        """
defaults: nemo_grpo://cluster-quickstart.yaml
policy:
  generation:
    val_temperature: 0.5
""",
        "policy.generation.val_temperature=0.5 differs from policy.generation.temperature=1.0: NeMo-RL "
        "samples validation like training and refuses anything else; leave it out, and evaluate checkpoints "
        "with nemo-grpo eval",
    ),
    "entropies without Megatron": (
        """
defaults: nemo_grpo://cluster-quickstart.yaml
loss_fn:
  variant: erpo
policy:
  megatron_cfg: {enabled: false}
  dtensor_cfg: {enabled: true}
""",
        "policy.dtensor_cfg.enabled=true: erpo needs entropies, which only the Megatron workers return; "
        "train with policy.megatron_cfg.enabled=true",
    ),
    "a clip of shaped advantages": (
        """
defaults: nemo_grpo://cluster-quickstart.yaml
grpo:
  advantage_clip_high: 5.0
loss_fn:
  variant: cw_grpo
""",
        "grpo.advantage_clip_high=5.0: it would clip advantages that cw_grpo has shaped, and distort its "
        "loss; set it to null",
    ),
    "asynchronous training without correction": (
        """
defaults: nemo_grpo://cluster-quickstart.yaml
grpo:
  async_grpo: {enabled: true}
policy:
  generation:
    vllm_cfg: {async_engine: true}
    colocated: {enabled: false, resources: {gpus_per_node: 1, num_nodes: 1}}
cluster:
  gpus_per_node: 2
""",
        "loss_fn.use_importance_sampling_correction=false: with grpo.async_grpo rollouts are older than the "
        "policy, and NeMo-RL refuses to train on them uncorrected; set it to true",
    ),
    "context parallelism without packing": (
        """
defaults: nemo_grpo://cluster-quickstart.yaml
policy:
  make_sequence_length_divisible_by: 4
  sequence_packing: {enabled: false}
  megatron_cfg:
    context_parallel_size: 2
cluster:
  gpus_per_node: 2
""",
        "policy.megatron_cfg.context_parallel_size=2 needs policy.sequence_packing.enabled=true: Megatron "
        "splits packed sequences only; set it to true",
    ),
    "checkpoints that no validation ranks": (
        """
defaults: nemo_grpo://cluster-quickstart.yaml
checkpointing:
  save_period: 5
  metric_name: val:accuracy
""",
        "checkpointing.save_period=5 is not a multiple of grpo.val_period=10: a checkpoint without "
        "val:accuracy ranks last and is deleted; make it one, or set checkpointing.metric_name to null or "
        "train:reward",
    ),
    "a tool's turns cut short": (
        """
defaults: nemo_grpo://cluster-quickstart.yaml
grpo:
  max_rollout_turns: 1
policy:
  generation:
    stop_strings: [</search>, </answer>]
nemo_grpo:
  task: {_override_: true, name: search_qa}
""",
        "grpo.max_rollout_turns=1 is less than nemo_grpo.task.num_turns=4: a response to search_qa takes up "
        "to 4 turns, and would end before its answer; use 4",
    ),
    "the single controller without its data plane": (
        """
defaults: nemo_grpo://cluster-quickstart.yaml
async_rl: {}
""",
        "data_plane.enabled=null: NeMo-RL's single controller (async_rl={..}) reads its data plane; set it "
        "to true",
    ),
    "chunks smaller than the variant's view": (
        """
defaults: nemo_grpo://cluster-quickstart.yaml
grpo:
  num_prompts_per_step: 2
loss_fn:
  variant: gpg
data_plane:
  enabled: true
async_rl:
  min_groups_for_streaming_train: 1
""",
        "async_rl.min_groups_for_streaming_train=1 is less than grpo.num_prompts_per_step=2: gpg as set "
        "decides a response's advantages by other groups, too; make them equal, for one chunk a step",
    ),
}
"""Name -> (text of the recipe, one of the messages that it gets)."""
