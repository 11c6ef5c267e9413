"""The metrics that are drawn. To add one, add a row."""

from nemo_grpo.diagnostics.plots import Panel, draw_percentiles, draw_validation
from nemo_grpo.diagnostics.runs import ENTROPY
from nemo_grpo.diagnostics.token_plots import draw_bins, draw_cumulative

PANELS: tuple[Panel, ...] = (
    Panel("learning_curve", "Held-out accuracy", "accuracy (mean of samples)", ("validation/accuracy",),
        "Mean over the samples of each held-out problem, at the evaluation's temperature. pass@k: share of "
        "problems that at least one of k samples solves.", draw=draw_validation),
    Panel("held_out_loss", "Held-out loss", "nats per response token", ("validation/val_loss",),
        "Mean cross entropy of the held-out problems' demonstrations; only supervised runs have it."),
    Panel("reward", "Training reward", "mean over rollouts", ("reward/accuracy", "reward/mean"),
        "Accuracy component of the rollouts' reward, comparable between runs with different reward weights; "
        "the whole reward if a run lacks it."),
    Panel("entropy", "Policy entropy", "nats per token", ENTROPY,
        "Entropy of the next-token distribution at the sampled positions; entropy/sampled estimates it by "
        "the mean of -log p over the sampled tokens. On this engine entropy/mean leaves out rows without a "
        "gradient where the update also scores; entropy/sampled has every row. A fall to 0 ends exploration; "
        "a rise to more than twice its start is instability.", from_zero=True),
    Panel("loss", "Training loss", "loss", ("loss/total",),
        "The variant's loss (GPG Figure 3). It is no measure of progress: advantages have mean 0 in a "
        "group."),
    Panel("length", "Response length", "tokens", ("length/mean",), "Mean length of the responses."),
    Panel("kl", "KL to start policy", "nats per token", ("kl/step_start", "kl/reference"),
        "Distance from the reference policy on the rollouts' tokens; only variants that load one have it."),
    Panel("grad_norm", "Gradient norm", "before clipping", ("grad_norm",),
        "Norm over all parameters, before clipping.", from_zero=True),
    Panel("clip_fraction", "Clipped tokens", "share of tokens", ("ratio/clip_fraction",),
        "Tokens whose ratio clip removes the gradient; always 0 with one update per step.", from_zero=True),
    Panel("covariance", "Covariance", "1st, 50th, 99th percentile",
        ("covariance/p1", "covariance/p50", "covariance/p99"),
        "Percentiles, over a step's tokens, of the covariance of log-probability and advantage.",
        draw=draw_percentiles),
    Panel("valid_groups", "Groups with signal", "share of groups", ("groups/valid_fraction",),
        "Groups whose rewards are not all equal; only these have a gradient.", from_zero=True),
    Panel("all_wrong", "Problems too hard", "share of drawn groups", ("rollout/all_wrong",),
        "Groups, of all that were drawn, in which every response is wrong (GPG Figure 2, left).",
        from_zero=True),
    Panel("all_right", "Problems too easy", "share of drawn groups", ("rollout/all_right",),
        "Groups, of all that were drawn, in which every response is right (GPG Figure 2, left).",
        from_zero=True),
    Panel("reward_std", "Spread of rewards", "std within groups", ("reward/group_std",),
        "Standard deviation of a group's rewards, mean over the step's groups (GPG Figure 2, right); GRPO "
        "divides by it.", from_zero=True),
    Panel("alpha", "GPG's alpha", "B / (B - M)", ("gpg/alpha",),
        "Factor by which GPG compensates for groups without signal; 1 if every group has signal."),
    Panel("cumulative_covariance", "Concentration of covariance", "share of the sum of |c|",
        ("cumulative", "covariance"),
        "Share of all covariance held by the tokens of largest covariance (CW-GRPO Figure 3), mean over the "
        "measured steps. If few tokens hold most of it, the curve starts high.", draw=draw_cumulative,
        xlabel="% of tokens, largest first", of_diagnostics=True),
    Panel("gradient_share", "Gradient by probability", "share of the sum of g (1 - pi)",
        ("probability", "gradient"),
        "Which tokens move the policy: share of the summed gradient bound g (1 - pi) by the token's "
        "probability. g is the size of the loss's derivative by the token's log-probability, with every "
        "weight, clip and KL of the variant.", draw=draw_bins, from_zero=True,
        xlabel="probability of the token", of_diagnostics=True),
    Panel("token_coefficient", "Weight by probability", "mean g",
        ("probability", "coefficient", "tokens"),
        "Mean g by probability: the effect of a variant's token weights, advantages included. Without tokens "
        "there is no mean.",
        draw=draw_bins, from_zero=True, xlabel="probability of the token", of_diagnostics=True),
    Panel("gradient_cv", "Evenness of token gradients", "std / mean over tokens", ("tokens/gradient_cv",),
        "Spread of g (1 - pi) over a step's tokens: large where few tokens dominate the update.",
        from_zero=True),
    Panel("pivots", "Entropy at pivots", "share of all entropy", ("tokens/entropy_top5_share",),
        "Share of a step's entropy that lies in its 5 % most undecided tokens, the decision pivots of ERPO.",
        from_zero=True),
)  # fmt: skip
"""Every picture of a report, in its order."""
