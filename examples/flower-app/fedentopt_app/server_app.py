"""The ServerApp: picks cohorts by label entropy, averages, evaluates, writes results."""

from __future__ import annotations

import time
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedentopt.errors import InputError
from fedentopt.flower import LabelAware, LocalTraining, strategy_from
from fedentopt.models import build
from fedentopt.randomness import key
from fedentopt.settings import amount
from fedentopt.simulation.config import RunConfig
from fedentopt_app.data import class_names, load_data
from fedentopt_app.evaluation import evaluate
from fedentopt_app.record import Bookkeeper
from fedentopt_app.settings import folder, least_nodes, run_settings, seconds

app = ServerApp()


def make_strategy(config: RunConfig, context: Context, num_classes: int) -> LabelAware:
    """The strategy the run config names; what else stands under `fedentopt.` there goes to it as it is."""
    told = context.run_config
    own = {name: value for name, value in config.to_dict().items() if name != "rounds"}
    options: dict[str, Any] = {
        "cohort_size": config.cohort_size,
        "num_classes": num_classes,
        "min_available_nodes": least_nodes(told, config.clients),
        "node_timeout": seconds(told, "node-timeout"),
        "query_timeout": seconds(told, "query-timeout"),
        "checkpoint_dir": folder(told, "checkpoint"),
        "fraction_evaluate": 0.0,  # the server evaluates
        "settings": {**own, "class-names": told["class-names"]},
        "selector": config.selector,
        "seed": config.seed,
        "audit": config.audit,
        "local": LocalTraining(config.lr, config.epochs, config.batch_size, None, config.momentum, config.lr_decay),
        "pretrained": config.weights is not None,
    }
    if config.selector != "random":
        options["buffer_size"] = amount(config.of("selector")["buffer"], config.clients, "buffer")
    if config.selector == "inferred":
        options["census_epochs"] = config.of("selector")["census_epochs"]
    if config.algorithm == "fedprox":
        options |= {"strategy": "FedProx", "proximal_mu": config.of("algorithm")["mu"]}
    elif config.algorithm.startswith("flwr:"):
        options["strategy"] = config.algorithm.removeprefix("flwr:")
    if config.algorithm == "flwr:FedAvgM":
        options["server_momentum"] = 0.9
    return strategy_from(told, **options)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation."""
    config = run_settings(context.run_config)
    out = folder(context.run_config, "out")
    data = load_data(config.dataset, config.image_size)
    own_data = bool(str(context.run_config["class-names"]))
    if own_data and data.class_names != class_names(context):
        raise InputError(f"class-names: {class_names(context)}, but the test images' classes are {data.class_names}")
    model = build(
        config.model,
        data.num_classes,
        seed=key(config.seed, "model") >> 1,
        image_size=data.image_size,
        weights=config.weights,
    )
    strategy = make_strategy(config, context, data.num_classes)
    books = Bookkeeper(config, data, strategy, own_data)
    if out is not None:
        books.begin(out, context.run_config)
        strategy.progress.callbacks += (books.note,)
    clock = time.monotonic()

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        nonlocal clock
        if server_round == 0:
            return None
        model.load_state_dict(arrays.to_torch_state_dict())
        begin, clock = clock, time.monotonic()
        sizes = {name: array.numpy().nbytes for name, array in arrays.items()}
        head = sum(sizes[name] for name in strategy.learning.heads.names or () if name is not None)
        return books.round_metrics(clock - begin, sum(sizes.values()), evaluate(model, data), head)

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=config.rounds,
        timeout=seconds(context.run_config, "round-timeout"),
        train_config=ConfigRecord({"mean": list(data.mean), "std": list(data.std)}),
        evaluate_fn=evaluate_fn,
    )
    if out is not None:
        print(f"results: {books.write(out, context.run_config, result)}")
