"""The versions of NeMo-RL on which the tests run."""

V0_7_0, HEAD = "0.7.0", "7ea279abf"
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
"""What of this package needs a name of NeMo-RL."""


def tested() -> str:
    """The tested versions, for a message."""
    return " or ".join(TESTED.values())
