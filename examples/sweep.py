"""A sweep: several buffer sizes and seeds, trained together in one stack: python examples/sweep.py [--out FOLDER]

Run it again and finished runs are read instead of repeated; stop it and it goes on where it was.
"""

import argparse
from pathlib import Path

from fedentopt.simulation import compare

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/sweep"))
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    methods = [f"fedentopt:buffer={buffer}" for buffer in ("0%", "40%", "80%")]
    result = compare(methods, seeds=2, out=options.out, clients=20, cohort="20%", rounds=options.rounds, epochs=2)
    for _, row in result.summary.iterrows():
        print(f"{row.method}: accuracy {row.accuracy:.1f} %, H_norm {row.h_norm:.3f}")
    print(result.report(options.out / "report.html"))
