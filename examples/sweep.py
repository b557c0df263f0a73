"""A sweep: several buffer sizes and seeds, trained together in one stack: python examples/sweep.py [--out FOLDER]

Run it again and finished runs are read instead of repeated; stop it and it goes on where it was.
"""

import argparse
from pathlib import Path

from fedentopt.report import write_report
from fedentopt.results.aggregate import by_method
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.options import RunOptions
from fedentopt.simulation.sweep import run_sweep

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/sweep"))
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    configs = [
        RunConfig(
            selector="fedentopt", buffer=buffer, seed=seed, clients=20, cohort="20%", rounds=options.rounds, epochs=2
        )
        for buffer in ("0%", "40%", "80%")
        for seed in range(2)
    ]
    results = run_sweep(configs, RunOptions(out=str(options.out), device="cpu", workers=1))
    for method in by_method(results):
        accuracy, fairness = method.spread("accuracy"), method.spread("h_norm")
        assert accuracy is not None
        assert fairness is not None
        print(f"{method.label}: accuracy {accuracy.mean:.1f} %, H_norm {fairness.mean:.3f}")
    print(write_report(options.out))
