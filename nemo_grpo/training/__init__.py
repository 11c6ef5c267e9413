"""Parts of a training run that both engines share.

rollout          groups of scored responses, and a step's groups as tensors
demonstrations   worked responses in their place
run_folder       ``runs/<name>/``, with the run's recipe, versions and metrics
trackers         tensorboard, wandb and mlflow
signals          a polite end
"""
