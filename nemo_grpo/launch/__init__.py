"""Jobs on a Slurm cluster: preflight checks, submission, status."""
