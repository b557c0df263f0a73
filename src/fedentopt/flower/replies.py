"""Is a reply fit to be averaged? Every training and evaluation reply is looked at before Flower aggregates.

One reply that Flower cannot average ends a run: a record too many, a missing weight, a metric that others lack, a list
of another length. And one that it can average may end the model: NaN, infinity, a weight of 2^53. Here each reply is
held against the model that was sent and against the other replies of the round:

* exactly one ArrayRecord, with the names and shapes of the model that was sent, numbers all of them, finite in the
  model's own precision, in which they are averaged (for boosted trees: one JSON document with the fields that bagging
  reads);
* exactly one MetricRecord, finite numbers all of them and not too many, with a weight above 0;
* the same records, metrics and lengths of lists as most replies of the round have (of equally many forms that one which
  names the model as it was sent);
* a plausible weight: at most `weight_cap` times the median weight of the round, or times what the median weight per
  reported sample gives for this client, whichever is more. The first serves weights that are all alike, the second
  clients that are truly large (reported sizes are capped themselves, so with both caps at 10 no client weighs more than
  100 of the median ones). Where there are two replies the smaller weight is the median.

What is found is the client's failure; the others go on.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from fedentopt.flower.exchange import Answer
from fedentopt.server.report import printable

LARGEST_WEIGHT = 2.0**53
MOST_NUMBERS = 2**16
"""In the metrics of a reply, with the letters of their names: averages are kept, round by round, while a run lasts."""
FEWEST, SHARE, MOST = 3, 4, 20
_HEADER = 4096  # bytes that NumPy may use for type and shape in front of an array's numbers

Check = Callable[[RecordDict], str | None]


class BadReplyError(ValueError):
    """What is wrong with a reply."""


def enough_to_tell(clients: int) -> int:
    """Of how many of the `clients` there are a figure must be lacking, and known of none, before it is the app's
    mistake and a run ends for it: a quarter of them and one more, at least 3 (or all of them) and at most 20. Fewer,
    which happen to be heard first, may be broken or worse."""
    return max(2, min(clients, max(FEWEST, clients // SHARE + 1), MOST))


def judge(
    answers: Sequence[Answer],
    check: Callable[[Message], str | None],
    weight_key: str,
    sizes: Mapping[int, float],
    weight_cap: float | None,
    wanted: Collection[str] = (),
    sent_as: str | None = None,
) -> list[Answer]:
    """The same answers, with `problem` set where a reply cannot be averaged with the others.

    `check` looks at one reply alone; `sizes` are the clients' reported numbers of samples by node. `wanted` are metrics
    that somebody needs, `sent_as` names the record in which the model was sent and comes back: where two forms are
    equally common, the one that has more of these metrics is the usual one, then the one that uses the name.
    """
    judged = [_looked_at(answer, check) for answer in answers]
    good = [answer for answer in judged if answer.failure is None]
    forms = {id(answer): _form(_content(answer)) for answer in good}
    if good:
        common = Counter(forms.values())

        def rank(form: tuple[Any, ...]) -> tuple[int, int, bool]:
            return common[form], sum(name in dict(form[2]) for name in wanted), form[0] == (sent_as,)

        usual = max(common, key=rank)  # of equal ones that of the first in the cohort
        judged = [
            replace(answer, problem=_difference(forms[id(answer)], usual))
            if forms.get(id(answer), usual) != usual
            else answer
            for answer in judged
        ]
    return _weighed(judged, weight_key, sizes, weight_cap)


def check_training(content: RecordDict, sent: ArrayRecord, weight_key: str) -> None:
    """Refuse what cannot be averaged into the model that was sent; order and types of the arrays become the model's."""
    name, arrays = _only(content.array_records, "ArrayRecord")
    if set(arrays) != set(sent):
        odd = sorted(set(arrays) ^ set(sent), key=str)[0]
        raise BadReplyError(f"{'unknown' if odd in arrays else 'missing'} array {printable(odd)!r}")
    checked = {key: _check_array(key, arrays[key], tuple(array.shape), array.dtype) for key, array in sent.items()}
    if list(arrays) != list(sent) or any(arrays[key] is not array for key, array in checked.items()):
        content[name] = ArrayRecord(checked)
    check_metrics(content, weight_key)


def check_trees(content: RecordDict, weight_key: str) -> None:
    """Refuse what bagging cannot add to a forest of boosted trees (one array, XGBoost's JSON)."""
    _, arrays = _only(content.array_records, "ArrayRecord")
    if list(arrays) != ["0"]:
        raise BadReplyError("accepted: exactly one array, named '0'")
    data = _read_header(arrays["0"], "0")
    if data[0] != np.dtype(np.uint8) or len(data[1]) != 1:
        raise BadReplyError("array '0': accepted: the bytes of a JSON document")
    try:
        model = json.loads(arrays["0"].numpy().tobytes())["learner"]["gradient_booster"]["model"]
        trees, parallel = model["trees"], int(model["gbtree_model_param"]["num_parallel_tree"])
        int(model["gbtree_model_param"]["num_trees"])
        if not 1 <= parallel <= len(trees) or not all(isinstance(tree, dict) for tree in trees):
            raise BadReplyError(f"boosted trees: {len(trees)} of them, {parallel} grown side by side")
        if not isinstance(model["tree_info"], list) or not isinstance(model["iteration_indptr"][-1], int):
            raise BadReplyError("boosted trees: tree_info or iteration_indptr is missing")
    except BadReplyError:
        raise
    except Exception as error:  # whatever nonsense in JSON trips over
        raise BadReplyError(f"boosted trees: not a model of XGBoost's ({printable(repr(error))})") from error
    check_metrics(content, weight_key)


def check_metrics(content: RecordDict, weight_key: str) -> None:
    """Refuse metrics that cannot be averaged: not one record, too many, no weight above 0, anything not finite."""
    _, metrics = _only(content.metric_records, "MetricRecord")
    size = sum(len(key) + (len(value) if isinstance(value, list) else 1) for key, value in metrics.items())
    if size > MOST_NUMBERS:
        raise BadReplyError(f"metrics: {size} numbers and letters of names; accepted: at most {MOST_NUMBERS}")
    for key, value in metrics.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(_is_finite(number) for number in numbers):
            raise BadReplyError(f"metric {printable(key)!r}: {_short(value)}; accepted: finite numbers")
    if weight_key not in metrics:
        raise BadReplyError(f"metric {weight_key!r} is missing, the weight in the average")
    weight = metrics[weight_key]
    if isinstance(weight, list) or not 0 < weight <= LARGEST_WEIGHT:
        raise BadReplyError(f"{weight_key}: {_short(weight)}; accepted: one number above 0, at most 2**53")


def check_loss(content: RecordDict, key: str) -> None:
    """Refuse a reply without the loss that the strategy weighs by: one number, 0 or more."""
    loss = metrics_of(content).get(key)
    if loss is None or isinstance(loss, list) or loss < 0:
        raise BadReplyError(f"metric {key!r}: {_short(loss)}; accepted: a loss, 0 or more")


def metrics_of(content: RecordDict) -> MetricRecord:
    """The metrics of a reply that was found good."""
    return next(iter(content.metric_records.values()))


def arrays_of(content: RecordDict) -> ArrayRecord:
    """The arrays of a reply that was found good."""
    return next(iter(content.array_records.values()))


def weight_of(answer: Answer, weight_key: str) -> float:
    """The weight in a reply that was found good."""
    return float(metrics_of(_content(answer))[weight_key])  # type: ignore[arg-type]


def is_finite_model(arrays: ArrayRecord) -> bool:
    """Whether every number of a model is finite."""
    return all(np.isfinite(array.numpy()).all() for array in arrays.values() if np.dtype(array.dtype).kind == "f")


def _looked_at(answer: Answer, check: Callable[[Message], str | None]) -> Answer:
    if answer.failure is not None or answer.reply is None:
        return answer
    try:
        problem = check(answer.reply)
    except BadReplyError as error:
        problem = str(error)
    except Exception as error:  # a reply is a stranger's: whatever it makes a check trip over is its own failure
        problem = f"cannot be read ({printable(repr(error))})"
    return answer if problem is None else replace(answer, problem=f"unusable reply: {printable(problem)}")


def _weighed(answers: Sequence[Answer], weight_key: str, sizes: Mapping[int, float], cap: float | None) -> list[Answer]:
    weights = {answer.node_id: weight_of(answer, weight_key) for answer in answers if answer.failure is None}
    if cap is None or len(weights) < 2:
        return list(answers)
    size = {node: max(sizes.get(node, 1.0), 1.0) for node in weights}
    usual = _low_median([*weights.values()])
    rate = _low_median([weight / size[node] for node, weight in weights.items()])
    judged = []
    for answer in answers:
        weight = weights.get(answer.node_id)
        most = cap * max(usual, rate * size.get(answer.node_id, 1.0))
        if answer.failure is None and weight is not None and weight > most:
            told = f"unusable reply: {weight_key}: {weight:g}; accepted: at most {most:g}, {cap:g} times what is usual"
            answer = replace(answer, problem=told)
        judged.append(answer)
    return judged


def _low_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def _content(answer: Answer) -> RecordDict:
    assert answer.reply is not None
    return answer.reply.content


def _form(content: RecordDict) -> tuple[Any, ...]:
    """What must be the same in all replies: names of records, names of metrics, lengths of lists."""
    lengths = {
        key: len(value) if isinstance(value, list) else -1
        for record in content.metric_records.values()
        for key, value in record.items()
    }
    return tuple(content.array_records), tuple(content.metric_records), tuple(sorted(lengths.items()))


def _difference(own: tuple[Any, ...], usual: tuple[Any, ...]) -> str:
    for what, mine, theirs in zip(("ArrayRecord", "MetricRecord"), own[:2], usual[:2], strict=True):
        if mine != theirs:
            return f"unusable reply: {what} {_names(mine)}, the others' is {_names(theirs)}"
    mine, theirs = dict(own[2]), dict(usual[2])
    odd = next(key for key in sorted({*mine, *theirs}, key=str) if mine.get(key) != theirs.get(key))
    words = {None: "missing", -1: "one number"}
    here, there = (words.get(side.get(odd), f"{side.get(odd)} numbers") for side in (mine, theirs))
    return f"unusable reply: metric {printable(odd)!r} is {here}, in the others' replies {there}"


def _names(names: Sequence[str]) -> str:
    return printable(", ".join(map(repr, names)) or "none")


def _only(records: Mapping[str, Any], what: str) -> tuple[str, Any]:
    if len(records) != 1:
        raise BadReplyError(f"{len(records)} {what}s; accepted: exactly one")
    return next(iter(records.items()))


def _check_array(name: str, array: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """The array in the model's type. Flower's average has the type of the first reply, and would hand half precision,
    or a type that torch does not know, to everybody. Its averages of whole numbers are float64."""
    kind, own_shape = _read_header(array, name)
    if own_shape != shape:
        raise BadReplyError(f"array {name!r}: shape {own_shape}; accepted: {shape}, as sent")
    if kind.kind not in "biuf":
        raise BadReplyError(f"array {name!r}: values of type {kind}; accepted: numbers")
    values = array.numpy()
    wanted = np.dtype(dtype) if np.dtype(dtype).kind == "f" else np.dtype(np.float64) if kind.kind == "f" else kind
    with np.errstate(over="ignore"):
        values = values.astype(wanted, copy=False)  # too large for the model's precision is not finite there
    if wanted.kind == "f" and not np.isfinite(values).all():
        raise BadReplyError(f"array {name!r}: {int((~np.isfinite(values)).sum())} values are not finite")
    return array if kind == wanted else Array(values)


def _read_header(array: Array, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Type and shape as the array's own bytes say, before memory is taken for it."""
    try:
        if array.stype != "numpy.ndarray":
            raise ValueError(f"serialised as {array.stype!r}")
        stream = BytesIO(array.data[:_HEADER])
        version = np.lib.format.read_magic(stream)
        reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, dtype = reader(stream)
        if len(array.data) - stream.tell() != math.prod(shape) * dtype.itemsize or dtype.hasobject:
            raise ValueError("its bytes do not fit its shape")
    except Exception as error:
        raise BadReplyError(f"array {printable(name)!r}: cannot be read ({printable(error)})") from error
    return dtype, tuple(shape)


def _is_finite(number: object) -> bool:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    try:
        return math.isfinite(float(number))
    except OverflowError:
        return False


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python prints
        text = "a number too long to print"
    return text if len(text) <= 60 else text[:57] + "..."
