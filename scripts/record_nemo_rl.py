"""Write down a tested NeMo-RL's interface as far as this package uses it, for `nemo-grpo doctor`.

    .venv/bin/python scripts/record_nemo_rl.py NEMO_RL_CLONE VERSION

Writes nemo_grpo/nemorl/interfaces/nemo_rl-VERSION.json: names, signatures and digests, nothing of NeMo-RL's
code. A version is recorded once `make test-nemo-rl` has passed on it.
"""

import argparse
import json
from pathlib import Path

from nemo_grpo.nemorl.doctor import RECORDS, observe
from nemo_grpo.nemorl.host_api import TESTED
from nemo_grpo.nemorl.static_api import Tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("clone", type=Path, help="NeMo-RL's repository, at that version")
    parser.add_argument("version", choices=list(TESTED))
    arguments = parser.parse_args()
    path = RECORDS / f"nemo_rl-{arguments.version}.json"
    path.parent.mkdir(exist_ok=True)
    found = observe(Tree(arguments.clone, "nemo_rl"))
    lines = (f"{json.dumps(name)}: {json.dumps(description)}" for name, description in found.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(path)


if __name__ == "__main__":
    main()
