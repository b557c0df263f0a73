"""Two clients per round out of four, checkpointed; every round leaves a line."""

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedentopt.flower import FedEntOpt

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    told = context.run_config
    traces = Path(str(told["traces"]))
    strategy = FedEntOpt(
        cohort_size=2,
        buffer_size=2,
        num_classes=10,
        seed=1,
        checkpoint_dir=traces / "checkpoint",
        min_available_nodes=int(told["min-nodes"]),
        fraction_evaluate=0.0,
        query_timeout=120,
        node_timeout=120,
    )

    def note(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round:
            last = strategy.history[-1]
            line = {
                "round": last.round,
                "clients": last.cohort.clients,
                "answered": last.answered,
                "failed": last.failed,
                "weight": float(arrays["w"].numpy()[0]),
            }
            with (traces / "rounds.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        return None

    strategy.start(
        grid,
        ArrayRecord({"w": Array(np.zeros(3, dtype=np.float32))}),
        num_rounds=int(told["rounds"]),
        timeout=float(told["round-timeout"]),
        evaluate_fn=note,
    )
    (traces / "finished").touch()
