"""How much training a census needs: errors of label estimates by epochs and samples per client.

    python benchmarks/census.py --data-dir DATA

Every client trains LeNet-5 from the start model, nothing is averaged, and its labels are estimated from the change of
its last bias. Printed per split: the total variation between estimate and truth, mean over 100 clients and `--seeds`
seeds, as a Markdown table.
"""

from __future__ import annotations

import argparse

import numpy as np

from fedentopt.simulation import RunConfig, RunOptions, simulate

CENSUSES = ((1, 16), (1, 32), (1, 64), (1, 128), (1, None), (5, None))
SPLITS = {"dir:0.1": "Dir(0.1)", "classes:2": "C=2", "dir:0.5": "Dir(0.5)"}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--device", default="auto")
    told = parser.parse_args()
    print(f"| epochs | samples per client | {' | '.join(SPLITS.values())} |")
    print(f"| ---: | ---: |{' ---: |' * len(SPLITS)}")
    for epochs, samples in CENSUSES:
        cells = []
        for split in SPLITS:
            errors = []
            for seed in range(told.seeds):
                settings = {
                    "dataset": told.dataset, "partition": split, "seed": seed, "rounds": 1, "epochs": 1,
                    "selector": "inferred", "selector.census_epochs": epochs,
                    "selector.census_samples": samples,
                }  # fmt: skip
                config = RunConfig.from_dict({name: value for name, value in settings.items() if value is not None})
                options = RunOptions(device=told.device, data_dir=told.data_dir)
                (run,) = simulate(config, progress=False, options=options).runs
                errors.append(float(run.rounds.estimate_error[0]))
            cells.append(f"{np.mean(errors):.3f}")
        print(f"| {epochs} | {samples or 'all'} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
