"""NeMo-RL's source has the signatures of the table of `nemo-grpo doctor`."""

import os
from pathlib import Path

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.doctor import check_tree
from nemo_grpo.nemorl.host_api import HEAD, SINGLE_CONTROLLER


def test_a_tested_version_fits_the_table():
    misfits = check_tree(Path(os.environ["NEMO_RL_SRC"]))
    if compat.version() == HEAD:
        assert misfits == []
    assert {misfit.name.part for misfit in misfits} <= {SINGLE_CONTROLLER}  # 0.7.0 has none


def test_the_installed_version_is_the_one_that_is_checked():
    assert compat.check() == compat.version()
