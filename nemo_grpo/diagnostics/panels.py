"""Which metrics are drawn. To add one, add a row."""

from __future__ import annotations

from nemo_grpo.diagnostics.plots import Panel, draw_percentiles, draw_training, draw_validation

PANELS: tuple[Panel, ...] = (
    Panel(
        "learning_curve",
        "Held-out accuracy",
        "accuracy (mean of samples)",
        ("validation/accuracy",),
        draw_validation,
        "Mean over the samples of each held-out problem, at the evaluation's temperature. pass@k: share of "
        "problems that at least one of k samples solves.",
    ),
    Panel(
        "reward",
        "Training reward",
        "mean over rollouts",
        ("reward/accuracy", "reward/mean"),
        draw_training,
        "Accuracy component of the rollouts' reward, by which runs with other reward weights compare; the "
        "whole reward if a run does not have it.",
    ),
    Panel(
        "entropy",
        "Policy entropy",
        "nats per token",
        ("entropy/mean",),
        draw_training,
        "Entropy of the next-token distribution at the sampled positions. A fall to 0 ends exploration; a "
        "rise to more than twice its start is instability.",
        from_zero=True,
    ),
    Panel(
        "length",
        "Response length",
        "tokens",
        ("length/mean",),
        draw_training,
        "Mean length of the responses.",
    ),
    Panel(
        "kl",
        "KL to start policy",
        "nats per token",
        ("kl/step_start", "kl/reference"),
        draw_training,
        "Distance from the reference policy on the rollouts' tokens; only variants that load one have it.",
    ),
    Panel(
        "grad_norm",
        "Gradient norm",
        "before clipping",
        ("grad_norm",),
        draw_training,
        "Norm over all parameters, before clipping.",
        from_zero=True,
    ),
    Panel(
        "clip_fraction",
        "Clipped tokens",
        "share of tokens",
        ("ratio/clip_fraction",),
        draw_training,
        "Tokens whose ratio clip removes the gradient; always 0 with one update per step.",
        from_zero=True,
    ),
    Panel(
        "covariance",
        "Covariance",
        "1st, 50th, 99th percentile",
        ("covariance/p1", "covariance/p50", "covariance/p99"),
        draw_percentiles,
        "Percentiles, over a step's tokens, of the covariance of log-probability and advantage.",
    ),
    Panel(
        "valid_groups",
        "Groups with signal",
        "share of groups",
        ("groups/valid_fraction",),
        draw_training,
        "Groups whose rewards are not all equal; only they teach anything.",
        from_zero=True,
    ),
)
"""Every picture of a report, in its order."""
