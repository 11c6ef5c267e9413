"""The loss that NeMo-RL's workers get, of a recipe's section."""

from nemo_grpo.nemorl.loss import ObjectiveLoss
from nemo_grpo.variants import parse_loss_fn


def build_loss(section):
    """The loss of a recipe's ``loss_fn`` section."""
    return ObjectiveLoss(parse_loss_fn(section))
