"""The peer that is no framework: a plain PyTorch loop, its clients shared by two processes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import torch
import work

_data: work.Data
_model: work.LeNet5


def begin(folder: Path) -> None:
    global _data, _model
    torch.set_num_threads(1)
    _data, _model = work.Data(folder), work.LeNet5()


def train(job: tuple[int, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    client, state = job
    _model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    work.train_locally(_model, *_data.client(client))
    return {name: value.numpy().copy() for name, value in _model.state_dict().items()}


def main() -> None:
    options = work.options()
    rng, clock = np.random.default_rng(0), work.Clock()
    model = work.LeNet5()
    with multiprocessing.get_context("spawn").Pool(work.WORKERS, begin, (options.data,)) as pool:
        for _ in range(options.rounds):
            state = {name: value.numpy() for name, value in model.state_dict().items()}
            cohort = rng.choice(work.CLIENTS, work.COHORT, replace=False).tolist()
            trained = pool.map(train, [(client, state) for client in cohort], chunksize=1)
            mean = {name: torch.from_numpy(np.mean([t[name] for t in trained], axis=0)) for name in state}
            model.load_state_dict(mean)
            clock.round_ended()
    clock.write(options.out, model, work.Data(options.data), ())


if __name__ == "__main__":
    main()
