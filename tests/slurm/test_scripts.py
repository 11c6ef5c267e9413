"""Every script is accepted by Slurm as it is."""

import pytest
from cluster import ROOT

OPTIONS = {
    "train.sbatch": [("--nodes=2",), ("--nodes=2", "--gpus-per-node=0")],  # GPUs that Slurm does not know
    "embedded.sbatch": [("--gpus-per-node=8",)],
    "convert.sbatch": [()],
    "eval.sbatch": [("--array=0-3",)],
}


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "slurm").glob("*.sbatch")))
def test_slurm_accepts_the_script(slurm, script):
    for options in OPTIONS[script]:
        command = ("sbatch", "--test-only", *options, str(ROOT / "slurm" / script), "recipes/x.yaml")
        assert "to start at" in slurm.run(*command).stderr
