"""Models by name, by seed, from weights, and a user's own."""

from __future__ import annotations

import math
import pickle
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedentopt.errors import InputError
from fedentopt.models import build, dropout_key, head_name


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_lenet5_is_the_rgb_network_of_the_literature() -> None:
    model = build("lenet5", 10, seed=0)
    assert parameters(model) == 62_006
    assert [type(layer).__name__ for layer in model] == [
        *("Conv2d", "ReLU", "MaxPool2d") * 2,
        "Flatten",
        *("Linear", "ReLU") * 2,
        "Linear",
    ]
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert head_name(model) == "fc3"
    assert build("lenet5", 4, seed=0, image_size=224)(torch.zeros(1, 3, 224, 224)).shape == (1, 4)
    assert build("lenet5", 4, seed=0, image_size=16)(torch.zeros(1, 3, 16, 16)).shape == (1, 4)
    with pytest.raises(InputError, match="image_size: 15 is too small for lenet5; accepted: at least 16"):
        build("lenet5", 10, seed=0, image_size=15)


def test_vgg11_has_torchvisions_features_and_one_linear_layer() -> None:
    from torchvision.models import vgg11

    model = build("vgg11", 20, seed=0)
    with torch.device("meta"):
        theirs = vgg11(weights=None)
    mine = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    expected = {f"features.{name}": tuple(t.shape) for name, t in theirs.features.state_dict().items()}
    assert mine == {**expected, "classifier.weight": (20, 512), "classifier.bias": (20,)}
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / (layer.out_channels * 9)), rel=0.05)
            assert layer.bias is not None
            assert not layer.bias.any()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 20)
    assert head_name(model) == "classifier"
    with pytest.raises(InputError, match="image_size: 31 is too small for vgg11"):
        build("vgg11", 10, seed=0, image_size=31)


def test_vgg11_with_batchnorm_is_torchvisions_with_one_linear_layer() -> None:
    from torchvision.models import vgg11_bn

    model = build("vgg11-bn", 10, seed=0)
    with torch.device("meta"):
        theirs = vgg11_bn(weights=None)
    mine = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    expected = {f"features.{name}": tuple(t.shape) for name, t in theirs.features.state_dict().items()}
    assert mine == {**expected, "classifier.weight": (10, 512), "classifier.bias": (10,)}
    assert parameters(model) == parameters(build("vgg11", 10, seed=0)) + 2 * 2752  # a scale and a shift per channel
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10), "one sample is a batch: four values per channel"
    with pytest.raises(InputError, match="image_size: 16 is too small for vgg11-bn"):
        build("vgg11-bn", 10, seed=0, image_size=16)


def test_layers_can_draw_their_weights_by_their_own_rule() -> None:
    """torch's default: uniform up to 1/sqrt(fan in), of which the deviation is 1/sqrt(3 fan in); biases too."""
    model = build("vgg11", 10, seed=0, initialisation="layers")
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            limit = 1 / math.sqrt(9 * layer.in_channels)
            assert layer.weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.05)
            assert layer.weight.abs().max().item() <= limit
            assert layer.bias is not None
            assert 0 < layer.bias.abs().max().item() <= limit
    again, other = (build("vgg11", 10, seed=seed, initialisation="layers") for seed in (0, 1))
    assert torch.equal(model.classifier.weight, again.classifier.weight)
    assert not torch.equal(model.classifier.weight, other.classifier.weight)


def test_vgg11_averages_what_larger_images_leave() -> None:
    model = build("vgg11", 3, seed=0, image_size=64).eval()
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        expected = model.classifier(model.features(images).mean((2, 3)))
        torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize(("name", "count"), [("efficientnet-b0", 4_020_358), ("efficientnet-b3", 10_711_602)])
def test_efficientnet_is_torchvisions_with_other_classes(name: str, count: int) -> None:
    model = build(name, 10, seed=0)
    assert parameters(model) == count
    assert head_name(model) == "classifier.1"
    with torch.no_grad():
        assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 10)
    assert dropout_key(model) is not None


@pytest.mark.parametrize("name", ["lenet5", "vgg11", "efficientnet-b0"])
def test_the_start_is_a_function_of_the_seed_alone(name: str) -> None:
    before = torch.get_rng_state()
    first = build(name, 10, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    second, other = build(name, 10, seed=5).state_dict(), build(name, 10, seed=6).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_unknown_names_and_too_few_classes_are_refused() -> None:
    with pytest.raises(InputError, match=r"model: 'resnet' is unknown; accepted: lenet5, vgg11, vgg11-bn, eff"):
        build("resnet", 10, seed=0)
    with pytest.raises(InputError, match="num_classes: 1 is out of range"):
        build("lenet5", 1, seed=0)
    with pytest.raises(InputError, match="initialisation: 'layer' is unknown; accepted: network, layers"):
        build("lenet5", 10, seed=0, initialisation="layer")


class NeedsSpread(nn.Sequential):
    """A layer whose rule for drawing takes something, as torch's own do not."""

    def reset_parameters(self, spread: float) -> None:
        nn.init.normal_(self[0].weight, std=spread)


def test_a_layer_that_cannot_be_drawn_anew_is_named() -> None:
    def factory(num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), NeedsSpread(nn.Linear(3 * 32 * 32, num_classes)))

    build("own", 10, seed=0, factory=factory)
    with pytest.raises(InputError, match=r"initialisation: a layer of own, NeedsSpread, cannot be drawn anew by its"):
        build("own", 10, seed=0, factory=factory, initialisation="layers")


def test_head_name_needs_a_linear_layer() -> None:
    assert head_name(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 3)))) == "1.1"
    with pytest.raises(InputError, match=r"Conv2d has no nn\.Linear"):
        head_name(nn.Conv2d(3, 3, 1))


# Start weights


@pytest.fixture
def lenet_file(tmp_path: Path) -> Path:
    save_file(build("lenet5", 10, seed=1).state_dict(), tmp_path / "lenet.safetensors")
    return tmp_path / "lenet.safetensors"


def test_weights_are_taken_from_a_local_file(lenet_file: Path) -> None:
    expected = build("lenet5", 10, seed=1).state_dict()
    model = build("lenet5", 10, seed=2, weights=str(lenet_file)).state_dict()
    assert all(torch.equal(model[name], expected[name]) for name in expected)


def test_a_head_of_other_classes_stays_as_initialised(lenet_file: Path) -> None:
    fresh = build("lenet5", 7, seed=2).state_dict()
    given = build("lenet5", 10, seed=1).state_dict()
    model = build("lenet5", 7, seed=2, weights=str(lenet_file)).state_dict()
    for name in model:
        assert torch.equal(model[name], fresh[name] if name.startswith("fc3.") else given[name]), name


def test_torchvisions_vgg_file_gives_the_features(tmp_path: Path) -> None:
    state = build("vgg11", 3, seed=1).state_dict()
    theirs = {name: t for name, t in state.items() if name.startswith("features.")}
    layers = {"classifier.0.weight": torch.zeros(4, 8), "classifier.6.bias": torch.zeros(9)}
    torch.save({**theirs, **layers}, tmp_path / "vgg11.pth")
    model = build("vgg11", 3, seed=2, weights=str(tmp_path / "vgg11.pth")).state_dict()
    assert all(torch.equal(model[name], theirs[name]) for name in theirs)
    assert torch.equal(model["classifier.weight"], build("vgg11", 3, seed=2).state_dict()["classifier.weight"])


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("conv1.weight", torch.zeros(6, 1, 5, 5), r"'conv1\.weight' .* \(6, 1, 5, 5\), the model's has \(6, 3, 5, 5\)"),
        ("conv1.weight", None, r"lacks the tensor 'conv1\.weight'"),
        ("bn1.weight", torch.zeros(6), r"a tensor 'bn1\.weight' that the model does not have"),
        ("fc1.bias", torch.full((120,), math.nan), r"'fc1\.bias' .* holds NaN"),
        ("fc1.bias", torch.zeros(120, dtype=torch.int64), r"'fc1\.bias' .* is torch\.int64, the model's is"),
    ],
)
def test_other_differences_are_refused_by_tensor(tmp_path: Path, name: str, tensor: torch.Tensor, told: str) -> None:
    state = {**build("lenet5", 10, seed=1).state_dict(), name: tensor}
    save_file({key: t for key, t in state.items() if t is not None}, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=told):
        build("lenet5", 10, seed=0, weights=str(tmp_path / "w.safetensors"))


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code from a pickle ran')",)


def test_no_pickle_is_ever_run(tmp_path: Path) -> None:
    torch.save({"conv1.weight": Evil()}, tmp_path / "evil.pth")
    (tmp_path / "evil.safetensors").write_bytes(pickle.dumps(Evil()))
    for name in ("evil.pth", "evil.safetensors"):
        with pytest.raises(InputError, match="cannot be read"):
            build("lenet5", 10, seed=0, weights=str(tmp_path / name))
    with pytest.raises(InputError, match=r"none\.safetensors is not a file"):
        build("lenet5", 10, seed=0, weights=str(tmp_path / "none.safetensors"))


# A user's own model

OWN = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, classes, width=6, drop=nn.Dropout):
        super().__init__()
        self.flatten = nn.Flatten()
        self.drop = drop(0.5)
        self.norm = nn.BatchNorm1d(3 * 8 * 8)
        self.head = nn.Linear(3 * 8 * 8, classes)
    def forward(self, x):
        return self.head(self.drop(self.norm(self.flatten(x))))

def make(classes): return Own(classes)
def wide(classes): return Own(classes + 1)
def nothing(classes): return "a model"
def failing(classes): raise RuntimeError("no such architecture")
constant = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module's name; it lies in the current directory, which is not on the path."""
    (tmp_path / "own_models_for_test.py").write_text(OWN)
    (tmp_path / "broken_models_for_test.py").write_text("import a_package_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models_for_test", raising=False)
    return "own_models_for_test"


def test_a_users_own_model_is_found_seeded_and_keyed(own: str) -> None:
    path = list(sys.path)
    before = torch.get_rng_state()
    model = build(f"{own}:make", 5, seed=3, image_size=8)
    assert sys.path == path
    assert torch.equal(torch.get_rng_state(), before)
    assert head_name(model) == "head"
    assert model.training
    assert dropout_key(model) is not None
    assert int(model.norm.num_batches_tracked) == 0, "trying the model left traces in its statistics"
    again = build(f"{own}:make", 5, seed=3, image_size=8)
    assert torch.equal(model.head.weight, again.head.weight)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("no_module_for_test:make", "no module 'no_module_for_test'"),
        ("broken_models_for_test:make", "importing broken_models_for_test raised ModuleNotFoundError"),
        ("{own}:gone", "own_models_for_test has no attribute 'gone'"),
        ("{own}:constant", "is int; accepted: a callable"),
        ("{own}:nothing", r"returned str; accepted: torch\.nn\.Module"),
        ("{own}:failing", r"failing raised RuntimeError: no such architecture"),
        ("{own}:wide", r"gives \(2, 6\) .*accepted: one row of 5 logits"),
        ("{own}:", "is not of the form package.module:factory"),
    ],
)
def test_unusable_factories_are_refused(own: str, spec: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        build(spec.format(own=own), 5, seed=0, image_size=8)


def test_a_model_that_cannot_take_the_images_is_refused(own: str) -> None:
    with pytest.raises(InputError, match=r"failed on images of shape \(2, 3, 16, 16\)"):
        build(f"{own}:make", 5, seed=0, image_size=16)
