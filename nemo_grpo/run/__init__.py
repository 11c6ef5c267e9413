"""Parts of a run that both engines share.

They are the checks of a recipe before the start, the run's folder and its trackers, the check of a resumed
run against its first start, the batch that a step's groups become, and the stop by a signal.
"""
