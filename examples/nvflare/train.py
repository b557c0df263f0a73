"""A site's training: softmax regression in NumPy. Nothing in it is about selection or label counts."""

import numpy as np
import nvflare.client as flare
from digits import samples

flare.init()
x, y = samples(flare.get_site_name())
hot = np.eye(10)[y]
while flare.is_running():
    model = flare.receive()
    if model is None:
        break
    weights = np.asarray(model.params["numpy_key"], dtype=np.float64)
    for _ in range(20):
        scores = x @ weights
        soft = np.exp(scores - scores.max(axis=1, keepdims=True))
        soft /= soft.sum(axis=1, keepdims=True)
        weights = weights - 0.5 * x.T @ (soft - hot) / len(x)
    loss = float(-np.log(np.maximum(soft[np.arange(len(y)), y], 1e-12)).mean())
    flare.send(
        flare.FLModel(
            params={"numpy_key": weights.astype(np.float32)},
            params_type=flare.ParamsType.FULL,
            metrics={"loss": loss},
            meta={"NUM_STEPS_CURRENT_ROUND": len(y)},  # the site's owner decides whether this number leaves
        )
    )
