"""NeMo-Gym's actor in the tests, which a worker of Ray's imports."""

import newer_python  # noqa: F401 - before NeMo-RL
from nemo_rl.environments.nemo_gym import NemoGym

ASKED, SAID, TOLD, ANSWER = [1, 2, 3], [4, 5], [6], [7]
"""A conversation of two turns, in tokens: NeMo-Gym's tool speaks between the policy's answers."""


class Servers:
    """NeMo-Gym's rollouts as its HTTP servers give them: the first response of each problem is right."""

    def run_examples(self, examples, head_server_config):
        async def answered(row):
            turns = [(ASKED, SAID), (ASKED + SAID + TOLD, ANSWER)]
            output = [
                {
                    "type": "message",
                    "content": [{"type": "output_text", "text": "!"}],
                    "prompt_token_ids": list(prompt),
                    "generation_token_ids": list(said),
                    "generation_log_probs": [-3.4] * len(said),
                }
                for prompt, said in turns
            ]
            result = {
                "reward": float(row["_rowidx"] == 0),
                "responses_create_params": row["responses_create_params"],
                "response": {"output": output},
            }
            return row, result

        return [answered(row) for row in reversed(examples)]


class Gym(NemoGym.__ray_metadata__.modified_class):
    """NeMo-RL's actor, whose servers are `Servers`."""

    def __init__(self, tokenizer):
        super().__init__({"model_name": "toy", "base_urls": [], "initial_global_config_dict": {}})
        self.rch, self.head_server_config = Servers(), None
        self.rollout_max_attempts_to_avoid_lp_nan = 1
        self._tokenizer = tokenizer

    def _require_spinup(self):
        pass
