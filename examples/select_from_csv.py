"""Balanced cohorts from a file of label counts: python examples/select_from_csv.py [COUNTS.csv]"""

import csv
import sys
from pathlib import Path

from fedentopt import EntropySelector

file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "label_counts.csv"
with file.open(newline="") as stream:
    counts = {row.pop("client"): [int(n) for n in row.values()] for row in csv.DictReader(stream)}
selector = EntropySelector(cohort_size=4, buffer_size=8)
selector.register(counts)
for number in range(1, 6):
    cohort = selector.select()
    print(f"round {number}: {', '.join(map(str, cohort.clients))}  ({cohort.entropy:.2f} bits)")
